"""``hfseq port``: the command, the comparison of modules, refused files, and the coverage table."""

from __future__ import annotations

import dataclasses
import importlib
import json
import re
import subprocess
import sys
from pathlib import Path

import numpy as np
import pytest

from hfseq import cli, plugins
from hfseq.cli import port
from hfseq.cli.port import bisection, coverage, translation, verification
from hfseq.errors import DataError, PluginError, UsageError
from hfseq.testing.case import ZERO_GRADIENTS, Case, Report

pytest.importorskip("torch")
LINE = 'NotTranslated("torch.foo has no translation", 12)'
MARKER = translation.Marker("torch.foo has no translation", "modeling_x.py", 12, "torch.foo(x)")


@pytest.fixture(autouse=True)
def directory(tmp_path, monkeypatch):
    """Runs each test in an empty directory, without the plugins of other tests."""
    monkeypatch.chdir(tmp_path)
    yield tmp_path
    plugins.unload()


def fake(**changes) -> translation.Translation:
    values = {"text": "", "heads": {"Model": "FlaxLlamaModel"}, "markers": (), "left_out": {}}
    values |= {"unread_fields": (), "lines": {}, "path": "modeling_llama.py"} | changes
    return translation.Translation(model_type="llama", **values)


def translate_as(monkeypatch, **changes):
    monkeypatch.setattr(translation, "translate", lambda *_: fake(**changes))


def test_the_command_writes_a_verified_plugin_and_its_test(capsys):
    command = ["port", "llama", "--output", "my_llama.py", "--heads", "Model"]
    assert cli.main([*command, "--checks", "shapes", "--json"]) == 0
    printed = capsys.readouterr()
    assert "hfseq already has 'llama'" in printed.err
    report = json.loads(printed.out)
    assert report["heads"] == ["Model"] and report["markers"] == []
    assert report["results"][0]["passed"] == ["FlaxLlamaModel.shapes"]
    namespace: dict = {"__file__": str(Path("test_my_llama.py").resolve())}
    exec(compile(Path("test_my_llama.py").read_text(), "test_my_llama.py", "exec"), namespace)
    assert callable(namespace["test_llama"])
    assert namespace["CONFIG"].to_dict() == verification.tiny_config("llama").to_dict()


@pytest.mark.parametrize(
    ("correct", "wrong", "module", "line"),
    [
        ("causal=causal", "causal=causal, scale=0.1", "layers.0.self_attn", "self.o_proj("),
        pytest.param(
            "self.act_fn(self.gate_proj(x))",
            "1.01 * self.act_fn(self.gate_proj(x))",
            "layers.0.mlp",
            "self.down_proj(",
            marks=pytest.mark.slow,
        ),
        pytest.param(
            "residual + hidden_states",
            "residual + hidden_states[:, :-1]",
            "layers.0",
            "residual + hidden_states",
            marks=pytest.mark.slow,
        ),
    ],
)
def test_the_first_module_that_differs_is_named_with_its_line(correct, wrong, module, line):
    text = translation.translate("llama", ["Model"]).text
    assert correct in text
    Path("llama.py").write_text(text.replace(correct, wrong, 1))
    config = verification.tiny_config("llama")
    config.num_hidden_layers = 1
    spec = verification.load_port(Path("llama.py"), "llama")
    model_class = spec.load_head("Model")
    case = Case("Model", model_class, config, Path("files"), spec, ZERO_GRADIENTS, 1e-5)
    with verification.quiet():
        difference = bisection.first_difference(case)
    assert difference is not None and difference.module == module
    assert difference.location is not None and difference.port_location is not None
    assert Path(difference.location.path).name == "modeling_llama.py"
    location = difference.location
    lines = Path(location.path).read_text().splitlines()[location.first - 1 : location.last]
    assert any(line in text for text in lines) and lines[0] == location.source[0]
    assert Path(difference.port_location.path).name == "llama.py"
    report = str(difference)
    assert not difference.message or wrong in difference.port_location.source[0]
    assert difference.message or f"differs by {difference.error:.1e}" in report
    assert difference.message or f"{difference.theirs:.6g}" in report


