"""Tokenization of conversations, prompt-completion pairs and texts for supervised fine-tuning.

The result for an example consists of token IDs and a loss mask.
"""

from __future__ import annotations

import json
import logging
import re
from bisect import bisect_left, insort
from collections import deque
from collections.abc import Mapping, Sequence
from itertools import accumulate
from pathlib import Path
from typing import TYPE_CHECKING, Any, NamedTuple

import numpy as np

from hfseq.checkpoints.hub import check_directory
from hfseq.data.arguments import ChatArguments, ConversationArguments
from hfseq.data.batches import PackedRows
from hfseq.data.records import Records, drop_invalid
from hfseq.data.store import TokenStore
from hfseq.data.tables import SURROGATE
from hfseq.errors import UsageError, first_line

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerBase

logger = logging.getLogger(__name__)

PROMPT_COMPLETION = ("prompt", "completion")
#: The tag that marks the beginning of an assistant message in a chat template, as in Transformers.
GENERATION_TAG = re.compile(r"\{%-?\s*generation\s*-?%\}")
#: The role for each value of "from" in messages with the keys "from" and "value".
ROLE_NAMES = {"human": "user", "gpt": "assistant"}


class InvalidExample(Exception):
    """Raised for an example that cannot be used for training. The message contains the reason."""


def common_prefix(first: np.ndarray, second: np.ndarray) -> int:
    """Returns the number of leading elements that two arrays have in common."""
    shared = min(len(first), len(second))
    differs = np.flatnonzero(first[:shared] != second[:shared])
    return int(differs[0]) if len(differs) else shared


class TokenizedExample(NamedTuple):
    """The tokens of an example.

    Attributes:
        ids: Token IDs, int32 `(tokens,)`.
        loss_mask: True for tokens that contribute to the loss, bool `(tokens,)`.
    """

    ids: np.ndarray
    loss_mask: np.ndarray


def configure_tokenizer(
    tokenizer: PreTrainedTokenizerBase, arguments: ConversationArguments
) -> None:
    """Sets the chat template and the end-of-turn token of a tokenizer according to the flags.

    Raises:
        UsageError: The template cannot be read, or the end-of-turn token is not in the vocabulary.
    """
    path, end = arguments.chat_template_path, arguments.eos_token
    if path is not None and path.endswith((".jinja", ".j2")):
        try:
            tokenizer.chat_template = Path(path).read_text(encoding="utf-8")
        except (OSError, UnicodeDecodeError) as error:
            raise UsageError(
                f"--chat_template_path {path} cannot be read: {first_line(error)}"
            ) from error
    elif path is not None:
        from transformers import AutoTokenizer

        try:
            check_directory(path)
            other = AutoTokenizer.from_pretrained(path)
        except Exception as error:  # the Rust parser of tokenizer.json raises plain exceptions
            raise UsageError(
                f"--chat_template_path {path} is neither a .jinja file nor a tokenizer "
                f"({first_line(error)})"
            ) from error
        if not other.chat_template:
            raise UsageError(f"--chat_template_path {path}: this tokenizer has no chat template")
        tokenizer.chat_template = other.chat_template
        end = end or other.eos_token
    if end is None:
        return
    if end not in tokenizer.get_vocab():
        source = "--eos_token" if arguments.eos_token else f"--chat_template_path {path} ends with"
        raise UsageError(
            f"{source} {end}: the tokenizer does not have this token. Before training, add the "
            "token to the tokenizer, and an embedding for it to the model"
        )
    tokenizer.eos_token = end


