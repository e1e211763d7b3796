"""The four kinds of retrieval models equal sentence-transformers, and exchange directories."""

from __future__ import annotations

import json
import shutil
import string

import numpy as np
import pytest

import hfseq
from tests.support.models import close
from tests.support.retrieval_models import (
    PAIRS,
    change_json,
    make_masked,
    make_pylate,
    make_reranker,
    make_stanford,
)
from tests.support.task_models import TEXTS, make

pytestmark = [pytest.mark.slow, pytest.mark.filterwarnings("ignore")]  # sentence-transformers

st = pytest.importorskip("sentence_transformers")


@pytest.fixture(scope="module")
def root(tmp_path_factory):
    return tmp_path_factory.mktemp("kinds")


@pytest.fixture(scope="module")
def bert(root):
    return make(root, "features")


@pytest.fixture(scope="module")
def masked(root):
    return make_masked(root)


def assert_close(actual, expected):
    """Compares vectors, or lists of token vectors."""
    if isinstance(expected, list):
        assert [len(rows) for rows in actual] == [len(rows) for rows in expected]
        actual, expected = np.concatenate(actual), np.concatenate(expected)
    assert close(actual, expected, 1e-5)


def dense(tensor):
    return tensor.to_dense().numpy()


POOLING = [
    {"pooling_mode": ["lasttoken", "mean_sqrt_len_tokens", "cls"]},
    {"pooling_mode": "cls", "include_prompt": False},
    {"pooling_mode": ["mean", "max", "weightedmean", "lasttoken"], "include_prompt": False},
]


@pytest.mark.parametrize("pooling", POOLING, ids=str)
def test_bi_encoders(bert, tmp_path, pooling):
    from sentence_transformers.base.modules import Dense, Normalize, Transformer
    from sentence_transformers.sentence_transformer.modules import Pooling

    module = Pooling(32, **pooling)
    layers = [Dense(module.get_embedding_dimension(), 9, use_residual=True), Normalize()]
    theirs = st.SentenceTransformer(
        modules=[Transformer(str(bert)), module, *layers],
        device="cpu",
        prompts={"query": "law of: ", "passage": "the river "},
        similarity_fn_name="dot",
    )
    theirs.save_pretrained(str(tmp_path / "theirs"))
    ours = hfseq.RetrievalModel.from_pretrained(tmp_path / "theirs")
    assert isinstance(ours, hfseq.SentenceEncoder) and ours.similarity_fn_name == "dot"
    for options in (
        {},
        {"prompt_name": "passage"},
        {"truncate_dim": 3},
        {"truncate_dim": 3, "normalize_embeddings": True},
    ):
        assert_close(ours.encode(TEXTS, **options), theirs.encode(TEXTS, **options))
    # A text with spaces at its ends is not stripped.
    assert_close(ours.encode([" law "]), theirs.encode([" law "]))
    queries, documents = theirs.encode_query(TEXTS), theirs.encode_document(TEXTS)
    assert_close(ours.encode_query(TEXTS), queries)
    assert_close(ours.encode_document(TEXTS), documents)
    for name in ("cosine", "dot", "euclidean", "manhattan"):
        object.__setattr__(ours.config, "similarity_fn_name", name)
        theirs.similarity_fn_name = name
        assert_close(ours.similarity(queries, documents), theirs.similarity(queries, documents))
        pairwise = theirs.similarity_pairwise(queries, documents)
        assert_close(ours.similarity_pairwise(queries, documents), pairwise)
    states = theirs.encode(TEXTS, output_value="token_embeddings")
    assert_close(
        ours.encode(TEXTS, output_value="token_embeddings"), [state.numpy() for state in states]
    )
    object.__setattr__(ours.config, "similarity_fn_name", "dot")
    ours.save_pretrained(tmp_path / "ours")
    again = st.SentenceTransformer(str(tmp_path / "ours"), device="cpu")
    assert again.similarity_fn_name == "dot" and again.prompts["passage"] == "the river "
    assert_close(again.encode_query(TEXTS), queries)


def make_static(bert, features):
    from sentence_transformers.sentence_transformer.modules import StaticEmbedding
    from tokenizers import Tokenizer

    tokenizer = Tokenizer.from_file(str(bert / "tokenizer.json"))
    table = np.random.default_rng(0).normal(size=(tokenizer.get_vocab_size(), features))
    return StaticEmbedding(tokenizer, embedding_weights=table.astype(np.float32))


