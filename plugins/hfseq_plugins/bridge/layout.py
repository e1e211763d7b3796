"""Sharding rules of bridged models, derived from Transformers' parallelism plans."""

from __future__ import annotations

import re
from collections.abc import Iterable, Mapping
from typing import TYPE_CHECKING, Any

from hfseq.nn import trees

if TYPE_CHECKING:
    import torch

#: How hfseq shards the kernel and the bias of a layer, for each style in Transformers' plans that
#: splits a linear layer or an embedding matrix over devices. Parameters with another style are not
#: split over the mesh axis `tensor`.
STYLES = {
    "colwise": ("column", "column_bias"),
    "packed_colwise": ("column", "column_bias"),
    "colwise_rep": ("column", "column_bias"),
    "colwise_gather_output": ("column", "column_bias"),
    "local_colwise": ("column", "column_bias"),
    "rowwise": ("row", "vector"),
    "rowwise_rep": ("row", "vector"),
    "rowwise_split_input": ("row", "vector"),
    "local_rowwise": ("row", "vector"),
    "embedding_rowwise": ("embedding", "embedding"),
}
#: Styles in expert-parallel plans whose parameters have the expert as their first axis.
EXPERT_STYLES = ("grouped_gemm",)


def sharding_rules(model: Any) -> list[tuple[str, str]]:
    """Returns a sharding rule for each parameter of a model.

    * Matrices and biases in the tensor-parallel plan of the PyTorch class are split over the mesh
      axis `tensor`. Parameters with more than two dimensions are never split over it.
    * Parameters in the expert-parallel plan are split by expert over the mesh axis `expert`, and
      along their second dimension over `fsdp` if its size is a multiple of 8.
    * All other parameters with at least two dimensions are split over `fsdp` along their second
      dimension. If its size is not a multiple of 8, they are split along their first dimension. If
      that size is not a multiple of 8 either, they are replicated.
    * All other vectors are replicated.

    Args:
        model: A bridged model.

    Returns:
        Pairs of a regular expression for the path of a parameter and the name of a layout.
    """
    plan = tensor_parallel_plan(model.structure.module)
    expert_plan = expert_parallel_plan(model.structure.module)
    rules: list[tuple[str, str]] = []
    for path, leaf in trees.flatten(model.abstract_params).items():
        name = model.structure.names.get(path, "")
        if _is_planned(name, expert_plan):
            tactic = expert_tactic(leaf.shape)
        else:
            planned = _planned_tactic(name, path[-1], plan, model.vocab_size(), leaf.shape)
            tactic = planned or _default_tactic(path[-1], leaf.shape, model.vocab_size())
        rules.append((f"^{re.escape(trees.join(path))}$", tactic))
    return rules


def tensor_parallel_plan(module: torch.nn.Module) -> dict[str, str]:
    """Returns the tensor-parallel plan of a PyTorch model, a style per pattern of module names."""
    plan = dict(getattr(module, "_tp_plan", None) or {})
    for name, part in module.named_modules():
        config = getattr(part, "config", None)
        part_plan = getattr(config, "base_model_tp_plan", None)
        if part_plan and type(part).__name__.endswith("Model"):
            prefix = f"{name}." if name else ""
            plan |= {f"{prefix}{pattern}": style for pattern, style in part_plan.items()}
    return {pattern: style for pattern, style in plan.items() if isinstance(style, str)}


def expert_parallel_plan(module: Any) -> tuple[str, ...]:
    """Returns patterns of the names of those parameters whose first axis is the expert."""
    plan = getattr(module, "_ep_plan", None) or {}
    return tuple(pattern for pattern, style in plan.items() if style in EXPERT_STYLES)


def expert_tactic(shape: tuple[int, ...]) -> str:
    """Returns the layout of a parameter whose first axis is the expert."""
    return "expert_table" if shape[1] % 8 == 0 else "expert_bias"


def _expression(pattern: str) -> re.Pattern[str]:
    """Converts a pattern of a plan to a regular expression. `*` matches one part of a name."""
    return re.compile(re.escape(pattern).replace(r"\*", r"[^.]+") + "$")


def _is_planned(name: str, patterns: Iterable[str]) -> bool:
    return any(_expression(pattern).match(name) for pattern in patterns)


def _planned_tactic(
    name: str, leaf: str, plan: Mapping[str, str], vocab_size: int | None, shape: tuple[int, ...]
) -> str | None:
    module_name, _, own_leaf = name.rpartition(".")
    for pattern, style in plan.items():
        regex = _expression(pattern)
        if style not in STYLES or not (regex.match(module_name) or regex.match(name)):
            continue
        weight, bias = STYLES[style]
        if own_leaf == "bias":
            return bias if len(shape) == 1 else None
        if len(shape) != 2:
            return None
        if leaf == "kernel" and weight == "column" and shape[1] == vocab_size:
            return "vocab_column"
        if leaf == "embedding":
            return "embedding"
        if leaf != "kernel":  # the parameter has PyTorch's layout, (outputs, inputs)
            return {"column": "row", "row": "column"}.get(weight, weight)
        return weight
    return None


def _default_tactic(leaf: str, shape: tuple[int, ...], vocab_size: int | None) -> str:
    if len(shape) < 2:
        return "replicated"
    if leaf == "embedding" and shape[0] == vocab_size:
        return "table"
    if shape[1] % 8 == 0:
        return "table"
    return "row_table" if shape[0] % 8 == 0 else "replicated"
