"""Tests that the first table of docs/benchmarks.md matches the records."""

from __future__ import annotations

import json
import shutil
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[2]
sys.path.insert(0, str(ROOT / "scripts" / "benchmarks"))
import summary

pytestmark = pytest.mark.slow


@pytest.fixture
def docs(tmp_path):
    """Returns a folder with a copy of the page and the records."""
    (tmp_path / "benchmarks").mkdir()
    shutil.copy(ROOT / "docs" / "benchmarks.md", tmp_path)
    for path in (ROOT / "docs" / "benchmarks").glob("*.json"):
        shutil.copy(path, tmp_path / "benchmarks")
    return tmp_path


def test_page_matches_the_records():
    assert summary.main(check=True) == 0


def test_changed_record_is_detected_and_written(docs, capsys):
    path = docs / "benchmarks" / "run_train.json"
    record = json.loads(path.read_text())
    row = next(r for r in record["rows"] if r["name"] == "hfseq" and "T5" in r["case"])
    row["ratio"] = 4.321
    path.write_text(json.dumps(record))
    assert summary.main(check=True, docs=docs) == 1
    assert "scripts/benchmarks/summary.py" in capsys.readouterr().out
    assert summary.main(docs=docs) == 0 and summary.main(check=True, docs=docs) == 0
    line = next(x for x in (docs / "benchmarks.md").read_text().splitlines() if "T5-small, 2" in x)
    assert "**4.32**" in line
    assert (docs / "benchmarks" / "summary.png").stat().st_size > 10_000


def test_page_without_markers_is_an_error(docs, capsys):
    (docs / "benchmarks.md").write_text("# Benchmarks\n")
    assert summary.main(docs=docs) == 1
    assert "summary" in capsys.readouterr().err
