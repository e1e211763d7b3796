"""Generation with collections: they are operands of the search, like the parameters."""

from __future__ import annotations

import jax
import numpy as np
import pytest

from hfseq import plugins
from hfseq.errors import UsageError
from hfseq.nn.fp8 import delayed_scaling
from tests.support import models as tiny
from tests.support.tiers import first


def pair(family, head, **options):
    """Returns a model in FP8, and one of the same structure without parameters."""
    spec = plugins.load().architectures.get(family)
    config = getattr(tiny, f"{family}_config")()
    return [
        spec.load_head(head)(config, precision=delayed_scaling(4), _do_init=initialized, **options)
        for initialized in (True, False)
    ]


def written(model, beams, **options):
    output = model.generate(
        tiny.ids(),
        num_beams=beams,
        max_new_tokens=5,
        min_new_tokens=5,
        return_dict_in_generate=True,
        output_scores=True,
        **options,
    )
    return np.asarray(output.sequences)


@pytest.mark.parametrize(
    ("family", "head", "beams"),
    first(
        [("gpt2", "ForCausalLM", 1), ("t5", "ForSeq2SeqLM", 3), ("bart", "ForSeq2SeqLM", 3)],
        ("gpt2", "ForCausalLM", 1),
    ),
)
def test_a_model_that_holds_none_writes_with_those_that_are_passed(family, head, beams):
    model, bare = pair(family, head)
    expected = written(model, beams)
    state = {"params": model.params, "extra": model.extra}
    assert np.array_equal(written(bare, beams, **state), expected)
    assert bare.extra == {}
    with pytest.raises(UsageError, match="fp8_params"):
        written(bare, beams, params=model.params)


@pytest.mark.slow
def test_compiled_searches_keep_no_collection():
    """A compiled program uses the passed scales, here scales that round everything to zero."""
    model, bare = pair("t5", "ForSeq2SeqLM", scan_layers=True)
    # Larger weights, so that the layers affect the tokens.
    params = jax.tree.map(lambda x: 20 * x, model.params)
    coarse = jax.tree.map(lambda x: x + 1e6, model.extra)
    expected = written(model, 1, params=params)
    changed = written(model, 1, params=params, extra=coarse)
    assert not np.array_equal(expected, changed)
    model.extra = coarse
    assert np.array_equal(written(model, 1, params=params), changed)
    assert np.array_equal(written(bare, 1, params=params, extra=coarse), changed)
