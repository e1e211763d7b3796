"""Models that run programs of `hfseq bridge export`, without PyTorch.

A directory with exported programs contains the folder `bridge`. In this folder are an index file
and the programs for each combination of batch size and length. A call selects the smallest program
that is large enough, and pads the inputs to its batch size and length.
"""

from __future__ import annotations

import dataclasses
import functools
import importlib
import json
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any, ClassVar

import jax
import jax.numpy as jnp
from flax import nnx
from jax import export
from transformers import PreTrainedConfig

from hfseq.errors import CheckpointError, UsageError, optional_import
from hfseq.generation import CausalGeneration
from hfseq.modeling import FlaxPreTrainedModel, JoinedTensor, WeightMap
from hfseq.nn import Buffer, Keys, outputs, trees
from hfseq.nn.context import current_options
from hfseq_plugins.bridge.variables import Holder

FOLDER, INDEX, FORMAT = "bridge", "index.json", 1
#: Attribute of a module that holds the cache during generation.
CACHE = "exported_cache"


_COLLECTIONS = {"batch_stats": nnx.BatchStat, "buffers": Buffer}


@dataclasses.dataclass(frozen=True)
class Program:
    """An exported program, as the index describes it.

    Attributes:
        role: `"forward"` for the forward pass, `"prefill"` for the prompt in generation, or
            `"decode"` for one new token.
        batch: Batch size.
        length: Number of tokens or audio samples per example. It is 1 for `"decode"`.
        capacity: Number of tokens that the cache can contain. It is 0 for `"forward"`.
        file: Name of the file that contains the program.
    """

    role: str
    batch: int
    length: int
    capacity: int
    file: str


@dataclasses.dataclass(frozen=True)
class Exports:
    """The exported programs of a directory.

    Attributes:
        folder: The folder that contains the index and the programs.
        index: The content of the index file.
        programs: The programs in the folder.
    """

    folder: Path
    index: Mapping[str, Any]
    programs: tuple[Program, ...]

    @classmethod
    def read(cls, directory: str | Path) -> Exports:
        """Reads the index of the programs in a directory.

        Raises:
            CheckpointError: The directory has no programs, or this version of hfseq cannot read
                their format.
        """
        folder = Path(directory) / FOLDER
        path = folder / INDEX
        if not path.is_file():
            raise CheckpointError(
                f"{directory} has no exported programs ({FOLDER}/{INDEX}), and torch is not "
                "installed: pip install 'hfseq[bridge]', or run `hfseq bridge export` on a machine "
                "with torch"
            )
        try:
            index = json.loads(path.read_text(encoding="utf-8"))
        except ValueError as error:
            raise CheckpointError(f"{path} is not readable JSON: {error}") from error
        if index.get("format") != FORMAT:
            raise CheckpointError(
                f"{path} has the format {index.get('format')}, but this version of hfseq reads the "
                f"format {FORMAT}: run `hfseq bridge export` again"
            )
        programs = tuple(Program(**program) for program in index["programs"])
        return cls(folder, index, programs)

    def choose(self, role: str, batch: int, length: int, capacity: int = 0) -> Program:
        """Returns the smallest program that supports a batch size and a length.

        Args:
            role: As in `Program`.
            batch: Number of examples.
            length: Number of tokens or audio samples per example.
            capacity: Number of tokens that the cache must contain.

        Raises:
            UsageError: All programs are too small.
        """
        group = [program for program in self.programs if program.role == role]
        exact = self.index["exact_lengths"] and role == "forward"
        fitting = [
            program
            for program in group
            if program.batch >= batch
            and (program.length == length if exact else program.length >= length)
            and program.capacity >= capacity
        ]
        if not fitting:
            sizes = sorted(
                {(program.batch, program.capacity or program.length) for program in group}
            )
            listed = ", ".join(f"{b} x {n}" for b, n in sizes)
            raise UsageError(
                f"{self.folder} has no {role} program for {batch} examples of length "
                f"{capacity or length}. It has programs for (batch size x length) {listed}: use "
                "inputs that fit one of these sizes, or run `hfseq bridge export` with other "
                "--batch_sizes and --lengths"
            )
        return min(fitting, key=lambda p: p.batch * max(p.length, p.capacity))

    def load(self, program: Program) -> export.Exported:
        """Returns the function of a program. Its file is read on first use."""
        return _load(str(self.folder / program.file))


def require_flatbuffers() -> None:
    """Raises a UsageError if flatbuffers, with which jax stores programs, is not installed."""
    with optional_import("exported programs", "flatbuffers", "hfseq[exported]"):
        importlib.import_module("flatbuffers")


