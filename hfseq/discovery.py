"""Where plugins are found: installed distributions, a checkout, ``hfseqfile.py``, files by name."""

from __future__ import annotations

import configparser
import importlib.util
import os
import re
import sys
from collections import defaultdict
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from importlib import metadata
from pathlib import Path
from types import ModuleType
from typing import Any

from hfseq.errors import PluginConflict, PluginError, nearest

GROUP = "hfseq"
PROJECT_FILE = "hfseqfile.py"


@dataclass(frozen=True)
class Candidate:
    """A plugin that can be loaded; ``origin`` says where it is from."""

    name: str
    origin: str
    version: str | None
    load: Callable[[], Any]


def candidates() -> Iterator[Candidate]:
    """Yield the plugins of the environment that the environment variables let through.

    Names that nobody has, or more than one, come as candidates whose loading fails with the reason.
    """
    only, without = _names("HFSEQ_PLUGINS"), _names("HFSEQ_DISABLE_PLUGINS")
    known = _by_name()
    for name, found in known.items():
        if name not in without and (not only or name in only):
            yield found[0] if len(found) == 1 else _conflict(name, found)
    for name in sorted(only - known.keys()):
        message = f"HFSEQ_PLUGINS names '{name}', which no plugin is called{nearest(name, known)}"
        yield _failing(name, "HFSEQ_PLUGINS", PluginError(message))


def file_candidate(path: Path) -> Candidate:
    """Return the plugin in the Python file ``path``; PluginError if there is no such file."""
    path = path.expanduser().resolve()
    if not path.is_file():
        raise PluginError(f"plugin file '{path}' does not exist")
    return Candidate(path.stem, str(path), None, lambda: _import_file(path))


def _names(variable: str) -> set[str]:
    return {name.strip() for name in os.environ.get(variable, "").split(",")} - {""}


def _by_name() -> dict[str, list[Candidate]]:
    found: dict[str, list[Candidate]] = defaultdict(list)
    checkout = _checkout()
    for candidate in (*checkout, *_installed(skip_own=bool(checkout))):
        found[candidate.name].append(candidate)
    if Path(PROJECT_FILE).is_file():
        candidate = file_candidate(Path(PROJECT_FILE))
        found[candidate.name].append(candidate)
    return found


def _installed(skip_own: bool) -> Iterator[Candidate]:
    points = metadata.entry_points(group=GROUP)
    for point in sorted(points, key=lambda point: (point.name, point.value)):
        name, version = (point.dist.name, point.dist.version) if point.dist else ("?", None)
        if not (skip_own and name.lower() == "hfseq"):
            yield Candidate(point.name, name, version, point.load)


def _checkout() -> list[Candidate]:
    """Return the plugins named in ``setup.cfg`` where hfseq runs from its source tree.

    They come before the installed metadata of an editable install, which are as old as that
    install.
    """
    from hfseq import __version__

    root = Path(__file__).resolve().parent.parent
    settings = configparser.ConfigParser()
    if not settings.read(root / "setup.cfg", encoding="utf-8"):
        return []
    if settings.get("metadata", "name", fallback="") != "hfseq":
        return []
    if importlib.util.find_spec("hfseq_plugins") is None:
        sys.path.append(str(root / "plugins"))
    lines = settings.get("options.entry_points", GROUP, fallback="").split("\n")
    pairs = [[part.strip() for part in line.split("=")] for line in lines if "=" in line]
    points = [metadata.EntryPoint(name, value, GROUP) for name, value in pairs]
    return [Candidate(point.name, "hfseq", __version__, point.load) for point in points]


def _conflict(name: str, found: list[Candidate]) -> Candidate:
    origins = " and ".join(" ".join(filter(None, (one.origin, one.version))) for one in found)
    message = (
        f"the plugin name '{name}' is claimed by {origins}, so none of them is loaded; "
        f"uninstall one or set HFSEQ_DISABLE_PLUGINS={name}"
    )
    return _failing(name, origins, PluginConflict(message))


def _failing(name: str, origin: str, error: PluginError) -> Candidate:
    def load() -> None:
        raise error

    return Candidate(name, origin, None, load)


def _import_file(path: Path) -> ModuleType:
    """Import ``path`` under its own name if that is free, so that imports agree."""
    name = re.sub(r"\W", "_", path.stem)
    present = sys.modules.get(name)
    if present is not None and _is_file(getattr(present, "__file__", None), path):
        return present
    if present is not None or _importable(name, path):
        name = f"hfseq_file_{name}"
    spec = importlib.util.spec_from_file_location(name, path)
    if spec is None or spec.loader is None:
        raise PluginError(f"plugin file '{path}' is not a Python file")
    module = importlib.util.module_from_spec(spec)
    sys.modules[name] = module
    try:
        spec.loader.exec_module(module)
    except BaseException:
        del sys.modules[name]
        raise
    return module


def _importable(name: str, path: Path) -> bool:
    """Tell whether ``import name`` would find something other than ``path``."""
    spec = importlib.util.find_spec(name)
    return spec is not None and not _is_file(spec.origin, path)


def _is_file(name: str | None, path: Path) -> bool:
    return name is not None and Path(name).resolve() == path
