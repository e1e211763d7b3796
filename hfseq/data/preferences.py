"""Preference data: pairs of a chosen and a rejected answer, and single answers with a label.

Prompts and answers are strings or lists of messages. Examples have one of these groups of columns:

- `prompt`, `chosen` and `rejected` (explicit prompts).
- `chosen` and `rejected`, which both begin with the prompt (implicit prompts).
- `prompt`, `completion` and `label`, where the label is true for good completions.
"""

from __future__ import annotations

import logging
import math
from collections.abc import Iterable, Mapping, Sequence
from itertools import chain
from typing import TYPE_CHECKING, Any, NamedTuple

import numpy as np

from hfseq.data.arguments import PreferenceArguments
from hfseq.data.batches import FieldRows, GroupedRows
from hfseq.data.chat import (
    InvalidExample,
    PackedChatRows,
    TextEncoder,
    TokenizedExample,
    check_answers,
    check_messages,
    check_text,
    common_prefix,
)
from hfseq.data.records import Records, drop_invalid
from hfseq.errors import DataError, UsageError

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerBase

logger = logging.getLogger(__name__)

PAIR = ("chosen", "rejected")
Messages = list[dict[str, Any]]


class Answers(NamedTuple):
    """The tokens of one example.

    Attributes:
        prompt: Token IDs of the prompt, which are the input of the encoder in an encoder-decoder.
        answers: Token IDs of each answer. For decoder-only models, they begin with the prompt.
        prompt_lengths: Number of prompt tokens at the beginning of each answer. The loss is
            computed on the tokens after them.
        values: Numbers that belong to the example, such as its label or margin, by name.
    """

    prompt: np.ndarray
    answers: tuple[np.ndarray, ...]
    prompt_lengths: tuple[int, ...]
    values: Mapping[str, float]


class Encoded(NamedTuple):
    """The tokenized examples of a split.

    Attributes:
        examples: The valid examples.
        num_truncated: The number of truncated examples.
        num_invalid: The number of skipped examples.
    """

    examples: list[Answers]
    num_truncated: int
    num_invalid: int


