"""The Llama example: installed as a distribution and found by its entry point."""

from __future__ import annotations

import json
import os
import shutil
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[2]
EXAMPLE = ROOT / "docs" / "examples" / "hfseq-llama"

STORIES = """
import json, sys
from pathlib import Path
import numpy as np
from hfseq import FlaxAutoModelForCausalLM, plugins
folder = Path(sys.argv[1])
info = next(info for info in plugins.load().infos if info.origin == "hfseq-llama")
model = FlaxAutoModelForCausalLM.from_pretrained(folder)
ids = np.array([json.loads((folder / "reference_logits.json").read_text())["ids"]])
logits = np.asarray(model(ids).logits, np.float64)[0]
shifted = logits - logits.max(-1, keepdims=True)
log_probabilities = shifted - np.log(np.exp(shifted).sum(-1, keepdims=True))
nll = -log_probabilities[np.arange(ids.shape[1] - 1), ids[0, 1:]].mean()
found = {"origin": info.origin, "version": info.version, "class": type(model).__module__}
print(json.dumps({**found, "last": logits[-1].tolist(), "nll": nll}))
"""

BATTERY = """
import json
from transformers import LlamaConfig
from hfseq.testing import check_architecture
config = LlamaConfig(vocab_size=64, hidden_size=32, intermediate_size=48, num_hidden_layers=2,
                     num_attention_heads=4, num_key_value_heads=2, head_dim=8)
report = check_architecture("llama", config)
tied = LlamaConfig(vocab_size=64, hidden_size=32, intermediate_size=48, num_hidden_layers=1,
                   num_attention_heads=4, num_key_value_heads=4, tie_word_embeddings=True,
                   attention_bias=True, attention_dropout=0.1)
check_architecture("llama", tied, heads=["ForCausalLM"])
print(json.dumps([report.passed, report.skipped]))
"""


@pytest.fixture(scope="module")
def installed(tmp_path_factory) -> Path:
    """A folder into which pip installed the example, without an index."""
    pytest.importorskip("setuptools")
    folder = tmp_path_factory.mktemp("llama")
    source, target = folder / "source", folder / "site"
    shutil.copytree(EXAMPLE, source)
    options = [
        "--no-deps",
        "--no-build-isolation",
        "--no-index",
        "--quiet",
        "--target",
        str(target),
    ]
    subprocess.run([sys.executable, "-m", "pip", "install", *options, str(source)], check=True)
    return target


def run(code: str, site: Path, *arguments: object):
    path = os.pathsep.join(map(str, (site, ROOT, ROOT / "plugins")))
    result = subprocess.run(
        [sys.executable, "-c", code, *map(str, arguments)],
        env={**os.environ, "PYTHONPATH": path},
        capture_output=True,
        text=True,
    )
    assert result.returncode == 0, result.stderr
    return json.loads(result.stdout.splitlines()[-1])


@pytest.mark.slow
def test_trained_llama_gives_its_reference_logits(installed, shared):
    folder = shared / "checkpoints-tiny" / "stories260K"
    result = run(STORIES, installed, folder)
    assert (result["origin"], result["version"]) == ("hfseq-llama", "0.1.0")
    assert result["class"] == "hfseq_llama"
    reference = json.loads((folder / "reference_logits.json").read_text())
    assert result["last"] == pytest.approx(reference["last_logits"], abs=2e-5)
    assert result["nll"] == pytest.approx(reference["mean_nll"], abs=1e-6)


@pytest.mark.slow
def test_battery(installed):
    passed, skipped = run(BATTERY, installed)
    assert "FlaxLlamaForCausalLM.cached_decoding" in passed
    # Rotary embeddings have no table, so there is no row limit.
    without_table = "max_length() is 2048: only limits of up to 256 tokens are tested"
    reasons = {"the model does not support generation", "the model has no experts"}
    assert set(skipped.values()) <= {"PyTorch is not installed", without_table} | reasons


def test_example_is_one_short_module():
    assert len((EXAMPLE / "hfseq_llama.py").read_text().splitlines()) <= 160
