"""Retrieval models: invalid inputs, trained modules, reductions of logits, and search."""

from __future__ import annotations

import json
import re
import shutil

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import hfseq
from hfseq.errors import CheckpointError, UsageError
from hfseq.modeling import sentence
from hfseq.modeling.sentence import search as searching
from hfseq.modeling.sentence.similarity import quantize, similarity
from hfseq.nn.heads import LogitReduction
from tests.support.retrieval_models import PAIRS, change_json, make_masked, make_reranker
from tests.support.task_models import TEXTS, make


@pytest.fixture(scope="module")
def root(tmp_path_factory):
    return tmp_path_factory.mktemp("retrieval")


@pytest.fixture(scope="module")
def bert(root):
    return make(root, "features")


@pytest.fixture(scope="module")
def saved(root, bert):
    """A directory of each kind, by the name of the kind."""
    encoder = hfseq.SentenceEncoder.from_pretrained(bert)
    encoder.save_pretrained(root / "bi")
    hfseq.SparseEncoder.from_pretrained(make_masked(root)).save_pretrained(root / "sparse")
    hfseq.MultiVectorEncoder.from_pretrained(bert).save_pretrained(root / "multi")
    shutil.copytree(make(root, "grade"), root / "cross")
    return {name: root / name for name in ("bi", "sparse", "multi", "cross")}


@pytest.mark.parametrize("strategy", ["max", "sum"])
def test_reduced_logits_have_the_gradients_of_full_logits(strategy):
    draw = np.random.default_rng(0)
    hidden, kernel = (
        jnp.asarray(draw.normal(size=size), jnp.float32) for size in ((3, 37, 8), (8, 50))
    )
    mask = jnp.asarray(np.arange(37) < np.array([[37], [5], [20]]), jnp.int32)

    def value(hidden, kernel, block):
        reduction = LogitReduction(mask, lambda x: jnp.log1p(jax.nn.relu(x)), strategy, block)
        return (reduction(lambda x: x @ kernel, hidden) ** 2).sum()

    gradient = jax.jit(jax.grad(value, (0, 1)), static_argnums=2)
    expected = gradient(hidden, kernel, 64)
    for block in (1, 8, 16):
        for actual, other in zip(gradient(hidden, kernel, block), expected, strict=True):
            scale = np.abs(other).max()
            np.testing.assert_allclose(actual / scale, other / scale, atol=1e-5)
    text = gradient.lower(hidden, kernel, 8).compile().as_text()
    assert not re.search(r"\[(3,(37|40)|5,3,8|5,8,3),50\]", text)  # no logits of all tokens


def test_an_unreduced_model_gives_the_same_sparse_vectors(saved, monkeypatch):
    model = hfseq.RetrievalModel.from_pretrained(saved["sparse"])
    expected = model.encode(TEXTS[2:4], convert_to_sparse_tensor=False)
    # A family without vocabulary_logits returns the logits of all tokens.
    monkeypatch.setattr("hfseq.nn.vocabulary_logits", lambda head, x, _: head(x))
    plain = hfseq.RetrievalModel.from_pretrained(saved["sparse"])
    actual = plain.encode(TEXTS[2:4], convert_to_sparse_tensor=False)
    np.testing.assert_allclose(actual, expected, atol=1e-5)


def test_a_directory_opens_as_its_kind(saved):
    kinds = {name: type(hfseq.RetrievalModel.from_pretrained(f)) for name, f in saved.items()}
    assert kinds == {
        "bi": hfseq.SentenceEncoder,
        "sparse": hfseq.SparseEncoder,
        "multi": hfseq.MultiVectorEncoder,
        "cross": hfseq.CrossEncoder,
    }


@pytest.mark.parametrize(
    ("kind", "name", "message"),
    [
        (hfseq.CrossEncoder, "multi", "contains a MultiVectorEncoder.*MultiVectorEncoder"),
        (hfseq.SentenceEncoder, "multi", "contains a MultiVectorEncoder"),
        (hfseq.SparseEncoder, "bi", "contains a SentenceTransformer"),
        (hfseq.MultiVectorEncoder, "sparse", "contains a SparseEncoder"),
        (hfseq.SparseEncoder, "cross", "requires a masked language model"),
    ],
)
def test_a_directory_of_another_kind_is_refused(saved, kind, name, message):
    with pytest.raises(CheckpointError, match=message):
        kind.from_pretrained(saved[name])


