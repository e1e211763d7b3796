"""Packed files that unpack to much more than text ever does are refused while they are read."""

from __future__ import annotations

import io
from typing import Any

from hfseq.errors import DataError

RATIO = 100  # bytes for each packed one; text has 3 to 10, the most repetitive logs some 50
FREE = 16 << 20  # bytes that any file may unpack to
READ = 1 << 18  # bytes that are unpacked at once, at most


class Counted(io.RawIOBase):
    """The packed bytes, and how many of them were read."""

    def __init__(self, file: Any) -> None:
        super().__init__()
        self.file, self.count = file, 0

    def readable(self) -> bool:
        """Tell that this can be read."""
        return True

    def seekable(self) -> bool:
        """Tell that places can be chosen, as archives want it."""
        return True

    def seek(self, place: int, whence: int = 0) -> int:
        """Go to a place; returns it."""
        return self.file.seek(place, whence)

    def tell(self) -> int:
        """Return the place."""
        return self.file.tell()

    def readinto(self, buffer: Any) -> int:
        """Read into a buffer; 0 at the end."""
        data = self.file.read(len(buffer))
        buffer[: len(data)] = data
        self.count += len(data)
        return len(data)


class Guarded(io.RawIOBase):
    """The unpacked bytes of ``stream``, whose packed ones ``packed`` counts; ``name`` is the file.

    Raises:
        DataError: more came out than ``FREE`` and ``RATIO`` times what went in.
    """

    def __init__(self, stream: Any, packed: Counted, name: str) -> None:
        super().__init__()
        self.stream, self.packed, self.name, self.count = stream, packed, name, 0

    def readable(self) -> bool:
        """Tell that this can be read."""
        return True

    def readinto(self, buffer: Any) -> int:
        """Read into a buffer; 0 at the end."""
        try:
            data = self.stream.read(min(len(buffer), READ))
        except (OSError, MemoryError):
            raise
        except Exception as error:  # each format has errors of its own
            raise OSError(f"it cannot be unpacked: {error}") from error
        buffer[: len(data)] = data
        self.count += len(data)
        if self.count > FREE + RATIO * self.packed.count:
            raise DataError(
                f"{self.name} unpacks to more than {RATIO} times its size "
                f"({self.count >> 20} MB of the first {self.packed.count} bytes): no text does. "
                "Where it is what you want, unpack it yourself and give the unpacked file"
            )
        return len(data)
