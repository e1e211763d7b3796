"""The base class of the pipelines: batched inference with a model and its processors.

A task converts each input to rows. A row is one entry of a batch, such as a text, or one window of
a long text. :class:`Pipeline` reads a window of several batches of inputs at a time and sorts their
rows by length. It pads batches to a small number of different shapes, so that few programs are
compiled. The answers have the order of the inputs.

The tasks are in :mod:`hfseq.pipelines.tasks`, :mod:`hfseq.pipelines.generation`,
:mod:`hfseq.pipelines.images` and :mod:`hfseq.pipelines.speech`. :func:`hfseq.pipeline` creates
their pipelines. The commands, and the evaluation of generated texts during training, use the same
classes.
"""

from __future__ import annotations

import logging
from collections.abc import Iterable, Iterator, Mapping, Sequence, Sized
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING, Any, ClassVar

import jax
import numpy as np
from jax.sharding import NamedSharding, PartitionSpec

from hfseq.checkpoints.config import class_names
from hfseq.data.arguments import RecordArguments
from hfseq.data.files import extension_of
from hfseq.data.question_answering import flatten_squad
from hfseq.data.sources import UnreadableError
from hfseq.data.tables import FORMATS, read_table
from hfseq.errors import UsageError, did_you_mean, first_line
from hfseq.generation.request import bucket_length, text_width
from hfseq.nn.cpu import rows_per_chunk
from hfseq.nn.sharding import BATCH_AXES
from hfseq.pipelines.lines import BadLine, open_input, read_lines, read_windows
from hfseq.plugins.registry import auto_class_name

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerBase

    from hfseq.modeling import FlaxPreTrainedModel

logger = logging.getLogger(__name__)

#: Number of batches in a window. The rows of a window are sorted by length.
WINDOW_BATCHES = 16


@dataclass
class Row:
    """A row of a batch.

    Attributes:
        ids: Token IDs. Empty for images and audio.
        token_type_ids: Token type IDs, if the tokenizer returns them.
        positions: Positions whose logits the task requires, or `None` for all positions.
        metadata: Additional data of the task, for example pixel values.
        warning: A warning about the input, for example that it was truncated.
    """

    ids: Sequence[int] = ()
    token_type_ids: Sequence[int] | None = None
    positions: Sequence[int] | None = None
    metadata: Any = None
    warning: str | None = None


class RejectedInput(str):
    """Replaces the rows or outputs of an input without an answer. Its text is the reason."""


@dataclass
class Answer:
    """The result for one input of :meth:`Pipeline.stream`.

    Attributes:
        output: The answer, in the format of Transformers' pipelines.
        error: The reason why the input has no answer, or `None`.
        warnings: Warnings about the input, for example that it was truncated.
    """

    output: Any = None
    error: str | None = None
    warnings: list[str] = field(default_factory=list)


Options = Mapping[str, Any]
#: Model outputs for one row, by name. Outputs per token do not include padding.
Outputs = Mapping[str, np.ndarray]