class TextEncoder:
    """Tokenizes texts, and conversations with the tokenizer's chat template.

    Args:
        tokenizer: The tokenizer.
        variables: Variables of the chat template.
    """

    def __init__(
        self, tokenizer: PreTrainedTokenizerBase, variables: Mapping[str, Any] | None = None
    ):
        self.tokenizer = tokenizer
        self.variables = dict(variables or {})

    def get_template(self) -> str:
        """Returns the chat template.

        Raises:
            UsageError: The tokenizer has no chat template.
        """
        try:
            return self.tokenizer.get_chat_template()
        except ValueError as error:  # no template, or several without a default
            raise UsageError(
                "conversations require a chat template, but the tokenizer has none: use "
                "--chat_template_path"
            ) from error

    def append_eos(self, text: str) -> str:
        """Appends the end-of-text token to a text, unless the text already ends with it."""
        end = self.tokenizer.eos_token
        if end is None:
            raise UsageError("the tokenizer has no end-of-text token: specify one with --eos_token")
        return text if text.endswith(end) else text + end

    def tokenize_text(self, text: str) -> TokenizedExample:
        """Tokenizes a text. All tokens are in the loss mask."""
        ids = np.array(self._encode(text)["input_ids"], np.int32)
        return TokenizedExample(ids, np.ones(len(ids), bool))

    def _encode(self, text: str, **options: bool) -> Mapping[str, Any]:
        if SURROGATE.search(text):
            raise InvalidExample("it contains an unpaired surrogate, which is not valid Unicode")
        return self.tokenizer(text, verbose=False, **options)

    def apply_template(
        self,
        messages: list[dict[str, Any]],
        example: Mapping[str, Any],
        generation_prompt: bool = False,
        answers_only: bool = False,
    ) -> TokenizedExample:
        """Formats messages with the chat template and tokenizes the result.

        A token is part of an answer if it contains at least one character of the answer. The mask
        that Transformers computes is not used, because it can be wrong: if an answer ends with a
        space that is not part of any token (`trim_offsets`), this mask includes everything up to
        the end of the conversation.

        Args:
            messages: The messages.
            example: The example. Its "tools" and "chat_template_kwargs" are passed to the template.
            generation_prompt: Whether to append the generation prompt.
            answers_only: Whether the loss mask only contains the tokens of answers. The template
                must then mark the answers. Otherwise, the mask contains all tokens.
        """
        from jinja2 import TemplateError, TemplateSyntaxError
        from transformers.utils.chat_template_utils import render_jinja_template

        tools = example.get("tools")
        try:
            variables = without_none(example.get("chat_template_kwargs") or {})
            options = self.tokenizer.special_tokens_map | self.variables | variables
            tools = json.loads(tools) if isinstance(tools, str) else without_none(tools)
            rendered: Any = render_jinja_template(  # the function's type annotation is wrong
                [messages],
                tools=tools,
                return_assistant_tokens_mask=answers_only,
                chat_template=self.tokenizer.get_chat_template(tools=tools),
                add_generation_prompt=generation_prompt,
                **options,
            )
        except TemplateSyntaxError as error:
            raise UsageError(
                f"the chat template is not valid, line {error.lineno}: {error.message}"
            ) from error
        except (TemplateError, TypeError, ValueError) as error:
            raise InvalidExample(
                f"the chat template raised an error: {first_line(error)}"
            ) from error
        texts, spans = rendered
        encoded = self._encode(
            texts[0], add_special_tokens=False, return_offsets_mapping=answers_only
        )
        ids = np.array(encoded["input_ids"], np.int32)
        if not answers_only:
            return TokenizedExample(ids, np.ones(len(ids), bool))
        loss_mask, previous_end = [], 0
        for start, stop in encoded["offset_mapping"]:
            # If a token consists of trimmed whitespace, its start equals its end.
            start = previous_end if start == stop else start
            loss_mask.append(any(start < last and stop > first for first, last in spans[0]))
            previous_end = stop
        return TokenizedExample(ids, np.array(loss_mask, bool))