@functools.cache
def _load(path: str) -> export.Exported:
    require_flatbuffers()
    try:
        return export.deserialize(bytearray(Path(path).read_bytes()))
    except OSError as error:
        raise CheckpointError(f"cannot read {path}: {error}") from error


class ExportedModule(nnx.Module):
    """The module of an exported model, which holds its variables and calls its programs.

    Args:
        config: The configuration. Its attribute `bridge_exports` holds the programs.
        rngs: Random number generators.
    """

    def __init__(self, config: PreTrainedConfig, rngs: nnx.Rngs):
        del rngs
        self.exports: Exports = config.bridge_exports
        for entry in self.exports.index["variables"]:
            variable_type = _COLLECTIONS.get(entry["collection"], nnx.Param)
            *above, leaf = entry["path"].split("/")
            node: Any = self
            for name in above:
                if not hasattr(node, name):
                    setattr(node, name, Holder())
                node = getattr(node, name)
            zeros: Any = jnp.zeros(entry["shape"], entry["dtype"])
            setattr(node, leaf, variable_type(zeros))
        cache = Holder()
        for number in (self.exports.index["cache"] or {}).get("layers", ()):
            setattr(cache, number, Holder())
        setattr(self, CACHE, cache)

    def _variables(self) -> dict[str, jax.Array]:
        values = {}
        for entry in self.exports.index["variables"]:
            node: Any = self
            for name in entry["path"].split("/"):
                node = getattr(node, name)
            values[entry["path"]] = node[...].astype(entry["dtype"])
        return values

    def __call__(self, *, rngs: Keys | None = None, **inputs: Any) -> Any:
        """Runs the smallest program that fits the inputs."""
        if rngs is not None or current_options().train:
            raise UsageError(
                "exported programs cannot be trained: install torch, and load the model with "
                "bridge=True"
            )
        for name in ("output_attentions", "output_hidden_states"):
            if inputs.pop(name, False):
                raise UsageError(f"exported programs do not support {name}")
        entries = {
            number: {n: v for n, v in vars(holder).items() if isinstance(v, nnx.Cache)}
            for number, holder in vars(getattr(self, CACHE)).items()
            if isinstance(holder, Holder)
        }
        entries = {number: entry for number, entry in entries.items() if entry}
        input_names = self.exports.index["inputs"]
        if unknown := [
            name for name in inputs if name not in input_names and name != "position_ids"
        ]:
            raise UsageError(
                f"the exported programs do not have the inputs {', '.join(unknown)}. Their inputs "
                f"are {', '.join(input_names)}"
            )
        return self._generate(inputs, entries) if entries else self._forward(inputs)

    def _forward(self, inputs: dict[str, Any]) -> Any:
        index = self.exports.index
        main = inputs[index["main_input_name"]]
        batch = main.shape[0]
        length = main.shape[1] if index["length_axis"] else 1
        program = self.exports.choose("forward", batch, length)
        sizes = {"batch": program.batch, "length": program.length}
        padded = _pad_inputs(index, inputs, (batch, length), sizes)
        values = self.exports.load(program).call(self._variables(), padded)
        real = {"batch": batch, "length": length}
        return _output(index, {n: _cut(index["axes"][n], v, real) for n, v in values.items()})

    def _generate(self, inputs: dict[str, Any], entries: Mapping[str, Any]) -> Any:
        ids = inputs["input_ids"]
        batch, new = ids.shape
        cache = {n: {k: v[...] for k, v in entry.items()} for n, entry in entries.items()}
        room = next(iter(cache.values()))["cached_key"].shape[1]
        role = "decode" if new == 1 else "prefill"
        program = self.exports.choose(role, batch, new, room)
        mask = inputs.get("attention_mask")
        mask = jnp.ones((batch, room), jnp.int32) if mask is None else mask
        padded = {
            "input_ids": _pad(ids, (program.batch, program.length)),
            "attention_mask": _pad(mask, (program.batch, program.capacity), 1),
        }
        positions = inputs.get("position_ids")
        if positions is not None:
            padded["position_ids"] = _pad(positions, (program.batch, program.length))
        padded = {n: padded[n] for n in self.exports.index["step_inputs"]}
        wide = {
            number: {
                name: value
                if value.ndim == 0
                else _pad(
                    value,
                    (program.batch, program.capacity if value.shape[1] == room else value.shape[1]),
                )
                for name, value in entry.items()
            }
            for number, entry in cache.items()
        }
        logits, new_cache = self.exports.load(program).call(self._variables(), padded, wide)
        for number, entry in entries.items():
            for name, variable in entry.items():
                old = cache[number][name]
                if name == "cache_index":
                    value = old + new
                else:
                    value = new_cache[number][name][tuple(slice(size) for size in old.shape)]
                variable.set_value(value)
        return outputs.FlaxCausalLMOutputWithCrossAttentions(logits=logits[:batch, :new])


