"""Streaming returns the same tokens, one step at a time."""

from __future__ import annotations

import io
from contextlib import redirect_stdout

import numpy as np
import pytest

from tests.generation import families
from tests.support.tiers import first

IDS = families.prompts(2, 5)
SETTINGS = {
    "greedy": {},
    "sample": {"do_sample": True, "prng_key": 3},
    "ends": {"eos_token_id": list(range(3, 20)), "output_scores": True},
}


class Collector:
    def __init__(self):
        self.parts, self.ended = [], False

    def put(self, value):
        self.parts.append(value)

    def end(self):
        self.ended = True


@pytest.mark.parametrize("name", SETTINGS)
@pytest.mark.parametrize("family", first(["llama", "t5"], "llama"))
def test_streamer_and_generator_give_the_tokens_of_generate(family, name):
    model, options = families.model(family), {"max_new_tokens": 7, **SETTINGS[name]}
    expected = model.generate(IDS, **options)
    streamer = Collector()
    output = model.generate(IDS, streamer=streamer, **options)
    assert (np.asarray(output.sequences) == np.asarray(expected.sequences)).all()
    if name == "ends":
        assert (np.asarray(output.scores) == np.asarray(expected.scores)).all()
    prompt, *steps = streamer.parts
    assert streamer.ended and prompt.ndim == 2
    streamed = np.concatenate([prompt, np.stack(steps, 1)], 1)
    assert (streamed == np.asarray(expected.sequences)[:, : streamed.shape[1]]).all()
    assert (np.asarray(expected.sequences)[:, streamed.shape[1] :] == families.PAD).all()
    yielded = list(model.stream_generate(IDS, **options))
    assert (np.stack(yielded) == np.stack(steps)).all()


def test_stream_can_be_left():
    stream = families.model("llama").stream_generate(IDS, max_new_tokens=40, eos_token_id=None)
    first = next(stream)
    assert first.shape == (2,)
    stream.close()
    assert list(stream) == []


def test_text_streamer_of_transformers_prints_the_text(shared):
    from transformers import AutoTokenizer, TextStreamer

    folder = shared / "checkpoints-tiny" / "caikit-BloomForCausalLM"
    tokenizer = AutoTokenizer.from_pretrained(folder)
    printed = io.StringIO()
    with redirect_stdout(printed):
        output = families.model("llama").generate(
            IDS[:1], streamer=TextStreamer(tokenizer), max_new_tokens=8, eos_token_id=None
        )
    assert printed.getvalue().rstrip("\n") == tokenizer.decode(np.asarray(output.sequences)[0])


def test_streaming_refuses_beams_and_tracers():
    import jax

    model = families.model("llama")
    with pytest.raises(ValueError, match="num_beams=2, because beam search revises"):
        model.generate(IDS, streamer=Collector(), num_beams=2, max_new_tokens=3)
    with pytest.raises(ValueError, match="num_beams=2"):
        model.stream_generate(IDS, num_beams=2, max_new_tokens=3)
    with pytest.raises(ValueError, match="outside of jit"):
        jax.jit(lambda ids: model.generate(ids, streamer=Collector(), max_new_tokens=3))(IDS)