class ChatEncoder(TextEncoder):
    """Tokenizes examples like TRL's `SFTTrainer`.

    Conversations are formatted with the tokenizer's chat template. If a prompt is a conversation,
    the generation prompt of the template is appended to it. The end-of-text token is appended to
    plain texts and completions.

    For examples with `prompt` and `completion`, the prompt is tokenized alone and together with its
    completion. The loss starts at the first token in which these token sequences differ.

    Attributes:
        columns: The columns to read.
        num_mismatched_prompts: Number of prompts so far whose last tokens change when the
            completion is appended.

    Raises:
        UsageError: The data lacks the required columns, or the data or the chat template does not
            support one of the flags.
    """

    def __init__(
        self, tokenizer: PreTrainedTokenizerBase, arguments: ChatArguments, records: Records
    ):
        super().__init__(tokenizer, arguments.template_variables)
        self.arguments = arguments
        table = records.tables[0]
        column_sets = (
            PROMPT_COMPLETION,
            ("messages",),
            ("conversations",),
            (arguments.dataset_text_field,),
        )
        found_columns = next(
            (group for group in column_sets if set(group) <= set(table.columns)), None
        )
        if found_columns is None:
            raise UsageError(
                f"{table.origin} has the columns {', '.join(table.columns)}: expected either "
                "'messages', or both 'prompt' and 'completion', or a text column "
                f"'{arguments.dataset_text_field}' (--dataset_text_field)"
            )
        for name in found_columns:
            records.column("dataset_text_field", None, (name,))  # checks the other tables
        self.columns = found_columns
        examples = (records[row] for row in range(len(records)))
        self.conversational = found_columns in column_sets[1:3] or (
            found_columns == PROMPT_COMPLETION
            and any(isinstance(example[PROMPT_COMPLETION[0]], list) for example in examples)
        )
        if arguments.completion_only_loss and found_columns != PROMPT_COMPLETION:
            raise UsageError(
                "--completion_only_loss requires the columns prompt and completion, but "
                f"{table.origin} has '{found_columns[0]}': drop the flag, or use "
                "--assistant_only_loss for conversations"
            )
        self.completion_only = (
            found_columns == PROMPT_COMPLETION and arguments.completion_only_loss is not False
        )
        self.assistant_only = arguments.assistant_only_loss
        if self.assistant_only and not self.conversational:
            raise UsageError(
                f"--assistant_only_loss requires conversations, but {table.origin} contains "
                "texts: drop the flag"
            )
        if self.conversational:
            self._check_template()
        self.num_mismatched_prompts = 0

    def _check_template(self) -> None:
        template = self.get_template()
        if not self.assistant_only:
            return
        if not GENERATION_TAG.search(template):
            raise UsageError(
                "--assistant_only_loss: the chat template does not mark assistant messages with "
                "{% generation %} ... {% endgeneration %}: pass a template that does with "
                "--chat_template_path"
            )
        if not self.tokenizer.is_fast:
            raise UsageError(
                f"--assistant_only_loss: {type(self.tokenizer).__name__} provides no character "
                "offsets: use a fast tokenizer (with a tokenizer.json)"
            )

    def __call__(self, example: Mapping[str, Any]) -> TokenizedExample:
        """Tokenizes an example.

        Raises:
            InvalidExample: The example has no answer or is malformed.
        """
        if self.columns != PROMPT_COMPLETION:
            value = example[self.columns[0]]
            if self.conversational:
                messages = check_messages(value)
                check_answers(messages)
                return self.apply_template(messages, example, answers_only=self.assistant_only)
            return self.tokenize_text(self.append_eos(check_text(value, self.columns[0])))
        prompt, completion = (example[name] for name in PROMPT_COMPLETION)
        if isinstance(prompt, list):
            prompt_messages = check_messages(prompt)
            completion_messages = check_messages(completion)
            check_answers(completion_messages)
            prompt_ids = self.apply_template(prompt_messages, example, generation_prompt=True).ids
            full = self.apply_template(
                [*prompt_messages, *completion_messages], example, answers_only=self.assistant_only
            )
        else:
            prompt_text = check_text(prompt, PROMPT_COMPLETION[0], empty=True)
            prompt_ids = self.tokenize_text(prompt_text).ids
            full = self.tokenize_text(
                prompt_text + self.append_eos(check_text(completion, PROMPT_COMPLETION[1]))
            )
        if not self.completion_only:
            return full
        prompt_length = common_prefix(prompt_ids, full.ids)
        self.num_mismatched_prompts += prompt_length < len(prompt_ids)
        return TokenizedExample(
            full.ids, full.loss_mask & (np.arange(len(full.ids)) >= prompt_length)
        )

    def end_of_turn(self) -> tuple[str | None, bool]:
        """Returns the token with which the chat template ends an answer.

        Returns:
            The token, or `None` if answers do not end with a special or added token. The second
            value is whether the model can learn to end an answer. It is false if
            `--assistant_only_loss` is set and the template does not mark the token at the end of an
            answer as part of the answer.
        """
        turns = [("user", "a"), ("assistant", "b"), ("user", "c")]
        messages = [{"role": role, "content": content} for role, content in turns]
        try:
            # Some templates only add the end-of-turn token if another turn follows.
            tokens = self.apply_template(
                messages if self.assistant_only else messages[:2],
                {},
                answers_only=self.assistant_only,
            )
        except InvalidExample:  # the template does not support these messages
            return None, True
        ids = tokens.ids[tokens.loss_mask].tolist()
        while ids and not str(self.tokenizer.decode(ids[-1:])).strip():
            ids.pop()
        added = set(self.tokenizer.get_added_vocab().values()) | set(self.tokenizer.all_special_ids)
        if ids and ids[-1] in added:
            return str(self.tokenizer.convert_ids_to_tokens(ids[-1])), True
        return None, not self.assistant_only


