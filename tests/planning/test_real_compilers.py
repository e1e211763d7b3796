"""Plans with the compilers of accelerators, without a device, and the fallback to CPUs."""

from __future__ import annotations

import json

import pytest

from hfseq import cli
from hfseq.cli.plan import step_compiler
from hfseq.cli.plan.estimate import make_plan
from hfseq.cli.plan.run import FUSED_KERNELS
from hfseq.cli.plan.step_compiler import Programs
from hfseq.training import aot

#: Families in base size, and their overrides.
FAMILIES = {
    "bart": None,
    "bert": None,
    "gpt2": None,
    "roberta": "max_position_embeddings=514",
    "t5": "d_model=768,d_ff=3072,num_layers=12,num_decoder_layers=12,num_heads=12",
}


def needs(name: str) -> None:
    if reason := aot.unavailable_reason(name):
        pytest.skip(reason)


def test_attention_is_chosen_for_the_devices_of_the_plan(options, monkeypatch):
    choices = {
        name: make_plan(options(devices=name, no_compile=True, precision="bfloat16"))["attention"]
        for name in ("h200:8", "tpu-v5e:8")
    }
    (on_gpu,), (on_tpu,) = choices.values()
    assert on_gpu["name"] in FUSED_KERNELS and on_tpu["name"] not in (
        "few_queries",
        "blocked",
        "xla",
    )
    assert on_gpu["of"].startswith("16 x 4 heads of 8 in bfloat16, 16 queries")
    assert all(why for choice in (on_gpu, on_tpu) for why in choice["refused"].values())


def test_attention_that_was_named_and_cannot_serve_is_wrong_usage(capsys):
    words = [
        "plan",
        "--config",
        "gpt2",
        "--config_overrides",
        "n_layer=1,n_embd=32,n_head=4",
        "--length",
        "16",
        "--no_compile",
        "--devices",
        "v5e",
        "--attn_implementation",
    ]
    assert cli.main([*words, "flash"]) == 2
    assert "attn_implementation 'flash'" in capsys.readouterr().err


@pytest.mark.parametrize(
    ("real", "host", "speaker"),
    [
        ([1, 2, 3], [], "real"),
        ([], [1, 2, 3], step_compiler.HOST_COMPILER),
        ([], [], ""),
    ],
)
def test_fallback_compiler_explains_the_failure_of_the_first(
    options, monkeypatch, real, host, speaker
):
    compilers = []

    def compiled(options, variants, compiler, end):
        compilers.append(compiler)
        indices = real if compiler == "real" else host
        programs = [
            variants[i]
            | {
                "arguments": 100,
                "temporary": 10 * variants[i]["rows"],
                "peak": None,
                "collectives": [],
                "attention": [],
                "seconds": 1.0,
            }
            for i, _ in enumerate(indices)
        ]
        return Programs(programs, compiler, "" if indices else f"{compiler} failed")

    monkeypatch.setattr(step_compiler, "compiler_for", lambda accelerator: "real")
    monkeypatch.setattr(step_compiler, "_compile_with", compiled)
    plan = make_plan(options())
    assert compilers == (["real"] if real else ["real", step_compiler.HOST_COMPILER])
    if speaker:
        assert plan["compiled"]["compiler"] == speaker
        assert (plan["fit"]["needed"], plan["fit"]["row"]) == (120, 10)
    else:
        assert plan["fit"]["source"] == "traced" and plan["activations"]
        assert plan["compiled"]["problem"] == f"{step_compiler.HOST_COMPILER} failed"
    assert plan["compiled"]["passed_over"] == ("" if real else "real failed")
    text = "\n".join(cli.plan.format_plan(plan))
    assert f"memory according to {speaker or 'the sharding rules and the trace'}" in text
    assert ("real failed" in text) == (not real)


def test_missing_packages_are_reported(options, monkeypatch):
    monkeypatch.setattr(aot, "_package_folder", lambda module: None)
    monkeypatch.setattr(step_compiler, "_compile_with", lambda *_: Programs(problem="slow"))
    programs = step_compiler.compile_in_subprocess(options(), [])
    assert "pip install 'hfseq[aot]'" in programs.skip_reason and programs.problem == "slow"


