"""The notebooks: stored with what they print, and they run."""

from __future__ import annotations

import ast
import json
import re
from pathlib import Path

import pytest

NOTEBOOKS = sorted((Path(__file__).resolve().parent.parent / "docs/notebooks").glob("*.ipynb"))


def named(path: Path) -> str:
    return path.stem


def cells(path: Path, kind: str = "code") -> list[dict]:
    notebook = json.loads(path.read_text(encoding="utf-8"))
    return [cell for cell in notebook["cells"] if cell["cell_type"] == kind]


def source(cell: dict) -> str:
    return "".join(cell["source"])


def test_two_notebooks_exist():
    assert list(map(named, NOTEBOOKS)) == ["causal_language_modeling", "masked_language_modeling"]


@pytest.mark.parametrize("path", NOTEBOOKS, ids=named)
def test_notebooks_are_stored_after_a_successful_run(path):
    counts = [cell["execution_count"] for cell in cells(path)]
    assert counts == list(range(1, len(counts) + 1))
    outputs = [output for cell in cells(path) for output in cell["outputs"]]
    assert {output["output_type"] for output in outputs} <= {"stream", "display_data"}
    assert any("image/png" in output.get("data", {}) for output in outputs)
    assert "loss" in json.dumps(outputs) and "/tmp" not in json.dumps(outputs)


@pytest.mark.parametrize("path", NOTEBOOKS, ids=named)
def test_the_code_of_a_notebook_parses_and_fits_its_page(path):
    for cell in cells(path):
        ast.parse(source(cell))
        assert max(map(len, source(cell).splitlines())) <= 100


@pytest.mark.slow
@pytest.mark.filterwarnings("default")
@pytest.mark.parametrize("path", NOTEBOOKS, ids=named)
def test_a_notebook_runs_from_top_to_bottom(path, tmp_path, monkeypatch):
    """All cells in order, with few steps: the stored outputs are from the whole run."""
    pytest.importorskip("torch")
    monkeypatch.setenv("MPLBACKEND", "agg")
    monkeypatch.chdir(tmp_path)
    names: dict = {}
    for cell in cells(path):
        code = re.sub(r"STEPS, BATCH = \d+", "STEPS, BATCH = 3", source(cell))
        code = code.replace("20, STEPS)", "1, STEPS)")  # the warm-up
        code = re.sub(r"--(max|logging|eval|save)_steps \d+", r"--\1_steps 2", code)
        code = re.sub(r"--warmup_steps \d+", "--warmup_steps 1", code)
        exec(compile(code, path.name, "exec"), names)
    assert names["metrics"]["eval_loss"] > 0
