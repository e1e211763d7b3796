"""Tests of the FP8 benchmark: kernel counts, profiles, remarks, and a tiny run."""

from __future__ import annotations

import importlib
import json
import re
import sys
import time
from pathlib import Path

import pytest

SCRIPTS = Path(__file__).resolve().parents[2] / "scripts" / "benchmarks"
sys.path.insert(0, str(SCRIPTS))

import fp8
import harness
import training

pytestmark = pytest.mark.slow

TINY = training.Size(width=32, layers=1, rows=2, length=16, vocab_size=100)

# Shortened from a step compiled for an H200: products of Triton and cuBLASLt, an FP8 operand that
# is converted back to bfloat16, an amax in two stages, and a loop.
PROGRAM = """HloModule jit_step, is_scheduled=true

%maximum (a: f32[], b: f32[]) -> f32[] {
  %a = f32[] parameter(0)
  %b = f32[] parameter(1)
  ROOT %larger = f32[] maximum(%a, %b)
}

%triton (p: f8e4m3fn[64,32], q: f8e5m2[32,32]) -> bf16[64,32] {
  %p = f8e4m3fn[64,32]{1,0} parameter(0)
  %q = f8e5m2[32,32]{1,0} parameter(1)
  %turned = f8e5m2[32,32]{0,1} transpose(%q), dimensions={1,0}
  %dot.1 = f32[64,32]{1,0} dot(%p, %turned), lhs_contracting_dims={1}, rhs_contracting_dims={0}
  ROOT %narrow = bf16[64,32]{1,0} convert(%dot.1)
}

%emulated (p.2: f8e4m3fn[64,32], q.2: bf16[32,32]) -> bf16[64,32] {
  %p.2 = f8e4m3fn[64,32]{1,0} parameter(0)
  %wide = bf16[64,32]{1,0} convert(%p.2)
  %q.2 = bf16[32,32]{1,0} parameter(1)
  ROOT %dot.2 = bf16[64,32]{1,0} dot(%wide, %q.2), lhs_contracting_dims={1}
}

%first_stage (x: f32[64,32]) -> f32[64] {
  %x = f32[64,32]{1,0} parameter(0)
  %positive = f32[64,32]{1,0} abs(%x)
  %zero = f32[] constant(0)
  ROOT %found = f32[64]{0} reduce(%positive, %zero), dimensions={1}, to_apply=%maximum
}

%second_stage (x.2: f32[64]) -> f32[] {
  %x.2 = f32[64]{0} parameter(0)
  %zero.2 = f32[] constant(0)
  ROOT %found.2 = f32[] reduce(%x.2, %zero.2), dimensions={0}, to_apply=%maximum
}

%rounded (x.3: f32[64,32]) -> f8e4m3fn[64,32] {
  %x.3 = f32[64,32]{1,0} parameter(0)
  ROOT %small = f8e4m3fn[64,32]{1,0} convert(%x.3)
}

%softmax (x.4: f32[64,32]) -> f32[64] {
  %x.4 = f32[64,32]{1,0} parameter(0)
  %zero.4 = f32[] constant(0)
  ROOT %highest = f32[64]{0} reduce(%x.4, %zero.4), dimensions={1}, to_apply=%maximum
}

%moved (x.5: f32[64,32]) -> f32[32,64] {
  %x.5 = f32[64,32]{1,0} parameter(0)
  ROOT %other = f32[32,64]{1,0} transpose(%x.5), dimensions={1,0}
}

%body (state: f32[64,32]) -> f32[64,32] {
  %state = f32[64,32]{1,0} parameter(0)
  ROOT %twice = f32[64,32]{1,0} add(%state, %state), metadata={op_name="jit(step)/jvp()/add"}
}

%condition (state.2: f32[64,32]) -> pred[] {
  %state.2 = f32[64,32]{1,0} parameter(0)
  ROOT %yes = pred[] constant(true)
}

ENTRY %main (x.9: f32[64,32], w: f8e5m2[32,32], v: bf16[32,32]) -> (f32[64,32], bf16[64,32]) {
  %x.9 = f32[64,32]{1,0} parameter(0)
  %w = f8e5m2[32,32]{1,0} parameter(1)
  %v = bf16[32,32]{1,0} parameter(2)
  %stage.1 = f32[64]{0} fusion(%x.9), kind=kInput, calls=%first_stage
  %stage.2 = f32[] fusion(%stage.1), kind=kInput, calls=%second_stage
  %cast = f8e4m3fn[64,32]{1,0} fusion(%x.9), kind=kLoop, calls=%rounded
  %gemm = bf16[64,32]{1,0} fusion(%cast, %w), kind=kCustom, calls=%triton
  %lt = (bf16[64,32]{1,0}, s8[33]{0}) custom-call(%cast, %w), custom_call_target="LT$f8"
  %half = bf16[64,32]{1,0} custom-call(%x.9, %v), custom_call_target="LT"
  %fake = bf16[64,32]{1,0} fusion(%cast, %v), kind=kCustom, calls=%emulated
  %flash = bf16[64,32]{1,0} custom-call(%v), custom_call_target="__cudnn$fmhaSoftmax"
  %rows = f32[64]{0} fusion(%x.9), kind=kInput, calls=%softmax, metadata={op_name="jvp()/max"}
  %turn = f32[32,64]{1,0} fusion(%x.9), kind=kLoop, calls=%moved
  %sum = f32[64,32]{1,0} all-reduce(%x.9), to_apply=%maximum
  %loop = f32[64,32]{1,0} while(%sum), condition=%condition, body=%body
  %adam = f32[64,32]{1,0} multiply(%loop, %loop), metadata={op_name="jit(step)/mul"}
  ROOT %out = (f32[64,32]{1,0}, bf16[64,32]{1,0}) tuple(%adam, %gemm)
}
""".replace("LT", "__cublas$lt$matmul")