class PreferenceEncoder(TextEncoder):
    """Tokenizes examples like TRL's trainers.

    Conversations are formatted with the tokenizer's chat template. The end-of-text token is
    appended to strings. The prompt is tokenized alone and together with each answer. It ends at the
    first token in which these token sequences differ.

    Args:
        tokenizer: The tokenizer.
        arguments: The data flags.
        records: The examples.
        paired: Whether the objective requires examples with a chosen and a rejected answer.
            Otherwise, it requires examples with one completion and a label. Pairs are then accepted
            too, for the caller to split.
        encoder_decoder: Whether the model is an encoder-decoder.
        requires_prompt: Whether the answers of a pair must begin with a common prompt if they are
            strings and the examples have no column "prompt".

    Attributes:
        names: The columns of the answers.
        num_mismatched_prompts: Number of prompts so far whose last tokens change when an answer is
            appended.

    Raises:
        UsageError: A required column is missing.
    """

    def __init__(
        self,
        tokenizer: PreTrainedTokenizerBase,
        arguments: PreferenceArguments,
        records: Records,
        paired: bool = True,
        encoder_decoder: bool = False,
        requires_prompt: bool = True,
    ):
        super().__init__(tokenizer, arguments.template_variables)
        self.arguments, self.encoder_decoder = arguments, encoder_decoder
        self.requires_prompt = requires_prompt
        table = records.tables[0]
        columns = set(table.columns)
        unpaired = {"prompt", "completion", "label"} <= columns
        if not paired and unpaired:
            self.names: tuple[str, ...] = ("completion",)
        elif set(PAIR) <= columns:
            self.names = PAIR
        else:
            expected = "both 'chosen' and 'rejected'" + (
                "" if paired else ", or both 'completion' and 'label'"
            )
            hint = (
                ". To train on labeled completions, use the objective kto"
                if paired and unpaired
                else ""
            )
            raise UsageError(
                f"{table.origin} has the columns {', '.join(table.columns)}: expected {expected}, "
                f"with the prompt in the column 'prompt' or at the beginning of each answer{hint}"
            )
        self.has_prompt = "prompt" in columns
        for name in (*self.names, *(["prompt"] if self.has_prompt else [])):
            records.column("train_file", None, (name,))  # checks the other tables
        self.num_mismatched_prompts = 0

    def __call__(self, example: Mapping[str, Any]) -> Answers:
        """Tokenizes an example.

        Raises:
            InvalidExample: The example has missing, identical or malformed values.
        """
        values = [example.get(name) for name in self.names]
        for name, value in zip(self.names, values, strict=True):
            if value is None:
                raise InvalidExample(f"{name} is missing")
        prompt = example.get("prompt") if self.has_prompt else None
        if self.has_prompt and prompt is None:
            raise InvalidExample("prompt is missing")
        if len(values) == 2 and values[0] == values[1]:
            raise InvalidExample("chosen and rejected are identical")
        if isinstance(prompt, list) or any(isinstance(value, list) for value in values):
            tokens = self._encode_messages(prompt, values, example)
        else:
            tokens = self._encode_texts(prompt, values)
        return tokens._replace(values=self._numbers(example))

    def _numbers(self, example: Mapping[str, Any]) -> dict[str, float]:
        """Returns the label or the margin of an example, if it has one."""
        if self.names != PAIR:
            label = example.get("label")
            if label not in (0, 1):  # True and False are equal to 1 and 0
                raise InvalidExample(f"the label must be true or false, not {label!r:.60}")
            return {"label": float(label)}
        if (margin := example.get("margin")) is None:
            return {}
        if not isinstance(margin, int | float) or not math.isfinite(margin):
            raise InvalidExample(f"the margin must be a finite number, not {margin!r:.60}")
        return {"margin": float(margin)}

    def _encode_messages(
        self, prompt: Any, values: Sequence[Any], example: Mapping[str, Any]
    ) -> Answers:
        self.get_template()
        answers = [
            check_messages(
                [{"role": "assistant", "content": value}] if isinstance(value, str) else value
            )
            for value in values
        ]
        if not isinstance(prompt, list):
            prompt_messages, answers = _split_messages(answers)
            if prompt is not None and prompt_messages[-1]["content"] != prompt:
                raise InvalidExample(
                    f"the answers do not begin with the prompt {prompt!r:.60}, but with "
                    f"{prompt_messages[-1]['content']!r:.60}"
                )
        else:
            prompt_messages = check_messages(prompt)
            shared = len(prompt_messages)
            if all(answer[:shared] == prompt_messages for answer in answers):
                raise InvalidExample(
                    "the answers repeat the prompt: remove its messages from the answers, or drop "
                    "the column 'prompt'"
                )
        for answer in answers:
            check_answers(answer)
        prompt_ids = self.apply_template(prompt_messages, example, generation_prompt=True).ids
        if self.encoder_decoder:
            texts = [str(answer[-1]["content"]) for answer in answers]
            return self._separate(prompt_ids, texts)
        full = [self.apply_template([*prompt_messages, *answer], example).ids for answer in answers]
        return self._joined(prompt_ids, full)

    def _encode_texts(self, prompt: Any, values: Sequence[Any]) -> Answers:
        answers = [check_text(value, name) for name, value in zip(self.names, values, strict=True)]
        if prompt is not None:
            text = check_text(prompt, "prompt", empty=True)
            prompt_ids = self.tokenize_text(text).ids
            if self.encoder_decoder:
                return self._separate(prompt_ids, answers)
            full = [self.tokenize_text(text + self.append_eos(answer)).ids for answer in answers]
            return self._joined(prompt_ids, full)
        if self.encoder_decoder:
            raise InvalidExample("an encoder-decoder model requires the prompt in column 'prompt'")
        full = [self.tokenize_text(self.append_eos(answer)).ids for answer in answers]
        length = common_prefix(*full) if len(full) == 2 else 0
        special = self.tokenizer.all_special_ids
        if self.requires_prompt and all(number in special for number in full[0][:length]):
            raise InvalidExample("chosen and rejected do not begin with the same prompt")
        # If one answer is the beginning of the other, its last token still belongs to the answer,
        # so that no answer is empty.
        length = min(length, *(len(ids) - 1 for ids in full))
        return self._joined(full[0][:length], full)

    def _joined(self, prompt_ids: np.ndarray, full: Sequence[np.ndarray]) -> Answers:
        length = min(common_prefix(prompt_ids, ids) for ids in full)
        if len(prompt_ids) and not length:
            raise InvalidExample(
                "the tokens of the prompt change completely when an answer is appended"
            )
        self.num_mismatched_prompts += length < len(prompt_ids)
        return Answers(prompt_ids[:length], tuple(full), (length,) * len(full), {})

    def _separate(self, prompt_ids: np.ndarray, texts: Sequence[str]) -> Answers:
        ids = [
            np.array(self.tokenizer(text_target=text, verbose=False)["input_ids"], np.int32)
            for text in texts
        ]
        return Answers(prompt_ids, tuple(ids), (0,) * len(ids), {})

    def truncate(self, tokens: Answers, length: int) -> tuple[Answers, bool]:
        """Truncates an example according to `--truncation_mode`.

        Args:
            tokens: The example.
            length: Maximum number of tokens of each answer, including the prompt.

        Returns:
            The example, and whether it was truncated.

        Raises:
            InvalidExample: An answer would be empty, or both answers would be equal.
        """
        longest = max(len(tokens.prompt), *(len(ids) for ids in tokens.answers), 0)
        if longest > length:
            keep_end = self.arguments.truncation_mode == "keep_end"
            answers, prompt_lengths = [], []
            for ids, prompt_length in zip(tokens.answers, tokens.prompt_lengths, strict=True):
                start = max(len(ids) - length, 0) if keep_end else 0
                if prompt_length >= start + length:
                    raise InvalidExample(
                        f"its prompt has {prompt_length} tokens, so no token of the answer is "
                        f"among the first {length} (--max_length)"
                    )
                answers.append(ids[start : start + length])
                prompt_lengths.append(max(prompt_length - start, 0))
            prompt = tokens.prompt[-length:] if keep_end else tokens.prompt[:length]
            tokens = tokens._replace(
                prompt=prompt, answers=tuple(answers), prompt_lengths=tuple(prompt_lengths)
            )
            if len(answers) == 2 and np.array_equal(answers[0], answers[1]):
                raise InvalidExample(
                    f"chosen and rejected are identical after truncation to {length} tokens "
                    "(--max_length)"
                )
        # A decoder-only model does not predict the first token.
        first = 0 if self.encoder_decoder else 1
        if any(
            len(ids) <= max(prompt_length, first)
            for ids, prompt_length in zip(tokens.answers, tokens.prompt_lengths, strict=True)
        ):
            raise InvalidExample("an answer has no token that the model predicts")
        return tokens, longest > length


