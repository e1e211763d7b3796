"""Tests of the language of code and documentation: phrases, docstring sections, spelling."""

from __future__ import annotations

import ast
import functools
import io
import re
import subprocess
import sys
import tokenize
from collections.abc import Iterator
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parent.parent
FOLDERS = ("hfseq", "plugins", "scripts", "docs")
PYTHON = sorted(path for folder in FOLDERS for path in (ROOT / folder).rglob("*.py"))
MARKDOWN = sorted([*ROOT.glob("*.md"), *(ROOT / "docs").rglob("*.md")])
#: Phrases of an idiom that readers had to decode, and what to write instead.
PHRASES = {
    r"\bbeside\b": "next to, in addition to",
    r"\b(?:anew|afresh|thereby|whence)\b": "again, new",
    r"\bmend(?:ed|s|ing)?\b": "fix",
    r"\b(?:nobody|somebody)\b": "no user, another process",
    r"\b(?:go|goes|went|going) on\b": "continue",
    r"\b(?:is|are) no (?:[a-z]+ )?(?:file|directory|model|number|name|flag)\b": "not a",
    r"\b(?:tokens|rows|steps|bytes|samples) an? (?:row|step|second|device|batch|shard)\b": "per",
    r"[;,] else\b": "otherwise",
    r"\b(?:[Pp]ictures|(?:a|the|each|every|of) picture)\b": "image",
}
SECTIONS = {"Args", "Attributes", "Example", "Examples", "Note", "Raises", "Returns", "Yields"}


def text_of_markdown(path: Path) -> Iterator[tuple[int, str]]:
    """Yield the numbered lines of a page without code."""
    fenced = False
    for number, line in enumerate(path.read_text(encoding="utf-8").splitlines(), 1):
        if line.lstrip().startswith("```"):
            fenced = not fenced
        elif not fenced:
            yield number, re.sub(r"`[^`]*`|\]\([^)]*\)", "", line)


def text_of_python(path: Path) -> Iterator[tuple[int, str]]:
    """Yield the numbered lines of comments and strings, without quoted code."""
    tokens = tokenize.generate_tokens(io.StringIO(path.read_text(encoding="utf-8")).readline)
    kinds = {tokenize.COMMENT, tokenize.STRING, getattr(tokenize, "FSTRING_MIDDLE", -1)}
    for token in tokens:
        if token.type in kinds:
            for offset, line in enumerate(token.string.splitlines()):
                yield token.start[0] + offset, re.sub(r"``?[^`]*``?", "", line)


@functools.cache
def all_text() -> list[tuple[str, str]]:
    """Return every line of text with its path and number."""
    return [
        (f"{path.relative_to(ROOT)}:{number}", line)
        for paths, read in ((MARKDOWN, text_of_markdown), (PYTHON, text_of_python))
        for path in paths
        for number, line in read(path)
    ]


@pytest.mark.parametrize("phrase", PHRASES)
def test_no_text_uses_a_rejected_phrase(phrase):
    matches = [
        f"{location}: {line.strip()}" for location, line in all_text() if re.search(phrase, line)
    ]
    assert not matches, f"write {PHRASES[phrase]!r} instead:\n" + "\n".join(matches)


def test_docstrings_have_known_sections_only():
    unknown = []
    for path in PYTHON:
        for node in ast.walk(ast.parse(path.read_text(encoding="utf-8"))):
            if isinstance(node, ast.Module | ast.ClassDef | ast.FunctionDef):
                docstring = ast.get_docstring(node) or ""
                # A section is a capitalized word and a colon above an indented block.
                for section in re.findall(r"^([A-Z]\w+):\n {4}\S", docstring, flags=re.M):
                    if section not in SECTIONS:
                        unknown.append(f"{path.relative_to(ROOT)}: {section}")
    assert not unknown


def test_words_are_spelled_as_codespell_knows_them():
    pytest.importorskip("codespell_lib")
    paths = [*(str(ROOT / folder) for folder in FOLDERS), *map(str, ROOT.glob("*.md"))]
    command = [sys.executable, "-m", "codespell_lib", *paths]
    result = subprocess.run(command, cwd=ROOT, capture_output=True, text=True)
    assert result.returncode == 0, result.stdout
