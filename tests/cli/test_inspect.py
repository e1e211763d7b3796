"""``hfseq inspect``: reports of valid and damaged checkpoints."""

from __future__ import annotations

import json
import os
import shutil
import subprocess
import sys
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from hfseq import cli
from hfseq.cli.inspect import inspect_checkpoint
from tests.support import models

ROOT = Path(__file__).resolve().parents[2]


@pytest.fixture(scope="module")
def saved(tmp_path_factory) -> Path:
    """A tiny GPT-2 with a tokenizer of its vocabulary size, in two formats and in shards."""
    import hfseq
    from hfseq.data.tokenizers import train_tokenizer

    folder = tmp_path_factory.mktemp("inspected") / "gpt2"
    words = "the law of every land is read by all who live there".split()
    tokenizer = train_tokenizer([[" ".join(words)] * 20], "gpt2", None, 280, folder)
    model = hfseq.FlaxGPT2LMHeadModel(models.gpt2_config(vocab_size=len(tokenizer)))
    model.save_pretrained(folder)
    model.save_pretrained(folder.parent / "flax", safe_serialization=False)
    model.save_pretrained(folder.parent / "shards", max_shard_size="30kB")
    return folder


@pytest.fixture
def copy(saved, tmp_path):
    """Returns a function that copies one of the saved models, to be modified."""

    def make(name: str = "gpt2") -> Path:
        return Path(shutil.copytree(saved.parent / name, tmp_path / name))

    return make


def quick(folder: Path, **options: Any) -> dict[str, Any]:
    """Inspects without the comparison of names, for which JAX has to build the model."""
    return inspect_checkpoint(str(folder), names=False, **options)


def test_valid_model_is_described(saved, capsys):
    assert cli.main(["inspect", str(saved)]) == 0
    out = capsys.readouterr().out
    for text in (
        *("gpt2 (plugin gpt2)", "GPT2LMHeadModel", "FlaxAutoModelForCausalLM", "no problem found"),
        *("tied           lm_head.weight = transformer.wte.weight", "AutoModelForCausalLM"),
        *("entries,", "embedding rows", "eos_token_id=2", "model.safetensors: 28 tensors"),
    ):
        assert text in out, text
    assert "\033" not in out


def test_json_has_it_all(saved, capsys):
    assert cli.main(["inspect", str(saved), "--json", "--values"]) == 0
    report = json.loads(capsys.readouterr().out)
    assert report["problems"] == [] and report["not_finite"] == {}
    rows = report["embedding_rows"]["transformer.wte.weight"]
    assert report["tokenizer"]["entries"] == rows == report["tokenizer"]["largest_id"] + 1
    assert report["names"] == {
        "class": "FlaxGPT2LMHeadModel",
        "missing": 0,
        "unexpected": 0,
        "tied": {"lm_head.weight": "transformer.wte.weight"},
    }
    assert sum(report["parameters"]["modules"].values()) == report["parameters"]["total"]
    assert report["parameters"]["dtypes"]["F32"]["bytes"] == 4 * report["parameters"]["total"]


@pytest.mark.parametrize("name", ["gpt2", "flax", "shards"])
def test_every_format_has_the_same_parameters(saved, name):
    report = inspect_checkpoint(str(saved.parent / name))
    assert report["problems"] == []
    assert report["parameters"]["total"] == inspect_checkpoint(str(saved))["parameters"]["total"]
    assert (len(report["files"]) > 1) == (name == "shards")


@pytest.mark.slow
def test_headers_only_imports_nothing_heavy_and_reads_no_values(saved, tmp_path):
    large = tmp_path / "large"
    large.mkdir()
    for name in ("config.json", "tokenizer.json"):
        shutil.copy(saved / name, large)
    count = 2_500_000_000
    header = {"x": {"dtype": "F32", "shape": [count], "data_offsets": [0, 4 * count]}}
    content = json.dumps(header).encode()
    with (large / "model.safetensors").open("wb") as file:
        file.write(len(content).to_bytes(8, "little") + content)
        file.truncate(8 + len(content) + 4 * count)  # a sparse file of 10 GB
    code = (
        "import sys; from hfseq import cli\n"
        "cli.main(['inspect', sys.argv[1], '--headers_only', '--json'])\n"
        "assert not {'jax', 'flax', 'torch', 'transformers'} & sys.modules.keys()\n"
        "import os; status = '/proc/self/status'\n"
        "lines = open(status) if os.path.exists(status) else []\n"
        "for peak in (line for line in lines if line.startswith('VmHWM')):\n"
        "    assert int(peak.split()[1]) < 300_000, peak"
    )
    process = subprocess.run(
        [sys.executable, "-c", code, str(large)],
        capture_output=True,
        text=True,
        timeout=60,
        env={**os.environ, "PYTHONPATH": str(ROOT)},
    )
    assert process.returncode == 0, process.stderr
    assert json.loads(process.stdout)["parameters"]["total"] == count


