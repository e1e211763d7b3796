"""Command-line interface of ``hfseq rank``, ``search``, ``mine`` and ``evaluate-retrieval``."""

from __future__ import annotations

import argparse
import json
import sys
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

from hfseq.cli import flags, models
from hfseq.cli.text import format_number, format_table
from hfseq.errors import DataError, UsageError
from hfseq.pipelines.lines import Output

if TYPE_CHECKING:
    from hfseq.modeling.sentence import CrossEncoder, TextEncoder

TABLE_HELP = "(.jsonl, .json, .csv, .tsv, .parquet)"


def _load(arguments: argparse.Namespace, name: str) -> Any:
    """Loads a retrieval model as an instance of the class with which it was saved."""
    from hfseq.modeling.sentence import RetrievalModel

    return RetrievalModel.from_pretrained(name, precision=arguments.precision)


def _load_encoder(arguments: argparse.Namespace, name: str, purpose: str) -> TextEncoder:
    from hfseq.objectives.retrieval_evaluation import check_encoder

    return check_encoder(_load(arguments, name), purpose)


def _load_reranker(arguments: argparse.Namespace) -> CrossEncoder | None:
    """Loads the cross-encoder of ``--reranker``, or returns `None` without the flag."""
    if arguments.reranker is None:
        return None
    from hfseq.modeling.sentence import CrossEncoder

    model = CrossEncoder.from_pretrained(arguments.reranker, precision=arguments.precision)
    _check_trained(model, arguments.reranker)
    return model


def _check_trained(model: CrossEncoder, name: str) -> None:
    """Checks that the classification head of a cross-encoder comes from the checkpoint.

    Raises:
        UsageError: The checkpoint contains no head, so the model has a random one.
    """
    classifier: Any = model.model
    if classifier._fresh_head:
        raise UsageError(
            f"'{name}' has no classification head, so its scores would be random. Train it with "
            "hfseq train cross_encoder first"
        )


def _options(arguments: argparse.Namespace) -> dict[str, Any]:
    """Returns the options of the methods ``encode`` and ``predict`` from the flags."""
    hidden = arguments.disable_tqdm or not sys.stderr.isatty()
    return {"batch_size": arguments.batch_size, "show_progress_bar": not hidden}


def _rows(file: str, columns: Sequence[str]) -> Iterator[tuple[int, Mapping[str, Any]]]:
    """Yields the rows of a table with their numbers, starting at 1.

    Args:
        file: The path of the table.
        columns: Names of the required columns. If the table does not contain all of them, its first
            columns are used in this order.

    Raises:
        UsageError: The file does not exist.
        DataError: The table has too few columns.
    """
    from hfseq.data.arguments import RecordArguments
    from hfseq.data.tables import read_table

    if not Path(file).is_file():
        raise UsageError(f"the table '{file}' does not exist")
    table = read_table(file, "", RecordArguments())
    names = list(table.columns)
    if not set(columns) <= set(names):
        if len(names) < len(columns):
            raise DataError(
                f"{file} has the columns {', '.join(names)}, but the columns "
                f"{', '.join(columns)} are required"
            )
        names = [*columns, *names[len(columns) :]]
    cells = zip(*table.columns.values(), strict=True)
    for number, row in enumerate(cells, 1):
        yield number, dict(zip(names, row, strict=True))


def _texts(file: str, number: int, row: Mapping[str, Any], columns: Sequence[str]) -> list[str]:
    """Returns the texts in some columns of a row.

    Raises:
        DataError: A value is empty or is not a text.
    """
    for name in columns:
        value = row.get(name)
        if not isinstance(value, str) or not value.strip():
            raise DataError(
                f"{file}: row {number}: '{name}' must be a text that is not empty, not "
                f"{value!r:.60}"
            )
    return [row[name] for name in columns]


# -- rank
# ----------------------------------------------------------------------------------------------


def add_rank(parser: argparse.ArgumentParser) -> None:
    """Adds the flags of ``hfseq rank``."""
    parser.add_argument("model", metavar="MODEL", help="Directory or Hub name of a cross-encoder.")
    parser.add_argument("query", metavar="QUERY", help="The query.")
    parser.add_argument(
        "documents", metavar="TEXT", nargs="*", help="Text to rank. Default: standard input."
    )
    group = parser.add_argument_group("scores")
    flags.add_flag(group, "top_k", default_text="all")
    group.add_argument(
        "--prompt", metavar="TEXT", help="Text to insert before the query. Default: none."
    )
    group.add_argument(
        "--prompt_name", metavar="NAME", help="Name of a prompt that is stored in the model."
    )
    group.add_argument(
        "--activation",
        metavar="NAME",
        help="Activation function of the scores, such as Identity or Sigmoid. Default: the "
        "activation function that is stored in the model.",
    )
    group = parser.add_argument_group("input and output")
    flags.add_flag(
        group,
        "input_file",
        help_text="File with one text per line, or a table with the column text "
        f"{TABLE_HELP}. Default: standard input (-).",
    )
    flags.add_output_flags(group, "Write a JSON object per text, with its index and score.")
    flags.add_model_flags(parser.add_argument_group("model"), batch_size=32)