def _split_messages(answers: Sequence[Messages]) -> tuple[Messages, list[Messages]]:
    """Splits two conversations into the messages with which both begin, and their other messages.

    Returns:
        The common messages, and the remaining messages of each conversation.

    Raises:
        InvalidExample: The conversations do not begin with the same message.
    """
    if len(answers) == 1:
        raise InvalidExample("the prompt must be a list of messages, like the completion")
    shared = 0
    while shared < min(map(len, answers)) and answers[0][shared] == answers[1][shared]:
        shared += 1
    # If one conversation is the beginning of the other, its last message still belongs to the
    # answer, so that no answer is empty.
    shared = min(shared, *(len(messages) - 1 for messages in answers))
    if not shared:
        raise InvalidExample("chosen and rejected do not begin with the same prompt")
    return answers[0][:shared], [messages[shared:] for messages in answers]


def unpair(examples: Iterable[Answers]) -> list[Answers]:
    """Splits each pair into an example with the label 1 and an example with the label 0."""
    return [
        Answers(item.prompt, (answer,), (length,), {"label": label})
        for item in examples
        for answer, length, label in zip(item.answers, item.prompt_lengths, (1.0, 0.0), strict=True)
    ]


def encode_preferences(
    encode: PreferenceEncoder,
    records: Records,
    split: str,
    length: int,
    drop_long: bool = False,
) -> Encoded:
    """Tokenizes and truncates the examples of a split, and skips invalid examples.

    Args:
        encode: The encoder.
        records: The examples.
        split: Name of the split, for messages.
        length: Maximum number of tokens of prompt and answer together.
        drop_long: Whether longer examples are skipped instead of truncated.

    Returns:
        The valid examples, and the numbers of truncated and of skipped examples.
    """
    examples, problems, num_truncated = [], {}, 0
    for row in range(len(records)):
        try:
            tokens = encode(records[row])
            longest = max(map(len, tokens.answers))
            if drop_long and longest > length:
                raise InvalidExample(
                    f"it has {longest} tokens, more than the maximum of {length} (--max_length)"
                )
            tokens, truncated = encode.truncate(tokens, length)
        except InvalidExample as bad:
            problems[row] = str(bad)
            continue
        num_truncated += truncated
        examples.append(tokens)
    drop_invalid(records, split, problems, encode.arguments)
    if encode.num_mismatched_prompts:
        logger.warning(
            "the last tokens of %d %s prompts change when an answer is appended. For these "
            "examples, the loss starts at the first changed token. End prompts at a token "
            "boundary, or use a chat template that renders a prompt identically with and without "
            "an answer (--chat_template_path)",
            encode.num_mismatched_prompts,
            split,
        )
    return Encoded(examples, num_truncated, len(problems))


