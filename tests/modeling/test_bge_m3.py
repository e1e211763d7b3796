"""BGE-M3: three kinds of embeddings against a computation with PyTorch, and invalid files."""

from __future__ import annotations

import numpy as np
import pytest

import hfseq
from hfseq.errors import CheckpointError, UsageError
from hfseq.modeling.bge_m3 import BGEM3Encoder
from tests.support.models import close, xlm_roberta_config

TEXTS = ["a b c a", "b", "c c b a d e f"]
SPECIAL = ["<s>", "<pad>", "</s>", "<unk>"]


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    """Returns the directory of a tiny model with the files of BAAI/bge-m3."""
    torch = pytest.importorskip("torch")
    from tokenizers import Tokenizer, models, pre_tokenizers, processors
    from transformers import PreTrainedTokenizerFast

    path = tmp_path_factory.mktemp("bge-m3")
    hfseq.FlaxXLMRobertaModel(xlm_roberta_config(), seed=1).save_pretrained(path)
    vocabulary = {token: number for number, token in enumerate([*SPECIAL, *"abcdef"])}
    tokenizer = Tokenizer(models.WordLevel(vocabulary, "<unk>"))
    tokenizer.pre_tokenizer = pre_tokenizers.WhitespaceSplit()
    ends = [("<s>", 0), ("</s>", 2)]
    tokenizer.post_processor = processors.TemplateProcessing(
        "<s> $A </s>", "<s> $A </s> $B </s>", ends
    )
    roles = dict(zip(("cls_token", "pad_token", "eos_token", "unk_token"), SPECIAL, strict=True))
    PreTrainedTokenizerFast(tokenizer_object=tokenizer, **roles).save_pretrained(path)
    torch.manual_seed(0)
    for name, features in (("sparse", 1), ("colbert", 32)):
        layer = torch.nn.Linear(32, features)
        torch.save(layer.state_dict(), path / f"{name}_linear.pt")
    return path


@pytest.fixture(scope="module")
def encoder(folder):
    return BGEM3Encoder.from_pretrained(str(folder))


def by_pytorch(folder, text):
    """Returns the dense vector, weights by token, and token vectors that PyTorch computes."""
    import torch
    from transformers import AutoTokenizer, XLMRobertaModel

    ids = AutoTokenizer.from_pretrained(folder)(text, return_tensors="pt")["input_ids"]
    model = XLMRobertaModel.from_pretrained(folder).eval()
    layers = {name: torch.load(folder / f"{name}_linear.pt") for name in ("sparse", "colbert")}
    with torch.no_grad():
        hidden = model(ids).last_hidden_state[0]
        weights, vectors = (
            torch.nn.functional.linear(hidden, layer["weight"], layer["bias"])
            for layer in (layers["sparse"], layers["colbert"])
        )
        dense = torch.nn.functional.normalize(hidden[0], dim=-1)
        vectors = torch.nn.functional.normalize(vectors[1:], dim=-1)
    lexical: dict[str, float] = {}
    for token, weight in zip(ids[0].tolist(), weights[:, 0].relu().tolist(), strict=True):
        if token > 3 and weight > 0:
            lexical[str(token)] = max(weight, lexical.get(str(token), 0.0))
    return dense.numpy(), lexical, vectors.numpy()


def test_three_outputs_are_those_of_pytorch(folder, encoder):
    output = encoder.encode(TEXTS, return_sparse=True, return_colbert_vecs=True, batch_size=2)
    assert any(output["lexical_weights"])
    for number, text in enumerate(TEXTS):
        dense, lexical, vectors = by_pytorch(folder, text)
        assert close(output["dense_vecs"][number], dense)
        assert close(output["colbert_vecs"][number], vectors)
        ours = output["lexical_weights"][number]
        assert ours.keys() == lexical.keys()
        assert close([ours[token] for token in lexical], [*lexical.values()])


def test_scores_of_pairs_combine_the_three_outputs(encoder):
    output = encoder.encode(TEXTS, return_sparse=True, return_colbert_vecs=True)
    score = encoder.compute_score((TEXTS[0], TEXTS[2]), weights_for_different_modes=[1, 0.3, 1])
    dense = output["dense_vecs"][0] @ output["dense_vecs"][2]
    first, second = (output["lexical_weights"][number] for number in (0, 2))
    sparse = sum(weight * second.get(token, 0.0) for token, weight in first.items())
    query, passage = (output["colbert_vecs"][number] for number in (0, 2))
    colbert = np.mean([max(a @ b for b in passage) for a in query])
    expected = (dense + 0.3 * sparse + colbert) / 2.3
    assert score["colbert+sparse+dense"] == pytest.approx(expected, abs=1e-5)
    assert score["sparse+dense"] == pytest.approx((dense + 0.3 * sparse) / 1.3, abs=1e-5)
    several = encoder.compute_score([(TEXTS[0], TEXTS[2])] * 2)
    assert several["dense"] == [pytest.approx(dense, abs=1e-5)] * 2


def test_outputs_that_are_not_requested_are_none_and_a_text_gives_its_own(encoder):
    output = encoder.encode(TEXTS[0])
    assert output["dense_vecs"].shape == (32,) and output["lexical_weights"] is None
    assert encoder.encode([])["dense_vecs"].shape == (0, 32)
    names = encoder.convert_id_to_token([{"4": 0.5}])
    assert names == [{"a": 0.5}]
    truncated = encoder.encode(TEXTS, max_length=3, return_colbert_vecs=True)["colbert_vecs"]
    assert [len(vectors) for vectors in truncated] == [2, 2, 2]


def test_invalid_files_and_arguments(folder, encoder, tmp_path):
    import shutil

    import torch

    shutil.copytree(folder, tmp_path / "model")
    path = tmp_path / "model" / "sparse_linear.pt"
    torch.save({"weight": torch.ones(1, 16), "bias": torch.ones(1)}, path)
    with pytest.raises(CheckpointError, match=r"sparse_linear.pt contains .*16"):
        BGEM3Encoder.from_pretrained(str(tmp_path / "model"))
    path.unlink()
    with pytest.raises(CheckpointError, match=r"no sparse_linear.pt"):
        BGEM3Encoder.from_pretrained(str(tmp_path / "model"))
    for call, message in (
        (lambda: encoder.encode(TEXTS, max_length=1), "max_length=1"),
        (lambda: encoder.encode(TEXTS, batch_size=0), "batch_size .*0"),
        (lambda: encoder.save_pretrained(tmp_path / "saved"), "PyTorch files"),
        (lambda: encoder.compute_score([("a", "b", "c")]), "pair 1"),
        (lambda: encoder.compute_score([("a", "b")], weights_for_different_modes=[1]), "three"),
    ):
        with pytest.raises(UsageError, match=message):
            call()