def run_rank(arguments: argparse.Namespace) -> int:
    """Prints texts in the order of their scores for a query."""
    documents = _input_texts(arguments, arguments.documents)
    from hfseq.modeling.sentence import CrossEncoder

    models.prepare_devices(arguments)
    model = CrossEncoder.from_pretrained(arguments.model, precision=arguments.precision)
    _check_trained(model, arguments.model)
    ranking = model.rank(
        arguments.query,
        documents,
        arguments.top_k,
        return_documents=True,
        prompt=arguments.prompt,
        prompt_name=arguments.prompt_name,
        activation_fn=arguments.activation,
        **_options(arguments),
    )
    with Output(arguments.output_file) as output:
        for entry in ranking:
            line = f"{entry['score']:.4f}\t{' '.join(entry['text'].split())}"
            output.write(json.dumps(entry, ensure_ascii=False) if arguments.json else line)
    return 0


def _input_texts(arguments: argparse.Namespace, texts: Sequence[str]) -> list[str]:
    """Returns the texts from the command line, from ``--input_file`` or from standard input.

    Raises:
        UsageError: Texts are passed both on the command line and with ``--input_file``.
        DataError: A text is empty or cannot be read.
    """
    if texts and arguments.input_file:
        raise UsageError("pass texts either as arguments or with --input_file, not both")
    from hfseq.pipelines.base import RejectedInput, input_text, read_inputs

    name = arguments.input_file or "-"
    if not texts and name == "-" and sys.stdin.isatty():
        print("reading lines from the terminal; press Ctrl-D to finish", file=sys.stderr)
    rows = [(f"input {number}", text) for number, text in enumerate(texts, 1)]
    checked = []
    for position, value in rows or read_inputs(name):
        text = input_text(value, "text")
        if isinstance(text, RejectedInput) or not text.strip():
            reason = text if isinstance(text, RejectedInput) else "the text is empty"
            raise DataError(f"{position}: {reason}. Each input must be a text that is not empty")
        checked.append(str(text))
    return checked


# -- search
# ----------------------------------------------------------------------------------------------


def add_search(parser: argparse.ArgumentParser) -> None:
    """Adds the flags of ``hfseq search``."""
    parser.add_argument(
        "model", metavar="MODEL", help="Directory or Hub name of a model that encodes texts."
    )
    parser.add_argument(
        "texts",
        metavar="PATH",
        help="Folder of text files, file with one text per line, or table with the column text "
        f"{TABLE_HELP}.",
    )
    parser.add_argument(
        "queries", metavar="QUERY", nargs="*", help="Query. Default: the lines of standard input."
    )
    group = parser.add_argument_group("search")
    flags.add_flag(group, "top_k", 10)
    group.add_argument(
        "--glob", metavar="PATTERN", default="*.txt,*.md",
        help="Comma-separated patterns of the files to search in a folder. Default: *.txt,*.md.",
    )  # fmt: skip
    group.add_argument(
        "--unit",
        choices=("paragraph", "file", "line"),
        default="paragraph",
        help="Unit into which the files of a folder are split. Default: paragraph.",
    )
    group.add_argument(
        "--reranker",
        metavar="MODEL",
        help="Directory or Hub name of a cross-encoder that reranks the results.",
    )
    models.add_int_flags(group, ("rerank_k", 100, "Number of results to rerank. Default: 100."))
    group = parser.add_argument_group("output")
    flags.add_output_flags(group, "Write a JSON object per result.")
    flags.add_model_flags(parser.add_argument_group("model"), batch_size=32)