def check_text(value: object, column: str, empty: bool = False) -> str:
    """Checks that the value of a cell is a string that is not blank, and returns it.

    Args:
        value: The value of the cell.
        column: Name of the column, for messages.
        empty: Whether blank strings are allowed.

    Raises:
        InvalidExample: The value is not a string, or is blank.
    """
    if not isinstance(value, str):
        raise InvalidExample(f"the {column} is not a string but {value!r:.60}")
    if not empty and not value.strip():
        raise InvalidExample(f"the {column} is empty")
    return value


def without_none(value: Any) -> Any:
    """Removes all keys with the value `None` from nested dictionaries and lists.

    In a table, the dictionaries of a column have the same keys in all rows. If a message, a tool
    call or a function schema does not have one of these keys, its value in the table is `None`.
    """
    if isinstance(value, Mapping):
        return {name: without_none(part) for name, part in value.items() if part is not None}
    return [without_none(part) for part in value] if isinstance(value, list) else value


def check_messages(value: object) -> list[dict[str, Any]]:
    """Checks messages, and returns them with the keys "role" and "content".

    The keys "from" and "value" are converted to these keys.

    Raises:
        InvalidExample: The value is not a list of messages.
    """
    if not isinstance(value, list) or not value:
        raise InvalidExample(f"messages must be a list, not {value!r:.60}")
    messages = []
    for number, message in enumerate(value, 1):
        if not isinstance(message, dict):
            raise InvalidExample(
                f"message {number} must have a role and a content, but is {message!r:.60}"
            )
        present = without_none(message)
        if "from" in present:
            present["role"] = ROLE_NAMES.get(str(present["from"]), present.pop("from"))
        if "value" in present:
            present["content"] = present.pop("value")
        for name in ("role", "content"):
            if not isinstance(present.get(name), str) and not (
                name == "content" and present.get("tool_calls")
            ):
                problem = f"{name} {present[name]!r:.60}" if name in present else f"no {name}"
                raise InvalidExample(f"message {number} has {problem}: {name} must be a string")
        messages.append(present)
    return messages


def check_answers(messages: Sequence[Mapping[str, Any]]) -> None:
    """Raises `InvalidExample` if an assistant turn is missing or empty."""
    answers = [answer for answer in messages if answer["role"] == "assistant"]
    if not answers:
        raise InvalidExample("it has no assistant turn")
    if not all(answer.get("content", "").strip() or answer.get("tool_calls") for answer in answers):
        raise InvalidExample("an assistant turn is empty")


def encode_examples(
    encode: ChatEncoder, records: Records, split: str, max_length: int
) -> tuple[list[TokenizedExample], int]:
    """Tokenizes the examples of a split and skips invalid examples.

    An example is also invalid if its loss mask contains no token after truncation. The first token
    of the example does not count, because the model cannot predict it without a preceding token.

    Args:
        encode: The encoder.
        records: The examples.
        split: Name of the split, for messages.
        max_length: Maximum number of tokens per example.

    Returns:
        The tokenized examples, and the number of truncated examples.
    """
    encoded, problems, num_truncated = [], {}, 0
    for row in range(len(records)):
        try:
            tokens = encode(records[row])
            if not tokens.loss_mask[1:max_length].any():
                beyond_limit = tokens.loss_mask[max_length:].any()
                raise InvalidExample(
                    f"its first {max_length} of {len(tokens.ids)} tokens contain no part of the "
                    "answer (--max_length)"
                    if beyond_limit
                    else "none of its tokens is in the loss mask"
                )
        except InvalidExample as bad:
            problems[row] = str(bad)
            continue
        num_truncated += len(tokens.ids) > max_length
        encoded.append(TokenizedExample(tokens.ids[:max_length], tokens.loss_mask[:max_length]))
    drop_invalid(records, split, problems, encode.arguments)
    if encode.num_mismatched_prompts:
        logger.warning(
            "the last tokens of %d %s prompts change when the completion is appended. For these "
            "examples, the loss starts at the first changed token. End prompts at a token "
            "boundary, or use a chat template that renders a prompt identically with and without "
            "a completion (--chat_template_path)",
            encode.num_mismatched_prompts,
            split,
        )
    return encoded, num_truncated