def check_labels(examples: Sequence[Answers], split: str) -> None:
    """Raises `DataError` if all examples have the same label."""
    labels = {item.values["label"] for item in examples}
    if len(labels) < 2:
        label_name = "true" if 1.0 in labels else "false"
        raise DataError(
            f"all {len(examples)} {split} examples have the label {label_name}, but the loss "
            "compares good and bad completions: add examples with the other label"
        )


def _loss_masks(examples: Sequence[Answers]) -> list[np.ndarray]:
    return [
        np.arange(len(ids)) >= length
        for item in examples
        for ids, length in zip(item.answers, item.prompt_lengths, strict=True)
    ]


def _numbers_of(examples: Sequence[Answers]) -> dict[str, np.ndarray]:
    names = {name for item in examples for name in item.values}
    return {
        name: np.array([item.values.get(name, 0.0) for item in examples], np.float32)
        for name in sorted(names)
    }


class AnswerRows(GroupedRows):
    """Rows that contain one example each. Arrays have the shape `(rows, answers, width)`.

    In addition to the arrays of `GroupedRows`, the rows have the array "learned", which is 1 for
    the tokens of the answers. They also have an array `(rows,)` for each number in the examples,
    such as "label" or "margin".

    Args:
        examples: The examples.
        pad: The pad token ID.
        length: Maximum number of tokens of prompt and answer together.
        pad_to_max_length: Whether all rows are padded to `length`.
    """

    def __init__(
        self, examples: Sequence[Answers], pad: int, length: int, pad_to_max_length: bool = False
    ):
        sides: Any = list(zip(*(item.answers for item in examples), strict=True))
        masks: Any = _loss_masks(examples)
        count = len(sides)
        super().__init__(
            sides,
            pad,
            length,
            pad_to_max_length,
            {"learned": [masks[number::count] for number in range(count)]},
            _numbers_of(examples),
        )
        self.examples = examples

    def fetch_mismatched(
        self, indices: np.ndarray, answer_rows: np.ndarray, width: int
    ) -> dict[str, np.ndarray]:
        """Combines the prompts of some rows with the answers of other rows.

        Only examples with a single answer are supported.

        Args:
            indices: The rows from which the prompts are taken.
            answer_rows: For each of them, the row from which the answer is taken.
            width: Number of tokens to which the result is padded or truncated.

        Returns:
            "mismatched_ids", "mismatched_segments" and "mismatched_learned", int32
            `(rows, 1, width)`.
        """
        arrays = {
            name: np.full((len(indices), 1, width), fill, np.int32)
            for name, fill in (
                ("mismatched_ids", self.store.pad_token_id),
                ("mismatched_segments", 0),
                ("mismatched_learned", 0),
            )
        }
        for row, (index, other) in enumerate(zip(indices, answer_rows, strict=True)):
            first, second = self.examples[index], self.examples[other]
            prompt = first.answers[0][: first.prompt_lengths[0]]
            answer = second.answers[0][second.prompt_lengths[0] :]
            ids = np.concatenate([prompt[: max(width - 1, 0)], answer])[:width]
            arrays["mismatched_ids"][row, 0, : len(ids)] = ids
            arrays["mismatched_segments"][row, 0, : len(ids)] = 1
            arrays["mismatched_learned"][row, 0, min(len(prompt), width - 1) : len(ids)] = 1
        return arrays


