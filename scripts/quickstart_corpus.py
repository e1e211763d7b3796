#!/usr/bin/env python
"""Write a small English corpus from the language reference and docstrings of Python.

    python scripts/quickstart_corpus.py quickstart/corpus.jsonl

Each line is a JSON object, {"text": ...}, with one document: a topic of the language reference or a
docstring. Modules of the standard library are parsed, not imported. The same Python version
gives the same file.
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
MIN_LENGTH = 40  # characters; shorter docstrings contain little text
SEPARATOR_LINES = re.compile(r"([-*=~^#_.])\1{3,}")  # underlines of headings


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
        except (SyntaxError, ValueError):  # templates that are not valid Python
            continue
        for node in ast.walk(tree):
            if isinstance(node, DOCUMENTED):
                yield ast.get_docstring(node) or ""


def documents() -> Iterator[str]:
    """Yield each distinct document with normalized white space and without separator lines."""
    unique_lines = set()
    for source in (topics(), docstrings(Path(sysconfig.get_path("stdlib")))):
        for text in source:
            line = " ".join(SEPARATOR_LINES.sub("", text).split())
            if len(line) >= MIN_LENGTH and line not in unique_lines:
                unique_lines.add(line)
                yield line


def main(path: Path) -> None:
    """Write the corpus to ``path``."""
    path.parent.mkdir(parents=True, exist_ok=True)
    # Sorted by hash, so that each part of the corpus is a random sample.
    lines = sorted(documents(), key=lambda line: hashlib.sha256(line.encode()).digest())
    with path.open("w", encoding="utf-8") as file:
        file.writelines(json.dumps({"text": line}, ensure_ascii=False) + "\n" for line in lines)
    print(f"{path}: {len(lines):,} documents, {sum(map(len, lines)) / 1e6:.1f} million characters")


if __name__ == "__main__":
    main(Path(sys.argv[1] if len(sys.argv) > 1 else "quickstart/corpus.jsonl"))
