"""The API reference has every public name, once."""

from __future__ import annotations

import importlib
import re
from collections import Counter
from pathlib import Path

import hfseq
from hfseq import plugins
from hfseq.plugins.registry import target_name

ROOT = Path(__file__).resolve().parent.parent
OWN = ROOT / "plugins" / "hfseq_plugins"
PAGES = sorted((ROOT / "docs" / "api").glob("*.md"))
TEXT = "\n".join(page.read_text(encoding="utf-8") for page in PAGES)
NAMES = re.findall(r"^\.\. (?:py:data|auto\w+):: ([\w.]+)(?:\(\))?$", TEXT, flags=re.M)


def public() -> set[str]:
    """The names that ``import hfseq`` offers: its own, its rooms' and the architectures' heads."""
    rooms = {name for room in hfseq._CLASS_MODULES for name in hfseq._class_names(room)}
    heads = {
        target_name(target)
        for entry in plugins.load().architectures.entries()
        if (OWN / entry.plugin).is_dir()  # other tests bring plugins of their own
        for target in entry.target.heads.values()
    }
    return {*hfseq._MODULES, *rooms, *heads}


def test_every_public_name_is_documented_once():
    counts = Counter(NAMES)
    assert {f"hfseq.{name}" for name in public()} <= set(counts)
    assert [name for name, count in counts.items() if count > 1] == []


def test_every_name_exists():
    for name in NAMES:
        module, _, attribute = name.rpartition(".")
        if module == "hfseq" and attribute in ("errors", "hookspecs"):
            importlib.import_module(name)
        else:
            assert hasattr(importlib.import_module(module), attribute), name


def test_every_hook_error_and_layer_is_documented():
    import hfseq.errors
    import hfseq.nn
    import hfseq.plugins.hookspecs

    errors = {
        name
        for name, kind in vars(hfseq.errors).items()
        if isinstance(kind, type) and issubclass(kind, hfseq.errors.HfseqError)
    }
    hooks = {
        name
        for name, value in vars(hfseq.plugins.hookspecs).items()
        if hasattr(value, "hfseq_spec")
    }
    assert len(hooks) == 10
    listed = set(re.findall(r"\w+", " ".join(re.findall(r":members: (.+)", TEXT))))
    assert errors | hooks <= listed
    assert {f"hfseq.nn.{name}" for name in hfseq.nn.__all__} <= set(NAMES)
