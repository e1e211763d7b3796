"""The tutorials: every command can be given, and all run in order as they stand, only shorter."""

from __future__ import annotations

import shutil
from pathlib import Path

import pytest

from tests.support import pages

ROOT = Path(__file__).resolve().parent.parent
TUTORIALS = sorted((ROOT / "docs" / "tutorials").glob("*.md"))
#: Their data is drawn, or spoken, where they run.
OWN_DATA = {"captioning": "image.save(", "transcription": "spoken_numbers.py"}
LOCAL = "scripts/launch/"  # what starts machines is only shown, with DRY_RUN=1


def named(page: Path) -> str:
    return page.stem


@pytest.mark.parametrize("page", TUTORIALS, ids=named)
def test_tutorials_show_commands_and_output(page):
    shell = [code for language, code in pages.code_blocks(page) if language == "bash"]
    text = page.read_text(encoding="utf-8")
    assert len(shell) >= (3 if page.stem in OWN_DATA else 4)
    assert text.count("```text") + text.count("\n    ") >= (1 if page.stem in OWN_DATA else 3)
    assert all("DRY_RUN=1" in code for code in shell if LOCAL in code)


@pytest.mark.parametrize("page", TUTORIALS, ids=named)
def test_tutorials_name_their_data(page):
    text = page.read_text(encoding="utf-8")
    if page.stem in OWN_DATA:
        assert OWN_DATA[page.stem] in text and "$DATA" not in text
    else:
        assert "`$DATA/" in text and "](http" in text


def test_shortened_commands_take_four_steps_and_four_examples():
    code = '--max_steps="300" --save_steps="100" --warmup_steps 50 --max_generate_samples 40'
    assert pages.shorten_code(f"{code} --do_predict").split() == [
        *("--max_steps", "4", "--max_eval_samples", "4", '--save_steps="2"', "--warmup_steps", "1"),
        *("--max_generate_samples", "4", "--do_predict", "--max_test_samples", "4"),
    ]


@pytest.mark.slow
@pytest.mark.filterwarnings("default")
@pytest.mark.parametrize("page", TUTORIALS, ids=named)
def test_a_tutorial_runs_from_top_to_bottom(page, shared, tmp_path, monkeypatch):
    pytest.importorskip("torch")
    if page.stem == "transcription" and shutil.which("espeak-ng") is None:
        pytest.skip("espeak-ng, which speaks, is not installed")
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("HFSEQ_CACHE", str(tmp_path / "cache"))
    pages.run(page, tmp_path, shared)
