"""Mamba-2 and Falcon-Mamba: the battery, chunks, masked tokens and windows of long sequences."""

from __future__ import annotations

import numpy as np
import pytest

from hfseq import plugins
from hfseq.errors import UsageError
from hfseq.testing import check_architecture
from hfseq.testing.case import jit
from tests.support import models
from tests.support.models import close, ids
from tests.support.parity import compare_tokens
from tests.support.tiers import CHECKS, first, heads
from tests.support.torch_counterparts import torch_counterpart

NAMES = ("mamba2", "falcon_mamba")


def built(name, head="ForCausalLM", **changes):
    config = getattr(models, f"{name}_config")(**changes)
    return plugins.load().architectures.get(name).load_head(head)(config, seed=1)


@pytest.mark.parametrize(
    ("name", "head", "checks"),
    first(
        [
            *((name, "ForCausalLM", CHECKS) for name in NAMES),
            *((name, head, None) for name in NAMES for head in heads(name)),
        ],
        *((name, "ForCausalLM", CHECKS) for name in NAMES),
    ),
)
def test_battery(name, head, checks):
    config = getattr(models, f"{name}_config")(**({"num_hidden_layers": 1} if checks else {}))
    check_architecture(name, config, heads=[head], checks=checks)


@pytest.mark.slow
@pytest.mark.parametrize(
    ("name", "changes"),
    [
        ("mamba2", {"tie_word_embeddings": True, "n_groups": 1, "chunk_size": 256}),
        ("mamba2", {"use_conv_bias": False, "residual_in_fp32": False}),
        ("mamba2", {"time_step_limit": (0.05, 0.4)}),
        ("falcon_mamba", {"tie_word_embeddings": True, "time_step_init_scheme": "constant"}),
        ("falcon_mamba", {"use_conv_bias": False, "residual_in_fp32": False}),
    ],
)
def test_battery_of_a_switch(name, changes):
    config = getattr(models, f"{name}_config")(**changes)
    skip = {}
    if "time_step_limit" in changes:
        skip["torch_generation"] = "PyTorch ignores time_step_limit when it generates"
    check_architecture(name, config, heads=["ForCausalLM"], skip=skip)


@pytest.mark.slow
@pytest.mark.parametrize("name", NAMES)
@pytest.mark.parametrize("padded", ["left", "none"])
def test_generated_tokens_are_pytorchs(name, padded, tmp_path):
    model = built(name)
    tokens, mask = np.maximum(ids(3, 9), 3), np.ones((3, 9), np.int32)
    if padded == "left":
        mask[0, :4], mask[1, :1] = 0, 0
        tokens = np.where(mask, tokens, 0)
    theirs = torch_counterpart(model, tmp_path)
    compare_tokens(model, theirs, tokens, mask, max_new_tokens=10, do_sample=False)


@pytest.mark.parametrize("name", first(NAMES, "mamba2"))
def test_masked_tokens_do_not_change_the_cache(name):
    model = built(name, num_hidden_layers=1, use_bias=True)
    tokens = ids(1, 7)
    mask = np.array([[0, 1, 1, 0, 1, 1, 0]], np.int32)
    call = jit(lambda *inputs: dict(model(*inputs, past_key_values=model.init_cache(1, 7))))
    outputs, short = call(tokens, mask), call(tokens[:, mask[0] > 0])
    assert close(outputs["logits"][:, mask[0] > 0], short["logits"])
    for path in ("window", "state", "position"):
        ours, expected = (
            output["past_key_values"]["backbone"]["layers"]["0"]["mixer"][path]
            for output in (outputs, short)
        )
        assert close(ours, expected), path


@pytest.mark.parametrize("name", first(NAMES, "mamba2"))
def test_windows_of_a_sequence_give_the_results_of_the_whole_sequence(name):
    model = built(name, num_hidden_layers=1)
    tokens, call = ids(2, 11), jit(lambda *args, **options: dict(model(*args, **options)))
    expected = np.asarray(call(tokens)["logits"])
    first_part = call(tokens[:, :6], past_key_values=model.init_cache(2, 11))
    cache = first_part["past_key_values"]
    second = call(tokens[:, 6:], past_key_values=cache)["logits"]
    assert close(np.concatenate([first_part["logits"], second], 1), expected)
    reset_rows = np.array([True, False])
    reset = call(tokens[:, 6:], past_key_values=cache, reset_rows=reset_rows)["logits"]
    assert close(reset[1], expected[1, 6:])
    assert close(reset[0], call(tokens[:, 6:])["logits"][0])


@pytest.mark.parametrize(
    ("name", "changes", "message"),
    [
        ("mamba2", {"n_groups": 3}, "n_groups=3"),
        ("falcon_mamba", {"time_step_init_scheme": "zeros"}, "time_step_init_scheme 'zeros'"),
    ],
)
def test_unsupported_configurations_are_refused(name, changes, message):
    with pytest.raises(UsageError, match=message):
        built(name, num_hidden_layers=1, **changes)
