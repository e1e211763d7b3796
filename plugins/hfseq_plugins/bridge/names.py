"""The names of a PyTorch model's tensors in checkpoint files.

The tensors in a checkpoint may have other names than those in the modules of Transformers, or be
parts of them. Transformers then renames, joins and splits tensors when it loads a checkpoint, and
reverses this when it saves one (`conversion_mapping.py`). The weight map of a bridged model reads
and writes the same files.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import numpy as np
import torch
from transformers.conversion_mapping import get_model_conversion_mapping
from transformers.core_model_loading import (
    Concatenate,
    MergeModulelist,
    PrefixChange,
    WeightConverter,
    WeightRenaming,
    apply_converters,
    apply_renamings,
)

from hfseq.modeling import JoinedTensor, Tensor, WeightMap
from hfseq.nn.trees import Path


class FileNames:
    """Converts between the tensor names of a PyTorch module and those in its checkpoint files.

    Args:
        module: The PyTorch model.

    Attributes:
        joined: The parameters that files store as several tensors, by the end of the parameter's
            name.
    """

    def __init__(self, module: Any):
        self._module = module
        transforms = get_model_conversion_mapping(module, add_legacy=False)
        self._reverse = [
            transform.reverse_transform()
            for transform in reversed(transforms)
            # When Transformers saves a new model, it does not add prefixes that the names in its
            # modules do not have.
            if isinstance(transform, WeightRenaming) and not isinstance(transform, PrefixChange)
        ]
        legacy = get_model_conversion_mapping(module, add_legacy=True)
        self._renamings = [t for t in legacy if isinstance(t, WeightRenaming)]
        self._converters = [t for t in transforms if isinstance(t, WeightConverter)]
        self.joined: dict[str, JoinedTensor] = {}
        self._other_converters = []
        for converter in self._converters:
            joined = _joined_tensor(converter)
            if joined is None:
                self._other_converters.append(converter)
            else:
                self.joined[converter.target_patterns[0].lstrip(".")] = joined
        self._module_names: dict[str, str] = {}

    def in_file(self, module_name: str) -> str:
        """Converts the name of a tensor in the module to its name in files."""
        name = apply_renamings(module_name, self._reverse)  # type: ignore[arg-type]
        self._module_names[name] = module_name
        return name

    def in_module(self, file_name: str) -> str:
        """Reverses `in_file`. A name that `in_file` has not returned stays the same."""
        return self._module_names.get(file_name, file_name)

    def canonical(self, file_name: str) -> str:
        """Converts an alternative name of a tensor in files to the name that `in_file` returns."""
        return self.in_file(apply_renamings(file_name, self._renamings))

    def convert(self, tensors: Mapping[str, Tensor]) -> dict[str, Tensor]:
        """Converts the tensors of a file to those that the weight map expects.

        Conversions other than renaming and joining run in PyTorch. A tensor that a file contains in
        joined form is split, because the weight map expects its parts.

        Args:
            tensors: The tensors by their name in the file.
        """
        converted: dict[str, Tensor] = {}
        groups: dict[str, tuple[WeightConverter, dict[str, list[tuple[str, Tensor]]]]] = {}
        for name, tensor in tensors.items():
            module_name = apply_renamings(name, self._renamings)
            target, pattern = apply_converters(module_name, self._other_converters)
            if pattern is not None:
                converter = next(c for c in self._other_converters if pattern in c.source_patterns)
                sources = groups.setdefault(target, (converter, {}))[1]
                sources.setdefault(pattern, []).append((module_name, tensor))
                continue
            end = next((e for e in self.joined if f".{module_name}".endswith(f".{e}")), None)
            if end is None:
                converted[name] = tensor
                continue
            stem = self.in_file(module_name).removesuffix(end)
            converted |= {f"{stem}{n}": t for n, t in _split(tensor, self.joined[end]).items()}
        for target, (converter, sources) in groups.items():
            for name, tensor in _run(converter, target, sources, self._module).items():
                converted[self.in_file(name)] = tensor
        return converted


def _joined_tensor(converter: WeightConverter) -> JoinedTensor | None:
    """Describes how a converter stacks or concatenates tensors.

    Returns:
        The description, or `None` for a converter that does anything else.
    """
    kinds = [type(operation) for operation in converter.operations]
    if len(converter.target_patterns) != 1 or kinds not in (
        [MergeModulelist],
        [MergeModulelist, Concatenate],
        [Concatenate],
    ):
        return None
    stacked = kinds[0] is MergeModulelist
    if stacked and converter.operations[0].dim != 0:  # type: ignore[attr-defined]
        return None
    sources = [pattern.replace("\\.", ".").lstrip(".^") for pattern in converter.source_patterns]
    if any(
        source.count("*") != int(stacked) or set("()[]|+?\\$") & {*source} for source in sources
    ):
        return None
    axis = converter.operations[-1].dim - stacked if kinds[-1] is Concatenate else 0  # type: ignore[attr-defined]
    return JoinedTensor(tuple(source.replace("*", "{}") for source in sources), axis)


def _split(tensor: Tensor, joined: JoinedTensor) -> dict[str, Tensor]:
    """Returns the parts of a joined tensor by the end of their name. Parts are read on demand."""
    stacked = "{}" in joined.names[0]
    shape = tensor.shape[1:] if stacked else tensor.shape
    size = shape[joined.axis] // len(joined.names)
    part_shape = (*shape[: joined.axis], size, *shape[joined.axis + 1 :])
    parts = {}
    for number in range(tensor.shape[0] if stacked else 1):
        for position, name in enumerate(joined.names):
            columns = slice(position * size, (position + 1) * size)
            inner = (*[slice(None)] * joined.axis, columns)

            def read(index: Any, inner: Any = inner, number: int = number) -> np.ndarray:
                lead = (slice(number, number + 1),) if stacked else ()
                values = tensor.read((*lead, *inner))
                return (values[0] if stacked else values)[index]

            parts[name.replace("{}", str(number))] = Tensor(part_shape, tensor.dtype, read)
    return parts


def _run(
    converter: WeightConverter,
    target: str,
    sources: Mapping[str, list[tuple[str, Tensor]]],
    module: Any,
) -> dict[str, Tensor]:
    """Converts tensors with the operations of one of Transformers' converters."""
    converter = converter.copy(
        list(converter._original_source_patterns),
        list(converter._original_target_patterns),
        operations=converter.operations,
    )
    dtype = ""
    for pattern, tensors in sources.items():
        for name, tensor in tensors:
            dtype = tensor.dtype
            array = np.array(tensor.read(...), np.float32)
            converter.add_tensor(target, name, pattern, torch.from_numpy(array))  # type: ignore[arg-type]
    results = {}
    for name, value in converter.convert(target, module, module.config).items():
        value = value[0] if isinstance(value, list) else value
        values = np.ascontiguousarray(value.numpy())
        results[name] = Tensor(values.shape, dtype, values.__getitem__)
    return results


