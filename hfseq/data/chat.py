"""Conversations, prompts with completions, and texts as tokens, and which of these are learned."""

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

from hfseq.data.arguments import ChatArguments
from hfseq.data.batches import PackedRows
from hfseq.data.records import Records, drop_invalid
from hfseq.data.store import TokenStore
from hfseq.data.tables import SURROGATE
from hfseq.errors import UsageError, first_line

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerBase

logger = logging.getLogger(__name__)

PROMPT_COMPLETION = ("prompt", "completion")
#: What marks the answers of a chat template, as transformers looks for it.
GENERATION_TAG = re.compile(r"\{%-?\s*generation\s*-?%\}")
#: Names of roles in conversations of {"from", "value"}.
ROLE_NAMES = {"human": "user", "gpt": "assistant"}


class InvalidExample(Exception):
    """Why an example cannot be learned from."""


class TokenizedExample(NamedTuple):
    """An example: its ids, int32 (tokens,), and which of them are learned, bool (tokens,)."""

    ids: np.ndarray
    loss_mask: np.ndarray


def configure_tokenizer(tokenizer: PreTrainedTokenizerBase, arguments: ChatArguments) -> None:
    """Give a tokenizer the chat template and the end of turns that the flags name.

    **Raises:** UsageError for a template that cannot be read, or tokens that the tokenizer lacks.
    """
    path, end = arguments.chat_template_path, arguments.eos_token
    if path is not None and path.endswith((".jinja", ".j2")):
        try:
            tokenizer.chat_template = Path(path).read_text(encoding="utf-8")
        except (OSError, UnicodeDecodeError) as error:
            raise UsageError(f"--chat_template_path {path}: {first_line(error)}") from error
    elif path is not None:
        from transformers import AutoTokenizer

        try:
            other = AutoTokenizer.from_pretrained(path)
        except Exception as error:  # the Rust reader of tokenizer.json raises nothing more exact
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
            f"{source} {end}: the tokenizer has no such token; add it to the tokenizer, and its "
            "row to the model, before training"
        )
    tokenizer.eos_token = end


