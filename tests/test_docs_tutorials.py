"""The tutorials: every command can be given, and all run in order as they stand, only shorter."""

from __future__ import annotations

import re
import shutil
from pathlib import Path

import pytest

from tests.support import pages

ROOT = Path(__file__).resolve().parent.parent
TUTORIALS = sorted((ROOT / "docs" / "tutorials").glob("*.md"))
#: Their data is drawn, or spoken, where they run.
OWN_DATA = {"captioning": "image.save(", "transcription": "spoken_numbers.py"}
#: Lines of output that depend on training, by their beginning, and a pattern of the line that a
#: shorter run prints. `None` for outputs of models of other runs, which the page names.
TRAINED = {
    "[' første'": r"\[.*\]",
    "Departementet kan gi": r"Departementet kan gi.*",
    "digits/validation/": r"digits/validation/\d+\.png\t.*",
    "Vannstanden var": None,
    "Jump!": None,
    "I helped him": None,
    "Tom started": None,
    "Have you ever": None,
}
NUMBER = r"[-+]?\d[\d.]*(?:e[-+]?\d+)?"
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


def not_printed(lines: list[str], output: str) -> list[str]:
    """Returns the lines that a block did not print.

    Numbers in log lines may differ, and "…" stands for any text.
    """
    missing = []
    for line in lines:
        beginning = next((begin for begin in TRAINED if line.startswith(begin)), None)
        pattern = re.escape(line) if beginning is None else TRAINED[beginning]
        if line.startswith(("Step...", "Eval...")):
            pattern = re.sub(NUMBER, "#", line)
            pattern = re.escape(pattern).replace("\\#", NUMBER).replace("…", ".*")
        if pattern is not None and not re.search(rf"^{pattern}\s*$", output, re.M):
            missing.append(line)
    return missing


def test_shown_output_is_compared_with_the_output(tmp_path):
    page = tmp_path / "page.md"
    page.write_text(
        "```python\nrun()\n```\n\n    Eval... (200 | eval_loss: 2.09285, …)\n    18 scales\n\n"
        "```text\npython other.py\n```\n\n```bash\nhfseq caption\n```\n\n```text\nan image\n```\n"
    )
    first, second = pages.shown_lines(page)
    assert (first[1:], second) == (["18 scales"], ["an image"])
    printed = "Eval... (4 | eval_loss: 5.1e-05, eval_accuracy: 1)\n18 scales"
    assert not_printed(first, printed) == []
    assert not_printed(first, printed.replace("18", "19")) == ["18 scales"]
    assert not_printed(first, printed.replace("eval_loss", "loss")) == [first[0]]


def test_lines_that_depend_on_training_are_shown():
    lines = [line for page in TUTORIALS for part in pages.shown_lines(page) for line in part]
    assert all(any(line.startswith(begin) for line in lines) for begin in TRAINED)


@pytest.mark.slow
@pytest.mark.filterwarnings("default")
@pytest.mark.parametrize("page", TUTORIALS, ids=named)
def test_a_tutorial_runs_from_top_to_bottom(page, shared, tmp_path, monkeypatch):
    pytest.importorskip("torch")
    if page.stem == "transcription" and shutil.which("espeak-ng") is None:
        pytest.skip("espeak-ng, which speaks, is not installed")
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("HFSEQ_CACHE", str(tmp_path / "cache"))
    outputs = pages.run(page, tmp_path, shared)
    pairs = zip(pages.shown_lines(page), outputs, strict=True)
    assert [not_printed(*pair) for pair in pairs] == [[]] * len(outputs)
