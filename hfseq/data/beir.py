"""Files of retrieval benchmarks: queries, documents and relevance judgments, as in BEIR.

A collection is a folder with the files `queries`, `corpus` and `qrels` (or `qrels/test`), each as
`.jsonl`, `.tsv`, `.csv` or `.parquet`. The folders of NanoBEIR have the same structure.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from hfseq.data.arguments import RecordArguments
from hfseq.data.files import extension_of
from hfseq.data.tables import FORMATS, read_table
from hfseq.errors import DataError, UsageError

EXTENSIONS = (".jsonl", ".tsv", ".parquet", ".csv", ".json")
ID_COLUMNS = ("_id", "id", "query-id", "corpus-id", "query_id", "corpus_id", "docid")
QUERY_COLUMNS = ("query-id", "query_id", "qid")
DOCUMENT_COLUMNS = ("corpus-id", "corpus_id", "doc_id", "docid", "pid")


@dataclass(frozen=True)
class Collection:
    """A retrieval benchmark.

    Attributes:
        name: Name of the benchmark.
        queries: The texts of the queries by their IDs. Queries without relevant documents are
            omitted.
        documents: The texts of the documents by their IDs.
        relevance: The IDs of the relevant documents of each query.
        origin: The file with the relevance judgments.
    """

    name: str
    queries: Mapping[str, str]
    documents: Mapping[str, str]
    relevance: Mapping[str, set[str]]
    origin: str


def read_collection(
    queries_file: str | Path, corpus_file: str | Path, qrels_file: str | Path, name: str = ""
) -> Collection:
    """Reads a collection from three files.

    Raises:
        DataError: A file is not valid, the judgments contain unknown IDs, or no query has a
            relevant document.
    """
    queries, documents = (_read_texts(str(file)) for file in (queries_file, corpus_file))
    relevance = _read_relevance(str(qrels_file))
    for name_of_ids, ids, texts in (
        ("query", relevance, queries),
        ("document", [item for group in relevance.values() for item in group], documents),
    ):
        if unknown := [item for item in ids if item not in texts]:
            raise DataError(
                f"{qrels_file} refers to {len(unknown)} unknown {name_of_ids} IDs. The first is "
                f"{unknown[0]!r}. Check that the files belong together"
            )
    if not relevance:
        raise DataError(f"{qrels_file} contains no relevant document")
    judged = {item: queries[item] for item in queries if item in relevance}
    return Collection(name, judged, documents, relevance, str(qrels_file))


def find_collections(folder: str | Path, split: str = "test") -> list[Collection]:
    """Reads the collection in a folder, or the collections in its subfolders.

    Args:
        folder: The folder.
        split: Name of the file in the folder ``qrels``.

    Raises:
        UsageError: The folder does not contain a collection.
    """
    folder = Path(folder)
    if not folder.is_dir():
        raise UsageError(f"'{folder}' is not a directory")
    candidates = [folder, *sorted(path for path in folder.iterdir() if path.is_dir())]
    collections = []
    for path in candidates:
        files = [
            _find(path, ["queries"]),
            _find(path, ["corpus"]),
            _find(path, [f"qrels/{split}", "qrels"]),
        ]
        if all(files):
            queries, corpus, qrels = (str(file) for file in files)
            collections.append(read_collection(queries, corpus, qrels, path.name))
        elif any(files) and path == folder:
            names = ("queries", "corpus", f"qrels/{split} or qrels")
            missing = [name for name, file in zip(names, files, strict=True) if file is None]
            raise UsageError(
                f"'{folder}' has no file {', '.join(missing)} ({', '.join(EXTENSIONS)})"
            )
    if not collections:
        raise UsageError(
            f"'{folder}' contains no collection: a folder with the files queries, corpus and "
            f"qrels ({', '.join(EXTENSIONS)})"
        )
    return collections


def _find(folder: Path, stems: list[str]) -> Path | None:
    paths = (folder / f"{stem}{extension}" for stem in stems for extension in EXTENSIONS)
    return next((path for path in paths if path.is_file()), None)


def _read_texts(file: str) -> dict[str, str]:
    """Returns the texts of a file by their IDs. Titles are prepended to the texts.

    TSV files without a header have the columns ID and text, as in MS MARCO.
    """
    texts: dict[str, str] = {}
    for position, row in _rows(file, ("_id", "text")):
        identifier = next((row[name] for name in ID_COLUMNS if row.get(name) is not None), None)
        text = row.get("text")
        if identifier is None or not isinstance(text, str):
            raise DataError(f"{position}: expected the columns _id and text, not {', '.join(row)}")
        if str(identifier) in texts:
            raise DataError(f"{position}: the ID {identifier!r} occurs twice")
        title = row.get("title") or ""
        texts[str(identifier)] = f"{title} {text}" if title else text
    if not texts:
        raise DataError(f"{file} is empty")
    return texts


def _read_relevance(file: str) -> dict[str, set[str]]:
    """Returns the IDs of the relevant documents of each query.

    Rows have a query ID, a document ID and, optionally, a score. A score of 0 means not relevant.
    Files without a header have the four columns of TREC (query, iteration, document, score) or
    three columns.
    """
    relevance: dict[str, set[str]] = {}
    for position, row in _rows(file, None):
        query, document = (
            next((row[name] for name in names if row.get(name) is not None), None)
            for names in (QUERY_COLUMNS, DOCUMENT_COLUMNS)
        )
        if query is None or document is None:
            raise DataError(
                f"{position}: expected the columns query-id, corpus-id and score, not "
                f"{', '.join(row)}"
            )
        try:
            score = float(row.get("score", 1))
        except (TypeError, ValueError):
            raise DataError(f"{position}: the score {row['score']!r} is not a number") from None
        if score > 0:
            relevance.setdefault(str(query), set()).add(str(document))
    return relevance


def _rows(file: str, header: tuple[str, ...] | None) -> list[tuple[str, dict[str, Any]]]:
    """Returns the rows of a table, each with its position in the file.

    Args:
        file: The file.
        header: The columns of TSV files without a header. `None` stands for the columns of
            relevance judgments.
    """
    extension = extension_of(file)
    if extension not in FORMATS:
        raise UsageError(f"{file}: unknown format (known: {', '.join(FORMATS)})")
    if not Path(file).is_file():
        raise UsageError(f"'{file}' does not exist")
    if extension == ".tsv":
        return _tsv_rows(Path(file), header)
    table = read_table(file, "", RecordArguments())
    names = list(table.columns)
    numbers = table.line_numbers or range(1, len(next(iter(table.columns.values()), [])) + 1)
    cells = zip(*table.columns.values(), strict=True)
    return [
        (f"{file}:{number}", dict(zip(names, row, strict=True)))
        for number, row in zip(numbers, cells, strict=True)
    ]


def _tsv_rows(file: Path, header: tuple[str, ...] | None) -> list[tuple[str, dict[str, Any]]]:
    """Returns the rows of a TSV file, with or without a header. Quotation marks have no meaning."""
    lines = list(enumerate(file.read_text(encoding="utf-8").split("\n"), 1))
    lines = [(number, line.rstrip("\r")) for number, line in lines if line.strip()]
    if not lines:
        raise DataError(f"{file} is empty")
    first = lines[0][1].split("\t")
    column_names = {*ID_COLUMNS, *QUERY_COLUMNS, *DOCUMENT_COLUMNS, "text"}
    if any(cell.strip() in column_names for cell in first):
        names, lines = tuple(cell.strip() for cell in first), lines[1:]
    elif header is not None:
        names = header
    else:
        columns = {3: ("query-id", "corpus-id", "score"), 2: ("query-id", "corpus-id")}
        names = columns.get(len(first), ("query-id", "iteration", "corpus-id", "score"))
    rows = []
    for number, line in lines:
        cells = line.split("\t", len(names) - 1)
        if len(cells) != len(names):
            raise DataError(
                f"{file}:{number}: expected {len(names)} columns separated by tabs, not "
                f"{len(cells)}"
            )
        rows.append((f"{file}:{number}", dict(zip(names, cells, strict=True))))
    return rows