class ChatEncoder:
    """Turns examples into tokens, as TRL's SFTTrainer does.

    Conversations are written by the tokenizer's chat template, prompts ending with what opens an
    answer; other texts and completions end with the end of text. What has a ``prompt`` and a
    ``completion`` is learned from where the two and the prompt alone begin to differ.

    **Raises:** UsageError where flags, columns and chat template do not go together.
    """

    def __init__(
        self, tokenizer: PreTrainedTokenizerBase, arguments: ChatArguments, records: Records
    ):
        self.tokenizer, self.arguments = tokenizer, arguments
        table = records.tables[0]
        kinds = (
            PROMPT_COMPLETION,
            ("messages",),
            ("conversations",),
            (arguments.dataset_text_field,),
        )
        found = next((one for one in kinds if set(one) <= set(table.columns)), None)
        if found is None:
            raise UsageError(
                f"{table.origin} has no column 'messages', none of texts called "
                f"'{arguments.dataset_text_field}' (see --dataset_text_field), and not both "
                f"'prompt' and 'completion', but {', '.join(table.columns)}"
            )
        for name in found:
            records.column("dataset_text_field", None, (name,))  # all tables have it
        self.columns = found
        examples = (records[row] for row in range(len(records)))
        self.conversational = found in kinds[1:3] or (
            found == PROMPT_COMPLETION
            and any(isinstance(one[PROMPT_COMPLETION[0]], list) for one in examples)
        )
        if arguments.completion_only_loss and found != PROMPT_COMPLETION:
            raise UsageError(
                f"--completion_only_loss needs the columns prompt and completion, and "
                f"{table.origin} has '{found[0]}': drop the flag, or give --assistant_only_loss "
                "for conversations"
            )
        self.completion_only = (
            found == PROMPT_COMPLETION and arguments.completion_only_loss is not False
        )
        self.assistant_only = arguments.assistant_only_loss
        if self.assistant_only and not self.conversational:
            raise UsageError(
                f"--assistant_only_loss is for conversations, and {table.origin} has texts: "
                "drop the flag"
            )
        if self.conversational:
            self._check_template()
        #: Prompts whose end is written in another way where a completion follows.
        self.num_mismatched_prompts = 0

    def _check_template(self) -> None:
        try:
            template = self.tokenizer.get_chat_template()
        except ValueError as error:  # it has none, or several of which none is the usual one
            raise UsageError(
                "conversations are written by a chat template, which this tokenizer has not: give "
                "--chat_template_path"
            ) from error
        if not self.assistant_only:
            return
        if not GENERATION_TAG.search(template):
            raise UsageError(
                "--assistant_only_loss: the chat template does not mark what the assistant says by "
                "{% generation %} ... {% endgeneration %}: give one that does with "
                "--chat_template_path"
            )
        if not self.tokenizer.is_fast:
            raise UsageError(
                f"--assistant_only_loss: {type(self.tokenizer).__name__} does not say which "
                "characters a token is of: give a fast tokenizer (a tokenizer.json)"
            )

    def __call__(self, example: Mapping[str, Any]) -> TokenizedExample:
        """Return the tokens of an example.

        **Raises:** BadExample where there is no answer in it, or nothing that can be read.
        """
        if self.columns != PROMPT_COMPLETION:
            value = example[self.columns[0]]
            if self.conversational:
                messages = check_messages(value)
                check_answers(messages)
                return self._write(messages, example)
            return self._all(self._ended(check_text(value, self.columns[0])))
        prompt, completion = (example[name] for name in PROMPT_COMPLETION)
        if isinstance(prompt, list):
            asked, answers = check_messages(prompt), check_messages(completion)
            check_answers(answers)
            begun = self._write(asked, example, opens=True, marked=False).ids
            whole = self._write([*asked, *answers], example)
        else:
            before = check_text(prompt, PROMPT_COMPLETION[0], empty=True)
            begun = self._all(before).ids
            whole = self._all(before + self._ended(check_text(completion, PROMPT_COMPLETION[1])))
        if not self.completion_only:
            return whole
        shared = min(len(begun), len(whole.ids))
        differs = np.flatnonzero(begun[:shared] != whole.ids[:shared])
        given = int(differs[0]) if len(differs) else shared
        self.num_mismatched_prompts += given < len(begun)
        return TokenizedExample(whole.ids, whole.loss_mask & (np.arange(len(whole.ids)) >= given))

    def _ended(self, text: str) -> str:
        end = self.tokenizer.eos_token
        if end is None:
            raise UsageError("the tokenizer has no end-of-text token: name one with --eos_token")
        return text if text.endswith(end) else text + end

    def _all(self, text: str) -> TokenizedExample:
        ids = np.array(self._encode(text)["input_ids"], np.int32)
        return TokenizedExample(ids, np.ones(len(ids), bool))

    def _encode(self, text: str, **options: bool) -> Mapping[str, Any]:
        if SURROGATE.search(text):
            raise InvalidExample("it has half of a surrogate pair, which is no Unicode")
        return self.tokenizer(text, verbose=False, **options)

    def _write(
        self,
        messages: list[dict[str, Any]],
        example: Mapping[str, Any],
        opens: bool = False,
        marked: bool | None = None,
    ) -> TokenizedExample:
        """Write messages by the chat template; with marks the answers alone are learned.

        ``opens`` writes what an answer begins with, too. A token is an answer's where it has a
        character of it: transformers' own mask runs on to the end where an answer ends with a
        space that is no part of a token (``trim_offsets``).
        """
        from jinja2 import TemplateError, TemplateSyntaxError
        from transformers.utils.chat_template_utils import render_jinja_template

        marked = self.assistant_only if marked is None else marked
        tools = example.get("tools")
        try:
            own = example.get("chat_template_kwargs") or {}
            options = self.tokenizer.special_tokens_map | own
            tools = json.loads(tools) if isinstance(tools, str) else tools
            written: Any = render_jinja_template(  # whose annotation says another thing
                [messages],
                tools=tools,
                return_assistant_tokens_mask=marked,
                chat_template=self.tokenizer.get_chat_template(tools=tools),
                add_generation_prompt=opens,
                **options,
            )
        except TemplateSyntaxError as error:
            raise UsageError(
                f"the chat template is not valid, line {error.lineno}: {error.message}"
            ) from error
        except (TemplateError, TypeError, ValueError) as error:
            raise InvalidExample(f"the chat template refuses it: {first_line(error)}") from error
        texts, spans = written
        made = self._encode(texts[0], add_special_tokens=False, return_offsets_mapping=marked)
        ids = np.array(made["input_ids"], np.int32)
        if not marked:
            return TokenizedExample(ids, np.ones(len(ids), bool))
        learned, before = [], 0
        for start, stop in made["offset_mapping"]:
            start = before if start == stop else start  # of space that was trimmed away
            learned.append(any(start < last and stop > first for first, last in spans[0]))
            before = stop
        return TokenizedExample(ids, np.array(learned, bool))

    def end_of_turn(self) -> tuple[str | None, bool]:
        """Return the token that ends an answer, if there is one, and whether it is learned."""
        turns = [("user", "a"), ("assistant", "b"), ("user", "c")]
        messages = [{"role": role, "content": content} for role, content in turns]
        try:
            # Some templates do not end the last turn: what follows it may belong to it.
            tokens = self._write(messages if self.assistant_only else messages[:2], {})
        except InvalidExample:  # it has wishes that nobody can know
            return None, True
        ids = tokens.ids[tokens.loss_mask].tolist()
        while ids and not str(self.tokenizer.decode(ids[-1:])).strip():
            ids.pop()
        added = set(self.tokenizer.get_added_vocab().values()) | set(self.tokenizer.all_special_ids)
        if ids and ids[-1] in added:
            return str(self.tokenizer.convert_ids_to_tokens(ids[-1])), True
        return None, not self.assistant_only


