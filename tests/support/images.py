"""Images of digits that are drawn with Pillow's font, with one directory per class."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest

CLASSES = ("0", "1", "2", "3")


def draw_digits(folder: Path, count: int, seed: int = 0, size: int = 32) -> Path:
    """Writes `count` images of each class into subdirectories of `folder`."""
    image = pytest.importorskip("PIL.Image")
    from PIL import ImageDraw, ImageFont

    random = np.random.default_rng(seed)
    for name in CLASSES:
        (folder / name).mkdir(parents=True, exist_ok=True)
        for number in range(count):
            picture = image.new("L", (size, size), int(random.integers(0, 80)))
            index = size * random.integers(6, 11) // 32, size * random.integers(2, 6) // 32
            font = ImageFont.load_default(size=int(size * random.integers(20, 24)) // 32)
            ink = int(random.integers(150, 255))
            ImageDraw.Draw(picture).text(tuple(map(int, index)), name, fill=ink, font=font)
            picture.save(folder / name / f"{number}.png")
    return folder


def write_bad_images(folder: Path) -> dict[str, str]:
    """Writes invalid image files, and returns the expected error message for each file."""
    image = pytest.importorskip("PIL.Image")
    folder.mkdir(parents=True, exist_ok=True)
    noise = np.random.default_rng(0).integers(0, 256, (40, 60, 3), np.uint8)
    (folder / "text.png").write_text("not an image")
    (folder / "empty.png").write_bytes(b"")
    image.fromarray(noise).save(folder / "whole.jpg")
    full = (folder / "whole.jpg").read_bytes()
    (folder / "cut.jpg").write_bytes(full[: len(full) // 2])
    (folder / "whole.jpg").unlink()
    frames = [image.fromarray(np.roll(noise, shift, 0)) for shift in range(3)]
    frames[0].save(folder / "moving.gif", save_all=True, append_images=frames[1:])
    deep = np.arange(2400, dtype=np.uint16).reshape(40, 60) * 20
    image.fromarray(deep).save(folder / "deep.png")
    write_bomb(folder / "bomb.png", 40_000, 25_000)
    return {
        "text.png": "unsupported image format",
        "empty.png": "unsupported image format",
        "cut.jpg": "truncated",
        "moving.gif": "3 frames",
        "deep.png": "more than 8 bits per channel",
        "bomb.png": "40000 x 25000 pixels",
    }


def write_bomb(path: Path, width: int, height: int) -> None:
    """Writes a decompression bomb: a small PNG file whose header declares many pixels."""
    import struct
    import zlib

    def chunk(case: bytes, data: bytes) -> bytes:
        check = struct.pack(">I", zlib.crc32(case + data))
        return struct.pack(">I", len(data)) + case + data + check

    header = struct.pack(">IIBBBBB", width, height, 1, 0, 0, 0, 0)
    packed = zlib.compress(b"\0" * ((width // 8 + 1) * 1000))
    path.write_bytes(
        b"\x89PNG\r\n\x1a\n" + chunk(b"IHDR", header) + chunk(b"IDAT", packed) + chunk(b"IEND", b"")
    )
