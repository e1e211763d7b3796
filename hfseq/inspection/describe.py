"""One report on a checkpoint: what it is, what takes it, what it holds, what is wrong with it."""

from __future__ import annotations

import importlib.util
import re
from pathlib import Path
from typing import Any

import numpy as np

from hfseq import conversion, plugins, resolve
from hfseq.errors import HfseqError, UsageError, first_line
from hfseq.inspection import beside, weight_files
from hfseq.inspection.headers import NUMPY
from hfseq.registry import ArchitectureSpec, auto_class_name
from hfseq.weights import FLOATING

#: Tables with a row for each token, by PyTorch's and by Flax's names.
EMBEDDINGS = re.compile(
    r"(^|\.)(word_embeddings|wte|shared|embed_tokens|token_embedding)\.(weight|embedding)$"
)


def inspect_checkpoint(
    name: str, *, names: bool = True, read_values: bool = False
) -> dict[str, Any]:
    """Return what is known of a directory, a Hub name or a weight file beside its config.json.

    ``names`` compares the names with those of the model's class, for which jax starts; without it
    only headers are read. ``read_values`` looks for NaN and infinities, reading everything. The
    report is made of JSON's types; ``problems`` is a list of sentences.
    """
    source = conversion.Source.of(name)
    folder = Path(source.place) if Path(source.place).is_dir() else None
    fetch = resolve.fetcher(source.place, {})
    problems: list[str] = []
    stored = beside.read_json(fetch, "config.json", problems)
    if fetch("config.json") is None:
        problems.append("no config.json")
    elif not problems and conversion.model_type(stored) is None:
        problems.append("config.json names no model_type")
    if folder is None:
        weights = weight_files.remote_weights(source.place)
    else:
        only = Path(source.file).name if source.file else None
        weights = weight_files.local_weights(folder, only)
    problems += weights.problems
    report = {
        "source": name,
        **_architecture(stored, problems),
        "parameters": _parameters(weights),
        "files": [
            {"name": h.file, "bytes": h.size, "tensors": len(h.tensors)} for h in weights.headers
        ],
        "not_read": weights.others,
        "tokenizer": beside.tokenizer(fetch, problems),
        "embedding_rows": _embedding_rows(weights),
        "generation": beside.generation(fetch, problems),
        "fp8": beside.fp8(fetch),
        "training": None if folder is None else beside.training(folder),
    }
    problems += (report["fp8"] or {}).get("problems", [])
    _check_vocabulary(report, stored, problems)
    if names and weights.headers and report["plugin"]:
        report["names"] = _compare_names(source.place, stored, weights, problems)
    if read_values:
        report["not_finite"] = _not_finite(weights, problems)
    return {**report, "problems": problems}


def _architecture(stored: dict[str, Any], problems: list[str]) -> dict[str, Any]:
    kind, twin = conversion.model_type(stored), stored.get("model_type")
    found: dict[str, Any] = {
        "model_type": kind,
        "stored_as": twin if twin != kind else None,
        "architectures": stored.get("architectures"),
        "plugin": None,
        "jax_classes": [],
        "pytorch_classes": [],
    }
    registry = plugins.load().architectures
    if kind is not None and kind not in registry:
        found["pytorch_classes"] = _torch_classes(stored, None)
        known = ", ".join(sorted(registry))
        problems.append(f"no plugin has the model type '{kind}': hfseq loads {known}")
    elif kind is not None:
        spec: ArchitectureSpec = registry.get(str(kind))
        found["plugin"] = spec.plugin
        found["jax_classes"] = _jax_classes(spec)
        stock = registry.get(str(twin)) if twin in registry else None
        found["pytorch_classes"] = _torch_classes(stored, stock)
    return found


def _jax_classes(spec: ArchitectureSpec) -> list[str]:
    return [f"Flax{auto_class_name(task)}" for task in spec.heads]


def _torch_classes(stored: dict[str, Any], spec: ArchitectureSpec | None) -> list[str]:
    """Return the classes of PyTorch that load it, without importing Transformers."""
    custom = stored.get("auto_map")
    if isinstance(custom, dict):
        return [f"{name} (trust_remote_code=True)" for name in custom if "Model" in name]
    stock = importlib.util.find_spec("transformers")
    folders = (stock.submodule_search_locations or []) if stock else []
    kind = re.sub(r"\W", "_", str(stored.get("model_type")))
    if not any((Path(folder) / "models" / kind).is_dir() for folder in folders):
        return []
    if spec is None:
        return [str(name) for name in stored.get("architectures") or ()]
    return [auto_class_name(task) for task in spec.heads]


