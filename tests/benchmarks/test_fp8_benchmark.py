"""The FP8 benchmark: what it counts in programs and profiles, what it says, and one tiny run."""

from __future__ import annotations

import importlib
import json
import re
import sys
import time
from pathlib import Path
from types import SimpleNamespace

import pytest

SCRIPTS = Path(__file__).resolve().parents[2] / "scripts" / "benchmarks"
sys.path.insert(0, str(SCRIPTS))

import fp8
import harness
import training

TINY = training.Size(width=32, layers=1, rows=2, length=16, vocab_size=100)

# Shortened from a step compiled for an H200: Triton's products, cuBLASLt's, a rounded operand that
# was widened again, an amax in two stages, a loop.
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


def test_kernels_are_told_apart():
    assert training.Program(PROGRAM).kinds() == {
        "stage.1": training.QUANTISATION,
        "stage.2": training.QUANTISATION,
        "cast": training.QUANTISATION,
        "gemm": training.FP8_PRODUCT,
        "lt": training.FP8_PRODUCT,
        "half": training.PRODUCT,
        "fake": training.PRODUCT,  # one operand is bfloat16 where it is multiplied
        "flash": training.ATTENTION,
        "rows": training.REST,
        "turn": training.COPY,
        "sum": training.COLLECTIVE,
        "twice": training.REST,
        "adam": training.OPTIMIZER,
    }
    counts = training.Program(PROGRAM).counts()
    assert counts[training.FP8_PRODUCT] == counts[training.PRODUCT] == 2
    assert list(counts) == [kind for kind in training.KINDS if kind in counts]


def test_what_is_no_program_is_refused():
    with pytest.raises(ValueError, match="no ENTRY computation"):
        training.Program("module @jit_step {}")


# -- profiles


def profile(**planes):
    """Stand in for ``jax.profiler.ProfileData``: plane -> line -> (name, instruction, ns)."""

    def line(name, events):
        made = [
            SimpleNamespace(name=n, stats=[("hlo_op", op)] if op else [], duration_ns=ns)
            for n, op, ns in events
        ]
        return SimpleNamespace(name=name, events=made)

    return SimpleNamespace(
        planes=[
            SimpleNamespace(name=name, lines=[line(*item) for item in lines.items()])
            for name, lines in planes.items()
        ]
    )


def test_shares_of_a_gpu_count_each_kernel_once():
    kinds = {"gemm.1": training.FP8_PRODUCT, "fusion.2": training.REST}
    stream = [
        ("gemm_1", "gemm.1", 600),
        ("fusion_2", "fusion.2", 200),
        ("MemcpyD2D", None, 50),
        ("ncclDevKernel_AllReduce", None, 100),
        ("who_knows", None, 50),
    ]
    data = profile(
        **{
            "/device:GPU:0": {"Stream #7(Compute)": stream, "XLA Ops": [("gemm", "gemm.1", 600)]},
            "/host:CPU": {"python": [("gemm", "gemm.1", 9999)]},
        }
    )
    assert fp8.shares(data, kinds) == {
        training.FP8_PRODUCT: 0.6,
        training.REST: 0.2,
        training.COLLECTIVE: 0.1,
        training.COPY: 0.05,
        fp8.UNKNOWN: 0.05,
    }


def test_shares_of_a_cpu_leave_out_what_only_holds_others():
    kinds = {"dot.1": training.PRODUCT, "add.2": training.REST}
    events = [
        ("while.3", "while.3", 500),
        ("dot.1", "dot.1", 300),
        ("add.2", "add.2", 100),
        ("python call", None, 7000),
    ]
    data = profile(**{"/host:CPU": {"worker": events}})
    assert fp8.shares(data, kinds) == {training.PRODUCT: 0.75, training.REST: 0.25}


@pytest.mark.parametrize(
    ("kernel", "kind"),
    [
        ("nvjet_qqtst_128x256_128x4_2x1_v_bz_TNT", training.FP8_PRODUCT),
        ("sm90_xmma_gemm_e4m3bf16_e4m3f32_f32_tn_n_tilesize128", training.FP8_PRODUCT),
        ("nvjet_tst_128x256_64x4_2x1_v_bz_coopA_NNT", training.PRODUCT),
        ("cudnn_generated_fort_native_sdpa_sm90_flash_fprop", training.ATTENTION),
    ],
)
def test_kernels_of_libraries_are_known_by_their_names(kernel, kind):
    assert fp8.kind_of(kernel, None, {}) == kind


# -- what runs


def test_sizes_follow_the_width_and_every_contestant_of_a_group_gets_the_same():
    options = fp8.parse([])
    cases = fp8.step_cases(options)
    found = [c for case in cases for c in case.contestants]
    assert [c.name for c in found[:3]] == ["bfloat16", "fp8_delayed", "fp8_current"]
    assert {c.group for c in found} == {
        f"{model}, d = {d}" for model in ("fp8_encoder", "gpt2") for d in (1024, 2048, 4096)
    }
    big = next(c for c in found if c.group == "gpt2, d = 4096").settings["size"]
    assert (big["layers"], big["rows"] * big["length"]) == (4, 8192)
    cases = fp8.step_cases(options, profile=True)
    alone = [c for case in cases for c in case.contestants]
    assert len({c.group for c in alone}) == len(alone) == len(found)
    with pytest.raises(SystemExit):
        fp8.parse(["--widths", "100"])


