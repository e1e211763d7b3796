"""Tokenizes texts and pairs of texts, and combines their tokens into batches."""

from __future__ import annotations

import logging
from collections.abc import Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import numpy as np

from hfseq.errors import UsageError

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerBase

logger = logging.getLogger(__name__)


@dataclass
class TokenizedTexts:
    """The tokens of texts, without padding.

    Attributes:
        ids: The token IDs of each text.
        types: The token type IDs of each text, or `None` if all of them are 0.
        attended: The number of leading tokens of each text that are in the attention mask. `None`
            if all tokens are.
        scored: For each text, a mask of the tokens that are pooled or scored. `None` if all tokens
            are.
    """

    ids: list[list[int]]
    types: list[list[int]] | None = None
    attended: list[int] | None = None
    scored: list[Sequence[bool]] | None = None

    def __len__(self) -> int:
        return len(self.ids)

    def batch(
        self, numbers: Sequence[int], rows: int, width: int, pad: int
    ) -> dict[str, np.ndarray]:
        """Combines some texts into a batch, with padding on the right.

        Args:
            numbers: The indices of the texts.
            rows: Number of rows. If there are fewer texts, the last text is repeated.
            width: Number of tokens per row.
            pad: ID of the padding token.

        Returns:
            The int32 arrays "input_ids" and "attention_mask", `(rows, width)`. The result also
            contains "token_type_ids" if `types` is set, and "scoring_mask" if `scored` is set.
        """
        names = ["input_ids", "attention_mask"]
        names += ["token_type_ids"] * (self.types is not None)
        names += ["scoring_mask"] * (self.scored is not None)
        inputs = {name: np.zeros((rows, width), np.int32) for name in names}
        inputs["input_ids"][:] = pad
        for row, number in enumerate([*numbers, *[numbers[-1]] * (rows - len(numbers))]):
            ids = self.ids[number]
            attended = len(ids) if self.attended is None else self.attended[number]
            inputs["input_ids"][row, : len(ids)] = ids
            inputs["attention_mask"][row, :attended] = 1
            if self.types is not None:
                types = self.types[number]
                inputs["token_type_ids"][row, : len(types)] = types
            if self.scored is not None:
                inputs["scoring_mask"][row, : len(ids)] = self.scored[number]
        return inputs


def tokenize(
    tokenizer: PreTrainedTokenizerBase,
    texts: Sequence[Any],
    limit: int,
    prompt: str = "",
    lower_case: bool = False,
    name: str = "sentence",
) -> TokenizedTexts:
    """Tokenizes texts or pairs of texts. Texts that are too long are truncated with a warning.

    Args:
        tokenizer: The tokenizer.
        texts: Texts, or pairs of texts, but not both.
        limit: Maximum number of tokens. In a pair that is too long, the longer text is truncated
            first.
        prompt: Prompt that precedes each text, or the first text of each pair.
        lower_case: Whether to convert all texts, and the prompt, to lower case.
        name: What an element of ``texts`` is called in messages.

    Raises:
        UsageError: The elements are neither all texts nor all pairs, or one has no tokens.
    """
    columns = _columns(texts, prompt, lower_case, name)
    if not columns[0]:
        return TokenizedTexts([])
    # The texts are first tokenized without truncation, to find out how many of them are too long.
    encoded = tokenizer(*columns, verbose=False)
    rows, types = encoded["input_ids"], encoded.get("token_type_ids")
    long = [number for number, row in enumerate(rows) if len(row) > limit]
    if long:
        logger.warning(
            "%d of %d %ss are longer than %d tokens and were truncated. The first is: %s",
            *(len(long), len(rows), name, limit, f"{columns[0][long[0]]:.60}"),
        )
        truncated = tokenizer(
            *([column[number] for number in long] for column in columns),
            truncation=True,
            max_length=limit,
        )
        for index, number in enumerate(long):
            rows[number] = truncated["input_ids"][index]
            if types is not None:
                types[number] = truncated["token_type_ids"][index]
    if empty := [number for number, row in enumerate(rows) if not row]:
        raise UsageError(f"{name} {empty[0] + 1} has no tokens: remove it from the inputs")
    return TokenizedTexts(rows, types if types is not None and any(map(any, types)) else None)


def _columns(texts: Sequence[Any], prompt: str, lower_case: bool, name: str) -> list[list[str]]:
    """Returns the positional arguments of the tokenizer.

    Returns:
        If the elements are texts, a list that contains the list of all texts. If they are pairs,
        the list of all first texts and the list of all second texts.

    Raises:
        UsageError: The elements are neither all texts nor all pairs of texts.
    """
    size = 1 if not len(texts) or isinstance(texts[0], str) else 2
    rows = [tuple(text) if isinstance(text, list | tuple) else (text,) for text in texts]
    for number, row in enumerate(rows, 1):
        if len(row) != size or not all(isinstance(text, str) for text in row):
            expected = "a text" if size == 1 else "a pair of texts, like the first one"
            raise UsageError(f"{name} {number} must be {expected}, not {texts[number - 1]!r:.60}")
    columns = [[row[side] for row in rows] for side in range(size)]
    if prompt:
        columns[0] = [prompt + text for text in columns[0]]
    if lower_case:
        columns = [[text.lower() for text in column] for column in columns]
    return columns


def check_texts(texts: Sequence[Any], name: str = "sentence") -> None:
    """Raises `UsageError` if an element is not a text."""
    for number, text in enumerate(texts, 1):
        if not isinstance(text, str):
            raise UsageError(f"{name} {number} must be a text, not {text!r:.60}")


def prompt_length(tokenizer: PreTrainedTokenizerBase, prompt: str) -> int:
    """Returns the number of leading tokens of a text that belong to its prompt.

    The prompt is tokenized alone. A special token at its end does not count.
    """
    ids = tokenizer(prompt)["input_ids"]
    return len(ids) - bool(ids and ids[-1] in tokenizer.all_special_ids)
