#!/usr/bin/env python
"""Write a small English corpus from what every Python has: its language reference and docstrings.

    python scripts/quickstart_corpus.py quickstart/corpus.jsonl

Each line is a JSON object, {"text": ...}, with one document: a topic of the language reference or a
docstring. Modules of the standard library are parsed, not imported, so none of them runs; the same
Python gives the same file.
"""

from __future__ import annotations

import ast
import hashlib
import json
import re
import sys
import sysconfig
from collections.abc import Iterator
from pathlib import Path

# Tests and vendored copies are not documentation; site-packages is not the standard library.
SKIPPED = {"__pycache__", "ensurepip", "idlelib", "lib2to3", "test", "tests", "turtledemo"}
SKIPPED |= {"dist-packages", "pydoc_data", "site-packages"}
DOCUMENTED = (ast.Module, ast.ClassDef, ast.FunctionDef, ast.AsyncFunctionDef)
SHORTEST = 40  # characters; shorter docstrings say little
RULES = re.compile(r"([-*=~^#_.])\1{3,}")  # lines drawn under headings


def topics() -> Iterator[str]:
    """Yield the language reference, as ``help("for")`` shows it."""
    from pydoc_data.topics import topics

    for name in sorted(topics):
        yield topics[name]


def docstrings(library: Path) -> Iterator[str]:
    """Yield the docstrings of all modules under ``library``, in the order of their paths."""
    for path in sorted(library.rglob("*.py")):
        if SKIPPED & set(path.relative_to(library).parts):
            continue
        try:
            tree = ast.parse(path.read_bytes())
        except (SyntaxError, ValueError):  # templates that only look like Python
            continue
        for node in ast.walk(tree):
            if isinstance(node, DOCUMENTED):
                yield ast.get_docstring(node) or ""


def documents() -> Iterator[str]:
    """Yield every document once, without rules and with its white space made single spaces."""
    seen = set()
    for source in (topics(), docstrings(Path(sysconfig.get_path("stdlib")))):
        for text in source:
            line = " ".join(RULES.sub("", text).split())
            if len(line) >= SHORTEST and line not in seen:
                seen.add(line)
                yield line


def main(path: Path) -> None:
    """Write the corpus to ``path``."""
    path.parent.mkdir(parents=True, exist_ok=True)
    # In the order of their hashes, so that any part of the corpus resembles the whole.
    lines = sorted(documents(), key=lambda line: hashlib.sha256(line.encode()).digest())
    with path.open("w", encoding="utf-8") as file:
        file.writelines(json.dumps({"text": line}, ensure_ascii=False) + "\n" for line in lines)
    print(f"{path}: {len(lines):,} documents, {sum(map(len, lines)) / 1e6:.1f} million characters")


if __name__ == "__main__":
    main(Path(sys.argv[1] if len(sys.argv) > 1 else "quickstart/corpus.jsonl"))
