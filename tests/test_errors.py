"""Texts of errors: their lines, suggestions, and packages that cannot be imported."""

from __future__ import annotations

import sys

import numpy as np
import pytest

from hfseq import cli
from hfseq.errors import UsageError, did_you_mean, first_line, one_line, without_folders

TOKENIZERS = """Couldn't instantiate the backend tokenizer from one of: 
(1) a `tokenizers` library serialization file,
(2) a slow tokenizer instance to convert.
"""


def test_a_first_line_that_introduces_a_list_keeps_it():
    expected = "from one of: (1) a `tokenizers` library serialization file, (2) a slow"
    assert expected in first_line(ValueError(TOKENIZERS))
    assert first_line(ValueError("\nno such file.\nHint: look again")) == "no such file."
    assert first_line(KeyError()) == "KeyError"
    assert one_line("a\n  b") == "a b" and one_line("long " * 99, 20) == "long long long..."
    paths = "/tmp/tmpq2_l/a/b.safetensors and /home/x/.venv/lib/site-packages/torch/nn.py"
    assert without_folders(paths) == "a/b.safetensors and torch/nn.py"


def test_dashes_are_not_compared():
    assert did_you_mean("--worker", ["--lora_r", "--preset"]) == ""
    assert did_you_mean("--save-step", ["--save_steps"]) == "; did you mean '--save_steps'?"


class Importer:
    """Fails to import a package, as if it or one of its dependencies were missing."""

    def __init__(self, package: str, missing: str) -> None:
        self.package, self.missing = package, missing

    def find_spec(self, name, path=None, target=None):
        if name.partition(".")[0] == self.package:
            raise ModuleNotFoundError(f"No module named '{self.missing}'", name=self.missing)


def read_audio(folder):
    from hfseq.data.audio import AudioFile

    (folder / "a.wav").write_bytes(b"RIFF")
    AudioFile(str(folder / "a.wav")).seconds  # noqa: B018


def load_processor(folder):
    from hfseq.data.images import load_image_processor

    load_image_processor(None, 8)


def make_numbers(folder):
    from hfseq.data.numbers_and_dates import generate_pairs

    generate_pairs.cache_clear()
    generate_pairs("de")


def score_rouge(folder):
    from hfseq.objectives.metrics import rouge_scores

    rouge_scores(["a"], [["a"]])


def quantize(folder):
    from hfseq.nn.qwix import quantize_kernel

    quantize_kernel(np.ones((4, 4), np.float32), "int8", 0)


def evaluate(folder):
    arguments = cli.build_parser().parse_args(["evaluate", "m", "--tasks", "t"])
    arguments.run(arguments)


def complete(folder):
    cli.run_completion(cli.build_parser().parse_args(["completion", "bash"]))


def save_remotely(folder):
    from fsspec.registry import _registry

    from hfseq.checkpoints.storage import Workspace

    _registry.pop("gs", None)
    Workspace("gs://bucket/run", folder)


FEATURES = [
    ("soundfile", "'hfseq[audio]'", read_audio),
    ("PIL", "'hfseq[vision]'", load_processor),
    ("num2words", "'hfseq[translation]'", make_numbers),
    ("rouge_score", "'hfseq[rouge]'", score_rouge),
    ("qwix", "'hfseq[qwix]'", quantize),
    ("lm_eval", "'hfseq[eval]'", evaluate),
    ("shtab", "'hfseq[completion]'", complete),
    ("gcsfs", "gcsfs", save_remotely),
]


@pytest.mark.parametrize(("package", "requirement", "use"), FEATURES)
def test_a_package_that_is_installed_is_not_called_missing(
    package, requirement, use, monkeypatch, tmp_path
):
    for name in [name for name in sys.modules if name.partition(".")[0] == package]:
        monkeypatch.delitem(sys.modules, name)
    importer = Importer(package, package)
    monkeypatch.setattr(sys, "meta_path", [importer, *sys.meta_path])
    with pytest.raises(UsageError) as error:
        use(tmp_path)
    assert f"pip install {requirement}" in str(error.value)
    importer.missing = "no_such_dependency"
    with pytest.raises(UsageError) as error:
        use(tmp_path)
    assert "No module named 'no_such_dependency'" in str(error.value)
    assert "pip install" not in str(error.value)
