"""The joint vocabulary of a translation run: made of the training pairs, kept with the model."""

from __future__ import annotations

import logging
import os
import shutil
from collections.abc import Callable, Iterator, Mapping
from pathlib import Path
from typing import Any

import numpy as np

from hfseq.data.batches import derive, permute
from hfseq.errors import DataError

logger = logging.getLogger(__name__)

FILE = "tokenizer.json"
BATCH = 1000  # pairs at a time


def vocabulary_in(folder: Path, arguments: Any, load: Callable[[], Mapping[str, Any]]) -> Any:
    """Return the tokenizer in ``folder``; the first process that finds none there trains it.

    ``arguments`` are the flags of translation: the training pairs, and size and kind of the
    vocabulary.

    Raises:
        DataError: there is no tokenizer, and no training pair to make it of.
    """
    return once(folder, lambda: _train(folder, arguments, load()))


def once(folder: Path, train: Callable[[], None]) -> Any:
    """Return the tokenizer in ``folder``; the first process to find none has it made."""
    from filelock import FileLock
    from transformers import AutoTokenizer

    if (folder / FILE).exists():
        logger.info("the vocabulary in %s is used; remove it to have another trained", folder)
    else:
        folder.mkdir(parents=True, exist_ok=True)
        lock = folder / "tokenizer.lock"
        with FileLock(str(lock)):
            if not (folder / FILE).exists():  # another process may have been quicker
                train()
        lock.unlink(missing_ok=True)
    return AutoTokenizer.from_pretrained(str(folder))


def _train(folder: Path, arguments: Any, splits: Mapping[str, Any]) -> None:
    from hfseq.data.vocabulary import joint_tokenizer

    if "train" not in splits:
        raise DataError(
            f"there are no training pairs to make a vocabulary of, and {folder} has none: give "
            "--train_file or --tokenizer_name"
        )

    def make(temporary: Path) -> None:
        joint_tokenizer(
            _texts(splits["train"]), arguments.tokenizer_algorithm, arguments.vocab_size,
            output_dir=temporary, max_corpus_chars=arguments.max_corpus_chars,
        )  # fmt: skip

    install(folder, make)


def install(folder: Path, make: Callable[[Path], Any]) -> None:
    """Have ``make`` write a tokenizer; its main file appears last, so a killed run leaves none."""
    temporary = folder / "tokenizer.tmp"
    shutil.rmtree(temporary, ignore_errors=True)
    temporary.mkdir()
    make(temporary)
    for file in sorted(temporary.iterdir(), key=lambda file: file.name == FILE):
        os.replace(file, folder / file.name)
    temporary.rmdir()
    logger.info("a vocabulary of the training data is saved in %s", folder)


def _texts(pairs: Any) -> Iterator[list[str]]:
    """Both sides in turns, so that a limit takes as much of either; files are often sorted."""
    count = -(-len(pairs) // BATCH)
    for number in permute(np.arange(count), count, derive("vocabulary")).tolist():
        batch = pairs[number * BATCH : (number + 1) * BATCH]
        yield batch["source"]
        yield batch["target"]