def test_a_file_refuses_to_load_until_its_markers_are_replaced(directory):
    names = "NotTranslated, hookimpl, refuse_untranslated"
    head = f"from hfseq.plugins import {names}\n\n\n"
    hook = "@hookimpl\ndef register_optimizers(register):\n    pass\n\n\n"
    body = f"def call(x):\n    {LINE}\n    return x\n\n\n{hook}refuse_untranslated(__file__)\n"
    path = directory / "half.py"
    path.write_text(head + body)
    with pytest.raises(PluginError, match=r"half.py has 1 statement .*line 5: torch.foo .*line 12"):
        plugins.load([path])
    path.write_text((head + body).replace(LINE, "x = x + 1"))
    plugins.load([path])


def test_statements_without_a_translation_are_listed(monkeypatch, capsys):
    translate_as(monkeypatch, markers=(MARKER,), left_out={"ForCausalLM": "reason, line 3"})
    assert cli.main(["port", "llama"]) == 1
    printed = capsys.readouterr().out
    assert "modeling_x.py:12: torch.foo has no translation" in printed
    assert "torch.foo(x)" in printed and "left out ForCausalLM: reason, line 3" in printed
    assert "--only_verify" in printed and Path("llama.py").exists()
    assert not Path("test_llama.py").exists()


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["lama"], "did you mean 'llama'"),
        (["user/remote-code"], "trust_remote_code"),
        (["layoutxlm"], "no model file for the model type .layoutxlm"),
        (["arcee", "--heads", "ForCausalML"], "ForCausalLM"),
        (["arcee", "--output", "exists.py"], "'exists.py' already exists.*--force"),
        (["arcee", "--output", "tested.py"], "'test_tested.py' already exists"),
        (["arcee", "--output", "missing/arcee.py"], "directory 'missing' does not exist"),
        (["arcee", "--only_verify"], "'arcee.py' does not exist"),
    ],
)
def test_wrong_usage_is_one_error_and_writes_nothing(arguments, message, capsys):
    Path("exists.py").write_text("x = 1\n")
    Path("test_tested.py").write_text("")
    before = sorted(Path().iterdir())
    assert cli.main(["port", *arguments]) == 2
    error = capsys.readouterr().err
    assert len(error.strip().splitlines()) == 1
    assert re.search(message, error)
    assert sorted(Path().iterdir()) == before and Path("exists.py").read_text() == "x = 1\n"


def test_without_pytorch_the_file_is_written_but_not_verified(monkeypatch, capsys):
    translate_as(monkeypatch, text="x = 1\n")
    monkeypatch.setitem(sys.modules, "torch", None)
    assert cli.main(["port", "llama"]) == 1
    error = capsys.readouterr().err
    assert "hfseq[port]" in error and "not compared" in error
    assert Path("llama.py").read_text() == "x = 1\n"


def test_a_configuration_that_cannot_be_small_is_reported(monkeypatch):
    def invalid(model_type):
        raise ValueError("hidden_size must be 4096")

    tiny = importlib.import_module("hfseq_plugins.bridge.tiny")
    monkeypatch.setattr(tiny, "tiny_config", invalid)
    with pytest.raises(UsageError, match="cannot be made tiny.*hidden_size must be 4096"):
        verification.tiny_config("llama")


def test_newer_versions_of_transformers_are_mentioned(monkeypatch, capsys):
    translate_as(monkeypatch, markers=(MARKER,))
    monkeypatch.setattr(port, "TESTED_VERSION", (5, 0))
    cli.main(["port", "llama"])
    assert "newer than the versions" in capsys.readouterr().out


def test_failed_checks_are_reported_with_their_reasons(monkeypatch, capsys):
    report = Report(passed=["FlaxX.shapes"], failed={"FlaxX.eager": "outputs differ\n  by 1"})
    result = verification.HeadResult("Model", report)
    translate_as(monkeypatch)
    monkeypatch.setattr(verification, "verify", lambda *_: [result])
    assert cli.main(["port", "llama"]) == 1
    assert "Model: 1 checks passed, 1 failed" in capsys.readouterr().out
    assert "FAILED eager: outputs differ" in str(result) and not result.passes


