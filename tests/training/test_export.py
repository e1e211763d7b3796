"""Saving a tokenizer on a full disk."""

from __future__ import annotations

from pathlib import Path

import pytest

from hfseq.training import export


class Tokenizer:
    """Writes two files like the Rust library, which raises plain exceptions."""

    def __init__(self, text, room=99):
        self.text, self.room = text, room

    def save_pretrained(self, folder):
        Path(folder, "more").mkdir()
        for name in ("more/template.jinja", "tokenizer.json"):
            Path(folder, name).write_text(self.text[: self.room])
            if self.room < len(self.text):
                raise Exception("No space left on device (os error 28)")


def files(folder):
    return {str(p.relative_to(folder)): p.read_text() for p in folder.rglob("*") if p.is_file()}


def test_failed_tokenizer_write_keeps_the_previous_one(tmp_path):
    export._save_tokenizer(Tokenizer("first"), tmp_path)
    original = files(tmp_path)
    assert original == {"more/template.jinja": "first", "tokenizer.json": "first"}
    with pytest.raises(OSError, match="No space left") as caught:
        export._save_tokenizer(Tokenizer("second", room=3), tmp_path)
    assert caught.value.errno == 28 and files(tmp_path) == original
    export._save_tokenizer(Tokenizer("second"), tmp_path)
    assert set(files(tmp_path).values()) == {"second"}


def test_other_tokenizer_errors_are_raised_unchanged(tmp_path):
    class Broken:
        def save_pretrained(self, folder):
            raise KeyError("vocab")

    with pytest.raises(KeyError, match="vocab"):
        export._save_tokenizer(Broken(), tmp_path)
