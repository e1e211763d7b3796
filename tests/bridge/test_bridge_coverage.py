"""The coverage table: a sample of model types agrees with PyTorch, and results become a table."""

from __future__ import annotations

import dataclasses
import json
import re
from pathlib import Path

import pytest

transformers = pytest.importorskip("transformers")
torch = pytest.importorskip("torch")

from hfseq.cli import main  # noqa: E402
from hfseq.errors import DataError, UsageError  # noqa: E402
from hfseq_plugins.bridge import (  # noqa: E402
    comparison,
    coverage,
    coverage_worker,
    tiny,
    tiny_sizes,
    trace,
)
from hfseq_plugins.bridge.coverage import Result  # noqa: E402
from tests.support.tiers import first  # noqa: E402

RESULTS = Path(__file__).parents[2] / "docs" / "bridge_coverage.json"
#: Encoders, decoders, mixtures of experts, state-space, image, audio and time-series models.
SAMPLE = [
    *("bert", "deberta-v2", "fnet", "mpnet", "nystromformer"),
    *("llama", "falcon", "gemma2", "olmo3", "phi3", "opt", "bloom", "gpt2"),
    *("mixtral", "dbrx"),
    *("mamba2", "rwkv", "t5"),
    *("vit", "convnext", "dinov2", "videomae"),
    *("audio-spectrogram-transformer", "wav2vec2", "patchtst"),
]
SHARDS = 12


@pytest.mark.parametrize("model_type", SAMPLE)
def test_forward_pass_agrees_with_pytorch(model_type):
    result = coverage_worker.compare(model_type, ())
    assert result.forward_agrees, coverage.line(result)


@pytest.mark.parametrize("model_type", first(["olmo2", "t5", "dory"], "t5", "dory"))
def test_training_files_and_generation_agree_with_pytorch(model_type):
    result = coverage_worker.compare(model_type, tuple(coverage.FURTHER_CHECKS))
    assert result.checks == dict.fromkeys(coverage.FURTHER_CHECKS, "agrees")


@pytest.mark.parametrize("model_type", ["perceiver", "molmo2", "apertus", "exaone", "kimi_linear"])
def test_files_of_models_with_special_inputs_and_weights(model_type):
    assert comparison.compare_files(tiny.tiny_model(model_type)) == "agrees"


def test_training_check_compares_statistics_and_finds_differences(monkeypatch):
    model = tiny.tiny_model("resnet")
    assert comparison.compare_training(model) == "agrees"
    call = trace.call

    def stale_statistics(*args, **kwargs):
        outputs, buffers = call(*args, **kwargs)
        assert any(name.endswith("running_var") for name in buffers)
        return outputs, {name: 0 * value for name, value in buffers.items()}

    monkeypatch.setattr(trace, "call", stale_statistics)
    assert "running_var differs by" in comparison.compare_training(model)


def test_checks_state_why_nothing_was_compared():
    model = tiny.tiny_model("resnet")
    assert comparison.compare_generation(model) == "not compared: no class generates text"
    error = ValueError("no class")
    assert comparison.not_compared(error) == "not compared: PyTorch raises ValueError: no class"


def test_inputs_of_relus_are_not_zero(monkeypatch):
    def smallest_input():
        model, inputs = tiny.tiny_model("maskformer"), []
        for part in model.modules():
            if isinstance(part, torch.nn.ReLU):
                part.register_forward_pre_hook(lambda _, x: inputs.append(x[0].abs().min().item()))
        with torch.no_grad():
            comparison.run_torch(model, tiny.tiny_inputs(model))
        return min(inputs)

    other = smallest_input()
    monkeypatch.setattr(tiny_sizes, "SEEDS", {})
    assert 0 < smallest_input() < 1e-5 < other  # the reason for the other seed


