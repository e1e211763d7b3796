"""Divergences between teacher and student, and the vocabularies of both."""

from __future__ import annotations

from types import SimpleNamespace

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from hfseq.data.arguments import CausalArguments, EmbeddingArguments
from hfseq.errors import UsageError
from hfseq.objectives import divergences
from hfseq.objectives.clm import CausalLM
from hfseq.objectives.distillation import with_teacher
from tests.support import chats

DRAW = np.random.default_rng(0)
STUDENT, TEACHER = DRAW.normal(size=(2, 5, 11)) * 3


def softmax(x: np.ndarray) -> np.ndarray:
    exponents = np.exp(x - x.max(-1, keepdims=True))
    return exponents / exponents.sum(-1, keepdims=True)


@pytest.mark.parametrize("temperature", [1.0, 2.0])
@pytest.mark.parametrize("name", ["forward_kl", "reverse_kl", "jsd"])
def test_divergences_equal_their_definitions(name, temperature):
    s, t = (softmax(x / temperature) for x in (STUDENT, TEACHER))
    m = 0.3 * t + 0.7 * s

    def kl(p, q):
        return (p * np.log(p / q)).sum(-1)

    expected = {
        "forward_kl": kl(t, s),
        "reverse_kl": kl(s, t),
        "jsd": 0.3 * kl(t, m) + 0.7 * kl(s, m),
    }[name] * temperature**2
    arrays = (jnp.asarray(x, jnp.float32) for x in (STUDENT, TEACHER))
    result = divergences.divergence(name, *arrays, temperature, 0.3)
    np.testing.assert_allclose(result, expected, rtol=2e-5)


def test_the_divergence_of_attention_weights_is_a_mean_over_heads():
    hidden = [[0, 0, 0, 1], [0, 0, 1, 1], [1, 1, 1, 1]]  # the last query sees no key
    scores = np.where(hidden, -np.inf, DRAW.normal(size=(2, 2, 5, 3, 4)) * 5)
    with np.errstate(invalid="ignore"):
        student, teacher = np.nan_to_num(softmax(scores))
        terms = np.nan_to_num(teacher * np.log(teacher / student))
    expected = terms.sum(-1).mean(1)
    result = divergences.attention_divergence(*map(jnp.float32, (student, teacher)))
    np.testing.assert_allclose(result, expected, rtol=2e-5, atol=1e-6)
    assert not result[:, -1].any()
    gradient = jax.grad(lambda x: divergences.attention_divergence(x, jnp.float32(teacher)).sum())
    assert jnp.isfinite(gradient(jnp.float32(student))).all()


@pytest.fixture
def folder(tmp_path):
    return chats.write_tokenizer(tmp_path / "tokenizer")


def distilled(tokenizer, teacher):
    arguments = CausalArguments(train_file=["x"], teacher=str(teacher))
    return with_teacher(CausalLM)(arguments, tokenizer, SimpleNamespace(vocab_size=302))


def test_a_teacher_with_other_tokens_is_refused(folder, tmp_path):
    from transformers import AutoTokenizer

    tokenizer = AutoTokenizer.from_pretrained(folder)
    tokenizer.add_tokens(["<extra>"])
    with pytest.raises(UsageError, match="1 tokens differ, .*'<extra>' .only student"):
        distilled(tokenizer, folder)
    with pytest.raises(UsageError, match="tokenizer of --teacher .*nowhere"):
        distilled(tokenizer, tmp_path / "nowhere")
    with pytest.raises(UsageError, match="--teacher has no effect"):
        EmbeddingArguments(train_file=["x"], teacher="t", distillation_weight=0)


def test_token_ids_of_a_reordered_vocabulary_are_mapped(folder, tmp_path):
    import json

    from transformers import AutoTokenizer

    tokenizer = AutoTokenizer.from_pretrained(folder)
    assert distilled(tokenizer, folder).teacher_ids is None
    state = json.loads((folder / "tokenizer.json").read_text())
    vocabulary = state["model"]["vocab"]
    first, second = "a", "e"
    vocabulary[first], vocabulary[second] = vocabulary[second], vocabulary[first]
    other = tmp_path / "other"
    tokenizer.save_pretrained(other)
    (other / "tokenizer.json").write_text(json.dumps(state))
    objective = distilled(tokenizer, other)
    ids = {token: tokenizer.convert_tokens_to_ids(token) for token in (first, second)}
    assert objective.teacher_ids[ids[first]] == ids[second]
    assert objective.teacher_ids[ids[second]] == ids[first]
    assert (np.sort(objective.teacher_ids) == np.arange(objective.num_tokens)).all()
