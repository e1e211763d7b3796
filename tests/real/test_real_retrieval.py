"""MiniLM as each kind of retrieval model equals sentence-transformers on real text."""

from __future__ import annotations

import numpy as np
import pytest

import hfseq
from tests.support.models import close

pytestmark = [pytest.mark.network, pytest.mark.slow, pytest.mark.filterwarnings("ignore")]

st = pytest.importorskip("sentence_transformers")


@pytest.fixture(scope="module")
def lines(shared):
    text = (shared / "wikitext-2" / "valid.txt").read_text(encoding="utf-8")
    texts = [line.strip() for line in text.splitlines() if len(line.split()) > 3]
    return list(dict.fromkeys(texts))[:300]


@pytest.fixture(scope="module")
def minilm(checkpoint):
    return checkpoint("minilm")


def test_a_bi_encoder_and_its_search(minilm, lines):
    from sentence_transformers.util import semantic_search

    from hfseq.modeling.sentence.search import search

    ours = hfseq.RetrievalModel.from_pretrained(minilm)
    vectors = ours.encode(lines)
    theirs = st.SentenceTransformer(str(minilm), device="cpu")
    expected = theirs.encode(lines)
    np.testing.assert_allclose(vectors, expected, atol=1e-6)
    scores, indices = search(ours, vectors[:20], vectors, 5)
    for hits, row, found in zip(
        semantic_search(expected[:20], expected, top_k=5), scores, indices, strict=True
    ):
        np.testing.assert_allclose([hit["score"] for hit in hits], row, atol=1e-6)
        # Texts of nearly equal similarity may be in another order.
        assert len({*found, *(hit["corpus_id"] for hit in hits)}) <= 6


@pytest.mark.parametrize("labels", [1, 3])
def test_a_cross_encoder_with_a_random_head(minilm, lines, tmp_path, labels):
    ours = hfseq.CrossEncoder.from_pretrained(minilm, num_labels=labels)
    ours.save_pretrained(tmp_path)
    theirs = st.CrossEncoder(str(tmp_path), device="cpu")
    pairs = list(zip(lines[::2], lines[1::2], strict=True))
    assert close(ours.predict(pairs), theirs.predict(pairs), 1e-5)
    if labels == 1:
        order = [entry["corpus_id"] for entry in theirs.rank(lines[0], lines[1:60])]
        assert [entry["corpus_id"] for entry in ours.rank(lines[0], lines[1:60])] == order


def test_a_sparse_encoder(minilm, lines, tmp_path):
    base = hfseq.FlaxAutoModel.from_pretrained(minilm)
    model = hfseq.FlaxBertForMaskedLM(base.config, seed=0)
    encoder = {k: v for k, v in base.params.items() if k in model.params["bert"]}
    model.params = {**model.params, "bert": encoder}
    from hfseq.modeling.sentence import SparseConfig

    tokenizer = hfseq.SentenceEncoder.from_pretrained(minilm).tokenizer
    hfseq.SparseEncoder(model, tokenizer, SparseConfig(max_seq_length=128)).save_pretrained(
        tmp_path
    )
    ours = hfseq.RetrievalModel.from_pretrained(tmp_path)
    theirs = st.SparseEncoder(str(tmp_path), device="cpu")
    expected = theirs.encode(lines[:60])
    actual = ours.encode(lines[:60])
    assert close(actual.toarray(), expected.to_dense().numpy(), 1e-5)
    tokens = [[token for token, _ in row] for row in theirs.decode(expected, top_k=20)]
    assert [[token for token, _ in row] for row in ours.decode(actual, top_k=20)] == tokens


def test_a_multi_vector_encoder(minilm, lines, tmp_path):
    ours = hfseq.MultiVectorEncoder.from_pretrained(minilm)
    ours.save_pretrained(tmp_path)
    theirs = st.MultiVectorEncoder(str(tmp_path), device="cpu")
    queries, documents = lines[:20], lines[20:80]
    actual = ours.similarity(ours.encode_query(queries), ours.encode_document(documents))
    expected = theirs.similarity(theirs.encode_query(queries), theirs.encode_document(documents))
    assert close(actual, expected.numpy(), 1e-5)