def run_search(arguments: argparse.Namespace) -> int:
    """Prints the texts that are most similar to each query."""
    models.check_at_least_one(arguments, "rerank_k")
    sources, texts = _searched_texts(arguments)
    models.prepare_devices(arguments)
    model = _load_encoder(arguments, arguments.model, "search")
    reranker = _load_reranker(arguments)
    from hfseq.modeling.sentence.search import search

    options = _options(arguments)
    documents = model.encode_document(texts, **options)
    print(f"searching {len(texts)} texts", file=sys.stderr)
    queries = arguments.queries or (line.strip() for line in sys.stdin)
    depth = max(arguments.top_k, arguments.rerank_k) if reranker else arguments.top_k
    with Output(arguments.output_file) as output:
        for query in queries:
            if not query.strip():
                continue
            scores, indices = search(model, model.encode_query([query]), documents, depth)
            results = list(zip(scores[0].tolist(), indices[0].tolist(), strict=True))
            if reranker is not None:
                candidates = [texts[index] for _, index in results]
                order = reranker.rank(query, candidates, batch_size=arguments.batch_size)
                results = [(entry["score"], results[entry["corpus_id"]][1]) for entry in order]
            for score, index in results[: arguments.top_k]:
                if arguments.json:
                    record = {"query": query, "score": score, "source": sources[index]}
                    line = json.dumps({**record, "text": texts[index]}, ensure_ascii=False)
                else:
                    line = f"{score:.4f}\t{sources[index]}\t{' '.join(texts[index].split()):.200}"
                output.write(line)
    return 0


def _searched_texts(arguments: argparse.Namespace) -> tuple[list[str], list[str]]:
    """Returns the sources of the texts to search, such as ``notes.txt:12``, and the texts.

    Raises:
        DataError: The path does not contain any text.
        UsageError: The path does not exist.
    """
    path = Path(arguments.texts)
    if not path.exists():
        raise UsageError(f"PATH '{path}' does not exist")
    sources, texts = [], []
    if path.is_dir():
        patterns = [pattern.strip() for pattern in arguments.glob.split(",")]
        files = sorted({file for pattern in patterns for file in path.rglob(pattern)})
        for file in filter(Path.is_file, files):
            for line, text in _units(file.read_text("utf-8", errors="replace"), arguments.unit):
                sources.append(f"{file.relative_to(path)}:{line}")
                texts.append(text)
    else:
        from hfseq.pipelines.base import RejectedInput, input_text, read_inputs

        for position, value in read_inputs(str(path)):
            text = input_text(value, "text")
            if not isinstance(text, RejectedInput) and text.strip():
                sources.append(str(position))
                texts.append(str(text))
    if not texts:
        content = f"files {arguments.glob} with text" if path.is_dir() else "texts"
        raise DataError(f"'{path}' does not contain {content}")
    return sources, texts


def _units(text: str, unit: str) -> Iterator[tuple[int, str]]:
    """Yields the units of a text, each with the number of its first line.

    Args:
        text: The content of a file.
        unit: "file", "paragraph" or "line".
    """
    if unit == "file":
        if text.strip():
            yield 1, text.strip()
        return
    start, lines = 1, list[str]()
    for number, line in enumerate([*text.splitlines(), ""], 1):
        if line.strip() and not lines:
            start = number
        if line.strip():
            lines.append(line.strip())
        if lines and (unit == "line" or not line.strip()):
            yield start, " ".join(lines)
            lines = []


# -- mine
# ----------------------------------------------------------------------------------------------


