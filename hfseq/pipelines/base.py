"""A model and its tokenizer at work on any number of inputs, in batches of similar length.

:class:`Pipeline` reads inputs in windows, sorts the rows that they make by length, pads them to
few widths and numbers of rows, so that few programs are compiled, and gives answers in the order of
the inputs. The tasks are in :mod:`hfseq.pipelines.tasks` and :mod:`hfseq.pipelines.generation`.
"""

from __future__ import annotations

import logging
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any, ClassVar

import jax
import numpy as np
from jax.sharding import NamedSharding, PartitionSpec

from hfseq.checkpoints.config import class_names
from hfseq.data.arguments import RecordArguments
from hfseq.data.files import extension_of
from hfseq.data.question_answering import flatten_squad
from hfseq.data.tables import FORMATS, read_table
from hfseq.errors import UsageError, did_you_mean
from hfseq.generation.request import bucket_length, text_width
from hfseq.nn.cpu import rows_per_chunk
from hfseq.pipelines.lines import BadLine, open_input, read_lines, read_windows
from hfseq.plugins.registry import auto_class_name

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerBase

    from hfseq.modeling import FlaxPreTrainedModel

logger = logging.getLogger(__name__)

#: Batches that are sorted by length together.
WINDOW_BATCHES = 16


@dataclass
class Row:
    """Tokens that become a row of a batch.

    types: of the tokens, where the tokenizer has them. places: those whose logits are asked for,
    where not all are. notes: what the task wants to know when it answers.
    """

    ids: Sequence[int]
    types: Sequence[int] | None = None
    places: Sequence[int] | None = None
    notes: Any = None


class RejectedInput(str):
    """Why an input has no answer."""


Options = Mapping[str, Any]
#: What the model says of a row, by name; of tokens only those that are no padding.
Outputs = Mapping[str, np.ndarray]