def test_inputs_that_the_battery_does_not_know_are_part_of_the_test():
    inputs = {"bbox": np.tile(np.array([[[1, 2]], [[3, 4]]], np.int32), (4, 1, 1))}
    inputs["pixels"] = np.ones((8, 2), np.float32)
    results = [
        verification.HeadResult("Model", Report(), inputs=inputs),
        verification.HeadResult("ForX", Report()),
    ]
    config = verification.tiny_config("llama")
    text = port._write_test(Path("ported.py"), "llama", config, results).read_text()
    (source,) = re.findall(r"^INPUTS = (\{.*?\})$", text, re.DOTALL | re.MULTILINE)
    bbox = eval(source, {"np": np})["bbox"]
    assert np.array_equal(bbox, inputs["bbox"]) and bbox.dtype == np.int32
    assert "normal(size=(8, 2))" in text
    assert re.search(r"heads=\[.Model.\], inputs=", text)
    assert re.search(r"heads=\[.ForX.\]\)", text)


# -- coverage
# ---------------------------------------------------------------------------------------

RESULTS = [
    coverage.Result(
        "a", 90, loads=True, heads={"ForCausalLM": "passes"}, generates=["ForCausalLM"]
    ),
    coverage.Result("b", 80, loads=True, heads={"Model": "passes", "ForX": "eager: differs"}),
    coverage.Result("c", 70, markers=["modeling_c.py:7: torch.foo has no translation", "x"]),
    coverage.Result("d", stage="time", reason="it took more than 5 seconds"),
    coverage.Result("e", 60, loads=True, heads={"Model": "passes"}, left_out={"ForX": "line 3"}),
]


def test_results_are_counted_and_explained(directory):
    assert list(coverage.counts(RESULTS).values()) == [5, 3, 3, 3, 1, 1]
    path = directory / "porting.md"
    path.write_text(f"before\n{coverage.BEGIN}\nold\n{coverage.END}\nafter\n")
    coverage.update_table(path, RESULTS)
    text = path.read_text()
    assert text.startswith("before") and text.endswith("after\n") and "old" not in text
    assert "| `c` | – | modeling_c.py:7: torch.foo has no translation (and 1 more) |" in text
    assert "| `b` | Model | ForX: eager: differs |" in text
    assert "| `d` | – | time: it took more than 5 seconds |" in text
    with pytest.raises(DataError, match="does not contain the lines"):
        coverage.update_table(directory / "other.md", RESULTS)


def test_stored_results_are_kept(directory, monkeypatch):
    file = directory / "results.json"
    coverage._write(str(file), RESULTS)
    changed = dataclasses.replace(RESULTS[1], heads={"Model": "passes"})
    monkeypatch.setattr(coverage, "select_types", lambda *_: ["b"])
    monkeypatch.setattr(coverage, "port_all", lambda *_: [changed])
    assert cli.main(["port-coverage", "--output_file", str(file)]) == 0
    assert coverage._read(str(file)) == {r.model_type: r for r in [*RESULTS, changed]}
    file.write_text("{}")
    with pytest.raises(DataError, match="not a file of coverage results"):
        coverage._read(str(file))


@pytest.mark.parametrize("shard", ["0/4", "5/4", "all"])
def test_invalid_shards_are_refused(shard):
    with pytest.raises(UsageError, match="--shard"):
        coverage.select_types(None, shard)


def test_unknown_types_are_refused():
    with pytest.raises(UsageError, match="did you mean 'llama'"):
        coverage.select_types(["lama"], "1/1")


@pytest.mark.slow
def test_a_worker_that_takes_too_long_or_crashes_is_replaced(directory):
    options = (str(directory), ["main"], ["shapes"])
    slow, result = list(coverage.port_all(["llama", "arcee"], 0.01, options, {}))
    assert (slow.stage, result.stage) == ("time", "time") and "0.01 seconds" in slow.reason
    (result,) = coverage.port_all(["arcee"], 600, options, {})
    assert result.heads == {"ForCausalLM": "passes"} and result.all_pass is not None
    (again,) = coverage.port_all(["arcee"], 600, options, {"arcee": result})
    assert again.heads == result.heads


#: Types of different kinds, and a head with its objective.
KINDS = ("arcee", "granitemoe", "distilbert", "vit", "audio-spectrogram-transformer")


@pytest.mark.slow
@pytest.mark.parametrize("model_type", KINDS)
def test_ports_pass_the_battery_and_their_generated_test(model_type, directory):
    assert cli.main(["port", model_type, "--output", "ported.py"]) == 0
    command = [sys.executable, "-m", "pytest", "-q", "-p", "no:cacheprovider", "test_ported.py"]
    process = subprocess.run(command, cwd=directory, capture_output=True, text=True)
    assert process.returncode == 0, process.stdout