def check_both_ways(theirs, tmp_path, methods=("encode", "encode_query", "encode_document")):
    """Compares a model of sentence-transformers with hfseq, and hfseq's directory with it."""
    theirs.save_pretrained(str(tmp_path / "theirs"))
    ours = hfseq.RetrievalModel.from_pretrained(tmp_path / "theirs")
    ours.save_pretrained(tmp_path / "ours")
    again = type(theirs)(str(tmp_path / "ours"), device="cpu")
    texts = [*TEXTS, ""]
    for method in methods:
        expected = getattr(theirs, method)(texts)
        expected = dense(expected) if hasattr(expected, "to_dense") else expected
        for model in (ours, hfseq.RetrievalModel.from_pretrained(tmp_path / "ours"), again):
            actual = getattr(model, method)(texts)
            if not isinstance(actual, np.ndarray):
                actual = dense(actual) if hasattr(actual, "to_dense") else actual.toarray()
            assert_close(actual, expected)
    return ours


def test_static_embeddings(bert, tmp_path):
    from safetensors.numpy import load_file, save_file
    from sentence_transformers.base.modules import Dense, Normalize

    modules = [make_static(bert, 12), Dense(12, 8), Normalize()]
    prompts = {"query": "law of: "}
    theirs = st.SentenceTransformer(modules=modules, device="cpu", prompts=prompts)
    ours = check_both_ways(theirs, tmp_path)
    with pytest.raises(hfseq.errors.UsageError, match="requires a transformer"):
        ours.encode(TEXTS, output_value="token_embeddings")
    # The names of the tensors of Model2Vec.
    file = tmp_path / "theirs/model.safetensors"
    table = load_file(file)["embedding.weight"]
    factors = np.random.default_rng(1).uniform(0.5, 2, len(table)).astype(np.float32)
    mapping = np.arange(len(table))[::-1].copy()
    save_file({"embeddings": table, "mapping": mapping, "weights": factors}, file)
    again = hfseq.RetrievalModel.from_pretrained(tmp_path / "theirs")
    expected = st.SentenceTransformer(str(tmp_path / "theirs"), device="cpu").encode(TEXTS)
    assert_close(again.encode(TEXTS), expected)


@pytest.mark.parametrize("default_route", ["query", "document"])
@pytest.mark.parametrize("static", [True, False])
def test_queries_with_other_modules_than_documents(bert, tmp_path, static, default_route):
    from sentence_transformers.base.modules import Dense, Normalize, Router, Transformer
    from sentence_transformers.sentence_transformer.modules import Pooling

    transformer, pooling = Transformer(str(bert)), Pooling(32, "cls", include_prompt=False)
    document = [Dense(32, 8)]
    if static:
        query = [make_static(bert, 12), Dense(12, 8)]
        router = Router.for_query_document(
            query_modules=query,
            document_modules=[transformer, pooling, *document],
            default_route=default_route,
        )
        modules = [router, Normalize()]
    else:
        query = [Dense(32, 8, use_residual=True), Normalize()]
        router = Router.for_query_document(query, document, default_route)
        modules = [transformer, pooling, router]
    prompts = {"query": "law of: ", "document": "the river "}
    theirs = st.SentenceTransformer(modules=modules, device="cpu", prompts=prompts)
    check_both_ways(theirs, tmp_path)


def test_queries_with_another_transformer_than_documents(bert, tmp_path):
    from sentence_transformers.base.modules import Dense, Normalize, Router, Transformer
    from sentence_transformers.sentence_transformer.modules import Pooling
    from transformers import BertConfig

    config = BertConfig.from_pretrained(bert, hidden_size=16, intermediate_size=24)
    small = shutil.copytree(bert, tmp_path / "small")
    hfseq.FlaxBertModel(config, seed=2).save_pretrained(small)
    router = Router.for_query_document(
        query_modules=[Transformer(str(small)), Pooling(16, "mean"), Dense(16, 32)],
        document_modules=[Transformer(str(bert)), Pooling(32, "cls")],
    )
    prompts = {"query": "law of: ", "document": "the river "}
    theirs = st.SentenceTransformer(modules=[router, Normalize()], device="cpu", prompts=prompts)
    ours = check_both_ways(theirs, tmp_path)
    assert ours.encode_query(TEXTS[0], truncate_dim=8).shape == (8,)
    # The model of queries can be used alone.
    alone = hfseq.RetrievalModel.from_pretrained(tmp_path / "ours/query_0_Transformer")
    assert_close(alone.encode_query(TEXTS), theirs.encode_query(TEXTS))