def add_mine(parser: argparse.ArgumentParser) -> None:
    """Adds the flags of ``hfseq mine``."""
    parser.add_argument(
        "model", metavar="MODEL", help="Directory or Hub name of a model that encodes texts."
    )
    group = parser.add_argument_group("input and output")
    group.add_argument(
        "--train_file",
        metavar="FILE",
        required=True,
        help="Table with the columns anchor and positive, or two other columns in this order "
        f"{TABLE_HELP}.",
    )
    group.add_argument(
        "--corpus_file",
        metavar="FILE",
        help="Texts from which negatives are selected: one text per line, or a table with the "
        f"column text {TABLE_HELP}. Default: the positives.",
    )
    flags.add_output_flags(
        group,
        "Write one JSON object per row. This is the default.",
        "Output file: JSON lines, or a table if it ends in .parquet.",
    )
    group.add_argument(
        "--output_format",
        choices=("triplet", "n-tuple", "labeled-pair", "labeled-list"),
        default="triplet",
        help="Columns of the output. triplet: anchor, positive, negative. n-tuple: one column per "
        "negative. labeled-pair: anchor, positive, label, where the column positive contains a "
        "positive or a negative. labeled-list: anchor, positive (list of documents), labels "
        "(list). Default: triplet.",
    )
    group.add_argument(
        "--output_scores", action="store_true", help="Write scores instead of labels."
    )
    group = parser.add_argument_group("negatives")
    models.add_int_flags(
        group,
        ("num_negatives", 3, "Number of negatives per query. Default: 3."),
        ("range_min", 0, "Number of candidates to skip, starting with the best. Default: 0."),
        (
            "range_max",
            None,
            "Number of candidates per query. Default: range_min + num_negatives (or 10 * "
            "num_negatives, if candidates are filtered) + the largest number of positives of a "
            "query.",
        ),
    )
    for name, text in (
        ("max_score", "Remove candidates with a higher score."),
        ("min_score", "Remove candidates with a lower score."),
        (
            "absolute_margin",
            "Remove candidates whose score exceeds the lowest score of the positives of the query "
            "minus this number.",
        ),
        (
            "relative_margin",
            "Remove candidates whose score exceeds the lowest score of the positives of the query "
            "minus this fraction of its absolute value, such as 0.05.",
        ),
    ):
        group.add_argument(f"--{name}", type=float, metavar="X", help=f"{text} Default: none.")
    group.add_argument(
        "--sampling_strategy",
        choices=("top", "random"),
        default="top",
        help="top: use the best candidates. random: sample from all candidates. Default: top.",
    )
    group.add_argument(
        "--cross_encoder",
        dest="reranker",
        metavar="MODEL",
        help="Directory or Hub name of a cross-encoder that computes the scores for the filters.",
    )
    flags.add_flag(group, "seed")
    flags.add_model_flags(parser.add_argument_group("model"), batch_size=32)


def run_mine(arguments: argparse.Namespace) -> int:
    """Finds hard negatives for pairs of queries and documents, and writes them."""
    import dataclasses

    from hfseq.objectives.mining import Mining, mine

    names = [field.name for field in dataclasses.fields(Mining)]
    mining = Mining(**{name: getattr(arguments, name) for name in names})
    file = arguments.train_file
    columns = ("anchor", "positive")
    pairs = [_texts(file, number, row, columns) for number, row in _rows(file, columns)]
    corpus = None
    if arguments.corpus_file is not None:
        corpus = _corpus(arguments.corpus_file)
    models.prepare_devices(arguments)
    model = _load_encoder(arguments, arguments.model, "mining")
    anchors, positives = (list(side) for side in zip(*pairs, strict=True))
    rows = mine(
        model,
        anchors,
        positives,
        mining,
        corpus=corpus,
        cross_encoder=_load_reranker(arguments),
        **_options(arguments),
    )
    print(f"{len(pairs)} pairs, {len(rows)} rows with negatives", file=sys.stderr)
    if arguments.output_file and arguments.output_file.endswith(".parquet"):
        import pyarrow
        from pyarrow import parquet

        from hfseq.errors import atomic_replace

        with atomic_replace(Path(arguments.output_file)) as temporary:
            parquet.write_table(pyarrow.Table.from_pylist(rows), temporary)
        return 0
    with Output(arguments.output_file) as output:
        for row in rows:
            output.write(json.dumps(row, ensure_ascii=False))
    return 0


def _corpus(file: str) -> list[str]:
    """Returns the texts of a corpus. Empty lines are skipped."""
    from hfseq.pipelines.base import RejectedInput, input_text, read_inputs

    texts = (input_text(value, "text") for _, value in read_inputs(file))
    corpus = [str(text) for text in texts if not isinstance(text, RejectedInput) and text.strip()]
    if not corpus:
        raise DataError(f"--corpus_file {file} contains no texts")
    return corpus


# -- evaluate-retrieval
# ----------------------------------------------------------------------------------------------