def _pad(value: jax.Array, lead: tuple[int, int], fill: int = 0) -> jax.Array:
    """Pads the first two axes of an array at their ends, to the sizes in `lead`."""
    missing = [(0, size - old) for size, old in zip(lead, value.shape, strict=False)]
    missing += [(0, 0)] * (value.ndim - 2)
    return jnp.pad(value, missing, constant_values=fill)


def _pad_inputs(
    index: Mapping[str, Any],
    inputs: Mapping[str, Any],
    real: tuple[int, int],
    sizes: Mapping[str, int],
) -> dict[str, jax.Array]:
    padded = {}
    for name, entry in index["inputs"].items():
        value = inputs.get(name)
        if value is None:
            lead = [{"batch": real[0], "length": real[1]}.get(a, a) for a in entry["shape"]]
            value = jnp.full(lead, entry["default"], entry["dtype"])
        padded_shape = [sizes.get(axis, axis) for axis in entry["shape"]]
        if value.ndim != len(padded_shape) or any(
            v > w for v, w in zip(value.shape, padded_shape, strict=True)
        ):
            raise UsageError(
                f"{name} has the shape {tuple(value.shape)}, which cannot be padded to the shape "
                f"{tuple(padded_shape)} of the exported program"
            )
        missing = [(0, w - v) for v, w in zip(value.shape, padded_shape, strict=True)]
        padded[name] = jnp.pad(value.astype(entry["dtype"]), missing)
    return padded


def _cut(axes: Sequence[str | None], value: jax.Array, sizes: Mapping[str, int]) -> jax.Array:
    return value[tuple(slice(sizes[axis]) if axis else slice(None) for axis in axes)]


def _output(index: Mapping[str, Any], values: Mapping[str, Any]) -> Any:
    return _output_class(index["output_class"], tuple(index["axes"]))(**values)


@functools.cache
def _output_class(name: str, fields: tuple[str, ...]) -> Any:
    native_class = getattr(outputs, name, None)
    if native_class is not None and {*fields} <= {
        field.name for field in dataclasses.fields(native_class)
    }:
        return native_class
    return dataclasses.make_dataclass(
        name, [(field, Any, None) for field in fields], bases=(outputs.FlaxModelOutput,)
    )


class _ExportedWeightMap(WeightMap):
    """A weight map that takes the names of tensors from the index of the programs."""

    def __init__(self, shapes: Mapping[trees.Path, tuple[int, ...]], index: Mapping[str, Any]):
        self._names = {
            tuple(entry["path"].split("/")): entry["name"] for entry in index["variables"]
        }
        super().__init__(
            shapes,
            prefix=index["base_model_prefix"],
            aliases=index["aliases"],
            joined={
                n: JoinedTensor(tuple(j["names"]), j["axis"]) for n, j in index["joined"].items()
            },
            ignored=(*FlaxPreTrainedModel.ignored_weights, r"inv_freq$", r"num_batches_tracked$"),
            integers={
                tuple(entry["path"].split("/"))
                for entry in index["variables"]
                if entry["dtype"].startswith("int")
            },
        )

    def torch_name(self, path: trees.Path) -> str:
        """Returns the name of the variable at ``path`` in checkpoint files."""
        return self._names.get(path) or super().torch_name(path)