class Pipeline:
    """What :func:`hfseq.pipeline` returns: called with an input, a list, an iterator or a file.

    An input gives its answer, a list a list, an iterator (or a ``Path``: a table with named
    columns, or a text a line) an iterator, whose answers come as soon as a window of 16 batches is
    there. ``options`` are the task's own, given here or with the call.
    """

    #: The end of the model class's name.
    head: ClassVar[str]
    #: Options with their defaults; ``None`` where the task takes whatever ``generate`` takes.
    defaults: ClassVar[Mapping[str, Any] | None]
    #: Whether the model says something of each token (or place), and not of the whole row.
    per_token: ClassVar[bool] = False

    def __init__(
        self,
        model: FlaxPreTrainedModel,
        tokenizer: PreTrainedTokenizerBase,
        task: str = "",
        *,
        batch_size: int = 8,
        progress: bool = False,
        **options: Any,
    ):
        if batch_size < 1:
            raise UsageError(f"batch_size {batch_size}: give a number of at least 1")
        self.model, self.tokenizer, self.task = model, tokenizer, task
        self.batch_size, self.progress = batch_size, progress
        self.options = self._checked(options)
        limit, most = model.max_length(), getattr(tokenizer, "model_max_length", None)
        if most is not None and most > 1_000_000:  # 1e30 stands for "no limit"
            most = None
        #: Tokens that a row may have at all, and those to which it is truncated.
        self.room = limit
        self.limit = min((one for one in (limit, most) if one), default=None)
        self._compiled = jax.jit(self.forward)
        self._typed = model.accepts("token_type_ids")

    # -- what a task defines

    def encode(self, inputs: Sequence[Any], options: Options) -> list[list[Row] | RejectedInput]:
        """Return the rows of each input, or why it is refused."""
        raise NotImplementedError

    def forward(self, params: Any, inputs: Mapping[str, Any]) -> dict[str, jax.Array]:
        """Run the model on a batch; traced. Arrays have a row for each of the batch."""
        raise NotImplementedError

    def answer(self, given: Any, rows: list[Row], outputs: list[Outputs], options: Options) -> Any:
        """Return the answer to an input from what the model says of its rows."""
        raise NotImplementedError

    def run_batch(self, inputs: Mapping[str, np.ndarray], options: Options) -> Outputs:
        """Return what the model says of a batch."""
        return self._compiled(self.model.params, distribute(inputs, self.model.params))

    def single(self, answer: Any, given: Any, options: Options) -> Any:
        """Shape the answer to an input that stood alone, as Transformers 4 did."""
        return answer

    def several(self, answers: list[Any], options: Options) -> list[Any]:
        """Shape the answers to a list, as Transformers 4 did."""
        return answers

    def is_one(self, inputs: Any) -> bool:
        """Tell one input from several."""
        return isinstance(inputs, str | Mapping)

    @classmethod
    def auto_class(cls) -> Any:
        """Return the Auto class that loads the task's models."""
        from hfseq.modeling import auto

        return getattr(auto, f"Flax{auto_class_name(cls.head)}")

    @classmethod
    def check_head(cls, model: FlaxPreTrainedModel, name: str) -> None:
        """Refuse a checkpoint without the task's head, whose weights would be random."""
        stored = class_names(model.config.to_dict())
        classes = ("ForSequenceClassification", "ForTokenClassification", "ForQuestionAnswering")
        ends = (cls.head,) if cls.head in classes else ("LM", "PreTraining", "Generation", "MT")
        fits = cls.head == "Model" or model.peft_config is not None or not stored
        if not fits and not any(end in one for end in ends for one in stored):
            raise UsageError(
                f"'{name}' holds {' '.join(stored)}, which has no head {cls.head}: it would be "
                "random. Fine-tune it first"
            )

    # -- what all do

    def __call__(self, inputs: Any, *, batch_size: int | None = None, **options: Any) -> Any:
        """Answer.

        **Raises:** UsageError for an unknown option, an input of another kind, or one that is
        longer than the model reads where it may not be truncated; it says which.
        """
        chosen = {**self.options, **self._checked(options)}
        given = batch_size, chosen, options
        if self.is_one(inputs):
            return self.single(next(self._answers([inputs], *given)), inputs, options)
        if isinstance(inputs, list | tuple):
            return self.several(list(self._answers(inputs, *given)), options)
        if isinstance(inputs, Path):
            return self._answers((one for _, one in read_inputs(str(inputs))), *given)
        if isinstance(inputs, Iterable):
            return self._answers(inputs, *given)
        raise UsageError(f"{self.task}: {inputs!r:.60} is no text, list, iterator or Path")

    def _answers(
        self, inputs: Iterable[Any], batch_size: int | None, chosen: Options, given: Options
    ) -> Iterator[Any]:
        from tqdm import tqdm

        total = len(inputs) if isinstance(inputs, Sequence) else None
        with tqdm(total=total, disable=not self.progress, unit=" inputs") as bar:
            for number, answer in enumerate(self.stream(inputs, batch_size, chosen), 1):
                if isinstance(answer, RejectedInput):
                    raise UsageError(f"{self.task}: input {number}: {answer}")
                bar.update()
                yield answer

    def stream(
        self,
        inputs: Iterable[Any],
        batch_size: int | None = None,
        options: Options | None = None,
        pause: float | None = None,
    ) -> Iterator[Any]:
        """Yield the answer to each input, in order; a :class:`Refused` where there is none.

        With a ``pause`` what has come is answered when nothing comes for so many seconds.
        """
        size, chosen = batch_size or self.batch_size, self.options if options is None else options
        for window in read_windows(inputs, WINDOW_BATCHES * size, size, pause):
            encoded = self.encode(window, chosen)
            for number, rows in enumerate(encoded):
                if not isinstance(rows, RejectedInput) and (why := self._too_long(rows)):
                    encoded[number] = RejectedInput(why)
            rows = [row for one in encoded if not isinstance(one, RejectedInput) for row in one]
            outputs = iter(self._run(rows, size, chosen))
            for given, own in zip(window, encoded, strict=True):
                if isinstance(own, RejectedInput):
                    yield own
                else:
                    yield self.answer(given, own, [next(outputs) for _ in own], chosen)

    def _too_long(self, rows: Sequence[Row]) -> str | None:
        longest = max((len(row.ids) for row in rows), default=0)
        if not longest:
            return "there is no token in it"
        if self.room and longest > self.room:
            return (
                f"{longest} tokens are more than the {self.room} that the model reads: shorten "
                "it, or let it be cut by truncation=True"
            )
        return None

    def _run(self, rows: Sequence[Row], size: int, options: Options) -> list[Outputs]:
        """Return what the model says of rows, the longest first so that memory fails early."""
        done: dict[int, Outputs] = {}
        order = sorted(range(len(rows)), key=lambda row: -len(rows[row].ids))
        while order:
            first = rows[order[0]]
            most = self.rows(self.width(len(first.ids)), size)
            numbers = order[:most]
            alike = [self.together(first, rows[number], options) for number in numbers]
            numbers = numbers[: alike.index(False)] if False in alike else numbers
            order = order[len(numbers) :]
            batch = [rows[number] for number in numbers]
            inputs = self._padded(batch, padded_row_count(len(batch), most))
            made = {name: np.asarray(a) for name, a in self.run_batch(inputs, options).items()}
            for place, (number, row) in enumerate(zip(numbers, batch, strict=True)):
                kept = row.ids if row.places is None else row.places
                cut = slice(0, len(kept) if self.per_token else None)
                done[number] = {name: array[place][cut] for name, array in made.items()}
        return [done[number] for number in range(len(rows))]

    def _padded(self, rows: Sequence[Row], count: int) -> dict[str, np.ndarray]:
        """Return rows as arrays (count, width); those that fill up repeat the last."""
        width = self.width(max(len(row.ids) for row in rows))
        filled = [*rows, *[rows[-1]] * (count - len(rows))]
        pad = self.tokenizer.pad_token_id or 0
        inputs = {"input_ids": np.full((count, width), pad, np.int32)}
        inputs["attention_mask"] = np.zeros_like(inputs["input_ids"])
        if self._typed and rows[0].types is not None:
            inputs["token_type_ids"] = np.zeros_like(inputs["input_ids"])
        if rows[0].places is not None:
            most = max(len(row.places or ()) for row in rows)
            inputs["places"] = np.zeros((count, bucket_length(most, None, 4)), np.int32)
        for number, row in enumerate(filled):
            own = self.columns(len(row.ids), width)
            inputs["input_ids"][number, own] = row.ids
            inputs["attention_mask"][number, own] = 1
            if row.types is not None and "token_type_ids" in inputs:
                inputs["token_type_ids"][number, own] = row.types
            if row.places is not None:
                inputs["places"][number, : len(row.places)] = row.places
        return inputs

    def together(self, first: Row, row: Row, options: Options) -> bool:
        """Tell whether a row may be in the batch of a longer one: it must not be twice as wide."""
        return 2 * self.width(len(row.ids)) > self.width(len(first.ids))

    def width(self, longest: int) -> int:
        """Return the width to which rows are padded."""
        return text_width(longest, self.room)

    def rows(self, width: int, size: int) -> int:
        """Return how many rows of a width make a batch, at most ``size``."""
        return rows_per_chunk(width, size)

    def columns(self, length: int, width: int) -> slice:
        """Return where a row of ``length`` tokens stands."""
        return slice(0, length)

    def tokenize(
        self,
        texts: Sequence[Any],
        pairs: Sequence[Any] | None = None,
        truncation: bool | str = False,
        max_length: int | None = None,
        **more: Any,
    ) -> Any:
        """Call the tokenizer; what is truncated is truncated to what the model reads."""
        if truncation:
            more |= {"truncation": truncation, "max_length": max_length or self.limit}
            if more["max_length"] is None:
                del more["truncation"], more["max_length"]
        both = (list(texts),) if pairs is None else (list(texts), list(pairs))
        return self.tokenizer(*both, verbose=False, **more)

    def _checked(self, options: Options) -> dict[str, Any]:
        if self.defaults is not None:
            for name in options:
                if name not in self.defaults:
                    known = ", ".join(self.defaults)
                    raise UsageError(
                        f"{self.task or type(self).__name__} takes no '{name}'"
                        f"{did_you_mean(name, self.defaults)}; it has {known}"
                    )
        return dict(options)


