"""The tokenizer of a trained directory loads in Transformers 5 and 4.57 with the same ids."""

from __future__ import annotations

import json
import subprocess

import pytest
from transformers import AutoTokenizer

from hfseq.data.tokenizers import train_tokenizer
from hfseq.training.export import _save_tokenizer

TEXT = "The law of every land, 12 <extra_id_0> x"
FAMILIES = ("bert", "roberta", "gpt2", "t5", "bart")


@pytest.fixture(scope="module")
def saved(tmp_path_factory):
    """Tokenizers as saved by runs: loaded, and saved again."""
    root = tmp_path_factory.mktemp("tokenizers")
    for family in FAMILIES:
        train_tokenizer([[TEXT.lower()] * 9], family, None, 400, root / "made" / family)
        (root / family).mkdir()
        _save_tokenizer(AutoTokenizer.from_pretrained(root / "made" / family), root / family)
    return root


def test_ids_and_special_tokens_are_kept(saved):
    for family in FAMILIES:
        settings = json.loads((saved / family / "tokenizer_config.json").read_text())
        assert settings["tokenizer_class"] != "TokenizersBackend"
        assert not isinstance(settings.get("extra_special_tokens"), list)
        created, reloaded = (
            AutoTokenizer.from_pretrained(f) for f in (saved / "made" / family, saved / family)
        )
        assert created(TEXT)["input_ids"] == reloaded(TEXT)["input_ids"]
        assert sorted(created.all_special_tokens) == sorted(reloaded.all_special_tokens)


THEIRS = """
import json, sys
from transformers import AutoTokenizer
for folder in sys.argv[2:]:
    made = AutoTokenizer.from_pretrained(folder)
    print("IDS", json.dumps([made(sys.argv[1])["input_ids"], sorted(made.all_special_tokens)]))
"""


@pytest.mark.slow
def test_transformers_4_reads_them(saved, python_4):
    folders = [str(saved / family) for family in FAMILIES]
    process = subprocess.run(
        [python_4, "-c", THEIRS, TEXT, *folders], capture_output=True, text=True
    )
    assert process.returncode == 0, process.stderr[-2000:]
    results = [
        json.loads(line[4:]) for line in process.stdout.splitlines() if line.startswith("IDS ")
    ]
    for folder, (ids, special) in zip(folders, results, strict=True):
        ours = AutoTokenizer.from_pretrained(folder)
        assert ids == ours(TEXT)["input_ids"] and special == sorted(ours.all_special_tokens)