@pytest.mark.parametrize("normalize", [False, True])
def test_sparse_autoencoders(bert, tmp_path, normalize):
    from sentence_transformers.base.modules import Normalize, Transformer
    from sentence_transformers.sentence_transformer.modules import Pooling
    from sentence_transformers.sparse_encoder.modules import SparseAutoEncoder

    encoder = SparseAutoEncoder(32, hidden_dim=64, k=6, k_aux=8, normalize=normalize)
    encoder.pre_bias.data += 0.1
    encoder.latent_bias.data += 0.2
    modules = [Transformer(str(bert)), Pooling(32, "mean"), Normalize(), encoder]
    theirs = st.SparseEncoder(modules=modules, device="cpu")
    ours = check_both_ways(theirs, tmp_path)
    expected = theirs.encode(TEXTS, max_active_dims=11)
    assert_close(ours.encode(TEXTS, max_active_dims=11).toarray(), dense(expected))
    assert ours.sparsity(ours.encode(TEXTS))["active_dims"] == 6
    assert ours.encode([]).shape == (0, 64)


@pytest.mark.parametrize("precision", ["int8", "uint8", "binary", "ubinary"])
def test_quantized_vectors(precision):
    from sentence_transformers.util.quantization import quantize_embeddings

    from hfseq.modeling.sentence.similarity import quantize

    vectors = np.random.default_rng(0).normal(size=(20, 16)).astype(np.float32)
    ranges = np.stack([vectors.min(0) - 1, vectors.max(0) + 1])
    for options in ({}, {"ranges": ranges}):
        expected = quantize_embeddings(vectors, precision, **options)
        actual = quantize(vectors, precision, **options)
        assert actual.dtype == expected.dtype
        np.testing.assert_array_equal(actual, expected)


def test_truncated_length_and_lower_case_of_old_files(bert, tmp_path):
    shutil.copytree(bert, tmp_path / "old")
    files = {
        "modules.json": [
            {"idx": 0, "name": "0", "path": "", "type": "sentence_transformers.models.Transformer"},
            {"idx": 1, "name": "1", "path": "1_P", "type": "sentence_transformers.models.Pooling"},
        ],
        "sentence_roberta_config.json": {"max_seq_length": 9, "do_lower_case": True},
        "1_P/config.json": {"word_embedding_dimension": 32, "pooling_mode_mean_tokens": True},
    }
    (tmp_path / "old/1_P").mkdir()
    for name, content in files.items():
        (tmp_path / "old" / name).write_text(json.dumps(content))
    ours = hfseq.SentenceEncoder.from_pretrained(tmp_path / "old")
    theirs = st.SentenceTransformer(str(tmp_path / "old"), device="cpu")
    assert_close(ours.encode(TEXTS), theirs.encode(TEXTS))


@pytest.mark.parametrize("name", ["grade", "nli"])
@pytest.mark.parametrize("activation", [None, "Identity", "Sigmoid"])
def test_cross_encoders(root, tmp_path, name, activation):
    import torch

    folder = make(tmp_path, name)
    function = None if activation is None else getattr(torch.nn, activation)()
    theirs = st.CrossEncoder(str(folder), device="cpu", activation_fn=function)
    expected = theirs.predict(PAIRS)
    theirs.save_pretrained(str(tmp_path / "theirs"))
    ours = hfseq.RetrievalModel.from_pretrained(tmp_path / "theirs")
    assert_close(ours.predict(PAIRS), expected)
    assert ours.predict(PAIRS[0]).shape == expected[0].shape
    if name == "nli":
        softmax = theirs.predict(PAIRS, apply_softmax=True)
        assert_close(ours.predict(PAIRS, apply_softmax=True), softmax)
    else:
        ranking = theirs.rank(TEXTS[0], TEXTS, top_k=3, return_documents=True)
        actual = ours.rank(TEXTS[0], TEXTS, top_k=3, return_documents=True)
        assert [e["text"] for e in actual] == [e["text"] for e in ranking]
    ours.save_pretrained(tmp_path / "ours")
    assert not (tmp_path / "ours/modules.json").exists()
    again = st.CrossEncoder(str(tmp_path / "ours"), device="cpu")
    assert_close(again.predict(PAIRS), expected)
    # Versions 2 and 3 read one key, versions 4 and 5 the other one.
    for removed in ("sentence_transformers", "sbert_ce_default_activation_function"):
        shutil.copytree(tmp_path / "ours", tmp_path / removed)
        change_json(tmp_path / removed / "config.json", **{removed: None})
        for model in (
            st.CrossEncoder(str(tmp_path / removed), device="cpu"),
            hfseq.CrossEncoder.from_pretrained(tmp_path / removed),
        ):
            assert_close(model.predict(PAIRS), expected)


