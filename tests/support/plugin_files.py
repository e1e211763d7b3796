"""Functions that write plugins to files, and fixtures for tests of plugins.

A test module enables the autouse fixture with ``project = plugin_files.project``.
"""

from __future__ import annotations

import os
import re
import sys
from pathlib import Path

import pytest

from hfseq import plugins

ROOT = Path(__file__).resolve().parents[2]
GUIDE = (ROOT / "docs" / "plugins.md").read_text(encoding="utf-8")


@pytest.fixture(autouse=True)
def project(tmp_path, monkeypatch):
    """An empty working directory, in which hfseq discovers its plugins again.

    The environment variables for plugins are empty, and modules from the directory are unloaded at
    the end of the test.
    """
    for variable in ("PLUGINS", "PLUGIN_FILES", "DISABLE_PLUGINS", "TRACE_PLUGINS"):
        monkeypatch.setenv(f"HFSEQ_{variable}", "")
    monkeypatch.chdir(tmp_path)
    modules = set(sys.modules)
    plugins.unload()
    yield tmp_path
    plugins.unload()
    sys.modules.pop("hfseqfile", None)
    for name in set(sys.modules) - modules:
        if str(tmp_path) in str(getattr(sys.modules[name], "__file__", "")):
            del sys.modules[name]


def write(path: Path, body: str) -> Path:
    path.write_text("from hfseq import hookimpl\n\n" + body, encoding="utf-8")
    return path


def write_project_file(project: Path, text: str) -> None:
    """Writes ``hfseqfile.py``, and makes hfseq load it as a plugin file during the test."""
    (project / "hfseqfile.py").write_text(text, encoding="utf-8")
    os.environ["HFSEQ_PLUGIN_FILES"] = "hfseqfile.py"


def optimizer(name: str, target: str = "optax:adam") -> str:
    return f"@hookimpl\ndef register_optimizers(register):\n    register({name!r}, {target!r})\n"


@pytest.fixture
def distribute(tmp_path, monkeypatch):
    """Returns a function that installs a fake distribution with one plugin module."""

    def install(project: str, plugin: str, body: str, version: str = "1.0") -> None:
        site = tmp_path / f"site_{project}"
        info = site / f"{project}-{version}.dist-info"
        info.mkdir(parents=True)
        module = f"{project}_module"
        write(site / f"{module}.py", body)
        (info / "METADATA").write_text(
            f"Metadata-Version: 2.1\nName: {project}\nVersion: {version}\n"
        )
        (info / "entry_points.txt").write_text(f"[hfseq]\n{plugin} = {module}\n")
        monkeypatch.syspath_prepend(site)

    return install


def write_documented_plugin(hook: str) -> Path:
    """Writes the example of ``hook`` in docs/plugins.md to a file, and returns its path."""
    section = re.search(rf"^### {hook}$(.*?)(?=^##)", GUIDE, re.M | re.S)
    assert section, f"docs/plugins.md has no section '### {hook}'"
    example = re.search(r"```python\n(.*?)```", section[1], re.S)
    assert example, f"docs/plugins.md has no example of {hook}"
    path = Path(f"documented_{hook}.py")
    path.write_text(example[1], encoding="utf-8")
    return path
