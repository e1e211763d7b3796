"""Generation tests of Transformers 4's test suite, with options on the configuration."""

from __future__ import annotations

import itertools

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from hfseq import (
    FlaxBartForConditionalGeneration,
    FlaxGPT2LMHeadModel,
    FlaxT5ForConditionalGeneration,
)
from tests.support.models import bart_config, gpt2_config, ids, t5_config
from tests.support.tiers import first

MODELS = {
    "gpt2": (FlaxGPT2LMHeadModel, gpt2_config),
    "t5": (FlaxT5ForConditionalGeneration, t5_config),
    "bart": (FlaxBartForConditionalGeneration, bart_config),
}
FORCED = {"min_length": 1, "forced_bos_token_id": 8, "forced_eos_token_id": 9}
OPTIONS = {
    "greedy": {},
    "greedy with processors": FORCED,
    "sampling with warpers": {
        **FORCED,
        "do_sample": True,
        "temperature": 0.8,
        "top_k": 10,
        "top_p": 0.3,
    },
    "beams": {**FORCED, "num_beams": 2},
    "two beams a row": {"num_beams": 2, "num_return_sequences": 2},
}

# One family per search.
QUICK = {("greedy with processors", "t5"), ("beams", "gpt2")}


def configured(family, options):
    cls, make = MODELS[family]
    config = make()
    length = 7 + 5
    settings = {"do_sample": False, "max_length": length, "decoder_start_token_id": 0, **options}
    for name, value in settings.items():
        setattr(config, name, value)
    return cls(config), length


@pytest.mark.parametrize(
    ("options", "family"),
    first(itertools.product(OPTIONS, MODELS), *QUICK),
)
def test_generate_equals_its_jitted_self_and_fills_max_length(family, options):
    model, length = configured(family, OPTIONS[options])
    tokens = jnp.asarray(ids(2, 7))
    result = model.generate(tokens).sequences
    rows = 2 * OPTIONS[options].get("num_return_sequences", 1)
    assert result.shape == (rows, length)
    assert np.array_equal(jax.jit(model.generate)(tokens).sequences, result)


@pytest.mark.slow
@pytest.mark.parametrize("family", MODELS)
def test_a_mask_may_hide_the_first_token(family):
    model, _ = configured(family, {})
    tokens = jnp.asarray(ids(2, 7))
    mask = jnp.ones_like(tokens).at[(0, 0)].set(0)
    result = model.generate(tokens, attention_mask=mask).sequences
    jitted = jax.jit(model.generate)(tokens, attention_mask=mask).sequences
    assert np.array_equal(result, jitted)
    boolean = model.generate(tokens, attention_mask=mask.astype(bool)).sequences
    assert np.array_equal(result, boolean)


@pytest.mark.slow
def test_unknown_arguments_are_all_named():
    model, _ = configured("gpt2", {})
    with pytest.raises(ValueError, match="do_samples"):
        model.generate(ids(2, 7), do_samples=True)
    with pytest.raises(ValueError, match="foo"):
        model.generate(ids(2, 7), do_samples=True, foo="bar")