@pytest.mark.slow
@pytest.mark.parametrize("shard", (1, 5, 9))  # `hfseq bridge coverage` compares all types
def test_stored_results_hold(shard):
    stored = {entry["model_type"]: Result(**entry) for entry in read()["results"]}
    types = coverage.select_types(None, f"{shard}/{SHARDS}")
    changed = [
        coverage.line(result)
        for result in coverage.compare_all(types, timeout=600, checks=("gradient",))
        if result.model_type in stored
        and stored[result.model_type].status == "agrees" != result.status
    ]
    assert not changed


def read():
    if not RESULTS.exists():
        pytest.skip("there are no stored results")
    return json.loads(RESULTS.read_text(encoding="utf-8"))


def test_stored_results_meet_the_goals_of_the_bridge():
    results = [Result(**entry) for entry in read()["results"]]
    compared = [result for result in results if result.runs_in_pytorch]
    assert sum(result.forward_agrees for result in compared) >= 0.97 * len(compared)
    gradients = [result for result in compared if result.compares_gradient]
    assert sum(result.gradient_agrees for result in gradients) >= 0.95 * len(gradients)
    for result in compared:
        assert result.status != "refused" or result.reason


def test_documents_have_the_numbers_of_the_stored_results(tmp_path):
    results = [Result(**entry) for entry in read()["results"]]
    page = tmp_path / "bridge.md"
    text = (RESULTS.parent / "bridge.md").read_text(encoding="utf-8")
    page.write_text(text)
    coverage.update_table(page, results)
    assert page.read_text() == text
    readme = (RESULTS.parents[1] / "README.md").read_text(encoding="utf-8").split()
    for sentence in coverage.summary(results)[1:]:
        share = re.search(r"\d+ of \d+", sentence)
        assert share is not None and share[0] in " ".join(readme)


AGREES = Result("bert", "BertModel", forward_error=1e-7, gradient_error=2e-6, gradient_name="w")
DIFFERS = dataclasses.replace(AGREES, model_type="gpt2", forward_error=3e-4, forward_name="logits")
REFUSED = Result(
    "led",
    "LEDModel",
    stage="run",
    reason="item() | asks",
    operator="item()",
    place="modeling_led.py, line 3, in forward",
    solution="pass it",
)
ABSENT = Result("bark", stage="build", reason="no <forward>")
CHECKED = dataclasses.replace(
    AGREES,
    model_type="opt",
    checks={"train": "w differs by 2.0e-03", "files": "agrees", "generate": "not compared: no"},
)


def test_table_lists_reasons_and_counts(tmp_path):
    page = tmp_path / "bridge.md"
    page.write_text(f"# Bridge\n\n{coverage.BEGIN}\nold\n{coverage.END}\n\nend\n")
    for _ in range(2):  # the result does not grow
        coverage.update_table(page, [REFUSED, AGREES, ABSENT, DIFFERS])
    text = page.read_text()
    assert text.startswith("# Bridge\n") and text.endswith("\n\nend\n") and "old" not in text
    assert f"Transformers {transformers.__version__}" in text
    assert "4 model types. Tiny models of 3 of them run in PyTorch." in text
    assert "agrees for 1 of 3 (33.3 %)" in text
    assert "| `led` | refused | item() | modeling_led.py, line 3, in forward | pass it |" in text
    assert "| `gpt2` | forward differs by 3.0e-04 | logits |" in text
    assert "These 1 model types agree:\n\n`bert`." in text
    assert "| `bark` | build | no &lt;forward> |" in text
    count = len(coverage.select_types(None, "1/1"))
    assert f"These {count - 4} model types have not been compared yet: " in text
    (tmp_path / "other.md").write_text("# nothing\n")
    with pytest.raises(DataError, match="does not contain the lines"):
        coverage.update_table(tmp_path / "other.md", [AGREES])