def test_names_that_do_not_fit_the_class_are_problems(copy, capsys):
    folder = copy()

    def change(tensors):
        tensors["transformer.h.0.ln_1.wait"] = tensors.pop("transformer.h.0.ln_1.weight")
        tensors["transformer.ln_f.bias"] = np.zeros(5, np.float32)
        tensors["transformer.h.1.ln_1.bias"] = np.zeros(32, np.int64)

    models.rewrite_tensors(folder / "model.safetensors", change)
    assert cli.main(["inspect", str(folder)]) == 1
    out = capsys.readouterr().out
    for text in (
        "missing: transformer.h.0.ln_1.weight; did you mean 'transformer.h.0.ln_1.wait'?",
        "unexpected: transformer.h.0.ln_1.wait",
        "transformer.ln_f.bias: (5,) in the file, (32,) in FlaxGPT2LMHeadModel",
        "transformer.h.1.ln_1.bias: unsupported dtype int64",
    ):
        assert text in out, text


@pytest.mark.parametrize("name", ["gpt2", "flax"])
def test_nan_and_infinities_are_found_when_values_are_read(copy, name):
    import hfseq

    folder = copy(name)
    model = hfseq.FlaxGPT2LMHeadModel.from_pretrained(folder)
    bias = np.array(model.params["transformer"]["ln_f"]["bias"])
    bias[:3] = np.nan, np.inf, -np.inf
    model.params["transformer"]["ln_f"]["bias"] = bias
    model.save_pretrained(folder, safe_serialization=name == "gpt2")
    assert quick(folder)["problems"] == []
    report = quick(folder, read_values=True)
    assert report["not_finite"] == {"transformer.ln_f.bias": 3}
    assert report["problems"] == ["transformer.ln_f.bias contains 3 NaN or infinite values"]


def _no_shard(folder: Path) -> None:
    next(folder.glob("model-00002*")).unlink()


def _stray_shard(folder: Path) -> None:
    shutil.copy(next(folder.glob("model-00002*")), folder / "model-00009-of-00009.safetensors")


def _index(change: Any) -> Any:
    def apply(folder: Path) -> None:
        path = folder / "model.safetensors.index.json"
        index = json.loads(path.read_text())
        change(index)
        path.write_text(json.dumps(index))

    return apply


BROKEN_SHARDS = {
    "which does not exist": _no_shard,
    "model-00009-of-00009.safetensors is a shard that": _stray_shard,
    "lists tensors that are not in their shards: new": _index(
        lambda index: index["weight_map"].update(new=next(iter(index["weight_map"].values())))
    ),
    "does not list transformer.ln_f.bias": _index(
        lambda index: index["weight_map"].pop("transformer.ln_f.bias")
    ),
    "total size of 7 bytes": _index(lambda index: index["metadata"].update(total_size=7)),
    "'../../etc/passwd': shards must be in the directory": _index(
        lambda index: index["weight_map"].update(new="../../etc/passwd")
    ),
    "is not an index of weight shards": _index(lambda index: index.pop("weight_map")),
}


@pytest.mark.parametrize("message", BROKEN_SHARDS)
def test_an_index_and_its_shards_that_disagree_are_problems(copy, message):
    folder = copy("shards")
    BROKEN_SHARDS[message](folder)
    assert any(message in problem for problem in quick(folder)["problems"])


