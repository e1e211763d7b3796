"""The commands for retrieval models, and the files that they read."""

from __future__ import annotations

import json
import re

import numpy as np
import pytest

import hfseq
from hfseq import cli
from hfseq.data import beir
from hfseq.errors import DataError, UsageError
from hfseq.objectives import retrieval_evaluation as evaluation
from tests.support.retrieval_models import make_masked
from tests.support.task_models import TEXTS, make

QUERIES = {"q1": "the law", "q2": "Berlin", "q3": "unused"}
DOCUMENTS = {"a": TEXTS[0], "b": TEXTS[2], "c": TEXTS[3]}
RELEVANCE = [("q1", "a", 1), ("q2", "b", 1), ("q2", "c", 0)]


@pytest.fixture(scope="module")
def root(tmp_path_factory):
    root = tmp_path_factory.mktemp("commands")
    bert = make(root, "features")
    hfseq.SentenceEncoder.from_pretrained(bert).save_pretrained(root / "bi")
    make(root, "grade")
    hfseq.SparseEncoder.from_pretrained(make_masked(root)).save_pretrained(root / "sparse")
    return root


def write_lines(file, lines):
    file.parent.mkdir(parents=True, exist_ok=True)
    file.write_text("".join(f"{line}\n" for line in lines))


def write_collection(folder):
    write_lines(
        folder / "queries.jsonl",
        (json.dumps({"_id": key, "text": text}) for key, text in QUERIES.items()),
    )
    write_lines(folder / "corpus.tsv", (f"{key}\t{text}" for key, text in DOCUMENTS.items()))
    rows = ["query-id\tcorpus-id\tscore", *("\t".join(map(str, row)) for row in RELEVANCE)]
    write_lines(folder / "qrels/test.tsv", rows)
    return folder


def output(capsys, *arguments):
    assert cli.main([str(argument) for argument in arguments]) == 0
    return capsys.readouterr().out


def test_the_files_of_a_collection_are_read(tmp_path):
    (collection,) = beir.find_collections(write_collection(tmp_path / "dev"))
    assert collection.name == "dev" and dict(collection.documents) == DOCUMENTS
    assert collection.relevance == {"q1": {"a"}, "q2": {"b"}}
    assert list(collection.queries) == ["q1", "q2"]
    write_collection(tmp_path / "nano/a"), write_collection(tmp_path / "nano/b")
    assert [c.name for c in beir.find_collections(tmp_path / "nano")] == ["a", "b"]
    write_lines(tmp_path / "trec.tsv", ["q1\t0\ta\t2", "q2\t0\tb\t0"])
    files = tmp_path / "dev/queries.jsonl", tmp_path / "dev/corpus.tsv"
    assert beir.read_collection(*files, tmp_path / "trec.tsv").relevance == {"q1": {"a"}}


@pytest.mark.parametrize(
    ("name", "lines", "message"),
    [
        ("qrels/test.tsv", ["q9\ta\t1"], "unknown query IDs.*'q9'"),
        ("qrels/test.tsv", ["q1\tz\t1"], "unknown document IDs.*'z'"),
        ("qrels/test.tsv", ["q1\ta\thigh"], r"test\.tsv:1.*'high' is not a number"),
        ("qrels/test.tsv", ["q1\ta\t0"], "no relevant document"),
        ("qrels/test.tsv", ["q1\ta\t1", "q2"], r"test\.tsv:2: expected 3 columns"),
        ("corpus.tsv", ["a\tx", "a\ty"], r"corpus\.tsv:2: the ID 'a' occurs twice"),
        ("corpus.tsv", ["a"], r"corpus\.tsv:1: expected 2 columns"),
        ("queries.jsonl", ['{"_id": "q1"}'], "expected the columns _id and text"),
    ],
)
def test_invalid_collections_are_rejected(tmp_path, name, lines, message):
    write_collection(tmp_path)
    write_lines(tmp_path / name, lines)
    with pytest.raises(DataError, match=message):
        beir.find_collections(tmp_path)


