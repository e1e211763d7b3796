"""Tests that every feature of the reference guides has a command and an existing test."""

from __future__ import annotations

import re
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parent.parent
TEXT = (ROOT / "docs" / "references.md").read_text(encoding="utf-8")
FILES = {path.name: path for path in sorted((ROOT / "tests").rglob("test_*.py"))}
# What no code of ours takes part in: bindings of processes to processors.
OUTSIDE = ("`numactl", "`CUDA_DEVICE_ORDER")


def rows() -> list[list[str]]:
    """Return the cells of each table row: guide, hfseq, test."""
    lines = [line for line in TEXT.splitlines() if line.startswith("| ")]
    cells = [re.split(r"(?<!\\) \| ", line.strip("| ")) for line in lines]
    return [row for row in cells if row[0] != "Guide"]


def test_all_five_documents_have_their_table_and_their_tutorial():
    assert len(re.findall(r"^## ", TEXT, flags=re.M)) == 5
    tutorials = {path.name for path in (ROOT / "docs" / "tutorials").glob("*.md")}
    tutorials -= {"captioning.md", "transcription.md"}  # which none of them has
    assert set(re.findall(r"\(tutorials/(\w+\.md)\)", TEXT)) == tutorials
    assert len(rows()) > 140


def test_every_feature_names_a_test_that_exists():
    for row in rows():
        assert len(row) == 3, row
        named = re.findall(r"`(\w+\.py)::(test_\w+)`", row[2])
        assert named or row[0].startswith(OUTSIDE), row
        for file, name in named:
            code = FILES[file].read_text(encoding="utf-8")
            assert re.search(rf"^def {name}\(", code, flags=re.M), (file, name)


def test_every_flag_on_our_side_is_one():
    from hfseq.data.arguments import OBJECTIVES
    from hfseq.training.arguments import (
        ModelArguments,
        ProcessArguments,
        TrainingArguments,
        flag_names,
    )

    known = flag_names((ModelArguments, TrainingArguments, ProcessArguments, *OBJECTIVES.values()))
    known |= {"vocab_size", "vocabulary", "logdir", "NAME"}  # other programs, a placeholder
    for row in rows():
        used = set(re.findall(r"(?<![\w-])--([a-zA-Z]\w*)", row[1]))
        assert used <= known, (row[1], used - known)


@pytest.mark.parametrize("suffix", ["py", "sh", "yaml"])
def test_every_script_on_our_side_exists(suffix):
    scripts = {path.name for path in (ROOT / "scripts").rglob(f"*.{suffix}")}
    for row in rows():
        named = {Path(name).name for name in re.findall(rf"[\w/]+\.{suffix}\b", row[1])}
        assert named <= scripts, (row[1], named - scripts)
