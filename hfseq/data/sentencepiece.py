"""The tokenizer class of Transformers 4's T5 example (`t5_tokenizer_model.py`)."""

from __future__ import annotations

import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from tokenizers import (
    AddedToken,
    Regex,
    Tokenizer,
    decoders,
    normalizers,
    pre_tokenizers,
    processors,
    trainers,
)
from tokenizers.implementations import BaseTokenizer
from tokenizers.models import Unigram

from hfseq.data.tokenizers import split_long_words


class SentencePieceUnigramTokenizer(BaseTokenizer):
    """A unigram tokenizer like T5's, which also converts text to lower case.

    The special tokens are `<pad>` (id 0), `</s>` (1) and `<unk>` (2). Text is normalized (Nmt,
    NFKC, lower case, single spaces) and split at spaces, digits and punctuation. `eos_token` is
    appended.

    `save` also writes a `tokenizer_config.json` next to `tokenizer.json`, so that `AutoTokenizer`
    returns this tokenizer. Without the file, `AutoTokenizer` would build a different tokenizer,
    which does not convert text to lower case.

    Args:
        replacement: The character that stands for a space.
        add_prefix_space: Whether to add a space before the text.
        unk_token: The token for unknown text.
        eos_token: The end-of-sequence token.
        pad_token: The padding token.
    """

    def __init__(
        self,
        replacement: str = "▁",
        add_prefix_space: bool = True,
        unk_token: str | AddedToken = "<unk>",
        eos_token: str | AddedToken = "</s>",
        pad_token: str | AddedToken = "<pad>",
    ):
        self.special_tokens = {
            "pad": {"id": 0, "token": pad_token},
            "eos": {"id": 1, "token": eos_token},
            "unk": {"id": 2, "token": unk_token},
        }
        self.special_tokens_list = [entry["token"] for entry in self.special_tokens.values()]
        scheme = "always" if add_prefix_space else "never"
        tokenizer = Tokenizer(Unigram())
        tokenizer.normalizer = normalizers.Sequence(
            [
                normalizers.Nmt(),
                normalizers.NFKC(),
                normalizers.Replace(Regex(" {2,}"), " "),
                normalizers.Lowercase(),
            ]
        )
        tokenizer.pre_tokenizer = pre_tokenizers.Sequence(
            [
                pre_tokenizers.Metaspace(replacement=replacement, prepend_scheme=scheme),
                pre_tokenizers.Digits(individual_digits=True),
                pre_tokenizers.Punctuation(),
            ]
        )
        tokenizer.decoder = decoders.Metaspace(replacement=replacement, prepend_scheme=scheme)
        tokenizer.post_processor = processors.TemplateProcessing(
            single=f"$A {eos_token}", special_tokens=[(str(eos_token), 1)]
        )
        super().__init__(
            tokenizer,
            {
                "model": "SentencePieceUnigram",
                "replacement": replacement,
                "add_prefix_space": add_prefix_space,
            },
        )

    def train(
        self, files: str | list[str], vocab_size: int = 8000, show_progress: bool = True
    ) -> None:
        """Trains the vocabulary on text files."""
        files = [files] if isinstance(files, str) else files
        self._tokenizer.train(files, trainer=self._trainer(vocab_size, show_progress))
        self.add_unk_id()

    def train_from_iterator(
        self,
        iterator: Iterator[str] | Iterator[list[str]],
        vocab_size: int = 8000,
        show_progress: bool = True,
    ) -> None:
        """Trains the vocabulary on texts, or on lists of texts."""
        self._tokenizer.train_from_iterator(
            split_long_words(iterator), trainer=self._trainer(vocab_size, show_progress)
        )
        self.add_unk_id()

    def _trainer(self, vocab_size: int, show_progress: bool) -> Any:
        return trainers.UnigramTrainer(
            vocab_size=vocab_size,
            special_tokens=self.special_tokens_list,
            unk_token=str(self.special_tokens["unk"]["token"]),
            show_progress=show_progress,
        )

    def add_unk_id(self) -> None:
        """Sets the id of the unknown token in the unigram model."""
        state = json.loads(self._tokenizer.to_str())
        state["model"]["unk_id"] = self.special_tokens["unk"]["id"]
        self._tokenizer = Tokenizer.from_str(json.dumps(state))

    def save(self, path: str, pretty: bool = True) -> None:
        """Saves the tokenizer as one JSON file.

        If the file is named `tokenizer.json`, a `tokenizer_config.json` is written next to it.
        """
        super().save(str(path), pretty)
        if Path(path).name == "tokenizer.json":
            roles = {f"{role}_token": str(e["token"]) for role, e in self.special_tokens.items()}
            config = {"tokenizer_class": "PreTrainedTokenizerFast", **roles}
            file = Path(path).with_name("tokenizer_config.json")
            file.write_text(json.dumps(config, indent=2) + "\n")