def test_folders_without_a_collection_are_rejected(tmp_path):
    with pytest.raises(UsageError, match="contains no collection"):
        beir.find_collections(tmp_path)
    write_collection(tmp_path)
    (tmp_path / "corpus.tsv").unlink()
    with pytest.raises(UsageError, match="no file corpus"):
        beir.find_collections(tmp_path)


def test_search_finds_the_paragraphs_of_a_folder(root, tmp_path, capsys):
    write_lines(tmp_path / "a.md", [TEXTS[0][:30], TEXTS[0][30:].strip(), "", TEXTS[3]])
    write_lines(tmp_path / "sub/b.txt", [TEXTS[2]])
    command = ["search", root / "bi", tmp_path, TEXTS[3], "--json", "--top_k", 2]
    rows = [json.loads(line) for line in output(capsys, *command).splitlines()]
    assert rows[0]["source"] == "a.md:4" and rows[0]["text"] == TEXTS[3] and len(rows) == 2
    assert rows[0]["score"] == pytest.approx(1, abs=1e-5)
    reranked = output(capsys, *command, "--reranker", root / "grade")
    model = hfseq.CrossEncoder.from_pretrained(root / "grade")
    texts = [f"{TEXTS[0][:30].strip()} {TEXTS[0][30:].strip()}", TEXTS[3], TEXTS[2]]
    best = model.rank(TEXTS[3], texts, return_documents=True)[0]["text"]
    assert json.loads(reranked.splitlines()[0])["text"] == best


def test_rank_sorts_texts(root, capsys):
    rows = output(capsys, "rank", root / "grade", TEXTS[0], *TEXTS[1:4], "--json").splitlines()
    expected = hfseq.CrossEncoder.from_pretrained(root / "grade").rank(TEXTS[0], TEXTS[1:4])
    assert [json.loads(row)["corpus_id"] for row in rows] == [e["corpus_id"] for e in expected]


def test_evaluation_reports_all_metrics(root, tmp_path, capsys):
    write_collection(tmp_path / "dev")
    write_lines(tmp_path / "sts.csv", ["sentence1,sentence2,score", "law,law,5", "law,river,1"])
    command = ["evaluate-retrieval", root / "bi", "--dataset", tmp_path / "dev", "--json"]
    metrics = json.loads(output(capsys, *command, "--sts_file", tmp_path / "sts.csv"))
    model = hfseq.SentenceEncoder.from_pretrained(root / "bi")
    scores = model.similarity(
        model.encode_query(list(QUERIES.values())[:2]),
        model.encode_document(list(DOCUMENTS.values())),
    )
    ranks = [(row > row[column]).sum() + 1 for column, row in enumerate(scores)]
    expected = np.mean([1 / rank for rank in ranks])
    assert metrics["dev_cosine_mrr@10"] == pytest.approx(expected)
    assert metrics["sts_spearman_cosine"] == pytest.approx(1)


def test_reranking_counts_positives_that_the_search_has_missed(root):
    model = hfseq.CrossEncoder.from_pretrained(root / "grade")
    found = {"query": TEXTS[0], "positive": [TEXTS[1]], "documents": [TEXTS[2], TEXTS[1]]}
    missed = {"query": TEXTS[0], "positive": [TEXTS[1]], "documents": [TEXTS[2], TEXTS[3]]}
    metrics = evaluation.evaluate_reranking(model, [found, missed])
    assert metrics["base_mrr@10"] == (1 / 2 + 0) / 2
    strict = evaluation.evaluate_reranking(model, [missed], always_rerank_positives=False)
    assert set(strict.values()) == {0}
    assert evaluation.evaluate_reranking(model, [missed])["mrr@10"] > 0