def test_cross_encoders_with_prompts_and_without_a_head(bert, tmp_path):
    folder = make(tmp_path, "grade")
    theirs = st.CrossEncoder(str(folder), device="cpu", prompts={"search": "law: "})
    expected = theirs.predict(PAIRS, prompt_name="search")
    theirs.save_pretrained(str(tmp_path / "theirs"))
    ours = hfseq.RetrievalModel.from_pretrained(tmp_path / "theirs")
    assert_close(ours.predict(PAIRS, prompt_name="search"), expected)
    ours.save_pretrained(tmp_path / "ours")
    again = st.CrossEncoder(str(tmp_path / "ours"), device="cpu")
    assert_close(again.predict(PAIRS, prompt_name="search"), expected)
    fresh = hfseq.CrossEncoder.from_pretrained(bert)
    assert fresh.num_labels == 1 and fresh.predict(PAIRS).shape == (3,)
    assert hfseq.CrossEncoder.from_pretrained(bert, num_labels=3).predict(PAIRS).shape == (3, 3)


def test_causal_rerankers(tmp_path):
    folder = make_reranker(tmp_path)
    theirs = st.CrossEncoder(str(folder), device="cpu", max_length=38)
    ours = hfseq.CrossEncoder.from_pretrained(folder)
    ours.limit = 38  # the pairs are truncated, but the end of the template is not
    assert_close(ours.predict(PAIRS), theirs.predict(PAIRS))
    prompt = "judge "
    assert_close(ours.predict(PAIRS, prompt=prompt), theirs.predict(PAIRS, prompt=prompt))
    theirs.save_pretrained(str(tmp_path / "theirs"))
    again = hfseq.RetrievalModel.from_pretrained(tmp_path / "theirs")
    assert_close(again.predict(PAIRS), theirs.predict(PAIRS))
    again.save_pretrained(tmp_path / "ours")
    third = st.CrossEncoder(str(tmp_path / "ours"), device="cpu")
    assert_close(third.predict(PAIRS), theirs.predict(PAIRS))


@pytest.mark.parametrize(
    ("strategy", "activation"), [("max", "relu"), ("max", "log1p_relu"), ("sum", "relu")]
)
def test_sparse_encoders(masked, tmp_path, strategy, activation):
    from sentence_transformers.base.modules import Transformer
    from sentence_transformers.sparse_encoder.modules import SpladePooling

    modules = [
        Transformer(str(masked), transformer_task="fill-mask"),
        SpladePooling(strategy, activation_function=activation),
    ]
    theirs = st.SparseEncoder(modules=modules, device="cpu")
    vectors = theirs.encode(TEXTS)
    theirs.save_pretrained(str(tmp_path / "theirs"))
    ours = hfseq.RetrievalModel.from_pretrained(tmp_path / "theirs")
    actual = ours.encode(TEXTS)
    assert_close(actual.toarray(), dense(vectors))
    dense_rows = ours.encode(TEXTS, convert_to_sparse_tensor=False)
    np.testing.assert_array_equal(dense_rows, actual.toarray())
    largest = theirs.encode(TEXTS, max_active_dims=5)
    assert_close(ours.encode(TEXTS, max_active_dims=5).toarray(), dense(largest))
    assert ours.sparsity(actual) == pytest.approx(theirs.sparsity(vectors), abs=1e-5)
    tokens = [[token for token, _ in row] for row in theirs.decode(vectors, top_k=20)]
    assert [[token for token, _ in row] for row in ours.decode(actual, top_k=20)] == tokens
    assert_close(ours.similarity(actual, actual), theirs.similarity(vectors, vectors))
    pairwise = theirs.similarity_pairwise(vectors, vectors)
    assert_close(ours.similarity_pairwise(actual, actual), pairwise)
    ours.save_pretrained(tmp_path / "ours")
    types = [entry["type"] for entry in json.loads((tmp_path / "ours/modules.json").read_text())]
    assert types[0].endswith("sparse_encoder.models.MLMTransformer")  # version 5 reads it too
    again = st.SparseEncoder(str(tmp_path / "ours"), device="cpu")
    assert_close(dense(again.encode(TEXTS)), dense(vectors))