def add_evaluate(parser: argparse.ArgumentParser) -> None:
    """Adds the flags of ``hfseq evaluate-retrieval``."""
    parser.add_argument(
        "model",
        metavar="MODEL",
        help="Directory or Hub name of a retrieval model.",
    )
    group = parser.add_argument_group("search")
    group.add_argument(
        "--dataset",
        metavar="DIR",
        action="append",
        default=[],
        help="Folder with the files queries, corpus and qrels (.jsonl, .tsv, .csv, .parquet), as "
        "in BEIR, or a folder of such folders, as in NanoBEIR (repeatable).",
    )
    for name in ("queries", "corpus", "qrels"):
        group.add_argument(
            f"--{name}_file",
            metavar="FILE",
            help=f"The file {name} of a dataset that is not in one folder. Requires the files "
            "queries, corpus and qrels.",
        )
    group.add_argument(
        "--split",
        default="test",
        help="Name of the file in the folder qrels of a dataset. Default: test.",
    )
    group.add_argument(
        "--reranker",
        metavar="MODEL",
        help="Directory or Hub name of a cross-encoder that reranks the 100 best results.",
    )
    group = parser.add_argument_group("other evaluations")
    group.add_argument(
        "--sts_file",
        metavar="FILE",
        help=f"Table with the columns sentence1, sentence2 and score {TABLE_HELP}.",
    )
    group.add_argument(
        "--pairs_file",
        metavar="FILE",
        help="Table with the columns sentence1, sentence2 and label (0 or 1).",
    )
    group.add_argument(
        "--triplets_file",
        metavar="FILE",
        help="Table with the columns anchor, positive and negative.",
    )
    group.add_argument(
        "--reranking_file",
        metavar="FILE",
        help="JSON lines with the keys query, positive (list), and either negative (list) or "
        "documents (list).",
    )
    group = parser.add_argument_group("output")
    flags.add_output_flags(group, "Write a JSON object with all metrics.")
    flags.add_model_flags(parser.add_argument_group("model"), batch_size=32)


def run_evaluate(arguments: argparse.Namespace) -> int:
    """Evaluates a retrieval model and prints the metrics."""
    from hfseq.data.beir import find_collections, read_collection

    collections = [
        collection
        for folder in arguments.dataset
        for collection in find_collections(folder, arguments.split)
    ]
    names = ("queries", "corpus", "qrels")
    files = [getattr(arguments, f"{name}_file") for name in names]
    if any(files):
        missing = [name for name, file in zip(names, files, strict=True) if file is None]
        if missing:
            raise UsageError(
                f"--{missing[0]}_file is missing: --queries_file, --corpus_file and --qrels_file "
                "must be used together"
            )
        collections.append(read_collection(*files))
    evaluations = [name for name in _EVALUATIONS if getattr(arguments, f"{name}_file")]
    if not collections and not evaluations:
        raise UsageError(
            "there is nothing to evaluate: use --dataset DIR, or at least one of --sts_file, "
            "--pairs_file, --triplets_file and --reranking_file"
        )
    data = {
        name: _read_evaluation(name, getattr(arguments, f"{name}_file")) for name in evaluations
    }
    models.prepare_devices(arguments)
    model = _load(arguments, arguments.model)
    from hfseq.objectives import retrieval_evaluation as evaluation

    options, reranker = _options(arguments), _load_reranker(arguments)
    results: dict[str, float] = {}
    searches = []
    for collection in collections:
        metrics = evaluation.evaluate_search(model, collection, reranker=reranker, **options)
        searches.append(metrics)
        results |= evaluation.prefixed(collection.name, metrics) if collection.name else metrics
    if len(searches) > 1:
        means = {key: sum(m[key] for m in searches) / len(searches) for key in searches[0]}
        results |= evaluation.prefixed("mean", means)
    for name, rows in data.items():
        function = getattr(evaluation, _EVALUATIONS[name][0])
        results |= evaluation.prefixed(name, function(model, *rows, **options))
    table = [("metric", "value"), *((key, format_number(v)) for key, v in results.items())]
    lines = [json.dumps(results, indent=2)] if arguments.json else format_table(table)
    with Output(arguments.output_file) as output:
        for line in lines:
            output.write(line)
    return 0


#: For each of the flags `--sts_file`, `--pairs_file`, …: the function in `retrieval_evaluation`,
#: the columns that contain texts, and the column that contains the label.
_EVALUATIONS: dict[str, tuple[str, tuple[str, ...], str | None]] = {
    "sts": ("evaluate_similarity", ("sentence1", "sentence2"), "score"),
    "pairs": ("evaluate_pairs", ("sentence1", "sentence2"), "label"),
    "triplets": ("evaluate_triplets", ("anchor", "positive", "negative"), None),
    "reranking": ("evaluate_reranking", (), None),
}


def _read_evaluation(name: str, file: str) -> list[Any]:
    """Reads a file of `--{name}_file`, and returns the arguments of the evaluation function."""
    _, columns, label = _EVALUATIONS[name]
    if not columns:
        return [[row for _, row in _rows(file, ("query", "positive"))]]
    texts, labels = [], []
    for number, row in _rows(file, (*columns, *([label] if label else []))):
        texts.append(tuple(_texts(file, number, row, columns)))
        if label is None:
            continue
        try:
            labels.append(float(row[label]))
        except (TypeError, ValueError):
            raise DataError(
                f"{file}: row {number}: '{label}' must be a number, not {row[label]!r}"
            ) from None
    return [texts] if label is None else [texts, labels]
