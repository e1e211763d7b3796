"""Importing, loading, calling and saving never import PyTorch, whether it is installed or not."""

from __future__ import annotations

import os
import re
import shutil
import subprocess
import sys
from pathlib import Path

import pytest

from hfseq.pipelines.factory import PIPELINES

ROOT = Path(__file__).resolve().parents[1]

#: Hides torch: it is not found, and importing it fails.
BLOCKER = """
import importlib.util, sys

class Blocker:
    def find_spec(self, name, path=None, target=None):
        if name.split(".")[0] in ("torch", "accelerate"):
            raise ModuleNotFoundError(f"No module named {name!r}", name=name)

sys.meta_path.insert(0, Blocker())
real = importlib.util.find_spec
def find_spec(name, package=None):
    return None if name.split(".")[0] in ("torch", "accelerate") else real(name, package)
importlib.util.find_spec = find_spec
"""

WORK = """
import hfseq, sys
import numpy as np
from hfseq import FlaxAutoModelForMaskedLM, FlaxRobertaForMaskedLM
from transformers import RobertaConfig
config = RobertaConfig(vocab_size=64, hidden_size=32, num_hidden_layers=1, num_attention_heads=4,
                       intermediate_size=48, max_position_embeddings=40)
model = FlaxRobertaForMaskedLM(config)
ids = np.arange(4, 24).reshape(2, 10)
before = np.asarray(model(ids).logits)
model.save_pretrained("one", max_shard_size="20kB")
model.save_pretrained("two", safe_serialization=False)
for folder in ("one", "two"):
    again = FlaxAutoModelForMaskedLM.from_pretrained(folder)
    assert type(again) is FlaxRobertaForMaskedLM
    assert np.array_equal(again(ids).logits, before)
    assert FlaxRobertaForMaskedLM.from_pretrained(folder, scan_layers=True)
assert "torch" not in sys.modules, "torch was imported"
print("done")
"""


def run(code: str, folder: Path, *arguments: str) -> subprocess.CompletedProcess[str]:
    path = os.pathsep.join((str(ROOT), str(ROOT / "plugins")))
    environment = {**os.environ, "PYTHONPATH": path}
    return subprocess.run(
        [sys.executable, "-c", code, *arguments],
        cwd=folder,
        env=environment,
        capture_output=True,
        text=True,
    )


def test_library_works_without_torch(tmp_path):
    result = run(BLOCKER + WORK, tmp_path)
    assert result.returncode == 0, result.stderr
    assert result.stdout.strip() == "done"


@pytest.mark.slow
def test_hfseq_itself_never_asks_for_torch(tmp_path):
    """Transformers may import an installed torch, but hfseq must not."""
    pytest.importorskip("torch")
    watcher = """
import builtins, sys
real = builtins.__import__
def watching(name, globals=None, locals=None, fromlist=(), level=0):
    if name.split(".")[0] == "torch" and (globals or {}).get("__name__", "").startswith("hfseq"):
        raise AssertionError(f"{globals['__name__']} imports {name}")
    return real(name, globals, locals, fromlist, level)
builtins.__import__ = watching
"""
    result = run(watcher + WORK.replace('assert "torch" not', "#"), tmp_path)
    assert result.returncode == 0, result.stderr


def test_importing_hfseq_imports_nothing_heavy(tmp_path):
    code = """
import hfseq, sys
heavy = {"jax", "flax", "transformers", "torch", "datasets", "orbax"} & set(sys.modules)
assert not heavy, heavy
"""
    result = run(code, tmp_path)
    assert result.returncode == 0, result.stderr


@pytest.mark.slow
def test_bin_weights_are_loaded_without_torch(tmp_path):
    torch, transformers = pytest.importorskip("torch"), pytest.importorskip("transformers")
    sizes = {"hidden_size": 8, "num_attention_heads": 1, "intermediate_size": 8, "vocab_size": 9}
    config = transformers.RobertaConfig(num_hidden_layers=1, **sizes)
    model = transformers.RobertaModel(config)
    config.save_pretrained(tmp_path / "model")
    torch.save(model.state_dict(), tmp_path / "model" / "pytorch_model.bin")
    code = """
from hfseq import FlaxRobertaModel
model = FlaxRobertaModel.from_pretrained("model")
print(float(model.params["embeddings"]["word_embeddings"]["embedding"].sum()))
"""
    result = run(BLOCKER + code, tmp_path)
    expected = model.embeddings.word_embeddings.weight.sum().item()
    assert float(result.stdout) == pytest.approx(expected, abs=1e-5), result.stderr


TASKS = """
import hfseq, sys
from pathlib import Path
from transformers import AutoTokenizer
texts, media = (Path(argument) for argument in sys.argv[1:])
image, audio = str(media / "0.png"), str(media / "0.wav")
query = {"query": "A law?", "documents": ["A river.", "A law."]}
labels = {"candidate_labels": ["law", "river"]}
sentences = {"source_sentence": "a law", "sentences": ["a river"]}
short = {"max_new_tokens": 3}
cases = [
    ("fill-mask", texts / "masked", "The <mask>.", {}),
    ("text-classification", texts / "classes", "A law.", {}),
    ("zero-shot-classification", texts / "nli", "A law.", labels),
    ("token-classification", texts / "tags", "Anna", {}),
    ("question-answering", texts / "answers", {"question": "Who?", "context": "Anna"}, {}),
    ("feature-extraction", texts / "features", "A law.", {}),
    ("sentence-similarity", texts / "features", sentences, {"pooling": "mean"}),
    ("text-ranking", texts / "grade", query, {}),
    ("text-generation", texts / "causal", "A law", short),
    ("text2text-generation", texts / "seq2seq", "A law", short),
    ("summarization", texts / "seq2seq", "A law", short),
    ("translation", texts / "seq2seq", "A law", short),
    ("image-classification", media / "vit", image, {}),
    ("zero-shot-image-classification", media / "clip", image, labels),
    ("image-feature-extraction", media / "features", image, {}),
    ("image-to-text", media / "writer", image, short),
    ("automatic-speech-recognition", media / "whisper", audio, short),
    ("automatic-speech-recognition", media / "ctc", audio, {}),
]
for task, name, inputs, options in cases:
    answer = hfseq.pipeline(task, str(name))(inputs, **options)
    assert answer, task
    print("ok", task)
assert "torch" not in sys.modules, "torch was imported"
"""


def save_models_of_all_tasks(folder: Path) -> tuple[str, str]:
    """Saves a model of each task. Returns the folders of text and media, the arguments of TASKS."""
    pytest.importorskip("PIL")
    pytest.importorskip("soundfile")
    from tests.support.stored_runs import STORED
    from tests.support.task_models import MADE, make, save_media_models

    for name in MADE:
        make(folder / "texts", name)
    save_media_models(folder / "media")
    shutil.copytree(STORED / "data" / "writer", folder / "media" / "writer")
    return str(folder / "texts"), str(folder / "media")


@pytest.mark.slow
def test_every_task_runs_without_torch(tmp_path):
    done = run(BLOCKER + TASKS, tmp_path, *save_models_of_all_tasks(tmp_path))
    assert done.returncode == 0, done.stderr[-3000:]
    assert done.stdout.count("ok ") == TASKS.count('    ("')


def test_every_task_of_the_pipelines_is_tried():
    tried = set(re.findall(r'^    \("([a-z0-9-]+)"', TASKS, re.MULTILINE))
    assert tried == set(PIPELINES)