@pytest.mark.parametrize(
    ("sample", "message"),
    [
        ({"positive": ["a"], "negative": ["b"]}, "sample 1 requires a 'query'"),
        ({"query": "q", "positive": ["a"]}, "either 'negative' or 'documents'"),
        ({"query": "q", "positive": ["a"], "negative": ["a"]}, "both positive and negative"),
    ],
)
def test_invalid_samples_are_rejected(root, sample, message):
    model = hfseq.SentenceEncoder.from_pretrained(root / "bi")
    with pytest.raises(DataError, match=message):
        evaluation.evaluate_reranking(model, [sample])


def test_mined_negatives_are_written(root, tmp_path, capsys):
    pairs = [{"anchor": TEXTS[0], "positive": TEXTS[1]}, {"anchor": TEXTS[0], "positive": TEXTS[2]}]
    pairs.append({"anchor": TEXTS[2], "positive": TEXTS[3]})
    write_lines(tmp_path / "pairs.jsonl", map(json.dumps, pairs))
    command = ["mine", root / "bi", "--train_file", tmp_path / "pairs.jsonl"]
    rows = [json.loads(line) for line in output(capsys, *command).splitlines()]
    # The positives of the first query are not its negatives.
    assert {row["negative"] for row in rows if row["anchor"] == TEXTS[0]} == {TEXTS[3]}
    assert len(rows) == 4
    output(capsys, *command, "--output_file", tmp_path / "rows.parquet")
    import pyarrow.parquet

    assert pyarrow.parquet.read_table(tmp_path / "rows.parquet").to_pylist() == rows


def test_sparse_vectors_are_written_as_tokens_and_arrays(root, tmp_path, capsys):
    from scipy.sparse import load_npz

    tokens = json.loads(output(capsys, "embed", root / "sparse", TEXTS[3]))
    model = hfseq.SparseEncoder.from_pretrained(root / "sparse")
    vectors = model.encode([TEXTS[3]])
    assert tokens == pytest.approx(dict(model.decode(vectors)[0]), abs=1e-5)
    output(capsys, "embed", root / "sparse", TEXTS[3], "--output_file", tmp_path / "v.npz")
    np.testing.assert_allclose(load_npz(tmp_path / "v.npz").toarray(), vectors.toarray(), atol=1e-5)


@pytest.mark.parametrize(
    ("arguments", "code", "message"),
    [
        (["embed", "grade", "x"], 2, "cross-encoder.*hfseq rank"),
        (["embed", "features", "x"], 1, "no modules.json.*--pooling mean"),
        (["embed", "sparse", "x", "--truncate_dim", "2"], 2, "--truncate_dim does not apply"),
        (["embed", "bi", "x", "--output_file", "v.npz"], 2, "dense vectors are written as .npy"),
        (["rank", "bi", "x", "y"], 2, "'bi' has no classification head"),
        (["rank", "sparse", "x", "y"], 1, "contains a SparseEncoder"),
        (["rank", "grade", "x", " "], 1, "the text is empty"),
        (["search", "grade", ".", "x", "--glob", "config.json"], 2, "requires a model that enc"),
        (["search", "bi", ".", "x", "--glob", "*.none"], 1, "does not contain files"),
        (["search", "bi", "absent", "x"], 2, "'absent' does not exist"),
        (["evaluate-retrieval", "bi"], 2, "nothing to evaluate"),
        (["evaluate-retrieval", "bi", "--qrels_file", "x.tsv"], 2, "--queries_file is missing"),
        (["mine", "bi", "--train_file", "absent.csv"], 2, "does not exist"),
        (
            ["mine", "bi", "--train_file", "x.csv", "--range_min", "3", "--range_max", "4"],
            2,
            "range_max 4 minus range_min 3",
        ),
    ],
)
def test_invalid_commands_are_rejected(root, monkeypatch, capsys, arguments, code, message):
    monkeypatch.chdir(root)
    assert cli.main(arguments) == code
    error = capsys.readouterr().err
    assert re.search(message, error), error