def _parameters(weights: weight_files.Weights) -> dict[str, Any]:
    types = weight_files.totals(weights)
    counts = {
        name: entry.count
        for name, (_, entry) in weights.entries.items()
        if NUMPY.get(entry.code) in FLOATING or entry.code not in NUMPY
    }
    return {"total": sum(counts.values()), "modules": _by_module(counts), "dtypes": types}


def _by_module(counts: dict[str, int], depth: int = 1) -> dict[str, int]:
    """Sum by the first component of names, and by two where one holds more than half of all."""
    groups: dict[str, dict[str, int]] = {}
    for name, count in counts.items():
        head = ".".join(name.split(".")[:-1][:depth]) or name
        groups.setdefault(head, {})[name] = count
    found: dict[str, int] = {}
    for head, part in groups.items():
        large = depth == 1 and 2 * sum(part.values()) > sum(counts.values())
        found |= _by_module(part, 2) if large else {head: sum(part.values())}
    return found


def _embedding_rows(weights: weight_files.Weights) -> dict[str, int]:
    return {
        name: entry.shape[0]
        for name, (_, entry) in weights.entries.items()
        if EMBEDDINGS.search(name) and len(entry.shape) == 2
    }


def _check_vocabulary(report: dict[str, Any], stored: dict[str, Any], problems: list[str]) -> None:
    largest = (report["tokenizer"] or {}).get("largest_id")
    for name, rows in report["embedding_rows"].items():
        if largest is not None and largest >= rows:
            problems.append(f"the tokenizer's largest id is {largest}, but {name} has {rows} rows")
        size = stored.get("vocab_size")
        if isinstance(size, int) and size != rows:
            problems.append(f"config.json says vocab_size {size}, but {name} has {rows} rows")


def _compare_names(
    place: str, stored: dict[str, Any], weights: weight_files.Weights, problems: list[str]
) -> dict[str, Any] | None:
    """Compare the names of the files with those of the class that config.json names."""
    tensors = weights.tensors()
    try:
        cls = conversion.find_class(stored, place)
        config, _ = resolve.load_config(cls, place, None, {}, {})
        try:
            options = cls.checkpoint_options(tensors)
        except weight_files.NotHere:
            options = {}
        model = cls(config, _do_init=False, **options)
    except (HfseqError, ValueError, TypeError, KeyError, AttributeError) as error:
        problems.append(f"its class cannot be made: {first_line(error)}")
        return None
    _, report = model.file_map.match(tensors, native=weights.native)
    problems += conversion.problems(model, report)
    tied = _tied(model, set(tensors))
    return {"class": cls.__name__, "missing": len(report.missing),
            "unexpected": len(report.unexpected), "tied": tied}  # fmt: skip


def _tied(model: Any, names: set[str]) -> dict[str, str]:
    """Return names of PyTorch's that are not stored, with the tensor that each repeats."""
    kind = type(model).__name__
    writes = model.can_generate() or "LM" in kind or "PreTraining" in kind
    return {
        alias: name
        for alias, name in model.file_map.aliases.items()
        # The table lists the heads of all classes of a family.
        if alias not in names and (writes or ".embed" in alias)
    }


def _not_finite(weights: weight_files.Weights, problems: list[str]) -> dict[str, int]:
    """Count NaN and infinities in every tensor of floating numbers."""
    if weights.folder is None:
        raise UsageError("--values needs the weights here: download the model first")
    found = {}
    for name, (header, entry) in weights.entries.items():
        if NUMPY.get(entry.code) not in FLOATING or header.problems:
            continue
        count = _count_not_finite(weight_files.values(weights.folder, header, entry))
        if count:
            found[name] = count
            problems.append(f"{name} holds {count:,} values that are NaN or infinite")
    return found


def _count_not_finite(values: np.ndarray) -> int:
    flat, size = values.reshape(-1), 1 << 22
    pieces = (flat[i : i + size] for i in range(0, len(flat), size))
    return sum(int((~np.isfinite(piece.astype(np.float32))).sum()) for piece in pieces)


__all__ = ["inspect_checkpoint"]
