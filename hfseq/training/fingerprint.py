"""What code a process runs, in a few letters, so that processes can see whether it is the same."""

from __future__ import annotations

import importlib.util
import sys
from collections.abc import Iterable, Sequence
from hashlib import blake2b
from importlib import metadata
from pathlib import Path


def of_program(plugin_files: Sequence[str] = ()) -> dict[str, str]:
    """Return a digest of each part of the program, named as a message calls it.

    The parts are hfseq, installed plugins, the script (a ``.py`` file; what pip writes into
    ``bin`` names its machine), and the given plugin files with a project's ``hfseqfile.py``.
    Nothing is imported for it; a file that is not there is left out.
    """
    groups = metadata.entry_points(group="hfseq")
    packages = {"hfseq", *(point.value.partition(":")[0].partition(".")[0] for point in groups)}
    found = {f"the code of {name}": _of_package(name) for name in packages}
    for path in map(Path, (sys.argv[0], "hfseqfile.py", *plugin_files)):
        if path.suffix == ".py" and path.is_file():
            found[f"the code of {path.name}"] = of_files(path.parent, [path])
    return found


def of_files(root: Path, files: Iterable[Path]) -> str:
    """Return a digest of names, relative to ``root``, and contents."""
    digest = blake2b(digest_size=6)
    for file in sorted(files):
        text = file.read_bytes()
        digest.update(f"{file.relative_to(root).as_posix()} {len(text)}\n".encode() + text)
    return digest.hexdigest()


def _of_package(name: str) -> str:
    found = importlib.util.find_spec(name)
    if found is None:
        return "absent"
    if not found.submodule_search_locations:
        return of_files(Path(found.origin or "").parent, [Path(found.origin or "")])
    roots = [Path(root) for root in found.submodule_search_locations]
    return " ".join(of_files(root, root.rglob("*.py")) for root in roots)