@pytest.mark.parametrize("idf_file", [False, True])
def test_static_query_encoders(masked, tmp_path, idf_file):
    import torch
    from sentence_transformers.base.modules import Router, Transformer
    from sentence_transformers.sparse_encoder.modules import SparseStaticEmbedding, SpladePooling

    transformer = Transformer(str(masked), transformer_task="fill-mask")
    vocabulary = transformer.tokenizer.get_vocab()
    weight = torch.tensor([0.1 + number % 7 for number in range(len(vocabulary))])
    query = SparseStaticEmbedding(tokenizer=transformer.tokenizer, weight=weight, frozen=True)
    router = Router.for_query_document(
        query_modules=[query], document_modules=[transformer, SpladePooling("max")]
    )
    theirs = st.SparseEncoder(modules=[router], device="cpu", similarity_fn_name="dot")
    theirs.save_pretrained(str(tmp_path / "theirs"))
    if idf_file:
        folder = tmp_path / "theirs/query_0_SparseStaticEmbedding"
        entries = {token: float(weight[number]) for token, number in vocabulary.items()}
        (folder / "idf.json").write_text(json.dumps(entries))
        change_json(folder / "config.json", path="idf.json")
        (folder / "model.safetensors").unlink()
    ours = hfseq.RetrievalModel.from_pretrained(tmp_path / "theirs")
    queries = dense(theirs.encode_query(TEXTS))
    documents = dense(theirs.encode_document(TEXTS))
    ours.save_pretrained(tmp_path / "ours")
    again = st.SparseEncoder(str(tmp_path / "ours"), device="cpu")
    assert_close(ours.encode_query(TEXTS).toarray(), queries)
    assert_close(ours.encode_document(TEXTS).toarray(), documents)
    assert_close(dense(again.encode_query(TEXTS)), queries)
    assert_close(dense(again.encode_document(TEXTS)), documents)


EXPANSIONS = [
    None,
    {"strategy": "fixed", "length": 24, "attend": False, "token": None},
    {"strategy": "min", "length": 12, "attend": True, "token": None},
    {"strategy": "min", "length": 12, "attend": False, "token": "[SEP]"},
]


@pytest.mark.parametrize("expansion", EXPANSIONS, ids=str)
def test_multi_vector_encoders(bert, tmp_path, expansion):
    import torch
    from sentence_transformers.base.modules import Dense, Normalize, Transformer
    from sentence_transformers.multi_vector_encoder.modules import MultiVectorMask

    name = "token_embeddings"
    projection = Dense(
        32, 8, bias=False, activation_function=torch.nn.Identity(), module_input_name=name
    )
    limited = expansion is None or expansion["strategy"] == "min"
    transformer = Transformer(
        str(bert),
        query_expansion=expansion,
        query_length=20 if limited else None,
        document_length=25,
    )
    mask = MultiVectorMask(skiplist_words=list(string.punctuation))
    theirs = st.MultiVectorEncoder(
        modules=[transformer, projection, mask, Normalize(module_input_name=name)],
        device="cpu",
        prompts={"query": "[Q] ", "document": "[D] "},
    )
    theirs.save_pretrained(str(tmp_path / "theirs"))
    ours = hfseq.RetrievalModel.from_pretrained(tmp_path / "theirs")
    check_multi_vector(ours, theirs, tmp_path)


def check_multi_vector(ours, theirs, tmp_path):
    """Compares token vectors and MaxSim, also after hfseq has saved the model."""
    queries, documents = (
        encode(TEXTS, convert_to_numpy=True)
        for encode in (theirs.encode_query, theirs.encode_document)
    )
    actual = ours.encode_query(TEXTS), ours.encode_document(TEXTS)
    assert_close(actual[0], queries)
    assert_close(actual[1], documents)
    assert_close(ours.encode(TEXTS), theirs.encode(TEXTS, convert_to_numpy=True))
    assert_close(ours.similarity(*actual), theirs.similarity(queries, documents))
    pairwise = theirs.similarity_pairwise(queries, documents)
    assert_close(ours.similarity_pairwise(*actual), pairwise)
    ours.save_pretrained(tmp_path / "ours")
    again = st.MultiVectorEncoder(str(tmp_path / "ours"), device="cpu")
    assert_close(again.encode_query(TEXTS, convert_to_numpy=True), queries)
    assert_close(again.encode_document(TEXTS, convert_to_numpy=True), documents)
    third = hfseq.MultiVectorEncoder.from_pretrained(tmp_path / "ours")
    assert_close(third.encode_query(TEXTS), queries)