@pytest.mark.slow
@pytest.mark.parametrize("devices", ["h200:4", "v5e:4"])
def test_the_real_compiler_answers(devices, capsys):
    needs(devices.partition(":")[0])
    # The sizes are multiples of the tile size of a TPU.
    sizes = "n_embd=256,n_layer=1,n_head=4,n_positions=128,vocab_size=2048"
    words = ["plan", "--config", "gpt2", "--length", "128", "--batch", "2", "--devices", devices,
             "--mesh", "data=2,fsdp=2",
             "--config_overrides", f"{sizes},bos_token_id=0,eos_token_id=0"]  # fmt: skip
    assert cli.main([*words, "--json"]) == 0
    plan = json.loads(capsys.readouterr().out)
    assert plan["compiled"]["real"] and not plan["compiled"]["problem"]
    assert plan["compiled"]["compiler"] == step_compiler.compiler_for(
        {"h": "h200", "v": "tpu-v5e"}[devices[0]]
    )
    first = plan["compiled"]["programs"][0]
    state = sum(plan["bytes"][name]["device"] for name in ("parameters", "optimizer", "batch"))
    assert first["arguments"] == pytest.approx(state, rel=0.05)
    assert 0 < first["alias"] <= first["arguments"]
    assert {tuple(choice["axes"]) for choice in plan["exchange"]["compiled"]} >= {("fsdp",)}
    assert plan["attention"] and not plan["activations"]


@pytest.mark.slow
@pytest.mark.parametrize(("devices", "kernel"), [("h200:1", "flash"), ("v5e:1", "splash")])
def test_windows_of_modernbert_reach_the_kernels_as_windows(devices, kernel, capsys):
    needs(devices.partition(":")[0])
    special = "pad_token_id=0,bos_token_id=1,eos_token_id=2,cls_token_id=1,sep_token_id=2"
    sizes = "hidden_size=256,num_hidden_layers=3,num_attention_heads=4,intermediate_size=384"
    words = ["plan", "--config", "modernbert", "--length", "512", "--batch", "4",
             "--precision", "bfloat16", "--devices", devices,
             "--config_overrides", f"{sizes},vocab_size=2048,{special}"]  # fmt: skip
    assert cli.main([*words, "--json"]) == 0
    compiled = json.loads(capsys.readouterr().out)["compiled"]
    assert compiled["real"] and not compiled["problem"]
    attention = compiled["programs"][0]["attention"]
    assert [choice["name"] for choice in attention] == [kernel, kernel]
    assert ["window (64, 64)" in choice["of"] for choice in attention] == [False, True]


@pytest.mark.slow
@pytest.mark.parametrize("family", FAMILIES)
def test_rules_agree_with_the_compiler_within_a_tenth(family, options):
    needs("h200")
    run = options(
        config=family,
        config_overrides=FAMILIES[family],
        devices="h200:1",
        length=512,
        per_device_train_batch_size=16,
        precision="bfloat16",
        scan_layers=True,
        no_compile=True,
    )
    compiled = step_compiler.compile_in_subprocess(run, [{"rows": 16, "remat": False}])
    assert compiled.is_accelerator and not compiled.problem
    needed = compiled.results[0]["arguments"] + compiled.results[0]["temporary"]
    assert make_plan(run)["fit"]["needed"] == pytest.approx(needed, rel=0.1)


@pytest.mark.slow
def test_a_program_that_is_larger_than_a_tpu_is_measured_all_the_same(options):
    needs("v5e")
    run = options(
        config_overrides="n_embd=1024,n_layer=1,n_head=8,n_positions=1024,vocab_size=50257",
        devices="v5e:1",
        length=1024,
        per_device_train_batch_size=128,
        precision="bfloat16",
    )
    programs = step_compiler.compile_in_subprocess(run, [{"rows": 128, "remat": False}])
    assert programs.is_accelerator and not programs.problem
    (program,) = programs.results
    assert program["arguments"] + program["temporary"] > 15.75 * 2**30
