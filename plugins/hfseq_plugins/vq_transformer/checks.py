"""What calls are checked for before anything is computed: shapes alone, so also in ``jit``."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping
from typing import TYPE_CHECKING, Any, NamedTuple

import numpy as np
from flax.traverse_util import flatten_dict

from hfseq.errors import UsageError
from hfseq_plugins.vq_transformer.state import RANKS

if TYPE_CHECKING:
    from hfseq_plugins.vq_transformer.configuration import VQTransformerConfig

Path = tuple[str, ...]


class Layout(NamedTuple):
    """Where a model's attentions are: below ``root``, and ``stacked`` over layers or one by one."""

    stacked: bool = False
    root: tuple[str, ...] = ("model",)


def check_call(
    config: VQTransformerConfig,
    given: Mapping[str, Any],
    state: Mapping[str, Any] | None,
    layout: Layout,
) -> None:
    """Raise one UsageError for inputs and a state that do not fit each other or the model.

    Options may have been changed since the configuration was made, so they are checked again.
    """
    config.check()
    problems = []
    if state and given["segment_ids"] is not None:
        problems.append(
            "past_key_values carry one document on, segment_ids cut rows into several: give one of "
            "them, or reset_rows for rows that begin a new document"
        )
    if given["reset_rows"] is not None and not state:
        problems.append("reset_rows needs past_key_values: without a state every row is fresh")
    ids = given["input_ids"]
    # The base class has its own messages for other things than arrays.
    shape = None if ids is None or isinstance(ids, (str, list, tuple)) else np.shape(ids)
    if shape is not None and (len(shape) != 2 or not shape[1]):
        problems.append(
            f"input_ids are {shape}: they have to be (batch, length) with at least one token"
        )
    elif shape is not None:
        wanted = dict.fromkeys(("attention_mask", "segment_ids", "code_mask"), shape)
        problems += [
            f"{name} is {np.shape(given[name])}, but input_ids are {shape}: it has to be {size}"
            for name, size in {**wanted, "reset_rows": shape[:1]}.items()
            if given[name] is not None and np.shape(given[name]) != size
        ]
    problems += [] if not state else dict.fromkeys(_wrong_state(config, state, layout))
    if problems:
        raise UsageError("; ".join(problems))


def _wrong_state(
    config: VQTransformerConfig, state: Mapping[str, Any], layout: Layout
) -> Iterator[str]:
    """Compare the entries of every attention with the configuration."""
    parts: dict[Path, dict[str, Any]] = {}
    for path, leaf in flatten_dict(dict(state)).items() if isinstance(state, Mapping) else ():
        parts.setdefault(path[:-1], {})[path[-1]] = leaf
    if not parts or any(
        part.keys() != RANKS.keys()
        # All axes, and either one of layers before them everywhere or none.
        or {np.ndim(part[name]) - rank for name, rank in RANKS.items()} not in ({0}, {1})
        for part in parts.values()
    ):
        yield (
            "past_key_values is no state of a VQ Transformer: give init_cache(rows) or what a call "
            "returned"
        )
        return
    stacked = any(np.ndim(part["position"]) > 1 for part in parts.values())
    if stacked != layout.stacked:
        made, own = ("with", "without") if stacked else ("without", "with")
        yield f"past_key_values was made {made} scan_layers, the model is {own}: use its init_cache"
        return
    layers = config.num_hidden_layers
    deep = {len(part["position"]) if stacked else layers for part in parts.values()}
    numbers = [()] if stacked else [(str(n),) for n in range(layers)]
    names = ("attention", "attention_2") if config.gated else ("attention",)
    wanted = {(*layout.root, "layers", *number, name) for number in numbers for name in names}
    if parts.keys() != wanted or deep != {layers}:
        yield (
            f"past_key_values was made for {_told(parts, deep, stacked)}, the model has "
            f"{_told(wanted, {layers}, stacked)}"
        )
    for part in parts.values():
        key, value = np.shape(part["window_key"]), np.shape(part["window_value"])
        sizes = {
            "window_size": (key[-2], config.window_size),
            "num_codes": (np.shape(part["cache_count"])[-1], config.num_codes),
            "key heads": (key[-3], config.key_heads),
            "head_dim": (key[-1], config.head_dim),
            "value_dim": (value[-1], config.value_width),
        }
        for name, (given, size) in sizes.items():
            if given != size:
                yield f"past_key_values was made for {name}={given}, the model has {name}={size}"


def _told(paths: Iterable[Path], deep: set[int], stacked: bool) -> str:
    named = sorted("/".join(path) for path in paths)
    some = named if len(named) < 3 else [named[0], "...", named[-1]]
    layers = f" in {'/'.join(map(str, sorted(deep)))} layers" if stacked else ""
    return f"{len(named)} attentions{layers} ({', '.join(some)})"
