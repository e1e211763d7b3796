"""Tests of the bytes that the kernels of a compiled step move, and of their table."""

from __future__ import annotations

import sys
from pathlib import Path

import pytest

SCRIPTS = Path(__file__).resolve().parents[2] / "scripts" / "benchmarks"
sys.path.insert(0, str(SCRIPTS))

import training

pytestmark = pytest.mark.slow

TEXT = """HloModule jit_step

%fused (p: f32[4,8]) -> bf16[4,8] {
  %p = f32[4,8]{1,0} parameter(0)
  ROOT %c = bf16[4,8]{1,0} convert(%p), metadata={op_name="jit(step)/jvp()/convert"}
}

ENTRY %main (a: f32[4,8], b: bf16[8,2]) -> bf16[4,2] {
  %a = f32[4,8]{1,0} parameter(0)
  %b = bf16[8,2]{1,0} parameter(1)
  %f = bf16[4,8]{1,0} fusion(%a), kind=kLoop, calls=%fused, metadata={op_name="jit(step)/jvp()/c"}
  ROOT %d = (bf16[4,2]{1,0}, s8[16]{0}) custom-call(%f, %b), custom_call_target="__cublas$gemm"
}
"""


def test_kernel_moves_its_operands_and_results():
    traffic = {
        kernel.name: (kernel_kind, size)
        for kernel, kernel_kind, size in training.Program(TEXT).traffic()
    }
    assert traffic == {
        "f": (training.ELEMENTWISE, 128 + 64),
        "d": (training.OTHER_PRODUCT, 64 + 32 + 16 + 16),
    }


@pytest.mark.parametrize("step", ["gpt2", "gpt2:16", "gpt2:0x8", "gpt2:16x"])
def test_invalid_step_is_a_usage_error(step, capsys):
    with pytest.raises(SystemExit) as error:
        training.parse_h200(["--target", "h200.txtpb", "--steps", step])
    assert error.value.code == 2
    assert "MODEL:ROWSxLENGTH" in capsys.readouterr().err
