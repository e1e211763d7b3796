"""The base class of the text pipelines: batched inference with a model and its tokenizer.

:class:`Pipeline` reads inputs in windows, sorts their rows by length, and pads them to a few widths
and numbers of rows, so that few programs are compiled. It returns answers in the order of the
inputs. The tasks are in :mod:`hfseq.pipelines.tasks` and :mod:`hfseq.pipelines.generation`.
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

#: Number of batches whose rows are sorted by length together.
WINDOW_BATCHES = 16


@dataclass
class Row:
    """A row of a batch.

    Attributes:
        ids: Token IDs.
        token_type_ids: Token type IDs, if the tokenizer returns them.
        positions: Positions whose logits are required, if not all are.
        metadata: Data that the task needs for postprocessing.
    """

    ids: Sequence[int]
    token_type_ids: Sequence[int] | None = None
    positions: Sequence[int] | None = None
    metadata: Any = None


class RejectedInput(str):
    """The reason why an input has no answer."""


Options = Mapping[str, Any]
#: Model outputs for a row by name. Per-token outputs exclude padding.
Outputs = Mapping[str, np.ndarray]


class Pipeline:
    """Base class of the pipelines that :func:`hfseq.pipeline` returns.

    A call with one input returns its answer, and a call with a list returns a list. A call with an
    iterator or a ``Path`` returns an iterator. A ``Path`` is a table with named columns, or a text
    file with one input per line. Answers are yielded when a window of 16 batches is complete.

    Args:
        model: The model.
        tokenizer: Its tokenizer.
        task: Name of the task in messages.
        batch_size: Maximum number of rows per batch.
        progress: Whether to show a progress bar.
        **options: Default options of the task.

    Raises:
        UsageError: Unknown option, or invalid ``batch_size``.
    """

    #: Suffix of the model class's name.
    head: ClassVar[str]
    #: Options with their defaults. ``None`` if the task accepts all options of ``generate``.
    defaults: ClassVar[Mapping[str, Any] | None]
    #: Whether outputs are per token (or position) instead of per row.
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
            raise UsageError(f"batch_size must be at least 1, not {batch_size}")
        self.model, self.tokenizer, self.task = model, tokenizer, task
        self.batch_size, self.progress = batch_size, progress
        self.options = self._checked(options)
        model_limit = model.max_length()
        tokenizer_limit = getattr(tokenizer, "model_max_length", None)
        # 1e30 stands for "no limit".
        if tokenizer_limit is not None and tokenizer_limit > 1_000_000:
            tokenizer_limit = None
        #: Maximum tokens per row, and the length to which rows are truncated.
        self.max_positions = model_limit
        self.truncation_length = min(
            (limit for limit in (model_limit, tokenizer_limit) if limit), default=None
        )
        self._compiled = jax.jit(self.forward)
        self._uses_token_types = model.accepts("token_type_ids")

    # -- methods that tasks define

    def encode(self, inputs: Sequence[Any], options: Options) -> list[list[Row] | RejectedInput]:
        """Returns the rows of each input, or the reason why it is rejected."""
        raise NotImplementedError

    def forward(self, params: Any, inputs: Mapping[str, Any]) -> dict[str, jax.Array]:
        """Runs the model on a batch.

        Traced by ``jit``; each returned array has one row per batch row.
        """
        raise NotImplementedError

    def postprocess(
        self, inputs: Any, rows: list[Row], outputs: list[Outputs], options: Options
    ) -> Any:
        """Returns the answer to an input from the model outputs for its rows."""
        raise NotImplementedError

    def run_batch(self, inputs: Mapping[str, np.ndarray], options: Options) -> Outputs:
        """Returns the model outputs for a batch."""
        return self._compiled(self.model.params, distribute(inputs, self.model.params))

    def format_single(self, answer: Any, inputs: Any, options: Options) -> Any:
        """Formats the answer to a single input as Transformers 4 did."""
        return answer

    def format_list(self, answers: list[Any], options: Options) -> list[Any]:
        """Formats the answers to a list of inputs as Transformers 4 did."""
        return answers

    def is_single_input(self, inputs: Any) -> bool:
        """Returns whether ``inputs`` is one input."""
        return isinstance(inputs, str | Mapping)

    @classmethod
    def auto_class(cls) -> Any:
        """Returns the Auto class for the task's models."""
        from hfseq.modeling import auto

        return getattr(auto, f"Flax{auto_class_name(cls.head)}")

    @classmethod
    def check_head(cls, model: FlaxPreTrainedModel, name: str) -> None:
        """Checks that a checkpoint has weights for the task's head.

        Raises:
            UsageError: The head would be initialized at random.
        """
        if cls.head == "Model" or model.peft_config is not None:
            return
        stored = class_names(model.config.to_dict())
        classes = ("ForSequenceClassification", "ForTokenClassification", "ForQuestionAnswering")
        endings = (cls.head,) if cls.head in classes else ("LM", "PreTraining", "Generation", "MT")
        has_name = any(end in class_name for end in endings for class_name in stored)
        if stored and not has_name or model._fresh_head:
            fresh = ", ".join(model._fresh_head[:3])
            raise UsageError(
                f"'{name}' contains {' '.join(stored) or 'weights'}, which has no head {cls.head}. "
                f"The head would be initialized at random{f' ({fresh})' if fresh else ''}. "
                "Fine-tune the model first."
            )
        if cls.head == "ForCausalLM":
            try:
                model.init_cache(1, 1)
            except UsageError as error:
                raise UsageError(
                    f"'{name}' contains {' '.join(stored)}, which cannot continue a text: {error}"
                ) from error

    # -- shared methods

    def __call__(self, inputs: Any, *, batch_size: int | None = None, **options: Any) -> Any:
        """Computes the answers to one or more inputs.

        Args:
            inputs: An input, or a list, iterator or file of inputs.
            batch_size: Overrides the pipeline's batch size.
            **options: Override the pipeline's default options.

        Raises:
            UsageError: An option is unknown, an input has the wrong type, or an input is longer
                than the model supports and must not be truncated. The message contains the number
                of the input.
        """
        all_options = {**self.options, **self._checked(options)}
        arguments = batch_size, all_options
        if self.is_single_input(inputs):
            return self.format_single(next(self._answers([inputs], *arguments)), inputs, options)
        if isinstance(inputs, list | tuple):
            return self.format_list(list(self._answers(inputs, *arguments)), options)
        if isinstance(inputs, Path):
            return self._answers((row for _, row in read_inputs(str(inputs))), *arguments)
        if isinstance(inputs, Iterable):
            return self._answers(inputs, *arguments)
        raise UsageError(
            f"{self.task}: input must be a text, list, iterator or Path, not {inputs!r:.60}"
        )

    def _answers(
        self, inputs: Iterable[Any], batch_size: int | None, options: Options
    ) -> Iterator[Any]:
        from tqdm import tqdm

        total = len(inputs) if isinstance(inputs, Sequence) else None
        with tqdm(total=total, disable=not self.progress, unit=" inputs") as bar:
            for number, answer in enumerate(self.stream(inputs, batch_size, options), 1):
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
        """Yields the answer to each input in order, or a :class:`RejectedInput` without an answer.

        Args:
            inputs: The inputs.
            batch_size: Overrides the pipeline's batch size.
            options: Options of the task, by default the pipeline's.
            pause: Seconds without a new input after which the inputs read so far are processed.
                ``None`` waits for complete windows.
        """
        size = batch_size or self.batch_size
        stream_options = self.options if options is None else options
        for window in read_windows(inputs, WINDOW_BATCHES * size, size, pause):
            encoded = self.encode(window, stream_options)
            for number, rows in enumerate(encoded):
                if not isinstance(rows, RejectedInput) and (problem := self._too_long(rows)):
                    encoded[number] = RejectedInput(problem)
            rows = [
                row
                for input_rows in encoded
                if not isinstance(input_rows, RejectedInput)
                for row in input_rows
            ]
            outputs = iter(self._run(rows, size, stream_options))
            for item, item_rows in zip(window, encoded, strict=True):
                if isinstance(item_rows, RejectedInput):
                    yield item_rows
                else:
                    yield self.postprocess(
                        item, item_rows, [next(outputs) for _ in item_rows], stream_options
                    )

    def _too_long(self, rows: Sequence[Row]) -> str | None:
        longest = max((len(row.ids) for row in rows), default=0)
        if not longest:
            return "it contains no tokens"
        if self.max_positions and longest > self.max_positions:
            return (
                f"{longest} tokens exceed the model's {self.max_positions} positions. Shorten it, "
                "or set truncation=True."
            )
        return None

    def _run(self, rows: Sequence[Row], size: int, options: Options) -> list[Outputs]:
        """Returns the model outputs for rows.

        The longest rows run first, so that memory fails early.
        """
        results: dict[int, Outputs] = {}
        order = sorted(range(len(rows)), key=lambda row: -len(rows[row].ids))
        while order:
            first = rows[order[0]]
            max_rows = self.max_rows(self.padded_width(len(first.ids)), size)
            numbers = order[:max_rows]
            compatible = [self.can_share_batch(first, rows[number], options) for number in numbers]
            numbers = numbers[: compatible.index(False)] if False in compatible else numbers
            order = order[len(numbers) :]
            batch = [rows[number] for number in numbers]
            inputs = self._padded(batch, padded_row_count(len(batch), max_rows))
            outputs = {
                name: np.asarray(value) for name, value in self.run_batch(inputs, options).items()
            }
            for position, (number, row) in enumerate(zip(numbers, batch, strict=True)):
                row_positions = row.ids if row.positions is None else row.positions
                valid = slice(0, len(row_positions) if self.per_token else None)
                results[number] = {name: array[position][valid] for name, array in outputs.items()}
        return [results[number] for number in range(len(rows))]

    def _padded(self, rows: Sequence[Row], count: int) -> dict[str, np.ndarray]:
        """Returns arrays `(count, width)` for rows. Missing rows are copies of the last one."""
        width = self.padded_width(max(len(row.ids) for row in rows))
        padded_rows = [*rows, *[rows[-1]] * (count - len(rows))]
        pad = self.tokenizer.pad_token_id or 0
        inputs = {"input_ids": np.full((count, width), pad, np.int32)}
        inputs["attention_mask"] = np.zeros_like(inputs["input_ids"])
        if self._uses_token_types and rows[0].token_type_ids is not None:
            inputs["token_type_ids"] = np.zeros_like(inputs["input_ids"])
        if rows[0].positions is not None:
            num_positions = max(len(row.positions or ()) for row in rows)
            inputs["positions"] = np.zeros((count, bucket_length(num_positions, None, 4)), np.int32)
        for index, row in enumerate(padded_rows):
            columns = self.token_columns(len(row.ids), width)
            inputs["input_ids"][index, columns] = row.ids
            inputs["attention_mask"][index, columns] = 1
            if row.token_type_ids is not None and "token_type_ids" in inputs:
                inputs["token_type_ids"][index, columns] = row.token_type_ids
            if row.positions is not None:
                inputs["positions"][index, : len(row.positions)] = row.positions
        return inputs

    def can_share_batch(self, first: Row, row: Row, options: Options) -> bool:
        """Returns whether a row may share a batch with a longer row, less than twice as wide."""
        return 2 * self.padded_width(len(row.ids)) > self.padded_width(len(first.ids))

    def padded_width(self, length: int) -> int:
        """Returns the width to which rows are padded."""
        return text_width(length, self.max_positions)

    def max_rows(self, width: int, size: int) -> int:
        """Returns the number of rows of a width per batch, at most ``size``."""
        return rows_per_chunk(width, size)

    def token_columns(self, length: int, width: int) -> slice:
        """Returns the columns of a row with ``length`` tokens."""
        return slice(0, length)

    def tokenize(
        self,
        texts: Sequence[Any],
        pairs: Sequence[Any] | None = None,
        truncation: bool | str = False,
        max_length: int | None = None,
        **options: Any,
    ) -> Any:
        """Calls the tokenizer. Truncation is to the model's maximum length by default."""
        if truncation:
            options |= {
                "truncation": truncation,
                "max_length": max_length or self.truncation_length,
            }
            if options["max_length"] is None:
                del options["truncation"], options["max_length"]
        texts_and_pairs = (list(texts),) if pairs is None else (list(texts), list(pairs))
        return self.tokenizer(*texts_and_pairs, verbose=False, **options)

    def _checked(self, options: Options) -> dict[str, Any]:
        if self.defaults is not None:
            for name in options:
                if name not in self.defaults:
                    option_names = ", ".join(self.defaults)
                    raise UsageError(
                        f"{self.task or type(self).__name__} has no option '{name}'"
                        f"{did_you_mean(name, self.defaults)}; its options are {option_names}"
                    )
        return dict(options)