def test_table_notes_the_limits_of_a_comparison(tmp_path):
    page = tmp_path / "bridge.md"
    page.write_text(f"{coverage.BEGIN}\n{coverage.END}\n")
    changes = {
        "led": {"constants": ("attention_mask",)},
        "ibert": {"has_gradient": False, "gradient_error": None},
        "opt": {"reference": "float64"},
        "vit": {"gradient_error": None},
    }
    results = [dataclasses.replace(AGREES, model_type=n, **c) for n, c in changes.items()]
    coverage.update_table(page, [AGREES, *results])
    text = page.read_text()
    assert "These 5 model types agree" in text and "The gradients agree for 3 of 3" in text
    assert "depends: `led` (`attention_mask`)." in text
    assert "PyTorch computes no gradients: `ibert`." in text
    assert "reference is in float64: `opt`." in text
    assert "gradients were not compared: `vit`." in text


def test_table_lists_checks(tmp_path):
    page = tmp_path / "bridge.md"
    page.write_text(f"{coverage.BEGIN}\n{coverage.END}\n")
    failed = dataclasses.replace(AGREES, checks={"train": "not compared: PyTorch raises E"})
    coverage.update_table(page, [CHECKED, failed])
    text = page.read_text()
    assert "Training steps without dropout agree for 0 of 1 (0.0 %)." in text
    assert "Saved and loaded files agree for 1 of 1 (100.0 %)." in text
    assert "generated tokens agree" not in text
    assert "| `opt` | training steps without dropout | w differs by 2.0e-03 |" in text
    assert "not compared because PyTorch raises an error: `bert`." in text


def test_results_of_checks_that_are_not_repeated_are_kept():
    new = dataclasses.replace(
        CHECKED, gradient_error=None, gradient_name="", forward_error=3e-7, checks={"files": "x"}
    )
    merged = coverage._merge(CHECKED, new, ("files",))
    assert merged.gradient_error == CHECKED.gradient_error and merged.forward_error == 3e-7
    assert merged.checks == {**CHECKED.checks, "files": "x"}
    assert coverage._merge(CHECKED, new, ("gradient",)).gradient_error is None
    differing = dataclasses.replace(new, forward_error=1.0)
    assert coverage._merge(CHECKED, differing, ("files",)) == differing


def test_command_compares_types_and_keeps_other_results(tmp_path, capsys):
    output, page = tmp_path / "results.json", tmp_path / "page.md"
    page.write_text(f"{coverage.BEGIN}\n{coverage.END}\n")
    entries = [dataclasses.asdict(result) for result in (AGREES, DIFFERS)]
    output.write_text(json.dumps({"results": entries}))
    arguments = ["--types", "fnet", "--checks", "--output", str(output), "--table", str(page)]
    assert main(["bridge", "coverage", *arguments]) == 0
    stored = json.loads(output.read_text())
    assert [entry["model_type"] for entry in stored["results"]] == ["bert", "fnet", "gpt2"]
    assert stored["transformers"] == transformers.__version__
    assert stored["results"][1]["forward_error"] < 1e-5
    assert "fnet: agrees, forward" in capsys.readouterr().out and "`gpt2`" in page.read_text()


def test_type_that_takes_too_long_is_ended():
    results = list(coverage.compare_all(["bert", "gpt2"], timeout=0.05))
    assert [result.model_type for result in results] == ["bert", "gpt2"]
    assert all("more than 0.05 seconds" in result.reason for result in results)


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["--types", "bertt"], "'bertt'; did you mean 'bert'"),
        (["--shard", "3/2"], "--shard 3/2"),
        (["--shard", "one"], "--shard one"),
        (["--types", "bert", "--output", "{broken}"], "not a file of coverage results"),
        (["--only_table", "--output", "{absent}"], "contains no results"),
    ],
    ids=["type", "shard", "shard text", "output", "no results"],
)
def test_bad_arguments_are_one_error(arguments, message, tmp_path, capsys):
    (tmp_path / "broken.json").write_text("{}")
    paths = {"{broken}": tmp_path / "broken.json", "{absent}": tmp_path / "absent.json"}
    words = [str(paths.get(word, word)) for word in arguments]
    assert main(["bridge", "coverage", *words]) != 0
    assert message in capsys.readouterr().err


def test_tiny_configurations_reject_unknown_types():
    with pytest.raises(UsageError, match="no model type 'lama'; did you mean 'llama'"):
        tiny.tiny_config("lama")
