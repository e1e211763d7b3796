"""Checksums of a checkpoint's files: a bit that flips on a disk must not become a parameter.

Orbax notices a file that is cut or absent, but not every changed byte of an array.
"""

from __future__ import annotations

import json
import threading
import zlib
from pathlib import Path

from hfseq import json_text
from hfseq.whole_files import write_text

FILE = "checksums.json"
CHUNK = 1 << 22
INTERVAL = 0.05  # seconds between two looks for a checkpoint that is being written


def write(folder: Path) -> None:
    """Note size and CRC-32 of every file in ``folder``, which is complete."""
    sums = {name: _sum(folder / name) for name in _names(folder)}
    write_text(folder / FILE, json.dumps(sums))


def problem(folder: Path) -> str:
    """Return what is wrong with the files of a checkpoint, or an empty text.

    Where no sums were noted (the run was killed right after the save) only the record is looked at.
    """
    try:
        sums = json_text.parse((folder / FILE).read_bytes())
        for name, known in sums.items():
            if not (folder / name).is_file():
                return f"{name} is missing"
            if (found := _sum(folder / name)) != known:
                sizes = f"{found[0]} bytes where {known[0]} are due"
                return (
                    f"{name} has {sizes if found[0] != known[0] else 'other bytes than were saved'}"
                )
        return ""
    except FileNotFoundError:
        return _unnoted_problem(folder)
    except (OSError, ValueError, AttributeError, TypeError, LookupError) as error:
        return f"{FILE} cannot be read: {error}"


def _unnoted_problem(folder: Path) -> str:
    missing = [name for name in ("state", "record") if not (folder / name).is_dir()]
    if missing:
        return f"{missing[0]} is missing"
    try:
        json_text.parse((folder / "record" / "metadata").read_bytes())
    except (OSError, ValueError) as error:
        return f"record cannot be read: {error}"
    return ""


def _names(folder: Path) -> list[str]:
    files = (path for path in folder.rglob("*") if path.is_file())
    names = (path.relative_to(folder).as_posix() for path in files)
    return sorted(name for name in names if not name.startswith(FILE))


def _sum(path: Path) -> list[int]:
    size = crc = 0
    with path.open("rb") as file:
        while chunk := file.read(CHUNK):
            size, crc = size + len(chunk), zlib.crc32(chunk, crc)
    return [size, crc]


class Sealer:
    """Notes the sums of a checkpoint in a thread, as soon as it is complete."""

    def __init__(self) -> None:
        self._thread: threading.Thread | None = None
        self._stop = threading.Event()

    def begin(self, folder: Path) -> None:
        """Wait for ``folder`` to appear, which it does when it is complete, and note its sums."""
        self.end()
        self._stop.clear()
        self._thread = threading.Thread(target=self._work, args=(folder,), daemon=True)
        self._thread.start()

    def end(self) -> None:
        """Return when the thread is done; whatever was being saved is complete, or never will."""
        if self._thread is not None:
            self._stop.set()
            self._thread.join()
            self._thread = None

    def _work(self, folder: Path) -> None:
        while not folder.is_dir():
            if self._stop.wait(INTERVAL) and not folder.is_dir():
                return
        try:
            write(folder)
        except OSError:  # a full disk; without sums there is no check, nothing worse
            return
