"""Which calls compile a program, and which ones reuse it."""

from __future__ import annotations

from contextlib import contextmanager

import jax
import numpy as np
import pytest

from hfseq.generation import FlaxTemperatureLogitsWarper
from hfseq.generation.request import bucket_length
from tests.generation import families


@contextmanager
def compilations():
    """Collects one entry per compilation of JAX."""
    compiled: list[str] = []

    def listen(event: str, duration: float, **_: object) -> None:
        if event == "/jax/core/compile/jaxpr_to_mlir_module_duration":
            compiled.append(event)

    jax.monitoring.register_event_duration_secs_listener(listen)
    try:
        yield compiled
    finally:
        jax.monitoring.unregister_event_duration_listener(listen)


def test_buckets():
    assert [bucket_length(n) for n in (1, 2, 16, 17, 24, 25, 33, 49, 65, 97, 1000)] == [
        1,
        16,
        16,
        24,
        24,
        32,
        48,
        64,
        96,
        128,
        1024,
    ]
    assert bucket_length(33, limit=40) == 40 and bucket_length(41, limit=40) == 41
    assert all(n <= bucket_length(n) <= max(16, 1.5 * n) for n in range(2, 3000))
    assert [bucket_length(n, smallest=8) for n in (1, 2, 8, 9, 13, 17)] == [1, 8, 8, 12, 16, 24]


@pytest.mark.slow
@pytest.mark.parametrize("lengths", [{"max_length": 30}, {"max_new_tokens": 12}])
@pytest.mark.parametrize(
    ("family", "options"),
    [
        ("llama", {}),
        ("llama", {"num_beams": 2, "repetition_penalty": 1.2}),
        ("t5", {}),
    ],
)
def test_prompt_lengths_of_a_bucket_share_a_program(family, options, lengths):
    model = families.model(family)
    generate = lambda n: model.generate(families.prompts(2, n), **options, **lengths)  # noqa: E731
    inside = (13, 14, 15, 16) if family in families.PAIRS else (3, 2, 5, 9, 15, 16)
    generate(inside[0])
    with compilations() as compiled:
        outputs = [generate(length) for length in inside]
    assert compiled == []
    assert all(not np.isnan(np.asarray(output.sequences)).any() for output in outputs)
    with compilations() as compiled:
        generate(17)
    assert compiled != []


def test_masks_lengths_and_keys_share_a_program():
    model, ids = families.model("llama"), families.prompts(2, 6)
    generate = lambda **options: model.generate(ids, do_sample=True, **options)  # noqa: E731
    generate(attention_mask=families.mask(2, 6, "left"), max_length=20, prng_key=1)
    with compilations() as compiled:
        generate(attention_mask=families.mask(2, 6, "right", seed=3), max_length=22, prng_key=2)
        generate(max_length=24, prng_key=3)
    assert compiled == []


def test_streaming_shares_a_program_too():
    model = families.model("llama")
    list(model.stream_generate(families.prompts(1, 4), max_new_tokens=3))
    with compilations() as compiled:
        list(model.stream_generate(families.prompts(1, 7), max_new_tokens=3))
    assert compiled == []


def test_processors_with_equal_settings_share_a_program():
    model, ids = families.model("llama"), families.prompts(2, 6)

    def generate(temperature):
        parts = [FlaxTemperatureLogitsWarper(temperature)]
        return model.generate(ids, max_length=20, logits_processor=parts)

    generate(0.5)
    with compilations() as compiled:
        generate(0.5)
    assert compiled == []
    with compilations() as compiled:
        generate(0.6)
    assert compiled != []


def test_weights_are_arguments_of_the_program():
    """A program with captured weights would contain a second copy of them."""
    model, ids = families.model("llama"), families.prompts(2, 6)
    traced = jax.make_jaxpr(lambda p, ids: model.generate(ids, params=p, max_length=9).sequences)
    constants = traced(model.params, ids).consts
    assert sum(np.size(constant) for constant in constants) < 500


@pytest.mark.slow
def test_prompt_is_run_once_and_its_logits_never():
    """The head runs on one column, because the compiler drops the logits of the prompt."""
    model = families.model("llama")
    ids = families.prompts(5, 16)
    generate = jax.jit(lambda p, ids: model.generate(ids, params=p, max_length=20).sequences)
    text = generate.lower(model.params, ids).compile().as_text()
    assert f"f32[5,{families.VOCAB}]" in text
    assert f"f32[5,16,{families.VOCAB}]" not in text and f"f32[80,{families.VOCAB}]" not in text
