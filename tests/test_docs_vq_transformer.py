"""Tests that the VQ Transformer guide names existing tests."""

from __future__ import annotations

import re
from pathlib import Path

ROOT = Path(__file__).resolve().parent.parent
GUIDE = ROOT / "docs" / "vq_transformer.md"
OWN = "tests/plugins/vq_transformer/"


def limits() -> list[str]:
    """Return the rows of the tables of limits and defects."""
    text = GUIDE.read_text(encoding="utf-8").split("## The reference's limits")[1]
    rows = [line for line in text.splitlines() if line.startswith("| ")]
    return [row for row in rows if not row.startswith(("| Limit of", "| Defect of"))]


def test_every_limit_names_a_test_that_exists():
    assert len(limits()) > 30
    for row in limits():
        named = re.findall(r"`([\w/]+\.py)::(test_\w+)`", row)
        assert named, row
        for file, test in named:
            path = ROOT / (file if "/" in file else OWN + file)
            assert f"\ndef {test}(" in path.read_text(encoding="utf-8"), (file, test)