def test_unknown_modules_kinds_and_missing_files_are_refused(saved, bert, tmp_path):
    with pytest.raises(CheckpointError, match=r"no modules\.json.*SentenceEncoder"):
        hfseq.RetrievalModel.from_pretrained(bert)
    with pytest.raises(CheckpointError, match="is not a directory"):
        hfseq.RetrievalModel.from_pretrained(tmp_path / "absent")
    for name in ("bi", "sparse", "multi"):
        folder = tmp_path / name
        shutil.copytree(saved[name], folder)
        modules = json.loads((folder / "modules.json").read_text())
        added = [*modules, {"idx": 9, "path": "9_CNN", "type": "sentence_transformers.models.CNN"}]
        (folder / "modules.json").write_text(json.dumps(added))
        with pytest.raises(CheckpointError, match="unsupported module CNN"):
            hfseq.RetrievalModel.from_pretrained(folder)
        (folder / "modules.json").write_text(json.dumps(modules))
        change_json(folder / "config_sentence_transformers.json", model_type="Other")
        with pytest.raises(CheckpointError, match="Other"):
            hfseq.RetrievalModel.from_pretrained(folder)
    for name, message in (("bi", "has no Pooling"), ("sparse", "requires .* one SpladePooling")):
        shutil.copytree(saved[name], tmp_path / f"{name}-1")
        file = tmp_path / f"{name}-1/modules.json"
        file.write_text(json.dumps(json.loads(file.read_text())[:1]))
        change_json(
            file.with_name("config_sentence_transformers.json"),
            model_type={"bi": "SentenceTransformer", "sparse": "SparseEncoder"}[name],
        )
        with pytest.raises(CheckpointError, match=message):
            hfseq.RetrievalModel.from_pretrained(file.parent)
    shutil.copytree(saved["multi"], tmp_path / "dense")
    (tmp_path / "dense/1_Dense/model.safetensors").unlink()
    with pytest.raises(CheckpointError, match=r"1_Dense.* has no model\.safetensors"):
        hfseq.RetrievalModel.from_pretrained(tmp_path / "dense")


@pytest.mark.parametrize(
    ("name", "file"),
    [
        ("bi", "modules.json"),
        ("bi", "config_sentence_transformers.json"),
        ("bi", "sentence_bert_config.json"),
        ("bi", "1_Pooling/config.json"),
        ("multi", "1_Dense/config.json"),
    ],
)
def test_duplicate_keys_are_refused(saved, tmp_path, name, file):
    shutil.copytree(saved[name], tmp_path / "model")
    path = tmp_path / "model" / file
    path.write_text(path.read_text().replace("{", '{"twice": 1, "twice": 2,', 1))
    with pytest.raises(CheckpointError, match=f"{file} is not valid JSON: duplicate key 'twice'"):
        hfseq.RetrievalModel.from_pretrained(tmp_path / "model")


INVALID = {
    "bi": [
        (lambda m: m.encode("a", truncate_dim=33), "truncate_dim .*32.* not 33"),
        (lambda m: m.encode(["a"], precision="int4"), "precision 'int4'.*int8"),
        (lambda m: m.encode("a", precision="int8"), "at least two vectors"),
        (lambda m: m.encode("a", prompt_name="passage"), "prompt_name 'passage'.*query"),
        (lambda m: m.encode("a", output_value="tokens"), "output_value 'tokens'"),
        (lambda m: m.encode(["a", 1]), "sentence 2 must be a text, not 1"),
        (lambda m: m.similarity(np.ones((1, 3)), np.ones((1, 4))), "3 and 4 features"),
        (
            lambda m: m.similarity_pairwise(np.ones((1, 3)), np.ones((2, 3))),
            "number of vectors, not 1 and 2",
        ),
    ],
    "cross": [
        (lambda m: m.predict(["a", "b", "c"]), "pair 1 must be a pair"),
        (lambda m: m.predict([("a", "b"), ("a",)]), "pair 2 must be a pair"),
        (lambda m: m.predict([("a", "b"), "ab"]), "pair 2 must be a pair"),
        (lambda m: m.predict(PAIRS, activation_fn="Swish"), "activation_fn 'Swish'.*Sigmoid"),
        (lambda m: m.rank("a", ["b"], activation_fn=lambda x: x * np.nan), "document 1 is not a n"),
        (lambda m: m.predict(PAIRS, batch_size=0), "batch_size must be at least 1"),
    ],
    "sparse": [
        (lambda m: m.encode("a", max_active_dims=0), "max_active_dims must be at least 1"),
    ],
    "multi": [
        (lambda m: m.encode("a", truncate_dim=0), "truncate_dim must be between 1 and"),
    ],
}