class FlaxExportedPreTrainedModel(FlaxPreTrainedModel):
    """Base class of models that run exported programs."""

    module_class = ExportedModule
    position_table = ""
    torch_name: ClassVar[str]

    @classmethod
    def from_pretrained(
        cls,
        pretrained_model_name_or_path: str | Path,
        *args: Any,
        config: PreTrainedConfig | None = None,
        **kwargs: Any,
    ) -> Any:
        """Loads the weights and the programs of a directory.

        The arguments are those of `FlaxPreTrainedModel.from_pretrained`.

        Raises:
            CheckpointError: The directory contains no programs.
            UsageError: The programs belong to a different class.
        """
        exports = Exports.read(pretrained_model_name_or_path)
        if exports.index["class_name"] != cls.torch_name:
            raise UsageError(
                f"{exports.folder} contains programs for {exports.index['class_name']}, not for "
                f"{cls.torch_name}: load the model with the class Flax{exports.index['class_name']}"
            )
        if config is None or isinstance(config, str | Path):
            location = pretrained_model_name_or_path if config is None else config
            config = cls.config_class.from_pretrained(location)
        config.bridge_exports = exports
        return super().from_pretrained(
            pretrained_model_name_or_path, *args, config=config, **kwargs
        )

    def _names(self, shapes: Mapping[trees.Path, tuple[int, ...]]) -> WeightMap:
        return _ExportedWeightMap(shapes, self.config.bridge_exports.index)

    def _set_structure(self) -> None:
        if not hasattr(self._config, "bridge_exports"):
            raise UsageError(
                f"{type(self).__name__} runs the PyTorch code of Transformers, but torch is not "
                "installed: pip install 'hfseq[bridge]'. Without torch, from_pretrained can only "
                "load directories that contain programs written by `hfseq bridge export`"
            )
        super()._set_structure()
        self.stored_collections = {  # type: ignore[misc]
            name: tuple({path[-1] for path in trees.flatten(shapes)})
            for name, shapes in self.extra_shape_tree.items()
        }

    def _apply_is_causal(self, module: nnx.Module) -> None:
        """Does nothing, because the programs compute causal masks themselves."""

    def has_input(self, name: str) -> bool:
        """Returns whether the programs have an input with this name."""
        return name in self.config.bridge_exports.index["inputs"]

    def _check_images(self, images: Any) -> None:
        """Does nothing, because the programs check the shapes of images."""

    def save_pretrained(self, *args: Any, **kwargs: Any) -> None:
        """Raises a UsageError. A directory with programs can be copied instead."""
        raise UsageError("models with exported programs cannot be saved: copy their directory")

    @classmethod
    def torch_class_name(cls) -> str:
        """Returns the name of the PyTorch class."""
        return cls.torch_name


class _ExportedGeneration(CausalGeneration):
    """Prepares the inputs of generation with exported programs."""

    def prepare_inputs_for_generation(
        self, input_ids: jax.Array, max_length: int, attention_mask: jax.Array | None = None
    ) -> dict[str, Any]:
        """Returns the keyword arguments of the call that processes the prompt."""
        prepared = super().prepare_inputs_for_generation(input_ids, max_length, attention_mask)
        model: Any = self
        if "position_ids" not in model.config.bridge_exports.index["step_inputs"]:
            del prepared["position_ids"]
        return prepared

    def update_inputs_for_generation(
        self, model_outputs: Any, model_kwargs: dict[str, Any]
    ) -> dict[str, Any]:
        """Returns the keyword arguments of the call that processes the next token."""
        updated = {**model_kwargs, "past_key_values": model_outputs.past_key_values}
        if "position_ids" in updated:
            updated["position_ids"] = updated["position_ids"][:, -1:] + 1
        return updated

    def _empty_cache(self, size: Any) -> dict[str, Any]:
        model: Any = self
        index = model.config.bridge_exports.index
        if index["cache"] is None:
            raise UsageError(
                f"the exported programs of {model.torch_class_name()} cannot generate, because "
                "they contain no cache. docs/bridge.md lists the models whose generation can be "
                "exported"
            )
        layers = {}
        for number, shapes in index["cache"]["layers"].items():
            layers[number] = {
                name: jnp.zeros(
                    (size.batch_size, size.max_length, *shape[2:]), index["cache"]["dtype"]
                )
                for name, shape in shapes.items()
            } | {"cache_index": jnp.zeros((), jnp.int32)}
        return {CACHE: layers}


@functools.cache
def exported_class(class_name: str) -> type[FlaxExportedPreTrainedModel]:
    """Returns the Flax class that runs exported programs of a PyTorch class."""
    from transformers.models.auto.modeling_auto import MODEL_FOR_CAUSAL_LM_MAPPING_NAMES

    mixin = (
        (_ExportedGeneration,) if class_name in MODEL_FOR_CAUSAL_LM_MAPPING_NAMES.values() else ()
    )
    content = {
        "__doc__": f"Exported programs of Transformers' {class_name}.",
        "__module__": "hfseq_plugins.bridge.classes",
        "torch_name": class_name,
        "config_class": _config_class(class_name),
    }
    return type(f"Flax{class_name}", (*mixin, FlaxExportedPreTrainedModel), content)


def _config_class(class_name: str) -> Any:
    """Returns the configuration class of a PyTorch class."""
    from transformers.models.auto.configuration_auto import CONFIG_MAPPING

    from hfseq_plugins.bridge.heads import torch_heads

    for model_type in CONFIG_MAPPING:
        if class_name in torch_heads(model_type).values():
            return CONFIG_MAPPING[model_type]
    raise UsageError(f"no configuration class of Transformers belongs to '{class_name}'")