def check_text(value: object, column: str, empty: bool = False) -> str:
    """Return a text; BadExample for what is none, or has nothing in it."""
    if not isinstance(value, str):
        raise InvalidExample(f"the {column} is no text but {value!r:.60}")
    if not empty and not value.strip():
        raise InvalidExample(f"the {column} is empty")
    return value


def check_messages(value: object) -> list[dict[str, Any]]:
    """Return messages with a role and a content each; BadExample for what are none."""
    if not isinstance(value, list) or not value:
        raise InvalidExample(f"messages are a list, and not {value!r:.60}")
    messages = []
    for number, message in enumerate(value, 1):
        if not isinstance(message, dict):
            raise InvalidExample(f"message {number} has no role and content but is {message!r:.60}")
        # What a table has for a message that lacks a key.
        known = {name: part for name, part in message.items() if part is not None}
        if "from" in known:
            known["role"] = ROLE_NAMES.get(str(known["from"]), known.pop("from"))
        if "value" in known:
            known["content"] = known.pop("value")
        for name in ("role", "content"):
            if not isinstance(known.get(name), str) and not (
                name == "content" and known.get("tool_calls")
            ):
                told = f"{name} {known[name]!r:.60}" if name in known else f"no {name}"
                raise InvalidExample(f"message {number} has {told}: a {name} is a text")
        messages.append(known)
    return messages


def check_answers(messages: Sequence[Mapping[str, Any]]) -> None:
    """Raise BadExample where the assistant says nothing."""
    answers = [one for one in messages if one["role"] == "assistant"]
    if not answers:
        raise InvalidExample("there is no assistant turn")
    if not all(one.get("content", "").strip() or one.get("tool_calls") for one in answers):
        raise InvalidExample("an assistant turn is empty")