@pytest.mark.parametrize("name", INVALID)
def test_invalid_calls_are_rejected(saved, name):
    model = hfseq.RetrievalModel.from_pretrained(saved[name])
    for call, message in INVALID[name]:
        with pytest.raises(UsageError, match=message):
            call(model)


@pytest.mark.parametrize(
    ("make_config", "message"),
    [
        (lambda: sentence.SentenceConfig(similarity_fn_name="cos"), "function 'cos'.*cosine"),
        (lambda: sentence.SparseConfig("mean"), "pooling_strategy 'mean'.*max, sum"),
        (lambda: sentence.CrossEncoderConfig(activation="Sigmod"), "did you mean 'Sigmoid'"),
        (lambda: sentence.QueryExpansion(strategy="max"), "strategy 'max'.*fixed, min"),
        (lambda: sentence.MultiVectorConfig(similarity_fn_name="dot"), "'dot'.*maxsim"),
    ],
)
def test_invalid_settings_are_rejected(make_config, message):
    with pytest.raises(UsageError, match=message):
        make_config()


def test_empty_inputs_and_empty_texts_have_results(saved):
    model = hfseq.RetrievalModel.from_pretrained(saved["bi"])
    assert model.encode([]).shape[0] == 0
    assert np.isfinite(model.encode([""])).all()  # [CLS] [SEP]
    assert hfseq.RetrievalModel.from_pretrained(saved["sparse"]).encode([]).shape[0] == 0
    assert hfseq.RetrievalModel.from_pretrained(saved["multi"]).encode([]) == []
    cross = hfseq.RetrievalModel.from_pretrained(saved["cross"])
    assert cross.predict([]).shape == (0,) and cross.rank("a", []) == []
    scores = similarity("maxsim", [np.ones((2, 3))], [np.ones((0, 3)), np.ones((1, 3))])
    assert scores.tolist() == [[-1e9, 6]]


def test_query_expansion_beyond_the_limit_of_the_model_is_rejected(bert):
    model = hfseq.MultiVectorEncoder.from_pretrained(bert)
    config = sentence.MultiVectorConfig(
        model.config.dense, query_expansion=sentence.QueryExpansion(500)
    )
    encoder = hfseq.MultiVectorEncoder(model.model, model.tokenizer, config)
    with pytest.raises(UsageError, match="500 tokens, .* 130"):
        encoder.encode_query(["a"])


def test_untrusted_activations_are_not_imported(saved, tmp_path, caplog):
    shutil.copytree(saved["cross"], tmp_path / "cross")
    change_json(tmp_path / "cross/config.json", sentence_transformers={"activation_fn": "os.Exit"})
    model = hfseq.CrossEncoder.from_pretrained(tmp_path / "cross")
    assert model.config.activation_name == "Sigmoid"
    assert "unsupported activation os.Exit" in caplog.text.replace("\n", " ")


def test_a_chat_template_without_the_roles_of_pairs_is_refused(tmp_path):
    model = hfseq.CrossEncoder.from_pretrained(make_reranker(tmp_path))
    score = model.predict([("a b", "c d")])
    assert 0 < score[0] < 1
    model.tokenizer.chat_template = "{% for m in messages if m.role == 'user' %}{{ m }}{% endfor %}"
    with pytest.raises(UsageError, match="chat template.*'query' and 'document'"):
        model.predict([("a b", "c d")])