def padded_row_count(count: int, max_rows: int) -> int:
    """Returns the number of rows to which a batch of ``count`` rows is padded: 1, 4, 16, ...

    The result is at most ``max_rows``.
    """
    num_rows = 1
    while num_rows < count:
        num_rows *= 4
    return min(num_rows, max_rows)


def read_inputs(name: str, replace: bool = False) -> Iterator[tuple[str, Any]]:
    """Yields the location and value of each input in a file: table rows as dicts, or lines.

    Lines with invalid UTF-8 are :class:`~hfseq.pipelines.lines.BadLine` objects.

    Args:
        name: Path of a table or text file. ``-`` reads lines from standard input.
        replace: Whether lines with invalid UTF-8 are usable, with replacement characters.
    """
    if name != "-" and extension_of(name) in FORMATS:
        table = flatten_squad(read_table(name, "--input_file", RecordArguments()))
        for row in range(len(table)):
            yield table.place(row), {column: table.columns[column][row] for column in table.columns}
        return
    display_name = "<stdin>" if name == "-" else name
    for number, line in enumerate(read_lines(open_input(name), display_name, replace), 1):
        yield f"{display_name}:{number}", line


def input_text(item: Any, name: str) -> str | RejectedInput:
    """Returns the text of an input, or of its column ``name``."""
    text = item.get(name) if isinstance(item, Mapping) else item
    if isinstance(text, BadLine) and not text.usable:
        return RejectedInput(text.problem)
    if isinstance(text, str):
        return text
    subject = f"its '{name}'" if isinstance(item, Mapping) else "it"
    return RejectedInput(f"{subject} must be a text, not {text!r:.60}")


def distribute(inputs: Mapping[str, np.ndarray], params: Any) -> Mapping[str, Any]:
    """Shards rows over the data axes of the mesh of the parameters, if they have one."""
    sharding = getattr(next(iter(jax.tree.leaves(params)), None), "sharding", None)
    if not isinstance(sharding, NamedSharding) or not sharding.is_fully_addressable:
        return inputs
    axes = [name for name in ("data", "fsdp") if sharding.mesh.shape.get(name, 1) > 1]
    shards = int(np.prod([sharding.mesh.shape[name] for name in axes]))
    if not axes or len(next(iter(inputs.values()))) % shards:
        return inputs
    batch_sharding = NamedSharding(sharding.mesh, PartitionSpec(tuple(axes)))
    return {name: jax.device_put(array, batch_sharding) for name, array in inputs.items()}
