"""Mutations that use the structure of a file format.

Each accepts the bytes of a valid file and a ``random.Random``, and returns other bytes. The result
only depends on the generator, so that a finding can be reproduced from its number.
"""

from __future__ import annotations

import json
import random
import struct
from collections.abc import Callable
from typing import Any

Mutator = Callable[[bytes, random.Random], bytes]

DEEP = "[" * 3000 + "]" * 3000
#: Values that readers may misinterpret, as JSON text.
HOSTILE = (
    "null", "true", "-1", "0", "1", "1e308", "1e999", "NaN", "-Infinity", str(2**31), str(2**63),
    str(10**12), str(10**30), "-9223372036854775808", "0.5", '""', '"\\ud800"', '"\\u0000"',
    '"../../outside/written"', '"/etc/passwd"', '"' + "A" * 5000 + '"', "[]", "{}", "[[]]",
    '[1, "a", null]', '{"a": {"b": 1}}', DEEP, '{"a":' * 1500 + "1" + "}" * 1500,
)  # fmt: skip
NUMBERS = (0, 1, 2, 7, 8, 127, 255, 2**15, 2**16, 2**31 - 1, 2**31, 2**32, 2**40, 2**63, 2**64 - 1)


def mutate_bytes(data: bytes, draw: random.Random) -> bytes:
    """Flips, removes, duplicates or moves bytes, or inserts numbers at the limits of a type."""
    out = bytearray(data)
    for _ in range(draw.choice((1, 1, 1, 2, 4, 16))):
        at = draw.randrange(len(out) + 1)
        end = min(len(out), at + draw.choice((1, 2, 4, 8, 64, 1024)))
        match draw.randrange(8):
            case 0 if at < len(out):
                out[at] ^= 1 << draw.randrange(8)
            case 1:
                del out[at:]
            case 2:
                del out[at:end]
            case 3:
                out[at:at] = out[at:end]
            case 4:
                out[at:at] = draw.randbytes(draw.choice((1, 8, 64)))
            case 5:
                form = draw.choice(("<Q", "<I", ">I", ">H"))
                size = struct.calcsize(form)
                number = draw.choice(NUMBERS) % (1 << 8 * size)
                out[at : at + size] = struct.pack(form, number)
            case 6:
                out[at:end] = bytes(end - at)
            case _:
                out[at:end] = b"\xff" * (end - at)
    return bytes(out)


def mutate_json(data: bytes, draw: random.Random) -> bytes:
    """Replaces a value, or removes, renames or duplicates a key; or mutates bytes."""
    if not draw.randrange(4):
        return mutate_bytes(data, draw)
    return _changed(json.loads(data), draw).encode()


def mutate_lines(data: bytes, draw: random.Random) -> bytes:
    """Changes lines of a JSON lines file as JSON, or replaces them by other values."""
    lines = data.splitlines()
    for _ in range(draw.choice((1, 1, 3))):
        at = draw.randrange(len(lines))
        match draw.randrange(6):
            case 0:
                lines[at] = draw.choice(HOSTILE).encode()
            case 1:
                lines[at] = mutate_bytes(lines[at], draw)
            case 2:
                del lines[at]
                lines = lines or [b""]
            case _:
                try:
                    lines[at] = _changed(json.loads(lines[at]), draw).encode()
                except (ValueError, RecursionError):  # the line was changed before
                    lines[at] = b""
    return b"\n".join(lines) + b"\n"


def mutate_text(data: bytes, draw: random.Random) -> bytes:
    """Inserts quotes, separators and line ends into text or CSV, or changes the encoding."""
    pieces = (
        b'"', b'""', b"\t", b",", b"\r", b"\r\n", b"\n\n", b"\0", b"\xff\xfe", b"\xef\xbb\xbf",
        b"\xed\xa0\x80", b"\xc3", "\u2028".encode(), b"A" * 70_000, b'"' + b"B\n" * 500, b"\x85",
    )  # fmt: skip
    match draw.randrange(5):
        case 0:
            return mutate_bytes(data, draw)
        case 1:
            other = draw.choice(("utf-16", "utf-32", "utf-7"))
            return data.decode("utf-8", "replace").encode(other)
        case 2:
            lines = data.splitlines(keepends=True)
            draw.shuffle(lines)
            return b"".join(lines[: draw.randrange(len(lines) + 1)])
    out = bytearray(data)
    for _ in range(draw.choice((1, 2, 5))):
        at = draw.randrange(len(out) + 1)
        out[at:at] = draw.choice(pieces)
    return bytes(out)