def test_missing_index_and_pickle_only_are_reported(copy):
    folder = copy("shards")
    (folder / "model.safetensors.index.json").unlink()
    assert "but no index that lists them" in quick(folder)["problems"][0]
    for path in folder.glob("model*"):
        path.unlink()
    assert quick(folder)["problems"][0].startswith("no weights: none of")
    (folder / "pytorch_model.bin").write_bytes(b"pickle")
    assert "pytorch_model.bin is damaged" in quick(folder)["problems"][0]


def test_a_bin_file_is_inspected_like_safetensors(copy):
    torch = pytest.importorskip("torch")
    from safetensors.torch import load_file

    folder = copy()
    expected = quick(folder)
    state = load_file(folder / "model.safetensors")
    name = "transformer.h.0.attn.c_attn.weight"
    state[name] = state[name].T.contiguous().T  # values that are not in order
    torch.save(state, folder / "pytorch_model.bin")
    (folder / "model.safetensors").unlink()
    report = inspect_checkpoint(str(folder), read_values=True)
    assert report["problems"] == [] and "pytorch_model.bin" not in report["not_read"]
    assert report["parameters"] == expected["parameters"] and report["not_finite"] == {}
    state[name][0, 1] = float("nan")
    torch.save(state, folder / "pytorch_model.bin")
    problems = inspect_checkpoint(str(folder), read_values=True)["problems"]
    assert any(name in problem for problem in problems)


def test_a_vocabulary_larger_than_the_embedding_is_a_problem(copy):
    folder = copy()

    def cut(tensors):
        tensors["transformer.wte.weight"] = tensors["transformer.wte.weight"][:-3]

    models.rewrite_tensors(folder / "model.safetensors", cut)
    problems = quick(folder)["problems"]
    assert any("the tokenizer's largest ID is" in problem for problem in problems)
    assert any("config.json has vocab_size" in problem for problem in problems)


def test_other_files_of_the_directory_are_described(copy):
    from tests.support.run_logs import records, write_log

    folder = write_log(copy(), records(60))
    for step in ("20", "60", "tmp"):
        (folder / "checkpoints" / step).mkdir(parents=True)
    (folder / "pytorch_model.bin").write_bytes(b"pickle")
    report = quick(folder)
    assert report["training"] == {"checkpoints": [20, 60], "logged_step": 60}
    assert report["not_read"] == ["pytorch_model.bin"] and report["problems"] == []


def test_classes_of_remote_code_are_named(copy):
    folder = copy()
    stored = json.loads((folder / "config.json").read_bytes())
    stored["auto_map"] = {"AutoConfig": "code.Config", "AutoModelForCausalLM": "code.Model"}
    (folder / "config.json").write_text(json.dumps(stored))
    classes = quick(folder)["pytorch_classes"]
    assert classes == ["AutoModelForCausalLM (trust_remote_code=True)"]


def test_long_generation_settings_are_counted(copy, capsys):
    languages = {f"<|{number}|>": number for number in range(99)}
    settings = {"eos_token_id": 2, "lang_to_id": languages, "suppress_tokens": [1, 2]}
    folder = copy()
    (folder / "generation_config.json").write_text(json.dumps(settings))
    assert cli.main(["inspect", "--headers_only", str(folder)]) == 0
    out = capsys.readouterr().out
    assert "eos_token_id=2, lang_to_id=99 entries, suppress_tokens=[1, 2]" in out


@pytest.mark.slow
def test_an_architecture_stored_as_its_twin_is_both(tmp_path):
    import hfseq

    config = models.wmt_transformer_config()
    model = hfseq.FlaxWMTTransformerForConditionalGeneration(config)
    model.save_pretrained(tmp_path)
    report = inspect_checkpoint(str(tmp_path))
    assert (report["model_type"], report["stored_as"]) == ("wmt_transformer", "pegasus")
    assert "AutoModelForSeq2SeqLM" in report["pytorch_classes"] and report["problems"] == []


def test_fp8_directory_shows_its_recipe(copy):
    from safetensors.numpy import save_file

    folder = copy()
    save_file(
        {"x": np.ones(3, np.float32)},
        folder / "fp8_params.safetensors",
        {"format": "hfseq", "recipe": "fp8_delayed"},
    )
    assert quick(folder)["fp8"]["recipe"] == "fp8_delayed"