class BridgedWeightMap(WeightMap):
    """The weight map of a bridged model.

    Args:
        shapes: Shape of each variable by path.
        names: The name of each variable in the PyTorch module by path.
        files: Converts the names in the module to those in files.
        aliases: Maps the other names of tied parameters in the module to the name in `names`.
        **options: Other arguments of `WeightMap`.
    """

    def __init__(
        self,
        shapes: Mapping[Path, tuple[int, ...]],
        names: Mapping[Path, str],
        files: FileNames,
        aliases: Mapping[str, str],
        **options: Any,
    ):
        self._names, self._files = names, files
        renamed = {files.in_file(alias): files.in_file(name) for alias, name in aliases.items()}
        super().__init__(shapes, aliases=renamed, joined=files.joined, **options)

    def torch_name(self, path: Path) -> str:
        """Returns the name of the variable at ``path`` in checkpoint files."""
        return self._files.in_file(self._names.get(path) or super().torch_name(path))

    def module_name(self, name: str) -> str:
        """Converts a name in files to the name in the PyTorch module, which adapters use."""
        return self._files.in_module(name)

    def apply_synonyms(self, name: str, native: bool = False) -> str:
        """Converts a tensor name in a checkpoint to the name that hfseq would write."""
        return name if native else self._files.canonical(name)

    def match(
        self, tensors: Mapping[str, Tensor], *, native: bool = False, compare: bool = True
    ) -> Any:
        """Assigns the tensors of a checkpoint to the variables, as `WeightMap.match` does."""
        converted = tensors if native else self._files.convert(tensors)
        return super().match(converted, native=native, compare=compare)
