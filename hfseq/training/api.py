"""Training from Python: :func:`train` does what ``hfseq train`` does, with objects in memory."""

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

    Calling the function again continues a stopped run from its last checkpoint, with the losses of
    an uninterrupted run. An interrupt (Ctrl-C, the stop button of a notebook) saves a checkpoint.

    Example::

        result = hfseq.train(
            "classification", "FacebookAI/roberta-base", train_dataset=rows, eval_dataset=dev,
            output_dir="my-classifier", num_train_epochs=3, learning_rate=2e-5,
        )
        result.metrics["eval_accuracy"]
        result.model(**inputs)

    Args:
        objective: Name of an objective (``hfseq train --list``).
        model: A directory, a Hub name, or a model. A model in memory is saved in
            ``<output_dir>-start`` first. Default: the flags ``config_name`` or ``model_type``.
        tokenizer: A directory, a Hub name, or a tokenizer or processor, which is saved in the same
            directory. Default: that of the model.
        train_dataset: A dataset, or a list of dicts or texts. Default: the flags of data, such as
            ``dataset_name`` and ``train_file``.
        eval_dataset: Examples for evaluation. Default: a part of the training examples
            (``validation_split_percentage``).
        output_dir: Directory for the model, the checkpoints and the logs.
        test_dataset: Examples for predictions, for objectives with a test split.
        callbacks: Called after each step, after evaluation and before saving. See
            :mod:`hfseq.training.callbacks`.
        **flags: The flags of ``hfseq train OBJECTIVE --help``, as keywords.

    Returns:
        The result, with the trained ``model``, the ``metrics`` and the ``folder``.

    Raises:
        HfseqError: The objective, a flag, the data or a checkpoint has a problem. Values and
            keywords are checked before anything is loaded.
        KeyboardInterrupt: The run was interrupted. Its state is saved.
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
            "a run of several processes loads the model and the tokenizer from a directory: save "
            "them with save_pretrained, and pass the directory"
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
    """Returns a dataset with the examples of a list, and other datasets unchanged."""
    import datasets

    if isinstance(examples, datasets.Dataset | datasets.IterableDataset):
        return examples
    if not isinstance(examples, Sequence) or isinstance(examples, str):
        raise UsageError(
            f"a dataset has the type {type(examples).__name__}: pass a datasets.Dataset, or a list "
            "of dicts or texts"
        )
    rows = [{"text": row} if isinstance(row, str) else row for row in examples]
    if not rows or not all(isinstance(row, Mapping) for row in rows):
        raise UsageError("a dataset is a list that is empty or has other items than dicts or texts")
    return datasets.Dataset.from_list([dict(row) for row in rows])


def _check_data_flags(flags: Mapping[str, Any]) -> None:
    """Rejects flags that name other data."""
    for name in ("dataset_name", "train_file", "validation_file", "test_file"):
        if flags.get(name):
            raise UsageError(f"{name} and a dataset in memory exclude each other: use one of them")


def _names(model: Any, tokenizer: Any, start: Path, values: Mapping[str, Any]) -> dict[str, str]:
    """Returns the flags that name the model and the tokenizer."""
    names = {}
    for flag, item in (("model_name_or_path", model), ("tokenizer_name", tokenizer)):
        if item is None:
            continue
        if values.get(flag):
            raise UsageError(f"{flag} is given twice, as a keyword argument and as a flag")
        names[flag] = os.fspath(item) if isinstance(item, str | os.PathLike) else str(start)
    return names


class _InMemoryData:
    """A plugin that provides datasets under the name `IN_MEMORY`."""

    def __init__(self, splits: Mapping[str, Any]) -> None:
        self._splits = splits

    @hookimpl
    def load_dataset(self, name: str) -> Mapping[str, Any] | None:
        return self._splits if name == IN_MEMORY else None


@contextmanager
def _provide(splits: Mapping[str, Any]) -> Iterator[None]:
    """Makes datasets available under the name `IN_MEMORY` in the body."""
    manager = plugins.load().manager
    plugin = _InMemoryData(splits)
    manager.register(plugin, name=IN_MEMORY)
    try:
        yield
    finally:
        manager.unregister(plugin)
