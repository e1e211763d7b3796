"""Finds parameters whose names in checkpoint files differ from the names in the PyTorch model.

Transformers renames and joins tensors when it loads a checkpoint, and reverses this when it saves
one (see `transformers.conversion_mapping`). A port describes the same conversions with attributes
of its model class.
"""

from __future__ import annotations

import re
from collections.abc import Iterable
from typing import Any


def _transforms(model_type: str, class_name: str) -> list[Any]:
    try:
        from transformers import conversion_mapping as mapping
    except ImportError:  # PyTorch is not installed
        return []
    transforms = mapping.get_checkpoint_conversion_mapping(class_name)
    if transforms is None:
        transforms = mapping.get_checkpoint_conversion_mapping(model_type)
    return list(transforms or ())


def joined_weights(
    model_type: str, class_name: str, parameter_names: Iterable[str]
) -> dict[str, tuple[tuple[str, ...], int]]:
    """Returns the parameters of experts that checkpoint files store as several tensors.

    Args:
        model_type: The model type.
        class_name: The name of the base model in PyTorch.
        parameter_names: The names of the parameters of experts.

    Returns:
        A dictionary with one entry for each such parameter. The key is the end of the name of the
        parameter. The value consists of the names of its tensors in the files, and the axis along
        which the tensors of one expert are concatenated.
    """
    joined_tensors = {}
    for transform in _transforms(model_type, class_name):
        kinds = [type(item).__name__ for item in getattr(transform, "operations", ())]
        if kinds not in (["MergeModulelist"], ["MergeModulelist", "Concatenate"]):
            continue
        if len(transform.target_patterns) != 1:
            continue
        target = _plain(transform.target_patterns[0])
        if target is None or target.split(".")[-1] not in parameter_names:
            continue
        sources = [pattern.replace("*", "{}") for pattern in transform.source_patterns]
        names = tuple(name for name in map(_plain, sources) if name is not None)
        axis = transform.operations[-1].dim - 1 if len(kinds) == 2 else 0
        if len(names) == len(sources):
            joined_tensors[target] = (names, axis)
    return joined_tensors


def renamed_weights(model_type: str, class_names: Iterable[str]) -> dict[str, str]:
    """Returns the parts of parameter names that differ in checkpoint files.

    Args:
        model_type: The model type.
        class_names: The names of PyTorch's classes whose conversions apply.

    Returns:
        For each part of a name in the module, the corresponding part in the files.
    """
    renamed: dict[str, str] = {}
    transforms = [item for name in class_names for item in _transforms(model_type, name)]
    for transform in transforms:
        if type(transform).__name__ != "WeightRenaming":
            continue
        sources, targets = transform.source_patterns, transform.target_patterns
        if len(sources) == len(targets) == 1:
            source, target = _plain(sources[0]), _plain(targets[0])
            if source and target and target not in renamed:
                renamed[target] = source
    return renamed


def split_weights(model_type: str, class_name: str) -> list[tuple[str, tuple[str, str]]]:
    """Returns the layers whose weights checkpoint files store as one tensor.

    Args:
        model_type: The model type.
        class_name: The name of the base model in PyTorch.

    Returns:
        For each such tensor, the name of the layer in the files, and the names of the two layers in
        PyTorch, whose weights are the halves of the tensor.
    """
    names: list[tuple[str, tuple[str, str]]] = []
    for transform in _transforms(model_type, class_name):
        kinds = [type(item).__name__ for item in getattr(transform, "operations", None) or ()]
        sources, targets = transform.source_patterns, transform.target_patterns
        if kinds != ["Chunk"] or len(sources) != 1 or len(targets) != 2:
            continue
        plain = [_plain(str(pattern)) or "" for pattern in (*sources, *targets)]
        if not all(name.endswith(".weight") for name in plain):
            continue
        source, first, second = (name.split(".")[-2] for name in plain)
        names.append((source, (first, second)))
    return names


def _plain(pattern: str) -> str | None:
    """Returns the text that a regular expression matches, or `None` if it is not a fixed text."""
    text = pattern.strip("^$").replace("\\.", ".").strip(".")
    return text if re.fullmatch(r"[\w.{}]+", text) else None
