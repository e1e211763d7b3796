"""BLEU and chrF agree with the sacreBLEU command."""

from __future__ import annotations

import json
import subprocess
import sys

import pytest

from hfseq.errors import UsageError
from hfseq.objectives.metrics import translation_scores

HYPOTHESES = [
    "The cat sat on the mat.",
    "",
    "He said: “No!”, and left…",
    "3,000 people — or 2.5 % –came",
    "a b c d e",
    "The Quick brown FOX",
]
REFERENCES = [
    "The cat is on the mat.",
    "Nothing.",
    "He said “No!” and left.",
    "3,000 people, or 2.5%, came.",
    "a b c d f",
    "the quick brown fox",
]


@pytest.mark.parametrize(("lowercase", "flags"), [(False, []), (True, ["-lc"])])
def test_bleu_and_chrf_are_those_of_the_sacrebleu_command(tmp_path, lowercase, flags):
    for name, lines in (("hyp", HYPOTHESES), ("ref", REFERENCES)):
        (tmp_path / name).write_text("\n".join(lines) + "\n", "utf-8")
    command = [
        sys.executable,
        "-m",
        "sacrebleu",
        str(tmp_path / "ref"),
        "-i",
        str(tmp_path / "hyp"),
        "-m",
        "bleu",
        "chrf",
        "-w",
        "10",
        *flags,
    ]
    output = subprocess.run(command, capture_output=True, text=True, check=True).stdout
    theirs = {row["name"].lower().rstrip("2"): row for row in json.loads(output)}
    ours = translation_scores(HYPOTHESES, REFERENCES, lowercase)
    assert ours.values["bleu"] == pytest.approx(theirs["bleu"]["score"], abs=1e-9)
    assert ours.signatures["bleu"] == theirs["bleu"]["signature"]
    if not lowercase:  # the command's -lc lower-cases chrF too, WMT's lower-cased mode is of BLEU
        assert ours.values["chrf"] == pytest.approx(theirs["chrf"]["score"], abs=1e-9)
        assert ours.signatures["chrf"] == theirs["chrf"]["signature"]


def test_lists_of_different_lengths_are_refused():
    with pytest.raises(UsageError, match="2 hypotheses for 1 references"):
        translation_scores(["a", "b"], ["a"])


def test_an_unknown_tokenizer_is_named_with_those_there_are():
    with pytest.raises(UsageError, match="--bleu_tokenizer 14a: sacreBLEU has .*13a"):
        translation_scores(["a"], ["a"], tokenizer="14a")