def test_kernels_are_classified_by_kind():
    assert training.Program(PROGRAM).kinds() == {
        "stage.1": training.QUANTIZATION,
        "stage.2": training.QUANTIZATION,
        "cast": training.QUANTIZATION,
        "gemm": training.FP8_PRODUCT,
        "lt": training.FP8_PRODUCT,
        "half": training.OTHER_PRODUCT,
        "fake": training.OTHER_PRODUCT,  # one operand of the product is bfloat16
        "flash": training.ATTENTION,
        "rows": training.ELEMENTWISE,
        "turn": training.COPY,
        "sum": training.COLLECTIVE,
        "twice": training.ELEMENTWISE,
        "adam": training.OPTIMIZER,
    }
    counts = training.Program(PROGRAM).counts()
    assert counts[training.FP8_PRODUCT] == counts[training.OTHER_PRODUCT] == 2
    assert list(counts) == [name for name in training.KERNEL_KINDS if name in counts]


def test_text_that_is_not_a_program_raises_an_error():
    with pytest.raises(ValueError, match="no ENTRY computation"):
        training.Program("module @jit_step {}")


# -- cases and programs


OTHERS = [
    "vq_transformer",
    "marian",
    "pegasus",
    "roberta",
    "wmt_transformer",
    "fp8_encoder",
    "megatron-bert",
]


@pytest.mark.parametrize(
    ("name", "recipe"),
    [
        ("bert", "fp8_delayed"),
        ("bert", "fp8_current"),
        ("gpt2", "fp8_delayed"),
        *((n, "fp8_current") for n in ("gpt2", "t5", "bart")),
        *((n, "fp8_delayed") for n in ("t5", "bart", *OTHERS)),
        *((n, "fp8_current") for n in OTHERS),
    ],
)
def test_all_three_products_of_every_targeted_linear_are_lowered_to_fp8_for_cuda(name, recipe):
    """Checks the forward product and both gradient products in the complete training step."""
    import jax

    prepared = training.prepare_sized(name, recipe, TINY)
    state = jax.eval_shape(prepared.random_state, jax.random.key(0))
    traced = jax.jit(prepared.step).trace(state, prepared.batches[0])
    text = traced.lower(lowering_platforms=("cuda",)).as_text()
    dots = re.findall(r"stablehlo\.dot_general .*: \((tensor<[^>]*>), (tensor<[^>]*>)\)", text)
    kinds = ["/".join(sorted(re.findall(r"f8E\dM\d", a + b))) for a, b in dots]
    forward = len(fp8.sites(name, TINY))
    assert forward > 3 and kinds.count("f8E4M3/f8E4M3") == forward
    backward = fp8.targeted(name, TINY) - forward
    assert kinds.count("f8E4M3/f8E5M2") == backward
    assert backward == 2 * forward - (2 if name == "vq_transformer" else 0)


# -- results


@pytest.fixture
def in_process(monkeypatch):
    """Replaces the functions of the harness by ones that run in this process."""

    def run(contestants, *, rounds, **options):
        for contestant in contestants:
            module, _, name = contestant.factory.partition(":")
            workload = getattr(importlib.import_module(module), name)(**contestant.settings)
            result_row = harness.Row(contestant.name, contestant.group, info=workload.info)
            for _ in range(rounds):
                started = time.perf_counter()
                result_row.values.append(workload.step())
                result_row.seconds.append(time.perf_counter() - started)
            result_row.peak_bytes = workload.memory()
            result_rows.append(result_row)
        return [result_rows.pop(0) for _ in contestants]

    result_rows: list[harness.Row] = []
    monkeypatch.setattr(harness, "run", run)
    monkeypatch.setattr(harness, "matmul_rates", lambda types, threads: {types[0]: 1e11})


def command(*models):
    return [
        *("--models", *models, "--widths", "32", "--layers", "1", "--batch_size", "2"),
        *("--length", "16", "--vocab_size", "100", "--rounds", "3", "--profile_steps", "2"),
    ]


@pytest.mark.alone
@pytest.mark.parametrize("models", [["gpt2"], ["fp8_encoder", "gpt2"]])
def test_a_tiny_run_on_the_cpu_records_all_results(models, in_process, tmp_path, capsys):
    assert fp8.steps([*command(*models), "--output", str(tmp_path)]) == 0
    result = json.loads((tmp_path / "benchmarks" / "fp8.json").read_text())
    assert len(result["rows"]) == 3 * len(models) and not result["problems"]
    for result_row in result["rows"]:
        assert result_row["rate"] > 0 and result_row["limit"]["share"] > 0
        assert sum(result_row["shares"].values()) == pytest.approx(1.0)
        assert result_row["shares"][training.OTHER_PRODUCT] > 0
        assert bool(result_row["facts"]["targeted"]) == result_row["name"].startswith("fp8")
        assert (training.QUANTIZATION in result_row["shares"]) == result_row["name"].startswith(
            "fp8"
        )
    plain, *quantized = result["rows"][:3]
    # Emulated FP8 trains on the same data as bfloat16, so the losses are close.
    expected = [value["loss"] for value in plain["values"]]
    for result_row in quantized:
        losses = [value["loss"] for value in result_row["values"]]
        assert losses == pytest.approx(expected, rel=0.02)
        assert losses != expected and len(losses) == 3
    text = (tmp_path / "benchmarks" / "tables.md").read_text()
    assert text.count("<!-- fp8 -->") == 1 and "Share of the time" in text
    assert "This device has no FP8 units" in capsys.readouterr().out
