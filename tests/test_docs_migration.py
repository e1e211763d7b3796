"""Tests that the migration guide covers every known defect and names existing tests and flags."""

from __future__ import annotations

import re
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parent.parent
TEXT = (ROOT / "docs" / "migration.md").read_text(encoding="utf-8")


def items(heading: str) -> dict[str, str]:
    """Return the numbered items of a section by number."""
    section = TEXT.split(f"\n## {heading}\n")[1].split("\n## ")[0]
    found = re.findall(r"^(?:- )?(D?\d+)\. (.*(?:\n +.*)*)", section, flags=re.M)
    return {number: re.sub(r"\s+", " ", text) for number, text in found}


def test_all_seventeen_defects_are_listed_in_order():
    assert list(items("Known defects of the classes")) == [f"D{number}" for number in range(1, 18)]


def test_all_twenty_nine_limitations_are_listed_in_order():
    assert list(items("Limitations of the scripts")) == [str(number) for number in range(1, 30)]


@pytest.mark.parametrize("heading", ["Known defects of the classes", "Limitations of the scripts"])
def test_every_item_has_a_title_a_description_and_a_test(heading):
    for text in items(heading).values():
        assert re.fullmatch(r"\*\*.+\.\*\* .+\. Tests?: .+\.", text), text
        assert "tests/" in text or "Test: the same" in text, text


@pytest.mark.parametrize("heading", ["Known defects of the classes", "Limitations of the scripts"])
def test_the_tests_that_are_named_exist(heading):
    for text in items(heading).values():
        for path in re.findall(r"`(tests/[\w/]+\.py)`", text):
            assert (ROOT / path).exists(), path
        for names, path in re.findall(r"((?:`test_\w+`(?: and )?)+) in `(tests/[\w/]+\.py)`", text):
            code = (ROOT / path).read_text(encoding="utf-8")
            for name in re.findall(r"test_\w+", names):
                assert re.search(rf"^def {name}\(", code, flags=re.M), f"{path}: {name}"
        assert len(re.findall(r"`test_", text)) == len(
            re.findall(r"`test_\w+`(?= in `tests/| and `test_)", text)
        ), text


def test_flags_of_the_table_exist():
    from hfseq.data.arguments import OBJECTIVES
    from hfseq.training.arguments import TOKEN_FLAGS, ModelArguments, TrainingArguments, flag_names

    known = flag_names((ModelArguments, TrainingArguments, *OBJECTIVES.values()))
    known |= {flag[2:] for flag in TOKEN_FLAGS}  # the guide says that these are refused
    derived = (ROOT / "hfseq" / "training" / "derived_flags.py").read_text(encoding="utf-8")
    known |= set(re.findall(r'"(\w+_model_name_or_path)"', derived))
    text = TEXT.split("\n## Scripts\n")[1]
    assert set(re.findall(r"(?<![\w-])--([a-z]\w+)", text)) <= known


def test_every_logits_processor_is_named():
    from hfseq import generation

    section = TEXT.split("\n## Generation\n")[1].split("\n## ")[0]
    v4 = {name for name in generation.__all__ if name.startswith("Flax")}
    internal = {"FlaxInfNanRemoveLogitsProcessor", "FlaxLogitNormalization"}
    assert v4 - internal <= set(re.findall(r"Flax\w+", section))