def padded_row_count(count: int, most: int) -> int:
    """Return with how many rows a batch of ``count`` is run: 1, 4, 16 and so on, or ``most``."""
    filled = 1
    while filled < count:
        filled *= 4
    return min(filled, most)


def read_inputs(name: str, replace: bool = False) -> Iterator[tuple[str, Any]]:
    """Yield the inputs of a file and where each stands: rows of a table by column, or lines.

    What is no UTF-8 comes as a :class:`~hfseq.pipelines.lines.BadLine`; ``replace`` lets it be
    used. ``-`` is standard input, which has lines.
    """
    if name != "-" and extension_of(name) in FORMATS:
        table = flatten_squad(read_table(name, "--input_file", RecordArguments()))
        for row in range(len(table)):
            yield table.place(row), {column: table.columns[column][row] for column in table.columns}
        return
    shown = "<stdin>" if name == "-" else name
    for number, line in enumerate(read_lines(open_input(name), shown, replace), 1):
        yield f"{shown}:{number}", line


def input_text(given: Any, name: str) -> str | RejectedInput:
    """Return the text of an input, or of its column ``name``."""
    text = given.get(name) if isinstance(given, Mapping) else given
    if isinstance(text, BadLine) and not text.usable:
        return RejectedInput(text.problem)
    if isinstance(text, str):
        return text
    what = f"its '{name}'" if isinstance(given, Mapping) else "it"
    return RejectedInput(f"{what} is no text but {text!r:.60}")


def distribute(inputs: Mapping[str, np.ndarray], params: Any) -> Mapping[str, Any]:
    """Distribute rows over the data axes of the mesh on which parameters lie, if they do."""
    sharding = getattr(next(iter(jax.tree.leaves(params)), None), "sharding", None)
    if not isinstance(sharding, NamedSharding) or not sharding.is_fully_addressable:
        return inputs
    axes = [name for name in ("data", "fsdp") if sharding.mesh.shape.get(name, 1) > 1]
    shards = int(np.prod([sharding.mesh.shape[name] for name in axes]))
    if not axes or len(next(iter(inputs.values()))) % shards:
        return inputs
    placed = NamedSharding(sharding.mesh, PartitionSpec(tuple(axes)))
    return {name: jax.device_put(array, placed) for name, array in inputs.items()}
