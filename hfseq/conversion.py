"""From a checkpoint in one format to the same model in another: ``hfseq convert``.

Everything goes through the model's class, which knows the names, transpositions and ties of both
sides; values are not touched unless another type is asked for.
"""

from __future__ import annotations

import contextlib
import dataclasses
import os
import shutil
import tempfile
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

from hfseq import checkpoint_files as files
from hfseq import json_text, plugins, resolve, weights
from hfseq.errors import CheckpointError, UsageError, WeightsError, first_line, nearest
from hfseq.registry import ArchitectureSpec, target_name
from hfseq.storage import PREPARED, matches

#: What is written beside the weights already, or is not the model's own.
LEFT_BEHIND = (
    "config.json",
    ".*",
    "__pycache__",
    "previous-*",
    "*.tmp*",
    "*.log",
    "*.out",
    "*.err",
)
WEIGHT_FILES = (".safetensors", ".msgpack", ".bin", ".index.json")
SIDECARS = ("fp8_params.safetensors",)


@dataclasses.dataclass(frozen=True)
class Source:
    """A checkpoint: where its files are, and the one weight file of it, if it is one file."""

    place: str
    file: str | None = None

    @classmethod
    def of(cls, name: str) -> Source:
        """Take ``name`` apart: a directory, a Hub name, or a weight file beside its config.json."""
        expanded = os.path.expanduser(name)
        if os.path.isfile(expanded):
            if not expanded.endswith(WEIGHT_FILES):
                raise UsageError(
                    f"{name} is no weight file ({', '.join(WEIGHT_FILES)}): give a directory"
                )
            return cls(os.path.dirname(expanded) or ".", expanded)
        if os.path.isdir(expanded):
            return cls(expanded)
        if os.path.isabs(expanded) or name.startswith(".") or name.count("/") > 1:
            raise CheckpointError(
                f"there is no directory '{name}' (in '{Path.cwd()}'); give an existing directory "
                "or the name of a model on the Hub"
            )
        return cls(name)

    @property
    def weights(self) -> str:
        """What the weights are loaded from."""
        return self.file or self.place


@dataclasses.dataclass
class Done:
    """What a conversion wrote."""

    model_class: str
    files: dict[str, int]
    tensors: int
    dtypes: dict[str, int]
    carried: list[str]
    initialised: list[str]
    dropped: list[str]


def read_config(place: str) -> dict[str, Any]:
    """Return config.json of a directory or a Hub name.

    **Raises:** :class:`~hfseq.errors.CheckpointError` where there is none, or it is no JSON object.
    """
    path = resolve.fetcher(place, {})("config.json")
    if path is None:
        raise CheckpointError(
            f"{place} has no config.json: is it a directory that a model was saved to?"
        )
    try:
        stored = json_text.parse(Path(path).read_bytes())
    except (OSError, ValueError) as error:
        raise CheckpointError(f"{path} is not readable JSON: {first_line(error)}") from error
    if not isinstance(stored, dict):
        raise CheckpointError(f"{path} is no JSON object")
    return stored


def model_type(stored: Mapping[str, Any]) -> str | None:
    """Return the architecture that a config.json names: the native one, where it names both."""
    return resolve.native_type(stored) or stored.get("model_type")


def find_class(
    stored: Mapping[str, Any],
    place: str,
    *,
    task: str | None = None,
    model_class: str | None = None,
) -> Any:
    """Return the Flax class that a checkpoint's config.json, or the user, names.

    ``task`` is a task of :data:`hfseq.registry.TASKS`; ``model_class`` a class with or without its
    prefix ``Flax``.

    **Raises:** UsageError where nothing or an unknown name is named.
    """
    kind = model_type(stored)
    if not isinstance(kind, str):
        raise CheckpointError(f"{place}/config.json names no model_type")
    registry = plugins.load().architectures
    spec: ArchitectureSpec = registry.get(kind)
    if task is not None:
        return spec.load_head(task)
    if model_class is not None:
        return spec.load_head(_task_of(model_class, spec))
    names = [name for name in stored.get("architectures") or () if isinstance(name, str)]
    # Stored as its stock twin, a model has the name of the twin's class.
    twin = registry.get(stored["model_type"]) if stored.get("model_type") in registry else spec
    for head in spec.heads:
        classes = [one.load_head(head) for one in (spec, twin) if head in one.heads]
        if {name for cls in classes for name in (cls.torch_class_name(), cls.__name__)} & {*names}:
            return spec.load_head(head)
    raise UsageError(
        f"{place}/config.json names {', '.join(names) or 'no architecture'}, which is no class of "
        f"'{kind}': give --task, one of {', '.join(spec.heads)}"
    )


def _task_of(name: str, spec: ArchitectureSpec) -> str:
    classes = {target_name(target): task for task, target in spec.heads.items()}
    wanted = name if name.startswith("Flax") else f"Flax{name}"
    if wanted not in classes:
        raise UsageError(
            f"--model_class {name} is no class of '{spec.model_type}'; it has "
            f"{', '.join(classes)}{nearest(wanted, classes)}"
        )
    return classes[wanted]


def structure(cls: Any, place: str, opened: files.OpenedWeights) -> Any:
    """Return the model of a checkpoint without parameters."""
    config, _ = resolve.load_config(cls, place, None, {}, {})
    return cls(config, _do_init=False, **cls.checkpoint_options(opened.tensors))


def problems(model: Any, report: weights.LoadReport) -> list[str]:
    """Say of every name that is missing, left over or of another shape or type what is wrong."""
    name = type(model).__name__
    found = [
        f"{given}: {shape} in the file, {expected} in {name}"
        for given, shape, expected in report.mismatched
    ]
    found += [f"missing:{line[1:]}" for line in weights.describe_missing(report).splitlines()]
    found += [f"unexpected: {left}" for left in sorted(report.unexpected)]
    return found + [f"{left}: type {code} is no parameter" for left, code in report.untyped.items()]