@pytest.mark.parametrize(
    "name", ["bert", "gpt2", "t5", "bart", "wmt_transformer", "vq_transformer"]
)
def test_a_size_reaches_every_architecture(name):
    config = training.sized_configuration(name, TINY, 0.25)
    own = config.to_dict()
    wanted = {key: value for key, value in TINY.values().items() if key in own}
    wanted |= training.OWN.get(name, {})
    assert {key: own[key] for key in wanted} == wanted and len(wanted) > 3
    rates = [own[key] for key in training.RATES if key in own]
    assert set(rates) == (set() if name == "vq_transformer" else {0.25})


OTHERS = [
    "vq_transformer",
    "marian",
    "pegasus",
    "roberta",
    "wmt_transformer",
    "fp8_encoder",
    "megatron-bert",
]


@pytest.mark.slow
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
    """Forward and both gradients, in the full step: loss, gradients, update."""
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


# -- what is said


def row(name, ratio, width=4096, units=True, products=12, spread=0.01):
    return {
        "name": name,
        "case": f"gpt2, d = {width}",
        "ratio": ratio,
        "spread": spread,
        "case_facts": {"width": width},
        "facts": {
            "fp8_units": units,
            "targeted": 12,
            "kernels": {training.FP8_PRODUCT: products},
        },
    }


def test_the_benchmark_says_where_fp8_does_not_pay():
    assert fp8.remarks([row("bfloat16", 1.0), row("fp8_delayed", 1.4)]) == []
    (line,) = fp8.remarks([row("fp8_delayed", 0.9, width=1024)])
    assert "does not pay here, 0.90x of bfloat16" in line and "--precision bfloat16" in line
    (line,) = fp8.remarks([row("fp8_delayed", 1.2)])
    assert "misses the aim of 1.3x" in line
    assert fp8.remarks([row("fp8_current", 1.05, width=2048)]) == []
    (line,) = fp8.remarks([row("fp8_current", 1.35, products=0)])
    assert "has no FP8 product in its program" in line


def test_emulation_is_named_as_such():
    lines = fp8.remarks([row("fp8_delayed", 0.5, units=False, products=0)])
    assert "emulated" in lines[0] and len(lines) == 2


@pytest.fixture
def here(monkeypatch):
    """The harness, but in this process."""

    def run(contestants, *, rounds, **others):
        for contestant in contestants:
            module, _, name = contestant.factory.partition(":")
            made = getattr(importlib.import_module(module), name)(**contestant.settings)
            done = harness.Row(contestant.name, contestant.group, facts=made.facts)
            for _ in range(rounds):
                started = time.perf_counter()
                done.values.append(made.step())
                done.seconds.append(time.perf_counter() - started)
            done.peak_bytes = made.memory()
            found.append(done)
        return [found.pop(0) for _ in contestants]

    found: list[harness.Row] = []
    monkeypatch.setattr(harness, "run", run)
    monkeypatch.setattr(harness, "matmul_rates", lambda types, threads: {types[0]: 1e11})


def command(*models):
    return [
        *("--models", *models, "--widths", "32", "--layers", "1", "--batch_size", "2"),
        *("--length", "16", "--vocab_size", "100", "--rounds", "3", "--profile_steps", "2"),
    ]


@pytest.mark.slow
@pytest.mark.alone
@pytest.mark.parametrize("models", [["gpt2"], ["fp8_encoder", "gpt2"]])
def test_a_tiny_run_on_the_cpu_writes_everything_down(models, here, tmp_path, capsys):
    assert fp8.steps([*command(*models), "--output", str(tmp_path)]) == 0
    result = json.loads((tmp_path / "benchmarks" / "fp8.json").read_text())
    assert len(result["rows"]) == 3 * len(models) and not result["problems"]
    for made in result["rows"]:
        assert made["rate"] > 0 and made["limit"]["share"] > 0
        assert sum(made["shares"].values()) == pytest.approx(1.0)
        assert made["shares"][training.PRODUCT] > 0
        assert bool(made["facts"]["targeted"]) == made["name"].startswith("fp8")
        assert (training.QUANTISATION in made["shares"]) == made["name"].startswith("fp8")
    plain, *quantised = result["rows"][:3]
    # Emulated FP8 trains on the same data as bfloat16 does.
    wanted = [value["loss"] for value in plain["values"]]
    for made in quantised:
        losses = [value["loss"] for value in made["values"]]
        assert losses == pytest.approx(wanted, rel=0.02)
        assert losses != wanted and len(losses) == 3
    text = (tmp_path / "benchmarks" / "tables.md").read_text()
    assert text.count("<!-- fp8 -->") == 1 and "Share of the time" in text
    assert "This device has no FP8 units" in capsys.readouterr().out
