"""The tool that compares two revisions sees every difference and nothing else."""

from __future__ import annotations

import importlib.util
import json
import shutil
import subprocess
import sys
from pathlib import Path
from types import SimpleNamespace

import numpy as np
import pytest
from safetensors.numpy import save_file

ROOT = Path(__file__).resolve().parents[2]
SCRIPT = ROOT / "scripts" / "compare_revisions.py"
spec = importlib.util.spec_from_file_location("compare_revisions", SCRIPT)
assert spec and spec.loader
compare = importlib.util.module_from_spec(spec)
spec.loader.exec_module(compare)


def test_every_card_has_its_data():
    cards = {path.parent.name for path in (ROOT / "model_cards").glob("*/card.yaml")}
    assert cards == set(compare.DATA) | compare.GENERATED_DATA_CARDS


def test_a_log_is_compared_to_the_last_bit_without_what_was_measured(tmp_path):
    def log(loss: float, seconds: float) -> dict:
        path = tmp_path / "metrics.jsonl"
        lines = [
            {"step": 0, "time": seconds, "run": {"seed": 1}},
            {
                "step": 1,
                "time": seconds,
                "train_loss": loss,
                "train_tokens_per_second": seconds,
                "train_runtime": seconds,
                "train_mfu": seconds,
                "peak_memory_gb": seconds,
            },
            {"step": 1, "time": seconds, "text": {"eval_samples": "a text"}},
        ]
        path.write_text("".join(f"{json.dumps(line)}\n" for line in lines))
        return compare.read_log(path)

    one = log(0.1, 2.0)
    assert set(one) == {"train_loss of step 1", "text of step 1"}
    assert compare.differences(one, log(0.1, 3.0)) == []
    (found,) = compare.differences(one, log(float(np.nextafter(0.1, 1)), 2.0))
    assert found.startswith(
        "train_loss of step 1: 0.1 (0x1.999999999999ap-4) and 0.1000000000000000"
    )
    assert len(compare.differences(one, {})) == 2


def test_weights_are_compared_by_what_they_say_and_not_by_the_order_of_metadata(tmp_path):
    def digest(value: float, metadata: dict) -> dict:
        save_file({"a": np.float32([value])}, tmp_path / "model.safetensors", metadata)
        return compare.hash_files(tmp_path)

    many = {f"key{n}": str(n) for n in range(20)}
    assert digest(1.0, many) == digest(1.0, dict(reversed(many.items())))
    assert digest(1.0, many) != digest(1.0, many | {"key3": "4"})
    assert digest(0.0, many) != digest(-0.0, many)


def test_usage_errors():
    for flags in (["--steps", "5"], ["--data", "nowhere"], ["--cards", "nothing"]):
        done = subprocess.run(
            [sys.executable, str(SCRIPT), ".", *flags], capture_output=True, text=True
        )
        assert done.returncode == 2 and flags[1] in done.stderr


@pytest.mark.parametrize("card", compare.DATA)
def test_the_command_of_a_card_is_cut_short_and_parses(card, tmp_path, shared):
    from hfseq.training.arguments import parse

    *before, training = compare.shortened_commands(
        card, SimpleNamespace(data=shared, steps=6), tmp_path
    )
    name = Path(training[0]).name
    objectives = {"run_t5_mlm_flax.py": "span_mlm", "run_bart_dlm_flax.py": "denoising"}
    objective = objectives.get(name) or name.split("_")[1]
    arguments = parse(training[1:], objective=objective)
    assert name in compare.AUTO_CLASSES and (ROOT / training[0]).exists()
    assert arguments.training.max_steps == 6 and arguments.training.save_steps == 3
    files = [word for word in training if str(tmp_path / "data") in word]
    assert all(0 < Path(file).stat().st_size < 700_000 for file in files)
    assert files or card == "numbers-en-de"
    made = [command[command.index("--output_dir") + 1] for command in before]
    if "--tokenizer_name" in training:
        assert training[training.index("--tokenizer_name") + 1] in made


@pytest.mark.slow
def test_a_changed_checkout_is_told_from_the_same_one(tmp_path, shared):
    """The recipe of one card against itself, and against a copy whose optimizer is another."""
    for name in ("hfseq", "plugins", "scripts"):
        shutil.copytree(ROOT / name, tmp_path / "changed" / name)
    path = tmp_path / "changed" / "hfseq" / "training" / "optimizers.py"
    text = path.read_text()
    assert text.count("\ndef make_schedule(") == 1
    path.write_text(
        text.replace("\ndef make_schedule(", "\ndef _made(")
        + "\n\ndef make_schedule(*given):\n"
        + "    made = _made(*given)\n"
        + "    return lambda step: made(step) * 1.0001\n"
    )
    command = [sys.executable, str(SCRIPT), str(ROOT)]
    options = ["--cards", "wikitext-2-gpt2", "--steps", "2", "--data", str(shared)]
    for other, code in ((ROOT, 0), (tmp_path / "changed", 1)):
        done = subprocess.run([*command, str(other), *options], capture_output=True, text=True)
        assert done.returncode == code, done.stdout + done.stderr
        assert ("DIFFER" in done.stdout) == bool(code)
        assert ("train_learning_rate of step 2" in done.stdout) == bool(code)
