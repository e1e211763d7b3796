"""Every family's training step compiled for real chips: what is fused, exchanged and kept."""

from __future__ import annotations

import json

import pytest

from hfseq.training import collectives
from tests.accelerators.steps import FAMILIES, LENGTH, MESHES, TABLE, Step, compiled, exchange
from tests.support.tiers import first

TRITON, CUDNN = "__gpu$xla.gpu.triton", "__cudnn$fmhaSoftmax"


def check(step: Step, family: str) -> None:
    """What holds of every program: no scores of all pairs, no callbacks, halves, bytes."""
    assert bool(step.squares) == bool(FAMILIES[family].squares), step.squares.most_common(5)
    assert bool(step.float32_products) == bool(FAMILIES[family].singles), step.float32_products
    assert "callback" not in step.text
    # TPUs lay arrays out in tiles of 8 x 128, which vectors do not fill.
    slack = 0.05 if "T(8,128)" in step.text else 0.02
    assert abs(step.arguments - step.state - step.inputs) <= slack * step.arguments
    assert step.alias >= 0.99 * step.state


@pytest.mark.parametrize("family", first(FAMILIES, "roberta"))
def test_a_step_with_dropout_is_fused_on_an_h200(family):
    step = compiled(family, dropout=0.1)
    check(step, family)
    attentions = FAMILIES[family].attentions
    extra = 2 if family in ("t5", "mt5") else 0  # a kernel more for the gradient of each bias
    assert step.calls(TRITON) == 3 * attentions + extra
    assert step.calls(CUDNN, f"{CUDNN}Backward") == 0


@pytest.mark.slow
@pytest.mark.parametrize("family", FAMILIES)
def test_a_step_without_dropout_is_cudnns_where_it_can_be(family):
    step = compiled(family, dropout=0.0)
    check(step, family)
    ours = {"t5": 1, "mt5": 1, "bart": 1}.get(family, 0)  # documents with a bias, or across
    attentions = FAMILIES[family].attentions
    assert step.calls(CUDNN) + step.calls("__cudnn$fmhaScaleBiasSoftmax") == attentions - ours
    assert step.calls(TRITON) >= 3 * ours


@pytest.mark.slow
def test_recomputed_layers_attend_forward_twice():
    step = compiled("roberta", dropout=0.0, remat=True)
    assert (step.calls(CUDNN), step.calls(f"{CUDNN}Backward")) == (2, 1)


@pytest.mark.slow
def test_the_explicit_form_would_be_noticed():
    step = compiled("roberta", dropout=0.1, attention="explicit")
    assert step.squares and step.calls(TRITON) == 0
    with pytest.raises(AssertionError):
        check(step, "roberta")


@pytest.mark.slow
@pytest.mark.parametrize("family", FAMILIES)
def test_a_step_is_splash_on_a_tpu_and_falls_back_where_it_must(family):
    step = compiled(family, "v5e", dropout=0.0)
    kinds = ("fwd_segmented_residuals", "dq_segmented_no_residuals", "dkv_segmented_no_residuals")
    found = [kind in step.text for kind in kinds]
    if family in ("t5", "mt5", "vq_transformer"):
        # T5 adds a bias and its targets are fewer than 128; VQ attends by its own form.
        assert "splash_mh" not in step.text and "callback" not in step.text
        return
    assert all(found), found
    check(step, family)


@pytest.mark.slow
@pytest.mark.parametrize("name", MESHES)
def test_devices_exchange_what_the_table_says(name):
    step, stored = exchange(name), json.loads(TABLE.read_text(encoding="utf-8"))[name]
    check(step, MESHES[name][0])
    assert [row[:3] for row in step.exchanged] == [row[:3] for row in stored]
    for found, wanted in zip(step.exchanged, stored, strict=True):
        assert found[3] == pytest.approx(wanted[3], rel=0.02)


@pytest.mark.slow
@pytest.mark.parametrize("family", ["roberta", "gpt2"])
def test_the_gradient_of_the_wide_layer_is_written_down_in_half_precision_alone(family):
    wide = {"roberta": "512", "gpt2": "1024"}[family]  # of a feed-forward layer
    program = collectives.instructions(compiled(family, dropout=0.0).text)
    written = [one.shape.split("{")[0] for one in program if one.opcode == "fusion"]
    assert f"bf16[2,{LENGTH},{wide}]" in written and f"f32[2,{LENGTH},{wide}]" not in written
