"""The mutants are other programs that compile, and are found again where their text has moved."""

from __future__ import annotations

import ast
import importlib.util
from collections import Counter
from pathlib import Path

import pytest

SCRIPT = Path(__file__).resolve().parents[2] / "scripts" / "mutants.py"
CODE = '''"""A module: 1 + 1."""

import logging

logger = logging.getLogger("x")


def clip(x: int = 3, *, most: "int | None" = None) -> int:
    """Not more than ``most``, 10 or less."""
    if x > 2 and most is not None:
        logger.warning("cut %d", x - 1)
        x = min(x, most)
    counts = {}
    counts[x] = 1
    print(f"{x + 1} of {most}")
    if x < 0:
        raise ValueError(f"{x - 1} is below 0", 17)
    return (x) + 5
'''


@pytest.fixture(scope="module")
def mutants():
    spec = importlib.util.spec_from_file_location("mutants", SCRIPT)
    module = importlib.util.module_from_spec(spec)
    import sys

    sys.modules["mutants"] = module
    spec.loader.exec_module(module)
    yield module
    del sys.modules["mutants"]


@pytest.fixture
def tree(tmp_path):
    for folder in ("hfseq/nn", "plugins/hfseq_plugins"):
        (tmp_path / folder).mkdir(parents=True)
    (tmp_path / "hfseq" / "nn" / "clip.py").write_text(CODE)
    return tmp_path


def all_of(mutants, tree):
    made = (make() for _, make in mutants.mutants_of(tree, "hfseq/nn/clip.py", "hfseq/nn"))
    return [mutant for mutant in made if mutant is not None]


def changed(mutant):
    lines = CODE.splitlines(keepends=True)
    lines[mutant.line - 1 : mutant.line - 1 + len(mutant.before)] = mutant.after
    return "".join(lines)


def test_every_mutation_type_occurs_and_messages_are_unchanged(mutants, tree):
    found = all_of(mutants, tree)
    assert Counter(mutant.kind for mutant in found) == {
        "constant": 5,
        "comparison": 3,
        "boolean": 1,
        "operator": 1,
        "condition": 2,
        "statement": 2,
        "arguments": 1,
    }
    texts = [changed(mutant) for mutant in found]
    assert len({ast.dump(ast.parse(text)) for text in (CODE, *texts)}) == len(texts) + 1
    for kept in ('"""A module: 1 + 1."""', 'most: "int | None"', '"cut %d", x - 1', "{x + 1} of"):
        assert all(kept in text for text in texts)
    assert sum('raise ValueError(f"{x - 1} is below 0", 17)' in text for text in texts) == 14


def test_mutant_is_located_after_text_moved(mutants, tree):
    found = all_of(mutants, tree)
    (tree / "hfseq" / "nn" / "clip.py").write_text("counts = {}\ncounts[x] = 1\n")
    indented = "class Clip:\n" + "".join(
        f"    {line}" if line.strip() else line for line in CODE.splitlines(keepends=True)
    )
    (tree / "plugins" / "hfseq_plugins" / "moved.py").write_text(indented)
    for mutant in found:
        file, line, indent = mutants.find(tree, mutant)
        assert (file, line) == ("plugins/hfseq_plugins/moved.py", mutant.line + 1)
        assert indent == len(mutant.before[0]) - len(mutant.before[0].lstrip()) + 4
    (tree / "plugins" / "hfseq_plugins" / "moved.py").unlink()
    assert mutants.find(tree, found[-1]) is None
