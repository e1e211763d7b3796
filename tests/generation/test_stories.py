"""A trained model generates a story."""

from __future__ import annotations

import numpy as np
import pytest

from tests.generation import families

STORY = "Once upon a time, there was a little girl named Lily."


@pytest.fixture(scope="module")
def teller(shared):
    """The trained Llama and its vocabulary."""
    folder = shared / "checkpoints-tiny" / "stories260K"
    lines = (folder / "tok512.vocab").read_text(encoding="utf-8").splitlines()
    pieces = [line.split("\t")[0].replace("▁", " ") for line in lines]
    model = families.flax_class("llama").from_pretrained(folder)
    return model, pieces, folder


def decode(pieces: list[str], ids: np.ndarray) -> str:
    return "".join(pieces[token] for token in ids if token > 2).strip()


@pytest.mark.slow
def test_story_is_english_and_pytorchs(teller):
    torch = pytest.importorskip("torch")
    from transformers import LlamaForCausalLM

    model, pieces, folder = teller
    begin = np.array([[1]])
    result = np.asarray(model.generate(begin, max_new_tokens=200, eos_token_id=None).sequences)
    theirs = LlamaForCausalLM.from_pretrained(folder)
    expected = theirs.generate(
        torch.tensor(begin), max_new_tokens=200, min_new_tokens=200, do_sample=False
    )
    text = decode(pieces, result[0])
    assert (result == expected.numpy()).all() or text == decode(pieces, expected[0].numpy())
    assert text.startswith(STORY)
    common = {"the", "and", "a", "to", "was", "she", "her", "in", "it", "with", "they", "play"}
    words = [word.strip('.,!?"').lower() for word in text.split()]
    assert len(words) > 60 and sum(word in common for word in words) > len(words) / 4


@pytest.mark.slow
def test_story_with_sampling_and_beams(teller):
    model, pieces, _ = teller
    sampled = model.generate(
        np.array([[1]]),
        do_sample=True,
        temperature=0.8,
        top_p=0.9,
        prng_key=5,
        max_new_tokens=80,
        num_return_sequences=2,
    )
    first, second = (decode(pieces, np.asarray(row)) for row in sampled.sequences)
    assert first != second and all(text.split()[0].isalpha() for text in (first, second))
    beams = model.generate(np.array([[1]]), num_beams=4, max_new_tokens=60)
    assert decode(pieces, np.asarray(beams.sequences)[0]).startswith("Once upon a time")
