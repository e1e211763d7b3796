"""Exports a bridged model as compiled programs, which run without PyTorch.

`hfseq_plugins.bridge.exported` reads and runs these programs.
"""

from __future__ import annotations

import json
import logging
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
from jax import export as jax_export

from hfseq.errors import UsageError
from hfseq.nn import trees
from hfseq_plugins.bridge.exported import FOLDER, FORMAT, INDEX, require_flatbuffers
from hfseq_plugins.bridge.generation import LAYERS, plan_cache
from hfseq_plugins.bridge.model import FlaxBridgedPreTrainedModel
from hfseq_plugins.bridge.refusals import UnsupportedModel

logger = logging.getLogger("hfseq")

#: The shape of inputs with one number per token or audio sample.
_TEXT = ("batch", "length")
#: The shape, dtype and default value of each input of the programs.
_INPUTS: dict[str, tuple[Sequence[str | int], str, int]] = {
    "input_ids": (_TEXT, "int32", 0),
    "attention_mask": (_TEXT, "int32", 1),
    "token_type_ids": (_TEXT, "int32", 0),
    "decoder_input_ids": (_TEXT, "int32", 0),
    "decoder_attention_mask": (_TEXT, "int32", 1),
    "input_values": (_TEXT, "float32", 0),
}


def export_model(
    model: FlaxBridgedPreTrainedModel,
    params: Mapping[str, Any],
    directory: str | Path,
    batch_sizes: Sequence[int],
    lengths: Sequence[int],
    platforms: Sequence[str] | None = None,
) -> list[str]:
    """Writes the programs of a model into the directory that contains its weights.

    Args:
        model: The model.
        params: The parameters of the model, or their shapes and dtypes.
        directory: The directory with the weights.
        batch_sizes: Batch sizes. Programs are written for each combination of a batch size and a
            length.
        lengths: Lengths in tokens or audio samples. Ignored for images.
        platforms: Platforms on which the programs can run, such as "cpu" and "cuda". Default: the
            platform of this process.

    Returns:
        The names of the program files.

    Raises:
        UsageError: The inputs of the model cannot be exported.
    """
    require_flatbuffers()
    folder = Path(directory) / FOLDER
    folder.mkdir(exist_ok=True)
    exporter = _Exporter(model, params, platforms)
    has_length = "length" in exporter.inputs[model.main_input_name]["shape"]
    sizes = lengths if has_length else [1]
    if not batch_sizes or not sizes:
        raise UsageError(
            "hfseq bridge export: pass at least one value each for --batch_sizes and --lengths"
        )
    exporter.describe_outputs(max(sizes))
    programs = []
    for batch in sorted(set(batch_sizes)):
        for length in sorted(set(sizes)):
            programs.append(exporter.write_forward(folder, batch, length))
            if exporter.cache is not None:
                programs += exporter.write_generation(folder, batch, length)
    index = exporter.index() | {"programs": programs}
    (folder / INDEX).write_text(json.dumps(index, indent=1) + "\n", encoding="utf-8")
    return [program["file"] for program in programs]