def test_trained_modules_are_parameters_and_are_saved(bert, tmp_path):
    encoder = hfseq.MultiVectorEncoder.from_pretrained(bert)
    model = encoder.model
    before = encoder.encode_document(TEXTS[:2])
    model.train_sentence_modules()
    kernel = model.params["sentence_modules"]["dense_0"]["kernel"]
    assert kernel.shape == (32, 128)
    assert ("sentence_modules", "dense_0", "kernel") in model.trainable_paths
    np.testing.assert_allclose(encoder.encode_document(TEXTS[:2])[1], before[1], atol=1e-6)
    config = model.sentence_config

    def loss(params):
        inputs = {"input_ids": jnp.ones((1, 4), jnp.int32), "attention_mask": jnp.ones((1, 4))}
        run = lambda **inputs: model(**inputs, params=params)  # noqa: E731
        return config.embed(run, inputs, params["sentence_modules"])[0].sum()

    gradient = jax.jit(jax.grad(loss))(model.params)["sentence_modules"]["dense_0"]["kernel"]
    assert np.abs(gradient).max() > 0
    trained = jax.tree.map(lambda leaf: leaf, model.params)
    trained["sentence_modules"]["dense_0"]["kernel"] = kernel + gradient
    model.save_pretrained(tmp_path / "trained", params=trained)
    encoder.tokenizer.save_pretrained(tmp_path / "trained")
    again = hfseq.RetrievalModel.from_pretrained(tmp_path / "trained")
    np.testing.assert_allclose(again.config.dense[0].kernel, kernel + gradient, atol=1e-7)
    expected = encoder.encode_document(TEXTS[:2], params=trained)
    np.testing.assert_allclose(again.encode_document(TEXTS[:2])[0], expected[0], atol=1e-6)
    assert not np.allclose(expected[0], before[0], atol=1e-4)


@pytest.mark.parametrize("name", ["cosine", "dot"])
def test_search_equals_a_sort_with_ties(saved, monkeypatch, name):
    monkeypatch.setattr(searching, "DOCUMENT_BLOCK", 3)
    monkeypatch.setattr(searching, "QUERY_BLOCK", 4)
    model = hfseq.RetrievalModel.from_pretrained(saved["bi"])
    object.__setattr__(model.config, "similarity_fn_name", name)
    draw = np.random.default_rng(0)
    queries, documents = draw.integers(-2, 3, (6, 4)), draw.integers(-2, 3, (50, 4))
    queries, documents = (array.astype(np.float32) + 0.5 for array in (queries, documents))
    documents[25:] = documents[:25]  # every document occurs twice
    scores, indices = searching.search(model, queries, documents, 9)
    expected = similarity(name, queries, documents)
    np.testing.assert_allclose(scores, np.sort(expected)[:, ::-1][:, :9], atol=1e-6)
    for row, found in enumerate(indices):
        assert len(set(found)) == 9
        if name == "dot":  # the sums are exact: of equal documents, the first is found first
            assert all(
                index < 25 or index - 25 in found[:place] for place, index in enumerate(found)
            )
        np.testing.assert_allclose(expected[row, found], scores[row], atol=1e-6)
    assert searching.search(model, queries, documents[:2], 9)[1].shape == (6, 2)
    with pytest.raises(UsageError, match="NaN"):
        searching.search(model, queries * np.nan, documents, 2)


def test_quantized_vectors_keep_their_order():
    vectors = np.linspace(-1, 1, 24, dtype=np.float32).reshape(3, 8)
    assert quantize(vectors, "ubinary").tolist() == [[0], [15], [255]]
    assert quantize(vectors, "binary").tolist() == [[-128], [-113], [127]]
    assert (np.diff(quantize(vectors, "int8").astype(int), axis=0) > 0).all()


def test_pipelines_rank_and_compare(saved):
    rank = hfseq.pipeline("text-ranking", str(saved["cross"]), return_documents=True)
    (answer,) = rank([{"query": TEXTS[0], "documents": TEXTS[1:]}])
    model = hfseq.CrossEncoder.from_pretrained(saved["cross"])
    expected = model.rank(TEXTS[0], TEXTS[1:], return_documents=True)
    assert [entry["text"] for entry in answer] == [entry["text"] for entry in expected]
    with pytest.raises(UsageError, match='"query" and "documents"'):
        rank({"query": "a"})
    compare = hfseq.pipeline("sentence-similarity", str(saved["multi"]))
    scores = compare({"source_sentence": TEXTS[0], "sentences": TEXTS[1:3]})
    multi = hfseq.RetrievalModel.from_pretrained(saved["multi"])
    vectors = multi.encode_query(TEXTS[:1]), multi.encode_document(TEXTS[1:3])
    np.testing.assert_allclose(scores, multi.similarity(*vectors)[0], rtol=1e-5)