@pytest.mark.parametrize("make_directory", [make_pylate, make_stanford])
def test_directories_of_pylate_and_of_stanfords_colbert(bert, tmp_path, make_directory):
    folder = make_directory(tmp_path, bert)
    theirs = st.MultiVectorEncoder(str(folder), device="cpu")
    check_multi_vector(hfseq.RetrievalModel.from_pretrained(folder), theirs, tmp_path)


def test_a_bi_encoder_becomes_a_multi_vector_encoder(bert, tmp_path):
    from sentence_transformers.base.modules import Dense, Normalize, Transformer
    from sentence_transformers.sentence_transformer.modules import Pooling

    modules = [Transformer(str(bert)), Pooling(32), Dense(32, 6), Normalize()]
    st.SentenceTransformer(modules=modules, device="cpu").save_pretrained(str(tmp_path / "bi"))
    theirs = st.MultiVectorEncoder(str(tmp_path / "bi"), device="cpu")
    ours = hfseq.MultiVectorEncoder.from_pretrained(tmp_path / "bi")
    check_multi_vector(ours, theirs, tmp_path)


def test_maxsim_of_documents_without_tokens():
    import torch
    from sentence_transformers.util.similarity import maxsim, mean_maxsim

    from hfseq.modeling.sentence.similarity import similarity

    draw = np.random.default_rng(0)
    queries, documents = (
        [draw.normal(size=(n, 4)).astype(np.float32) for n in sizes]
        for sizes in ((3, 1), (5, 0, 2))
    )
    tensors = [[torch.tensor(rows) for rows in side] for side in (queries, documents)]
    for name, function in (("maxsim", maxsim), ("meanmaxsim", mean_maxsim)):
        assert_close(similarity(name, queries, documents), function(*tensors).numpy())


@pytest.mark.parametrize("output_format", ["triplet", "n-tuple", "labeled-pair", "labeled-list"])
@pytest.mark.parametrize(
    "filters",
    [
        {},
        {"absolute_margin": 0.02},
        {"relative_margin": 0.05, "range_min": 1},
        {"max_score": 0.97, "min_score": 0.5, "num_negatives": 2},
    ],
    ids=str,
)
def test_mined_negatives(bert, tmp_path, output_format, filters):
    from datasets import Dataset
    from sentence_transformers.base.modules import Transformer
    from sentence_transformers.sentence_transformer.modules import Pooling
    from sentence_transformers.util import mine_hard_negatives

    from hfseq.objectives.mining import Mining, mine

    words = sorted({word for text in TEXTS for word in text.split()})
    draw = np.random.default_rng(0)
    texts = [" ".join(draw.choice(words, 5)) for _ in range(240)]
    anchors = [texts[number] for number in draw.integers(0, 30, 60)]
    positives = texts[100:160]
    theirs = st.SentenceTransformer(modules=[Transformer(str(bert)), Pooling(32)], device="cpu")
    theirs.save_pretrained(str(tmp_path / "bi"))
    ours = hfseq.SentenceEncoder.from_pretrained(tmp_path / "bi")
    dataset = Dataset.from_dict({"anchor": anchors, "positive": positives})
    for corpus in (None, texts):
        for scores in (False, True):
            options = {"output_format": output_format, "output_scores": scores, **filters}
            expected = mine_hard_negatives(
                dataset, theirs, corpus=corpus, verbose=False, **options
            ).to_list()
            actual = mine(ours, anchors, positives, Mining(**options), corpus=corpus)
            names = {"scores", "score"}
            assert [{k: v for k, v in row.items() if k not in names} for row in actual] == [
                {k: v for k, v in row.items() if k not in names} for row in expected
            ]
            for row, other in zip(actual, expected, strict=True):
                for name in names & set(other):
                    assert row[name] == pytest.approx(other[name], abs=1e-5)
