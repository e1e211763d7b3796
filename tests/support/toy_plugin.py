"""A plugin and checkpoints that do not use jax, for tests of the Auto classes."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest

from hfseq import plugins
from tests.support import plugin_files
from tests.support.plugin_files import ROOT

# A plugin that does not use jax. Its model stores the arguments with which it was created.
TOY = """
from transformers import PreTrainedConfig

from hfseq import hookimpl


class ToyConfig(PreTrainedConfig):
    model_type = "toy"
    hidden_size: int = 4


class FlaxToyForMaskedLM:
    config_class = ToyConfig

    @classmethod
    def _from_config(cls, config, **kwargs):
        self = cls()
        self.config, self.made = config, kwargs
        return self

    @classmethod
    def from_pretrained(cls, name, *args, config=None, **kwargs):
        return cls._from_config(config, name=name, args=args, **kwargs)


@hookimpl
def register_architectures(register):
    register("toy", config=ToyConfig, heads={"ForMaskedLM": f"{__name__}:FlaxToyForMaskedLM"})
"""

REMOTE = """
from transformers import PreTrainedConfig


class RemoteConfig(PreTrainedConfig):
    model_type = "{model_type}"
    hidden_size: int = 4


class FlaxRemote:
    config_class = RemoteConfig

    @classmethod
    def register_for_auto_class(cls, auto_class): ...

    @classmethod
    def from_pretrained(cls, name, *args, config=None, **kwargs):
        self = cls()
        self.config = config
        return self

    _from_config = from_pretrained
"""


@pytest.fixture
def toy(project):
    """The module of the toy plugin, which is loaded from ``hfseqfile.py``."""
    plugin_files.write_project_file(project, TOY)
    plugins.load()
    return sys.modules["hfseqfile"]


def save_config(folder: Path, **content) -> Path:
    folder.mkdir(exist_ok=True)
    (folder / "config.json").write_text(json.dumps(content))
    return folder


def run(code: str, folder: Path) -> str:
    """Runs ``code`` in a new interpreter in ``folder`` and returns its output."""
    command = [sys.executable, "-c", code]
    environment = {**os.environ, "PYTHONPATH": str(ROOT)}
    process = subprocess.run(command, capture_output=True, text=True, cwd=folder, env=environment)
    assert process.returncode == 0, process.stderr
    return process.stdout


def remote_checkpoint(folder: Path, auto: str, model_type: str = "remote") -> Path:
    modules = {"AutoConfig": "modeling_x.RemoteConfig", auto: "modeling_x.FlaxRemote"}
    save_config(folder, model_type=model_type, hidden_size=6, auto_map=modules)
    (folder / "modeling_x.py").write_text(REMOTE.replace("{model_type}", model_type))
    return folder