class _Exporter:
    def __init__(
        self,
        model: FlaxBridgedPreTrainedModel,
        params: Mapping[str, Any],
        platforms: Sequence[str] | None,
    ):
        self.model, self.platforms = model, list(platforms or [jax.default_backend()])
        self.params = {trees.join(p): _abstract(x) for p, x in trees.flatten(params).items()}
        collections = model.extra_shape_tree
        self.collections = {
            trees.join(path): name
            for name, tree in collections.items()
            for path in trees.flatten(tree)
        }
        self.variables = self.params | {
            trees.join(path): _abstract(x)
            for tree in collections.values()
            for path, x in trees.flatten(tree).items()
        }
        self.inputs = self._describe_inputs()
        can_generate = type(model).can_generate() and not model.config.is_encoder_decoder
        plan = None
        try:
            plan = plan_cache(model.structure, False) if can_generate else None
        except UnsupportedModel as error:
            logger.warning("no programs for generation are exported: %s", error)
        # Exported models number the positions from 0.
        is_exported = plan is not None and plan.cache_type == "keys" and not plan.first_position
        self.cache = plan if is_exported else None
        has_positions = plan is None or plan.first_position is not None
        self.step_inputs = ["input_ids", "attention_mask"]
        if has_positions and model.has_input("position_ids"):
            self.step_inputs.append("position_ids")
        self.output_class = ""
        self.axes: dict[str, list[str | None]] = {}

    def _describe_inputs(self) -> dict[str, Any]:
        model = self.model
        names = [name for name in _INPUTS if model.has_input(name)]
        main = model.main_input_name
        inputs = {
            name: {"shape": list(shape), "dtype": dtype, "default": default}
            for name, (shape, dtype, default) in _INPUTS.items()
            if name in names
        }
        if main == "pixel_values":
            shape = model.image_shape()
            if shape is None:
                size = getattr(model.config, "image_size", None)
                raise UsageError(
                    f"the configuration of {type(model).__name__} does not state one height and "
                    f"width for images (image_size={size!r}): add --config_overrides image_size=..."
                )
            inputs = {} if "input_ids" not in names else inputs
            inputs[main] = {"shape": ["batch", *shape], "dtype": "float32", "default": 0}
        if main not in inputs:
            raise UsageError(
                f"{type(model).__name__} cannot be exported: the export does not support its main "
                f"input {main}"
            )
        return inputs

    def _arguments(self, batch: int, length: int) -> dict[str, jax.ShapeDtypeStruct]:
        sizes: dict[Any, int] = {"batch": batch, "length": length}
        return {
            name: jax.ShapeDtypeStruct([sizes.get(a, a) for a in entry["shape"]], entry["dtype"])
            for name, entry in self.inputs.items()
        }

    def describe_outputs(self, length: int) -> None:
        """Finds out which axes of the outputs have the batch size or the length of the inputs.

        Args:
            length: A length of inputs that the model supports.
        """
        other = max(1, length // 2)
        base, wider, shorter = (
            jax.eval_shape(self._forward, self.variables, self._arguments(*size))
            for size in ((2, length), (3, length), (2, other))
        )
        for name, output in base.items():
            self.axes[name] = [
                "batch"
                if wider[name].shape[axis] != size
                else "length"
                if size == length and shorter[name].shape[axis] == other != length
                else None
                for axis, size in enumerate(output.shape)
            ]

    def _split(self, variables: Mapping[str, Any]) -> tuple[dict[str, Any], dict[str, Any]]:
        flat = {tuple(name.split("/")): x for name, x in variables.items()}
        params = {p: x for p, x in flat.items() if trees.join(p) not in self.collections}
        extra: dict[str, Any] = {}
        for name, collection in self.collections.items():
            path = tuple(name.split("/"))
            extra.setdefault(collection, {})[path] = flat[path]
        return trees.unflatten(params), {n: trees.unflatten(leaves) for n, leaves in extra.items()}

    def _forward(self, variables: Mapping[str, Any], inputs: Mapping[str, Any]) -> dict[str, Any]:
        params, extra = self._split(variables)
        output = self.model(**inputs, params=params, extra=extra, return_dict=True)[0]
        self.output_class = type(output).__name__
        return {name: x for name, x in output.items() if isinstance(x, jax.Array)}

    def _step(
        self, variables: Mapping[str, Any], inputs: Mapping[str, Any], cache: Mapping[str, Any]
    ) -> tuple[jax.Array, Any]:
        params, extra = self._split(variables)
        output = self.model(
            **inputs, params=params, extra=extra, past_key_values={LAYERS: cache}, return_dict=True
        )[0]
        return output.logits, output.past_key_values[LAYERS]

    def write_forward(self, folder: Path, batch: int, length: int) -> dict[str, Any]:
        """Writes the forward pass for a batch size and a length, and returns its index entry."""
        file = f"forward-{batch}x{length}.bin"
        arguments = (self.variables, self._arguments(batch, length))
        self._write(folder / file, self._forward, arguments)
        return {"role": "forward", "batch": batch, "length": length, "capacity": 0, "file": file}

    def write_generation(self, folder: Path, batch: int, length: int) -> list[dict[str, Any]]:
        """Writes the two programs of generation, which process the prompt and one new token.

        Args:
            folder: The folder for the files.
            batch: Batch size.
            length: Number of tokens that the cache can contain.

        Returns:
            The index entries of the programs.
        """
        assert self.cache is not None
        programs = []
        layers = {
            number: {
                name: jax.ShapeDtypeStruct((batch, length, *shape[2:]), jnp.float32)
                for name, shape in shapes.items()
            }
            | {"cache_index": jax.ShapeDtypeStruct((), jnp.int32)}
            for number, shapes in self.cache.layers.items()
        }
        for role, new in (("prefill", length), ("decode", 1)):
            inputs = {
                name: jax.ShapeDtypeStruct((batch, new), jnp.int32) for name in self.step_inputs
            }
            inputs["attention_mask"] = jax.ShapeDtypeStruct((batch, length), jnp.int32)
            file = f"{role}-{batch}x{length}.bin"
            self._write(folder / file, self._step, (self.variables, inputs, layers))
            sizes = {"batch": batch, "length": new, "capacity": length}
            programs.append({"role": role, **sizes, "file": file})
        return programs

    def _write(self, path: Path, function: Any, arguments: tuple[Any, ...]) -> None:
        exported = jax_export.export(jax.jit(function), platforms=self.platforms)(*arguments)
        path.write_bytes(exported.serialize())
        logger.info("%s: %.1f MB", path, path.stat().st_size / 1e6)

    def index(self) -> dict[str, Any]:
        """Returns the content of the index file, without the entries of the programs."""
        model, names = self.model, self.model.file_map
        model_inputs = self.inputs[model.main_input_name]["shape"]
        masked = "attention_mask" in self.inputs or type(model).can_generate()
        return {
            "format": FORMAT,
            "class_name": model.torch_class_name(),
            "jax": jax.__version__,
            "platforms": self.platforms,
            "main_input_name": model.main_input_name,
            "length_axis": "length" in model_inputs,
            "exact_lengths": "length" in model_inputs and not masked,
            "base_model_prefix": model.base_model_prefix,
            "variables": [
                {
                    "path": path,
                    "name": names.torch_name(tuple(path.split("/"))),
                    "shape": list(x.shape),
                    "dtype": jnp.dtype(x.dtype).name,
                    "collection": self.collections.get(path),
                }
                for path, x in self.variables.items()
            ],
            "aliases": dict(names.aliases),
            "joined": {n: {"names": j.names, "axis": j.axis} for n, j in names.joined.items()},
            "inputs": self.inputs,
            "step_inputs": self.step_inputs,
            "cache": None
            if self.cache is None
            else {"dtype": "float32", "layers": self.cache.layers},
            "output_class": self.output_class,
            "axes": self.axes,
        }


def _abstract(leaf: Any) -> jax.ShapeDtypeStruct:
    return jax.ShapeDtypeStruct(leaf.shape, leaf.dtype)
