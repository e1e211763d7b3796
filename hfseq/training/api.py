"""Training from Python.

:func:`train` does the same as ``hfseq train``, and also accepts models and datasets in memory.
"""

from __future__ import annotations

import os
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import TYPE_CHECKING, Any

from hfseq import plugins
from hfseq.errors import UsageError
from hfseq.plugins import hookimpl
from hfseq.training import arguments as flag_classes
from hfseq.training.usage import objective_name

if TYPE_CHECKING:
    from datasets import Dataset, IterableDataset
    from transformers import PreTrainedTokenizerBase

    from hfseq.modeling import FlaxPreTrainedModel
    from hfseq.training.callbacks import Callback, CallbackFunction
    from hfseq.training.run import Result

#: Value of ``dataset_name`` for datasets in memory.
IN_MEMORY = "in-memory"


def train(
    objective: str,
    model: str | os.PathLike[str] | FlaxPreTrainedModel | None = None,
    tokenizer: str | os.PathLike[str] | PreTrainedTokenizerBase | None = None,
    train_dataset: Dataset | IterableDataset | Sequence[Any] | None = None,
    eval_dataset: Dataset | IterableDataset | Sequence[Any] | None = None,
    *,
    output_dir: str | os.PathLike[str],
    test_dataset: Dataset | Sequence[Any] | None = None,
    callbacks: Sequence[Callback | CallbackFunction] = (),
    **flags: Any,
) -> Result:
    """Trains and evaluates a model, like ``hfseq train OBJECTIVE`` with the same flags.

    A run that is interrupted (by Ctrl-C or the stop button of a notebook) saves a checkpoint. Call
    the function again with the same arguments to continue from the last checkpoint. The losses are
    the same as in an uninterrupted run.

    Example::

        result = hfseq.train(
            "classification", "FacebookAI/roberta-base", train_dataset=rows, eval_dataset=dev,
            output_dir="my-classifier", num_train_epochs=3, learning_rate=2e-5,
        )
        result.metrics["eval_accuracy"]
        result.model(**inputs)

    Args:
        objective: Name of an objective (``hfseq train --list``).
        model: A directory, a Hub ID, or a model object. A model object is first saved in
            ``<output_dir>-start``. By default, the flag ``config_name`` or ``model_type`` selects
            the architecture of a new model.
        tokenizer: A directory, a Hub ID, or a tokenizer or processor object. An object is first
            saved in ``<output_dir>-start``. Default: the tokenizer of ``model``.
        train_dataset: A dataset, or a list of dicts or strings. By default, the data flags, such as
            ``dataset_name`` and ``train_file``, select the data.
        eval_dataset: A dataset or list for evaluation. By default, a part of the training examples
            is held out (``validation_split_percentage``).
        output_dir: Directory for the model, the checkpoints and the logs.
        test_dataset: A dataset or list of examples to predict. Only for objectives that support a
            test split.
        callbacks: Functions that are called after each step, or callback objects. If a step is
            followed by an evaluation or a save, they are called after the evaluation and before the
            checkpoint is saved. See :mod:`hfseq.training.callbacks`.
        **flags: The flags of ``hfseq train OBJECTIVE --help``, as keyword arguments.

    Returns:
        The result of the run. Its attributes include the trained ``model``, the ``metrics`` and the
        output directory, ``folder``.

    Raises:
        HfseqError: The objective, a flag, the data or a checkpoint is invalid. Flags are checked
            before anything is loaded.
        KeyboardInterrupt: The run was interrupted, after it saved a checkpoint.
    """
    name = objective_name(objective)
    flag_classes.check_objective(name, flags.get("plugin") or ())
    splits = {
        split: _dataset(examples)
        for split, examples in (
            ("train", train_dataset),
            ("validation", eval_dataset),
            ("test", test_dataset),
        )
        if examples is not None
    }
    values = dict(flags) | {"output_dir": os.fspath(output_dir)}
    if splits:
        _check_data_flags(flags)
        values["dataset_name"] = IN_MEMORY
        if any(not hasattr(dataset, "__len__") for dataset in splits.values()):
            values["streaming"] = True
    if not {"do_train", "do_eval", "do_predict"} & set(flags) and splits:
        values["do_train"] = "train" in splits
        values["do_eval"] = "validation" in splits or "train" in splits
        values["do_predict"] = "test" in splits
    start = Path(f"{os.fspath(output_dir).rstrip('/')}-start")
    values |= _names(model, tokenizer, start, values)
    arguments = flag_classes.parse_values(values, name)

    from hfseq.training.run import main

    in_memory = [
        item for item in (model, tokenizer) if not isinstance(item, str | os.PathLike | None)
    ]
    if in_memory and (arguments.processes.distributed or arguments.processes.num_processes):
        raise UsageError(
            "a run with several processes cannot use a model or tokenizer object: save it with "
            "save_pretrained, and pass the directory"
        )
    for item in in_memory:
        item.save_pretrained(start)
    with _provide(splits):
        try:
            return main(arguments, name, callbacks=callbacks)
        except SystemExit as stopped:
            raise KeyboardInterrupt(
                f"the run was stopped; call train again to continue it from {values['output_dir']}"
            ) from stopped


def _dataset(examples: Any) -> Any:
    """Converts a list of examples to a dataset. A dataset is returned unchanged."""
    import datasets

    if isinstance(examples, datasets.Dataset | datasets.IterableDataset):
        return examples
    if not isinstance(examples, Sequence) or isinstance(examples, str):
        raise UsageError(
            f"unsupported dataset of type {type(examples).__name__}: pass a datasets.Dataset or "
            "datasets.IterableDataset, or a list of dicts or strings"
        )
    rows = [{"text": row} if isinstance(row, str) else row for row in examples]
    if not rows or not all(isinstance(row, Mapping) for row in rows):
        raise UsageError("a list of examples must not be empty and must contain dicts or strings")
    return datasets.Dataset.from_list([dict(row) for row in rows])


def _check_data_flags(flags: Mapping[str, Any]) -> None:
    """Rejects flags that select a dataset in addition to the datasets in memory."""
    for name in ("dataset_name", "train_file", "validation_file", "test_file"):
        if flags.get(name):
            raise UsageError(
                f"the flag {name} cannot be used together with a dataset in memory: use only one "
                "of the two"
            )


def _names(model: Any, tokenizer: Any, start: Path, values: Mapping[str, Any]) -> dict[str, str]:
    """Returns the values of the flags that select the model and the tokenizer."""
    names = {}
    for flag, item in (("model_name_or_path", model), ("tokenizer_name", tokenizer)):
        if item is None:
            continue
        if values.get(flag):
            raise UsageError(
                f"the flag {flag} cannot be used together with the argument "
                f"{flag.partition('_')[0]}: use only one of the two"
            )
        names[flag] = os.fspath(item) if isinstance(item, str | os.PathLike) else str(start)
    return names


class _InMemoryData:
    """A plugin that provides the datasets in memory as the dataset with the name `IN_MEMORY`."""

    def __init__(self, splits: Mapping[str, Any]) -> None:
        self._splits = splits

    @hookimpl
    def load_dataset(self, name: str) -> Mapping[str, Any] | None:
        return self._splits if name == IN_MEMORY else None


@contextmanager
def _provide(splits: Mapping[str, Any]) -> Iterator[None]:
    """Registers the datasets under the name `IN_MEMORY` while the context is active."""
    manager = plugins.load().manager
    plugin = _InMemoryData(splits)
    manager.register(plugin, name=IN_MEMORY)
    try:
        yield
    finally:
        manager.unregister(plugin)