def encode_examples(
    encode: ChatEncoder, records: Records, split: str, max_length: int
) -> tuple[list[TokenizedExample], int]:
    """Return the examples of a split as tokens, ``length`` at most, without bad ones.

    Returns how many were cut, too. An example is bad where nothing that is learned is left of it:
    the first token of a row is not, as nothing comes before it.
    """
    made, problems, cut = [], {}, 0
    for row in range(len(records)):
        try:
            tokens = encode(records[row])
            if not tokens.loss_mask[1:max_length].any():
                long = tokens.loss_mask[max_length:].any()
                raise InvalidExample(
                    f"nothing of the answer is among its first {max_length} tokens, of "
                    f"{len(tokens.ids)} (--max_length)"
                    if long
                    else "no token of it is learned"
                )
        except InvalidExample as bad:
            problems[row] = str(bad)
            continue
        cut += len(tokens.ids) > max_length
        made.append(TokenizedExample(tokens.ids[:max_length], tokens.loss_mask[:max_length]))
    drop_invalid(records, split, problems, encode.arguments)
    if encode.num_mismatched_prompts:
        logger.warning(
            "%d %s prompts end in another way where a completion follows; what is learned begins "
            "where they differ. Let a prompt end where a token does, or give a chat template that "
            "writes both alike (--chat_template_path)",
            encode.num_mismatched_prompts,
            split,
        )
    return made, cut


def best_fit_decreasing(lengths: Sequence[int], capacity: int) -> list[list[int]]:
    """Say which documents share a row: longest first, each into the fullest row with room for it.

    No length is above ``room``. Of rows that are equally full the one that was first is taken.
    """
    rows: list[list[int]] = []
    with_room: list[deque[int]] = [deque() for _ in range(capacity + 1)]  # rows by what is free
    known: list[int] = []  # the sizes of free parts that there are, in order
    for document in np.argsort(-np.asarray(lengths), kind="stable").tolist():
        at = bisect_left(known, lengths[document])
        if at == len(known):
            free, row = capacity, len(rows)
            rows.append([])
        else:
            free = known[at]
            row = with_room[free].popleft()
            if not with_room[free]:
                del known[at]
        rows[row].append(document)
        free -= lengths[document]
        if free and not with_room[free]:
            insort(known, free)
        with_room[free].append(row)
    return rows


class PackedChatRows(PackedRows):
    """Rows of whole examples; "learned" is 1 at tokens that are learned, 0 elsewhere."""

    def __init__(self, examples: Sequence[TokenizedExample], pad: int, length: int):
        rows = best_fit_decreasing([len(one.ids) for one in examples], length)
        ordered = [examples[number] for row in rows for number in row]
        offsets = np.array([0, *accumulate(len(one.ids) for one in ordered)], np.int64)
        ids, learned = (np.concatenate(part) for part in zip(*ordered, strict=True))
        super().__init__(TokenStore(ids, offsets, pad), length)
        self.loss_mask = TokenStore(learned.astype(np.int32), offsets)
        #: Where each row begins in the store, and the last one ends.
        self.row_offsets = offsets[[0, *accumulate(map(len, rows))]]

    def __len__(self) -> int:
        return len(self.row_offsets) - 1

    @property
    def total_tokens(self) -> int:
        """Tokens of all rows, without padding."""
        return self.store.total_tokens

    def spans(self, indices: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
        """Return where in the store these rows begin, and how many tokens each has."""
        starts = self.row_offsets[np.asarray(indices)]
        return starts, self.row_offsets[np.asarray(indices) + 1] - starts

    def fetch(self, indices: np.ndarray, width: int | None = None) -> dict[str, np.ndarray]:
        """Copy these rows out."""
        gathered, _ = self.loss_mask.gather(*self.spans(indices), self.length)
        return super().fetch(indices, width) | {"learned": gathered["input_ids"]}