class PackedAnswerRows(PackedChatRows):
    """Rows that contain several packed pairs. The answers of a pair are two adjacent documents.

    Args:
        examples: The examples.
        pad: The pad token ID.
        length: Number of tokens per row.

    Attributes:
        pair_numbers: The index of the example of each pair in a row, int64 `(rows, max_pairs)`. It
            is -1 in rows with fewer than `max_pairs` pairs.
        arrays: Additional arrays with one entry per example, by name. `fetch` returns the entries
            of the pairs in each row.
    """

    def __init__(self, examples: Sequence[Answers], pad: int, length: int):
        documents = [
            TokenizedExample(ids, mask)
            for ids, mask in zip(
                chain.from_iterable(item.answers for item in examples),
                _loss_masks(examples),
                strict=True,
            )
        ]
        super().__init__(documents, pad, length, group=len(examples[0].answers))
        self.pair_numbers = np.full((len(self.groups), max(map(len, self.groups))), -1, np.int64)
        for row, numbers in enumerate(self.groups):
            self.pair_numbers[row, : len(numbers)] = numbers
        self.arrays: dict[str, np.ndarray] = _numbers_of(examples)

    def fetch(self, indices: np.ndarray, width: int | None = None) -> dict[str, np.ndarray]:
        """Returns the arrays of some rows, and "pairs", a mask of the pairs that a row contains."""
        numbers = self.pair_numbers[np.asarray(indices)]
        arrays = {name: values[np.maximum(numbers, 0)] for name, values in self.arrays.items()}
        return super().fetch(indices, width) | arrays | {"pairs": numbers >= 0}


class PromptRows:
    """Rows for encoder-decoders: a prompt for the encoder, and answers for the decoder.

    Args:
        examples: The examples.
        pad: The pad token ID.
        length: Maximum number of tokens of a prompt, and of an answer.
        pad_to_max_length: Whether all rows are padded to `length`.
    """

    max_runs = 2

    def __init__(
        self, examples: Sequence[Answers], pad: int, length: int, pad_to_max_length: bool = False
    ):
        prompts: Any = [item.prompt for item in examples]
        self.prompts = FieldRows(prompts, pad, length, {}, {}, pad_to_max_length)
        self.answers = AnswerRows(examples, pad, length, pad_to_max_length)
        self.arrays = self.answers.arrays
        self.examples = examples

    def __len__(self) -> int:
        return len(self.answers)

    @property
    def total_tokens(self) -> int:
        """The number of tokens in all rows, without padding."""
        return self.prompts.total_tokens + self.answers.total_tokens

    def width(self, indices: np.ndarray) -> tuple[int, int]:
        """Returns the widths of the prompts and of the answers of a batch."""
        return self.prompts.width(indices), self.answers.width(indices)

    def fetch(
        self, indices: np.ndarray, width: tuple[int, int] | None = None
    ) -> dict[str, np.ndarray]:
        """Returns "prompt_ids" and "prompt_segments", and the arrays of the answers."""
        widths = width or self.width(indices)
        prompts = self.prompts.fetch(indices, widths[0])
        arrays = {f"prompt_{name.split('_')[0]}": array for name, array in prompts.items()}
        return self.answers.fetch(indices, widths[1]) | {
            "prompt_ids": arrays["prompt_input"],
            "prompt_segments": arrays["prompt_segment"],
        }

    def fetch_mismatched(
        self, indices: np.ndarray, answer_rows: np.ndarray, width: tuple[int, int]
    ) -> dict[str, np.ndarray]:
        """Returns the answers of other rows, as `AnswerRows.fetch_mismatched` does."""
        return self.answers.fetch_mismatched(indices, answer_rows, width[1])
