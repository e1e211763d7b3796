"""Every family's training step compiled for real chips: what is fused, exchanged and kept."""

from __future__ import annotations

import json
import re

import pytest

from hfseq import plugins
from hfseq.training import collectives
from tests.accelerators.families import FAMILIES, LENGTH, NOT_COMPILED, says
from tests.accelerators.steps import (
    MESHES,
    TABLE,
    TEMPORARY,
    Step,
    compiled,
    exchange,
    step_of,
)

TRITON, CUDNN = "__gpu$xla.gpu.triton", "__cudnn$fmhaSoftmax"


def check(step: Step, family: str, program: str = "h200") -> None:
    """What holds of every program: no scores of all pairs, no callbacks, halves, bytes."""
    spec = FAMILIES[family]
    assert bool(step.squares) == says(spec.squares, program), step.squares.most_common(5)
    assert bool(step.float32_products) == says(spec.singles, program), step.float32_products
    assert "callback" not in step.text
    # TPUs lay arrays out in tiles of 8 x 128, which small ones do not fill.
    most = step.tiled if "T(8,128)" in step.text else step.state + step.inputs
    assert 0.98 * (step.state + step.inputs) <= step.arguments <= 1.02 * most
    assert step.alias >= 0.99 * step.state


def check_kept(step: Step, family: str, program: str) -> None:
    """What a program keeps beside its arguments is at most what it was."""
    stored = json.loads(TEMPORARY.read_text(encoding="utf-8"))[family][program]
    assert step.temporary <= 1.05 * stored, (step.temporary, stored)


def test_every_architecture_compiles_or_gives_the_reason():
    here = {name.split(",")[0] for name in FAMILIES}
    assert here | set(NOT_COMPILED) == set(plugins.load().architectures)
    assert not here & set(NOT_COMPILED) and all(NOT_COMPILED.values())
    for name, family in FAMILIES.items():
        usual = family.flash is None and family.fused is None and family.splash
        assert usual == (not family.because), f"{name}: what is unusual needs a reason"


@pytest.mark.slow
@pytest.mark.parametrize("family", FAMILIES)
def test_a_step_with_dropout_is_fused_on_an_h200(family):
    step = step_of(family, "h200, dropout")
    check(step, family, "h200, dropout")
    check_kept(step, family, "h200, dropout")
    if FAMILIES[family].attentions and not FAMILIES[family].dropout:
        return  # the program without dropout
    assert step.calls(TRITON) == FAMILIES[family].flash_calls
    assert step.calls(CUDNN, f"{CUDNN}Backward") == 0


@pytest.mark.slow
@pytest.mark.parametrize("family", FAMILIES)
def test_step_without_dropout_is_fused_on_an_h200(family):
    step, spec = step_of(family, "h200"), FAMILIES[family]
    check(step, family)
    check_kept(step, family, "h200")
    kinds = (CUDNN, "__cudnn$fmhaScaleBiasSoftmax")
    forward, backward = step.calls(*kinds), step.calls(*(f"{kind}Backward" for kind in kinds))
    flash = [step.text.count(f'name = "flash_{part}_kernel"') for part in ("forward", "key")]
    assert forward + flash[0] == backward + flash[1] == spec.fused_calls


@pytest.mark.slow
def test_recomputed_layers_attend_forward_twice():
    step = compiled("roberta", dropout=0.0, remat=True)
    kernels = [f'name = "flash_{part}_kernel"' for part in ("forward", "key")]
    assert [step.text.count(kernel) for kernel in kernels] == [2, 1]


@pytest.mark.slow
def test_the_explicit_form_would_be_noticed():
    step = compiled("roberta", dropout=0.1, attention="explicit")
    assert step.squares and step.calls(TRITON) == 0
    with pytest.raises(AssertionError):
        check(step, "roberta")


@pytest.mark.slow
@pytest.mark.parametrize("family", FAMILIES)
def test_tpu_step_uses_splash_or_falls_back(family):
    step, spec = step_of(family, "v5e"), FAMILIES[family]
    check(step, family, "v5e")
    check_kept(step, family, "v5e")
    kinds = (f"{phase}_(segmented_)?(no_)?residuals" for phase in ("fwd", "dq", "dkv"))
    assert [bool(re.search(kind, step.text)) for kind in kinds] == [spec.splash] * 3


@pytest.mark.slow
@pytest.mark.parametrize("name", MESHES)
def test_collectives_match_the_table(name):
    step, stored = exchange(name), json.loads(TABLE.read_text(encoding="utf-8"))[name]
    check(step, MESHES[name][0])
    assert [row[:3] for row in step.exchanged] == [row[:3] for row in stored]
    for found, wanted in zip(step.exchanged, stored, strict=True):
        assert found[3] == pytest.approx(wanted[3], rel=0.02)


@pytest.mark.slow
@pytest.mark.parametrize("family", ["roberta", "gpt2"])
def test_wide_layer_gradient_is_stored_in_half_precision(family):
    wide = {"roberta": "512", "gpt2": "1024"}[family]  # of a feed-forward layer
    program = collectives.instructions(compiled(family, dropout=0.0).text)
    written = [one.shape.split("{")[0] for one in program if one.opcode == "fusion"]
    assert f"bf16[2,{LENGTH},{wide}]" in written and f"f32[2,{LENGTH},{wide}]" not in written