@pytest.mark.parametrize(
    ("change", "message"),
    [
        (lambda f: (f / "config.json").write_text("{"), "config.json cannot be read"),
        (lambda f: (f / "config.json").write_text("[]"), "config.json cannot be read"),
        (lambda f: (f / "config.json").unlink(), "no config.json"),
        (
            lambda f: (f / "config.json").write_text('{"model_type": "x"}'),
            "no plugin registers the model type 'x'",
        ),
        (lambda f: (f / "config.json").write_text("{}"), "no model_type"),
        (lambda f: (f / "tokenizer.json").write_text("{}"), "tokenizer.json cannot be read"),
        (lambda f: (f / "model.safetensors").write_bytes(b"x" * 99), "header length is"),
    ],
)
def test_damaged_files_are_reported_and_others_shown(copy, capsys, change, message):
    folder = copy()
    change(folder)
    assert cli.main(["inspect", str(folder), "--headers_only"]) == 1
    out = capsys.readouterr().out
    assert message in out and "model type" in out


@pytest.mark.parametrize(
    ("name", "code", "message"),
    [
        ("nowhere/at/all", 1, "'nowhere/at/all' does not exist"),
        ("text.txt", 2, "text.txt is not a weight file"),
    ],
)
def test_non_checkpoint_is_a_one_line_error(tmp_path, monkeypatch, capsys, name, code, message):
    monkeypatch.chdir(tmp_path)
    Path("text.txt").write_text("text")
    assert cli.main(["inspect", name]) == code
    (line,) = capsys.readouterr().err.splitlines()
    assert line.startswith("error: ") and message in line


# huggingface_hub uploads files through a deprecated argument of its HTTP library.
@pytest.mark.filterwarnings("ignore:Use 'content=:DeprecationWarning")
def test_a_model_on_the_hub_is_inspected_without_its_weights(hub, saved):
    from huggingface_hub import try_to_load_from_cache

    from hfseq.checkpoints.hub import push_folder

    push_folder(saved.parent / "shards", "user/shards")
    report = inspect_checkpoint("user/shards")
    assert report["problems"] == [] and len(report["files"]) > 1
    assert report["parameters"]["total"] == quick(saved)["parameters"]["total"]
    assert try_to_load_from_cache("user/shards", report["files"][0]["name"]) is None


@pytest.mark.parametrize("value", [["gpt2"], {"a": 1}, 5, True, None, ""])
@pytest.mark.parametrize("name", ["model_type", "architectures", "hfseq", "auto_map", "vocab_size"])
def test_a_configuration_with_values_of_other_types_is_described(copy, capsys, name, value):
    folder = copy()
    stored = json.loads((folder / "config.json").read_bytes())
    (folder / "config.json").write_text(json.dumps({**stored, name: value}))
    for flags in ((), ("--json",)):
        code = cli.main(["inspect", str(folder), "--headers_only", *flags])
        captured = capsys.readouterr()
        assert code in (0, 1) and not captured.err and captured.out
    if name == "model_type":
        assert "no model_type" in captured.out


@pytest.mark.parametrize(
    ("shape", "kind"),
    [
        (["a"], "float32"),
        ([None], "float32"),
        ([[2]], "float32"),
        ([-2], "float32"),
        ([1.5], "float32"),
        ([2], 7),
        ([2], ["float32"]),
        ([2], None),
    ],
)
def test_an_array_in_msgpack_that_is_described_wrongly_is_a_problem(tmp_path, shape, kind):
    import msgpack

    array = msgpack.ExtType(1, msgpack.packb((shape, kind, bytes(8))))
    (tmp_path / "flax_model.msgpack").write_bytes(msgpack.packb({"w": array}))
    problems = quick(tmp_path, read_values=True)["problems"]
    assert any("flax_model.msgpack cannot be read: invalid array of dtype" in p for p in problems)


def test_half_a_pair_of_an_escape_is_printed_as_the_escape(copy):
    folder = copy()
    stored = json.loads((folder / "config.json").read_bytes())
    (folder / "config.json").write_text(json.dumps({**stored, "model_type": "a\ud800b"}))
    process = subprocess.run(
        [sys.executable, "-m", "hfseq.cli", "inspect", str(folder), "--headers_only"],
        capture_output=True,
        text=True,
        env={**os.environ, "PYTHONPATH": str(ROOT)},
    )
    assert process.returncode == 1 and "a\\ud800b" in process.stdout and not process.stderr