def convert(
    source: str,
    destination: str | os.PathLike[str],
    *,
    to: str = "safetensors",
    dtype: str | None = None,
    max_shard_size: int | str = "5GB",
    strict: bool = False,
    task: str | None = None,
    model_class: str | None = None,
    overwrite: bool = False,
) -> Done:
    """Write the model at ``source`` to ``destination``, whole or not at all.

    **Arguments:** ``source`` a directory, a Hub name or a weight file beside its config.json;
    ``to`` "safetensors" (PyTorch's names) or "msgpack" (Transformers 4's Flax); ``dtype`` of the
    parameters, those of the files by default; ``strict`` makes every missing, unexpected or
    mis-shaped name an error; ``overwrite`` replaces the model in a directory that is not empty.

    **Raises:** UsageError, CheckpointError and WeightsError, each before anything is written.
    """
    import jax.numpy as jnp

    found, target = Source.of(source), Path(destination)
    check_destination(target, overwrite)
    files.parse_size(max_shard_size)
    stored = read_config(found.place)
    cls = find_class(stored, found.place, task=task, model_class=model_class)
    opened = resolve.open_source(found.weights, {}, from_pt=True)
    model = structure(cls, found.place, opened)
    _, report = model.file_map.match(opened.tensors, native=opened.native)
    if strict and (wrong := problems(model, report)):
        lines = "".join(f"\n  {line}" for line in wrong)
        raise WeightsError(f"{opened.source} does not fit {cls.__name__} (--strict):{lines}")
    model = cls.from_pretrained(
        found.weights,
        config=model.config,
        from_pt=True,
        param_dtype=None if dtype is None else jnp.dtype(dtype),
    )
    if found.file:
        model.load_generation_config(found.place)
    if dtype is not None:
        model.config.dtype = dtype
    origin = Path(found.place) if Path(found.place).is_dir() else _downloaded(found.place)
    with _written(target) as folder:
        model.save_pretrained(
            folder, max_shard_size=max_shard_size, safe_serialization=to == "safetensors"
        )
        carried = _carry(origin, folder)
        sizes = {path.name: path.stat().st_size for path in sorted(folder.iterdir())}
    kept = files.open_weights(lambda name: _existing(target / name), str(target)).tensors
    types: dict[str, int] = {}
    for tensor in kept.values():
        types[tensor.dtype] = types.get(tensor.dtype, 0) + 1
    lost = [] if strict else sorted(report.unexpected)
    fresh = sorted(".".join(path) for path in report.missing)
    return Done(cls.__name__, sizes, len(kept), types, carried, fresh, lost)


def check_destination(target: Path, overwrite: bool) -> None:
    """Refuse a file, and a directory with anything in it unless that may be overwritten."""
    if target.exists() and not target.is_dir():
        raise UsageError(f"{target} is a file: give a directory to write to")
    if target.is_dir() and any(target.iterdir()) and not overwrite:
        raise UsageError(
            f"{target} is not empty: give another directory, or --overwrite to replace its model"
        )


@contextlib.contextmanager
def _written(target: Path) -> Iterator[Path]:
    """Give a directory whose files come to ``target`` together, if all of them were written."""
    try:
        with _staged(target) as stage:
            yield stage
    except CheckpointError as error:
        reason: BaseException = error
        while isinstance(reason, CheckpointError) and reason.__cause__ is not None:
            reason = reason.__cause__  # what the directories under way are called helps nobody
        raise CheckpointError(
            f"cannot write {target} ({first_line(reason)}): what was there is untouched; free "
            "some space or give another directory"
        ) from error


@contextlib.contextmanager
def _staged(target: Path) -> Iterator[Path]:
    if target.is_dir() and any(target.iterdir()):
        with files.staged(target) as stage:
            yield stage
        return
    try:
        target.parent.mkdir(parents=True, exist_ok=True)
        parent = tempfile.mkdtemp(prefix=f".{target.name}.", dir=target.parent)
    except OSError as error:
        raise CheckpointError(str(error)) from error
    try:
        fresh = Path(parent) / target.name
        fresh.mkdir()
        with files.staged(fresh) as stage:
            yield stage
        os.replace(fresh, target)
    finally:
        shutil.rmtree(parent, ignore_errors=True)


def _carry(origin: Path, folder: Path) -> list[str]:
    """Copy tokenizer, card and what else is small and the model's own; returns the names."""
    carried = []
    for path in sorted(origin.iterdir()):
        own = matches(path, PREPARED) and not matches(path, LEFT_BEHIND)
        if (own or path.name in SIDECARS) and path.is_file() and not (folder / path.name).exists():
            shutil.copyfile(path, folder / path.name)
            carried.append(path.name)
    return carried


def _downloaded(name: str) -> Path:
    """Return a snapshot of a repository's small files."""
    from huggingface_hub import snapshot_download

    wanted = [pattern for pattern in (*PREPARED, *SIDECARS) if pattern not in LEFT_BEHIND]
    try:
        return Path(snapshot_download(name, allow_patterns=wanted, library_name="hfseq"))
    except Exception as error:  # the client's own, and those of its HTTP library
        raise CheckpointError(
            f"cannot load the tokenizer files of '{name}': {first_line(error)}"
        ) from error


def _existing(path: Path) -> str | None:
    return str(path) if path.is_file() else None


__all__ = ["Done", "Source", "check_destination", "convert", "find_class", "problems"]