def mutate_safetensors(data: bytes, draw: random.Random) -> bytes:
    """Changes length, names, dtypes, shapes or offsets of a header; or mutates bytes."""
    (size,) = struct.unpack("<Q", data[:8])
    header, body = data[8 : 8 + size], data[8 + size :]
    if (choice := draw.randrange(8)) == 0:
        return mutate_bytes(data, draw)
    if choice == 1:
        length = draw.choice((*NUMBERS, size - 1, size + 1, len(data), len(data) - 8))
        return struct.pack("<Q", length % 2**64) + header + body
    if choice < 4:
        text = _changed(json.loads(header), draw).encode()
    else:
        entries = json.loads(header)
        for _ in range(draw.choice((1, 1, 2))):
            _lie(entries, draw, len(body))
        text = json.dumps(entries).encode()
    text += b" " * (-len(text) % 8)
    return struct.pack("<Q", len(text)) + text + body


def _lie(entries: dict[str, Any], draw: random.Random, size: int) -> None:
    name = draw.choice([key for key in entries if key != "__metadata__"])
    entry = entries[name]
    start, end = entry["data_offsets"]
    match draw.randrange(7):
        case 0:
            other = draw.choice([key for key in entries if key != "__metadata__"])
            entry["data_offsets"] = list(entries[other]["data_offsets"])
        case 1:
            entry["data_offsets"] = [start, draw.choice((end - 1, end + 1, size + 1, 2**62))]
        case 2:
            entry["data_offsets"] = [draw.choice((-1, end, start + 1, 2**63)), end]
        case 3:
            entry["dtype"] = draw.choice(("I64", "F8_E4M3", "BOOL", "F16", "BF16", "C64", "X", 4))
        case 4:
            entry["shape"] = draw.choice(([], [0], [-1], [2**40], [2**32, 2**32], [1] * 200, "a"))
        case 5:
            entry["shape"] = [*entry["shape"], draw.choice((1, 2, 0, -4))]
        case _:
            strange = (f"{name}\ud800", "", "a.b/../c", "x" * 70_000)
            entries[draw.choice(strange)] = entries.pop(name)


def mutate_msgpack(data: bytes, draw: random.Random) -> bytes:
    """Inserts wrong lengths, extension types or deep nesting; or mutates bytes."""
    heads = (
        b"\xdd\xff\xff\xff\xff",
        b"\xdf\x7f\xff\xff\xff",
        b"\xdb\xff\xff\xff\xff",
        b"\xc6\xff\xff\xff\xff",
        b"\xc9\xff\xff\xff\xff\x01",
        b"\xd4\x05\x00",
        b"\xd5\x01\x00\x00",
        b"\xc7\x08\x03" + bytes(8),
        b"\xc7\x02\x01\x93\xc0",
        b"\x91" * 5000,
        b"\x81\xc0" * 2000,
        b"\xca\x7f\xc0\x00\x00",
        b"\xc1",
        b"\xd6\xff\x00\x00\x00\x00",
        b"\xc0",
    )
    if not draw.randrange(3):
        return mutate_bytes(data, draw)
    at = draw.randrange(len(data))
    head = draw.choice(heads)
    return data[:at] + head + data[at + draw.choice((0, 1, len(head))) :]


def _changed(tree: Any, draw: random.Random) -> str:
    """Returns JSON text with one or two hostile changes."""
    marks: dict[str, str] = {}
    for number in range(draw.choice((1, 1, 2))):
        parent, key = _pick(tree, draw)
        mark = f"hostile-{number}"
        match draw.randrange(6) if isinstance(parent, dict) else 5:
            case 0:
                del parent[key]
            case 1:
                parent[draw.choice(("", "__class__", "../x", "auto_map", f"{key} "))] = parent.pop(
                    key
                )
            case 2:  # a duplicate key
                marks[f'"{mark}": 0'] = f"{json.dumps(key)}: {draw.choice(HOSTILE)}"
                parent[mark] = 0
            case _ if parent is not None:
                parent[key] = mark
                marks[f'"{mark}"'] = draw.choice(HOSTILE)
            case _:
                return draw.choice(HOSTILE)
    text = json.dumps(tree)
    for mark, value in marks.items():
        text = text.replace(mark, value)
    return text


def _pick(tree: Any, draw: random.Random) -> tuple[Any, Any]:
    """Returns a container and a key in it, or (None, None) for the whole value."""
    parent, key, node = None, None, tree
    while isinstance(node, dict | list) and node and (parent is None or draw.randrange(3)):
        parent = node
        key = draw.choice(list(node)) if isinstance(node, dict) else draw.randrange(len(node))
        node = node[key]
    return parent, key


MUTATORS: dict[str, Mutator] = {
    "bytes": mutate_bytes,
    "json": mutate_json,
    "lines": mutate_lines,
    "text": mutate_text,
    "safetensors": mutate_safetensors,
    "msgpack": mutate_msgpack,
}