def best_fit_decreasing(lengths: Sequence[int], capacity: int) -> list[list[int]]:
    """Packs documents into rows with the best-fit decreasing algorithm.

    The longest documents are packed first. Each document is added to the row with the least free
    space among those with enough space. If several rows have the same free space, the one that has
    had it for the longest time is used.

    Args:
        lengths: Length of each document, at most `capacity`.
        capacity: Length of a row.

    Returns:
        The document indices of each row.
    """
    rows: list[list[int]] = []
    rows_by_space: list[deque[int]] = [deque() for _ in range(capacity + 1)]  # rows by free space
    free_spaces: list[int] = []  # values of the free space that some row has, in ascending order
    for document in np.argsort(-np.asarray(lengths), kind="stable").tolist():
        at = bisect_left(free_spaces, lengths[document])
        if at == len(free_spaces):
            free, row = capacity, len(rows)
            rows.append([])
        else:
            free = free_spaces[at]
            row = rows_by_space[free].popleft()
            if not rows_by_space[free]:
                del free_spaces[at]
        rows[row].append(document)
        free -= lengths[document]
        if free and not rows_by_space[free]:
            insort(free_spaces, free)
        rows_by_space[free].append(row)
    return rows


class PackedChatRows(PackedRows):
    """Rows that contain several packed examples (`--packing`). No example is split between rows.

    In addition to the arrays of `PackedRows`, the rows have the array "learned", which is 1 for
    tokens in the loss mask and 0 for all other tokens.

    Args:
        examples: The examples.
        pad: The pad token ID.
        length: Row length in tokens.
        group: Number of consecutive examples that form a group, which is packed into one row.

    Attributes:
        groups: The numbers of the groups in each row.
        row_offsets: Index of the first token of each row in the store, which holds the tokens of
            all rows. The last entry is the total number of tokens.
    """

    def __init__(self, examples: Sequence[TokenizedExample], pad: int, length: int, group: int = 1):
        sizes = np.reshape([len(example.ids) for example in examples], (-1, group)).sum(1)
        self.groups = best_fit_decreasing(sizes.tolist(), length)
        rows = [[n * group + k for n in row for k in range(group)] for row in self.groups]
        ordered = [examples[number] for row in rows for number in row]
        offsets = np.array([0, *accumulate(len(example.ids) for example in ordered)], np.int64)
        ids, learned = (np.concatenate(part) for part in zip(*ordered, strict=True))
        super().__init__(TokenStore(ids, offsets, pad), length)
        self.loss_mask = TokenStore(learned.astype(np.int32), offsets)
        self.row_offsets = offsets[[0, *accumulate(map(len, rows))]]

    def __len__(self) -> int:
        return len(self.row_offsets) - 1

    @property
    def total_tokens(self) -> int:
        """The number of tokens in all rows, without padding."""
        return self.store.total_tokens

    def spans(self, indices: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
        """Returns the index of the first token in the store and the number of tokens of rows."""
        starts = self.row_offsets[np.asarray(indices)]
        return starts, self.row_offsets[np.asarray(indices) + 1] - starts

    def fetch(self, indices: np.ndarray, width: int | None = None) -> dict[str, np.ndarray]:
        """Returns the arrays of some rows, as `Rows.fetch` does."""
        gathered, _ = self.loss_mask.gather(*self.spans(indices), self.length)
        return super().fetch(indices, width) | {"learned": gathered["input_ids"]}