class Pipeline:
    """Base class of the pipelines that :func:`hfseq.pipeline` returns.

    A call with one input returns its answer, and a call with a list returns a list. A call with an
    iterator, a dataset or a ``Path`` returns an iterator, which yields answers whenever a window of
    several batches is complete. For tasks on texts, a ``Path`` refers to a table with named
    columns, or to a text file with one input per line.

    Args:
        model: The model.
        tokenizer: Its tokenizer, if the task reads or writes text.
        task: Name of the task in messages.
        feature_extractor: Its feature extractor, for audio.
        image_processor: Its image processor, for images.
        batch_size: Maximum number of rows per batch.
        num_workers: Number of processes that decode images.
        device: Device of the computation. Default: the device of the model's parameters.
        params: Parameters to use instead of the model's.
        progress: Whether to show a progress bar.
        **options: Default options of the task.

    Raises:
        UsageError: An option is unknown, ``batch_size`` is invalid, or the device does not exist.
    """

    #: Suffix of the model class's name.
    head: ClassVar[str]
    #: Description of one input, for messages.
    input_description: ClassVar[str] = "a text"
    #: Options with their defaults. ``None`` if the task accepts all options of ``generate``.
    defaults: ClassVar[Mapping[str, Any] | None]
    #: Whether outputs are per token (or position) instead of per row.
    per_token: ClassVar[bool] = False
    #: The processors that the task requires: "tokenizer", "feature_extractor", "image_processor".
    processors: ClassVar[tuple[str, ...]] = ("tokenizer",)
    #: Number of batches whose rows are read and sorted by length together.
    window_batches: ClassVar[int] = WINDOW_BATCHES

    def __init__(
        self,
        model: FlaxPreTrainedModel,
        tokenizer: PreTrainedTokenizerBase | None = None,
        task: str = "",
        *,
        feature_extractor: Any = None,
        image_processor: Any = None,
        batch_size: int = 8,
        num_workers: int = 0,
        device: Any = None,
        params: Any = None,
        progress: bool = False,
        **options: Any,
    ):
        if batch_size < 1:
            raise UsageError(f"batch_size must be at least 1, not {batch_size}")
        # Tasks without text have no tokenizer and do not access it.
        self.tokenizer: PreTrainedTokenizerBase = tokenizer  # type: ignore[assignment]
        self.check_model(model, task)
        self.model, self.task = model, task
        self.feature_extractor, self.image_processor = feature_extractor, image_processor
        self.batch_size, self.num_workers, self.progress = batch_size, num_workers, progress
        if device is not None:
            params = jax.device_put(model.params if params is None else params, find_device(device))
        self._params = params
        self.options = self._checked(options)
        self._has_succeeded = False
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

    @property
    def params(self) -> Any:
        """The parameters that the pipeline uses."""
        return self.model.params if self._params is None else self._params

    @property
    def device(self) -> jax.Device:
        """The first device of the parameters."""
        leaf = jax.tree.leaves(self.params)[0]
        return next(iter(leaf.devices())) if isinstance(leaf, jax.Array) else jax.devices()[0]

    def __repr__(self) -> str:
        """Returns the class, the task, the model's class and the batch size."""
        name = type(self.model).__name__
        return (
            f"{type(self).__name__}(task={self.task!r}, model={name}, batch_size={self.batch_size})"
        )

    # -- methods that tasks define

    def encode(self, inputs: Sequence[Any], options: Options) -> list[list[Row] | RejectedInput]:
        """Returns the rows of each input, or the reason why it is rejected."""
        raise NotImplementedError

    def forward(self, params: Any, inputs: Mapping[str, Any]) -> dict[str, jax.Array]:
        """Runs the model on a batch.

        This method is traced by ``jax.jit``. The first axis of each returned array is the batch.
        """
        raise NotImplementedError

    def postprocess(
        self, inputs: Any, rows: list[Row], outputs: list[Outputs], options: Options
    ) -> Any:
        """Returns the answer to an input from the model outputs for its rows."""
        raise NotImplementedError

    def run_batch(self, inputs: Mapping[str, np.ndarray], options: Options) -> Outputs:
        """Returns the model outputs for a batch."""
        return self._compiled(self.params, distribute(inputs, self.params))

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
    def check_model(cls, model: FlaxPreTrainedModel, task: str) -> None:
        """Raises a UsageError if the model does not have the task's inputs or methods."""

    @classmethod
    def check_head(cls, model: FlaxPreTrainedModel, name: str) -> None:
        """Checks that a checkpoint has weights for the task's head.

        Raises:
            UsageError: The head would be initialized at random.
        """
        if cls.head == "Model" or model.peft_config is not None:
            return
        stored = class_names(model.config.to_dict())
        # The heads of these classes have the same parameter names, so compare the class names.
        classes = ("ForSequenceClassification", "ForTokenClassification", "ForQuestionAnswering")
        is_other_class = cls.head in classes and not any(cls.head in name for name in stored)
        if stored and is_other_class or model._fresh_head:
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
        try:
            iter(inputs)  # datasets define __getitem__ only
        except TypeError:
            raise UsageError(
                f"{self.task}: input must be {self.input_description}, a list, an iterator or a "
                f"dataset of these, not {inputs!r:.60}"
            ) from None
        return self._answers(inputs, *arguments)

    def _answers(
        self, inputs: Iterable[Any], batch_size: int | None, options: Options
    ) -> Iterator[Any]:
        from tqdm import tqdm

        total = len(inputs) if isinstance(inputs, Sized) else None
        warnings = list[str]()
        with tqdm(total=total, disable=not self.progress, unit=" inputs") as bar:
            for number, answer in enumerate(self.stream(inputs, batch_size, options), 1):
                if answer.error is not None:
                    raise UsageError(f"{self.task}: input {number}: {answer.error}")
                warnings += [f"input {number}: {text}" for text in answer.warnings]
                bar.update()
                yield answer.output
        if warnings:
            logger.warning("%s: %d inputs with warnings: %s", self.task, len(warnings), warnings[0])

    def stream(
        self,
        inputs: Iterable[Any],
        batch_size: int | None = None,
        options: Options | None = None,
        pause: float | None = None,
    ) -> Iterator[Answer]:
        """Yields an :class:`Answer` to each input in order.

        If an input cannot be read, or the model fails on it, its answer has an ``error``. The
        answers to the other inputs are not affected. If the iterator ``inputs`` itself raises an
        error, the error is raised after the answers to the inputs so far.

        Args:
            inputs: The inputs.
            batch_size: Overrides the pipeline's batch size.
            options: Options of the task. Default: the options of the pipeline.
            pause: Seconds without a new input after which the inputs read so far are processed.
                ``None`` waits for complete windows.

        Raises:
            UsageError: Options contradict each other, or the model does not support them.
        """
        size = self.batch_size if batch_size is None else batch_size
        if size < 1:
            raise UsageError(f"batch_size must be at least 1, not {size}")
        stream_options = self.options if options is None else options
        for window in read_windows(inputs, self.window_batches * size, size, pause):
            encoded = [
                (RejectedInput(problem) if (problem := self.find_problem(rows)) else rows)
                if not isinstance(rows, RejectedInput)
                else rows
                for rows in self.encode(window, stream_options)
            ]
            rows = [row for item in encoded if isinstance(item, list) for row in item]
            outputs = iter(self._run(rows, size, stream_options))
            for item, item_rows in zip(window, encoded, strict=True):
                if isinstance(item_rows, RejectedInput):
                    yield Answer(error=str(item_rows))
                    continue
                warnings = [row.warning for row in item_rows if row.warning]
                results = [next(outputs) for _ in item_rows]
                error = next((item for item in results if isinstance(item, RejectedInput)), None)
                if error is not None:
                    yield Answer(error=str(error), warnings=warnings)
                    continue
                output = self.postprocess(item, item_rows, results, stream_options)  # type: ignore[arg-type]
                yield Answer(output, warnings=warnings)

    def find_problem(self, rows: Sequence[Row]) -> str | None:
        """Returns the reason why the model cannot process the rows of an input, or `None`."""
        longest = max((len(row.ids) for row in rows), default=0)
        if not longest:
            return "it contains no tokens"
        if self.max_positions and longest > self.max_positions:
            return (
                f"{longest} tokens exceed the model's {self.max_positions} positions. Shorten it, "
                "or set truncation=True."
            )
        return None

    def _run(
        self, rows: Sequence[Row], size: int, options: Options
    ) -> list[Outputs | RejectedInput]:
        """Returns the model outputs for rows.

        The longest rows run first, so that a lack of memory becomes apparent early.
        """
        results: dict[int, Outputs | RejectedInput] = {}
        order = sorted(range(len(rows)), key=lambda row: -len(rows[row].ids))
        while order:
            first = rows[order[0]]
            max_rows = self.max_rows(self.padded_width(len(first.ids)), size)
            numbers = order[:max_rows]
            compatible = [self.can_share_batch(first, rows[number], options) for number in numbers]
            numbers = numbers[: compatible.index(False)] if False in compatible else numbers
            order = order[len(numbers) :]
            outputs = self._run_each([rows[number] for number in numbers], max_rows, options)
            results.update(zip(numbers, outputs, strict=True))
        return [results[number] for number in range(len(rows))]

    def _run_each(
        self, batch: Sequence[Row], max_rows: int, options: Options
    ) -> Sequence[Outputs | RejectedInput]:
        """Returns the outputs for a batch.

        If the batch fails, each row runs alone. Rows that fail again are rejected.

        Raises:
            UsageError: An option is invalid.
            Exception: More than three rows have failed, and no row has succeeded so far. The inputs
                are then probably not the cause.
        """
        try:
            inputs = self.collate(batch, padded_row_count(len(batch), max_rows))
            outputs = {
                name: np.asarray(value) for name, value in self.run_batch(inputs, options).items()
            }
        except UsageError:
            raise
        except Exception as error:
            if len(batch) == 1:
                is_input = isinstance(error, UnreadableError)
                return [
                    RejectedInput(f"{'' if is_input else 'the model failed: '}{first_line(error)}")
                ]
            separate = [self._run_each([row], max_rows, options)[0] for row in batch]
            if len(batch) > 3 and not self._has_succeeded:
                raise
            return separate
        self._has_succeeded = True
        results = []
        for position, row in enumerate(batch):
            row_positions = row.ids if row.positions is None else row.positions
            valid = slice(0, len(row_positions) if self.per_token else None)
            results.append({name: array[position][valid] for name, array in outputs.items()})
        return results

    def collate(self, rows: Sequence[Row], count: int) -> dict[str, Any]:
        """Returns the model inputs for rows, as arrays `(count, width)`.

        If there are fewer than ``count`` rows, copies of the last row fill the batch.
        """
        width = self.padded_width(max(len(row.ids) for row in rows))
        padded_rows = [*rows, *[rows[-1]] * (count - len(rows))]
        pad = self.tokenizer.pad_token_id or 0
        inputs = {"input_ids": np.full((count, width), pad, np.int32)}
        inputs["attention_mask"] = np.zeros_like(inputs["input_ids"])
        if rows[0].token_type_ids is not None and self.model.accepts("token_type_ids"):
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
        """Returns whether ``row`` may be in a batch with the longer row ``first``.

        By default, ``first`` must be less than twice as wide.
        """
        return 2 * self.padded_width(len(row.ids)) > self.padded_width(len(first.ids))

    def padded_width(self, length: int) -> int:
        """Returns the width to which rows are padded."""
        return text_width(length, self.max_positions)

    def max_rows(self, width: int, size: int) -> int:
        """Returns the maximum number of rows per batch for a width. It is at most ``size``."""
        return rows_per_chunk(width, size)

    def token_columns(self, length: int, width: int) -> slice:
        """Returns the columns of a padded row that contain its ``length`` tokens."""
        return slice(0, length)

    def tokenize(
        self,
        texts: Sequence[Any],
        pairs: Sequence[Any] | None = None,
        truncation: bool | str = False,
        max_length: int | None = None,
        **options: Any,
    ) -> Any:
        """Calls the tokenizer. With ``truncation``, ``max_length`` is by default the model's."""
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
    """Shards a batch over the data axes of the mesh, if the parameters are sharded over a mesh."""
    sharding = getattr(next(iter(jax.tree.leaves(params)), None), "sharding", None)
    if not isinstance(sharding, NamedSharding) or not sharding.is_fully_addressable:
        return inputs
    axes = [name for name in BATCH_AXES if sharding.mesh.shape.get(name, 1) > 1]
    shards = int(np.prod([sharding.mesh.shape[name] for name in axes]))
    if not axes or len(next(iter(inputs.values()))) % shards:
        return inputs
    batch_sharding = NamedSharding(sharding.mesh, PartitionSpec(tuple(axes)))
    return {name: jax.device_put(array, batch_sharding) for name, array in inputs.items()}


def find_device(device: Any) -> jax.Device:
    """Returns the JAX device for the argument ``device`` of a pipeline, as in Transformers.

    Args:
        device: One of these: a JAX device; a name such as "cpu", "gpu", "cuda", "tpu" or "cuda:1";
            an object whose string form is such a name, for example a ``torch.device``; or the index
            of a device, where -1 is the CPU.

    Raises:
        UsageError: The device does not exist.
    """
    if isinstance(device, jax.Device):
        return device
    if isinstance(device, int):
        kind, number = ("cpu", 0) if device < 0 else (jax.default_backend(), device)
    else:
        kind, _, index = str(device).partition(":")
        number = int(index) if index.isdigit() else 0
    try:
        return jax.devices(kind)[number]
    except (RuntimeError, IndexError):
        names = sorted({str(item) for item in [*jax.devices(), *jax.devices("cpu")]})
        raise UsageError(
            f"device {device!r} does not exist; use one of {', '.join(names)}"
        ) from None
