"""Model classes that run a PyTorch class of Transformers as a JAX function.

A bridged model is an ordinary `FlaxPreTrainedModel`. Its NNX module holds the parameters of the
PyTorch model (`hfseq_plugins.bridge.structure`). A call of the module runs the Python code of the
PyTorch model over traced arrays (`hfseq_plugins.bridge.trace`).
"""

from __future__ import annotations

import dataclasses
import functools
import inspect
import logging
from collections.abc import Callable, Mapping
from typing import Any, ClassVar

import jax
import jax.numpy as jnp
import numpy as np
import torch
import transformers
from flax import nnx
from jax.typing import DTypeLike
from transformers import PreTrainedConfig

from hfseq import nn
from hfseq.errors import UsageError
from hfseq.modeling import DerivedTensor, FlaxPreTrainedModel, WeightMap
from hfseq.modeling.seq2seq import FlaxSeq2SeqPreTrainedModel
from hfseq.nn import Keys, outputs, trees
from hfseq.nn.context import current_options
from hfseq_plugins.bridge import trace
from hfseq_plugins.bridge.generation import (
    BridgedCausalGeneration,
    BridgedSeq2SeqGeneration,
    add_holders,
    generation_mixin,
    run_with_cache,
)
from hfseq_plugins.bridge.initialization import initial_values
from hfseq_plugins.bridge.layout import sharding_rules
from hfseq_plugins.bridge.names import BridgedWeightMap
from hfseq_plugins.bridge.structure import Structure, forward_signature, new_layer, structure_of
from hfseq_plugins.bridge.variables import Holder

logger = logging.getLogger("hfseq")

#: Arguments of PyTorch's forward passes that bridged models set themselves.
_NOT_INPUTS = ("labels", "return_dict", "use_cache", "cache", "cache_params", "state", "kwargs")
#: Arguments of PyTorch's forward passes that are options of hfseq's models.
_OPTIONS = ("output_attentions", "output_hidden_states")
#: The order of these inputs, which come first, as in all text models of hfseq.
_TEXT_INPUTS = ("input_ids", "attention_mask", "token_type_ids", "position_ids")
#: Inputs whose values determine shapes. They are constants of the compiled program.
_STATIC_INPUTS = ("grid_thw", "image_sizes", "spatial_shapes", "grid_hws", "image_num_patches")


class BridgedModule(nnx.Module):
    """The parameters of a PyTorch model, and a call that runs its code.

    Args:
        config: The configuration.
        rngs: Random number generators.

    Attributes:
        torch_class_name: The PyTorch class in Transformers.
    """

    torch_class_name: ClassVar[str]
    #: The dtype in which PyTorch's code computes, or `None` for that of the parameters.
    compute_dtype: DTypeLike | None = None

    def __init__(self, config: PreTrainedConfig, rngs: nnx.Rngs):
        self.structure = structure_of(config, self.torch_class_name)
        parts = dict(self.structure.module.named_modules())
        for layer in self.structure.layers:
            part = parts[layer.name]
            if layer.layer_type != "plain":
                above, _, last = layer.name.rpartition(".")
                setattr(self._holder(above), last, new_layer(part, layer, rngs))
                continue
            holder = self._holder(layer.name)
            for leaf, path_leaf in layer.leaves.items():
                parameter = part._parameters[leaf]
                assert parameter is not None
                setattr(holder, path_leaf, nnx.Param(jnp.zeros(parameter.shape)))
        for name, value in self.structure.statistics.items():
            *above_path, leaf = self.structure.buffer_paths[name]
            is_statistic = name.endswith(("running_mean", "running_var"))
            variable_type = nnx.BatchStat if is_statistic else nn.Buffer
            setattr(self._holder(".".join(above_path)), leaf, variable_type(jnp.asarray(value)))
        add_holders(self)

    def _holder(self, name: str) -> Any:
        """Returns the module at a PyTorch name, which is created if it does not exist."""
        node: Any = self
        for part in name.split(".") if name else ():
            if not hasattr(node, part):
                setattr(node, part, Holder())
            node = getattr(node, part)
        return node

    def _variable(self, path: trees.Path) -> nnx.Variable:
        node: Any = self
        for part in path:
            node = getattr(node, part)
        return node

    def tensors(self) -> tuple[dict[str, jax.Array], dict[str, trace.Layer]]:
        """Returns the PyTorch tensors by name, and the hfseq layers by the name of their module."""
        structure, dtype = self.structure, self.compute_dtype
        tensors: dict[str, jax.Array] = {}
        layers: dict[str, trace.Layer] = {}
        for layer in structure.layers:
            module = self._holder(layer.name)
            for leaf, path_leaf in layer.leaves.items():
                name = f"{layer.name}.{leaf}" if layer.name else leaf
                if path_leaf == "kernel":
                    # XLA drops the transposition if no code of PyTorch uses the weight itself.
                    value = module.gathered_kernel().T
                else:
                    value = getattr(module, path_leaf)[...]
                shape = structure.shapes[name]
                if value.shape != shape:  # the vocabulary is padded
                    value = value[tuple(slice(size) for size in shape)]
                if name in structure.frozen:
                    value = jax.lax.stop_gradient(value)
                is_float = jnp.issubdtype(value.dtype, jnp.floating)
                tensors[name] = value.astype(dtype) if dtype is not None and is_float else value
            if layer.layer_type in ("linear", "conv1d", "layer_norm"):
                layers[layer.name] = module
            elif layer.layer_type == "embedding":
                part: Any = structure.module.get_submodule(layer.name)
                layers[layer.name] = _lookup(module, part.padding_idx)
        for name, path in structure.buffer_paths.items():
            tensors[name] = self._variable(path)[...]
        for name, constant in structure.constants.items():
            if name.endswith("num_batches_tracked"):  # incremented in training
                tensors[name] = jnp.asarray(constant)
        return tensors, layers

    def __call__(
        self,
        *,
        rngs: Keys | None = None,
        output_attentions: bool = False,
        output_hidden_states: bool = False,
        **inputs: Any,
    ) -> Any:
        """Runs PyTorch's forward pass.

        Args:
            rngs: Keys of dropout, or `None` in evaluation.
            output_attentions: Whether to return attention weights.
            output_hidden_states: Whether to return hidden states.
            **inputs: The inputs of PyTorch's forward pass, and ``segment_ids``.
        """
        flags = {"output_attentions": output_attentions}
        flags |= {"output_hidden_states": output_hidden_states}
        segments = inputs.pop("segment_ids", None)
        if segments is not None:
            positions = nn.positions_in_segments(segments) + self.structure.first_position()
            inputs.setdefault("position_ids", positions)
        options = {name: True for name, flag in flags.items() if flag}
        run = functools.partial(self._run, rngs=rngs, segment_ids=segments)
        arguments = {**inputs, **options}
        output = run_with_cache(run, self, arguments)
        return run(arguments) if output is None else output

    def _run(self, inputs: Mapping[str, Any], rngs: Keys | None = None, **options: Any) -> Any:
        """Runs the PyTorch model, updates the buffers, and returns its outputs."""
        structure, call_options = self.structure, current_options()
        arguments = {name: _static(name, value) for name, value in inputs.items()}
        accepted = structure.parameters.parameters
        if "use_cache" in accepted:
            arguments.setdefault("use_cache", False)
        dtype = self.compute_dtype
        for name, value in arguments.items():
            if dtype is not None and isinstance(value, jax.Array):
                if jnp.issubdtype(value.dtype, jnp.floating):
                    arguments[name] = value.astype(dtype)
        tensors, layers = self.tensors()
        adapted = {n: f for n, f in layers.items() if getattr(f, "lora", None) is not None}
        called: set[str] = set()
        layers |= {n: _recording(f, called, n) for n, f in adapted.items()}
        values, buffers = trace.call(
            structure.module,
            tensors,
            arguments,
            train=call_options.train,
            rng=rngs,
            gradient_checkpointing=call_options.remat,
            layers=layers,
            make_output=_output,
            **options,
        )
        if unused := sorted(adapted.keys() - called) if "function" not in options else []:
            logger.warning(
                "the adapters of %s have no effect in this call, because PyTorch's code does not "
                "call these layers as modules",
                ", ".join(unused[:5]) + (f" and {len(unused) - 5} more" if unused[5:] else ""),
            )
        for name, value in buffers.items():
            if name in structure.buffer_paths and call_options.train:
                variable = self._variable(structure.buffer_paths[name])
                variable.set_value(jax.lax.stop_gradient(value).astype(variable[...].dtype))
        return values if isinstance(values, outputs.FlaxModelOutput) else _plain_output(values)


def _recording(layer: trace.Layer, called: set[str], name: str) -> trace.Layer:
    """Returns a layer that adds its name to `called`."""

    def call(x: jax.Array) -> jax.Array:
        called.add(name)
        return layer(x)

    return call


def _lookup(layer: nn.Embed, padding_idx: int | None) -> Callable[[jax.Array], jax.Array]:
    """Returns the lookup in an embedding matrix. As in PyTorch, the padding row is not trained."""
    if padding_idx is None:
        return layer

    def lookup(ids: jax.Array) -> jax.Array:
        rows = layer(ids)
        is_padding = (ids == padding_idx)[..., None]
        return jnp.where(is_padding, jax.lax.stop_gradient(rows), rows)

    return lookup


def _static(name: str, value: Any) -> Any:
    """Returns the values of inputs that determine shapes, unless they are traced."""
    is_static = name.endswith(_STATIC_INPUTS)
    if is_static and isinstance(value, jax.Array) and not isinstance(value, jax.core.Tracer):
        return np.asarray(value)
    return value


def _output(torch_class: type, values: Mapping[str, Any]) -> Any:
    """Returns an hfseq output with the fields of an output of PyTorch."""
    names = [field.name for field in dataclasses.fields(torch_class)]
    names = [name for name in names if name != "loss"]
    fields = {n: v for n, v in values.items() if n in names and not _is_cache(n)}
    return _output_class(torch_class.__name__, tuple(names))(**fields)


def _is_cache(name: str) -> bool:
    return name in ("past_key_values", "cache", "cache_params", "state")


def _plain_output(values: Any) -> Any:
    """Returns an hfseq output for a forward pass that returns a tensor, a tuple or a dictionary."""
    if not isinstance(values, Mapping):
        values = values if isinstance(values, tuple) else (values,)
        values = {f"output_{number}": value for number, value in enumerate(values)}
    return _output_class("Output", tuple(values))(**values)


def _field_names(output_class: Any) -> set[str]:
    return {field.name for field in dataclasses.fields(output_class)}


@functools.cache
def _output_class(class_name: str, field_names: tuple[str, ...]) -> Any:
    """Returns the output class with the fields of an output class of PyTorch."""
    native_class = getattr(outputs, f"Flax{class_name}", None)
    names = [name for name in field_names if not _is_cache(name)]
    if native_class is not None and {*names} <= _field_names(native_class):
        return native_class
    names.append("past_key_values")  # set by cached decoding
    return dataclasses.make_dataclass(
        f"Flax{class_name}",
        [(name, Any, None) for name in names],
        bases=(outputs.FlaxModelOutput,),
        namespace={"__doc__": f"The outputs of PyTorch's {class_name}.", "__module__": __name__},
    )


class FlaxBridgedPreTrainedModel(FlaxPreTrainedModel):
    """Base class of the model classes that run a PyTorch class of Transformers."""

    structure: Structure

    def __init__(self, config: PreTrainedConfig, *args: Any, **kwargs: Any):
        if kwargs.get("scan_layers"):
            raise UsageError(
                f"{type(self).__name__} runs PyTorch's code, which does not stack its layers: "
                "remove scan_layers"
            )
        super().__init__(config, *args, **kwargs)

    #: Buffers that Transformers computes and does not read from checkpoints.
    ignored_weights = (*FlaxPreTrainedModel.ignored_weights, r"inv_freq$")

    def _set_structure(self) -> None:
        self.structure = structure_of(self._config, self.torch_class_name())
        self.weight_aliases = self.structure.aliases  # type: ignore[misc]
        super()._set_structure()
        self.stored_collections = {  # type: ignore[misc]
            name: tuple({path[-1] for path in trees.flatten(shapes)})
            for name, shapes in self.extra_shape_tree.items()
            if name in ("batch_stats", "buffers")
        }
        self._has_dropout = self.structure.has_dropout
        if not self.structure.packs:
            self._accepted["__call__"].pop("segment_ids", None)
        if self.structure.frozen:
            logger.info(
                "%s: PyTorch does not train %d parameters (requires_grad=False): %s",
                type(self).__name__,
                len(self.structure.frozen),
                ", ".join(sorted(self.structure.frozen)[:5]),
            )

    def __getstate__(self) -> dict[str, Any]:
        """Returns the state for a pickle, without PyTorch's module."""
        return {n: v for n, v in super().__getstate__().items() if n != "structure"}

    def _apply_is_causal(self, module: nnx.Module) -> None:
        """Does nothing, because PyTorch's code reads ``is_causal`` itself."""

    def _build(self, rngs: nnx.Rngs, cache: Any = None) -> nnx.Module:
        module = super()._build(rngs, cache)
        assert isinstance(module, BridgedModule)
        module.compute_dtype = self.precision.compute_dtype
        return module

    def _initialize(self, rng: jax.Array) -> tuple[dict[str, Any], dict[str, Any]]:
        """Draws the initial values that PyTorch's class would draw from its distributions."""
        params, extra = super()._initialize(rng)
        flat = trees.flatten(params)
        values = initial_values(self.structure, rng)
        for path, name in self.structure.names.items():
            if path in flat:
                value = values[name]
                flat[path] = value.T if path[-1] == "kernel" else value
        return trees.unflatten(flat), extra

    def _names(self, shapes: Mapping[trees.Path, tuple[int, ...]]) -> WeightMap:
        derived = [name.replace(".", r"\.") for name in self.derived_weights()]
        return BridgedWeightMap(
            shapes,
            self.structure.names,
            self.structure.files,
            self.structure.aliases,
            prefix=self.base_model_prefix,
            fallbacks=self._fallbacks(),
            ignored=(*self.ignored_weights, *(rf"(^|\.){name}$" for name in derived)),
        )

    def derived_weights(self) -> Mapping[str, DerivedTensor]:
        """Returns the integer buffers that PyTorch's class stores."""
        return {
            name: DerivedTensor(value, unused=name.endswith("num_batches_tracked"))
            for name, value in self.structure.constants.items()
        }

    @property
    def trainable_paths(self) -> set[trees.Path]:
        """The paths of the parameters that training changes.

        The result does not contain parameters that PyTorch's class sets to ``requires_grad=False``.
        """
        frozen = {p for p, name in self.structure.names.items() if name in self.structure.frozen}
        return super().trainable_paths - frozen

    def sharding_rules(self) -> Any:
        """Returns rules from the tensor-parallel plan of the configuration.

        Parameters that are not in the plan are split over the axis ``fsdp`` only.
        """
        return sharding_rules(self)

    def max_length(self) -> int | None:
        """Returns the maximum length, without positions that the model reserves for padding."""
        length = super().max_length()
        return length - self.structure.first_position() if isinstance(length, int) else length

    def image_shape(self) -> tuple[int, int, int] | None:
        """Returns the channels, height and width of images, or `None` for any size."""
        try:
            return super().image_shape()
        except (TypeError, ValueError):  # the configuration describes the size in another way
            return None

    def _check_images(self, images: Any) -> None:
        """Does nothing, because PyTorch's code checks the shapes of images, patches and videos."""

    def __getattr__(self, name: str) -> Any:
        """Provides the number of frames that the feature encoder of an audio model computes."""
        if name == "_get_feat_extract_output_lengths":
            method = getattr(self.structure.module, name, None)
            if method is not None:
                return functools.partial(_count_frames, method)
        return super().__getattr__(name)  # type: ignore[misc]

    def has_input(self, name: str) -> bool:
        """Returns whether the PyTorch class has an argument with this name."""
        return name in input_names(self.torch_class_name())

    @classmethod
    def can_generate(cls) -> bool:
        """Returns whether PyTorch's class can generate."""
        return issubclass(cls, BridgedCausalGeneration | BridgedSeq2SeqGeneration)

    @classmethod
    def torch_class_name(cls) -> str:
        """Returns the name of the PyTorch class."""
        return cls.module_class.torch_class_name


def _count_frames(method: Callable[..., Any], samples: Any, add_adapter: bool = True) -> Any:
    """Returns the number of frames for a number of samples, with a method of PyTorch's class."""
    lengths = torch.as_tensor(np.asarray(samples, np.int64))
    options = {"add_adapter": add_adapter}
    parameters = inspect.signature(method).parameters
    frames = method(lengths, **{n: v for n, v in options.items() if n in parameters})
    return np.asarray(frames)


class FlaxBridgedSeq2SeqPreTrainedModel(FlaxBridgedPreTrainedModel, FlaxSeq2SeqPreTrainedModel):
    """Base class of bridged encoder-decoders."""


class BridgedSeq2SeqModule(BridgedModule):
    """The parameters of a PyTorch encoder-decoder, and calls that run its parts."""

    def encode(self, *, rngs: Keys | None = None, **inputs: Any) -> Any:
        """Runs the encoder."""
        options = {n: True for n in _OPTIONS if inputs.pop(n, False)}
        return self._run({**inputs, **options}, rngs, function=_run_encoder)

    def decode(
        self,
        decoder_input_ids: jax.Array,
        encoder_hidden_states: jax.Array,
        *,
        encoder_attention_mask: jax.Array | None = None,
        decoder_attention_mask: jax.Array | None = None,
        rngs: Keys | None = None,
        output_attentions: bool = False,
        output_hidden_states: bool = False,
    ) -> Any:
        """Runs the decoder on the last hidden states of the encoder.

        The number of rows of the decoder may be a multiple of that of the encoder: beams share the
        input.
        """
        rows = decoder_input_ids.shape[0]
        encoder_hidden_states = _repeat_rows(encoder_hidden_states, rows)
        if encoder_attention_mask is not None:
            encoder_attention_mask = _repeat_rows(encoder_attention_mask, rows)
        inputs: dict[str, Any] = {
            "encoder_outputs": (encoder_hidden_states,),
            "attention_mask": encoder_attention_mask,
            "decoder_input_ids": decoder_input_ids,
            "decoder_attention_mask": decoder_attention_mask,
            "output_attentions": output_attentions or None,
            "output_hidden_states": output_hidden_states or None,
        }
        inputs = {name: value for name, value in inputs.items() if value is not None}
        run = functools.partial(self._run, rngs=rngs)
        output = run_with_cache(run, self, inputs)
        return run(inputs) if output is None else output


def _repeat_rows(array: jax.Array, rows: int) -> jax.Array:
    return jnp.repeat(array, rows // array.shape[0], axis=0) if array.shape[0] < rows else array


def _run_encoder(module: Any, **inputs: Any) -> Any:
    inputs.pop("use_cache", None)
    return module.get_encoder()(**inputs)


@functools.cache
def input_names(class_name: str) -> tuple[str, ...]:
    """Returns the inputs of a PyTorch class that are arrays, in hfseq's order."""
    names = forward_signature(_torch_class(class_name)).parameters
    inputs = [
        n for n in names if n not in (*_NOT_INPUTS, *_OPTIONS) and not n.startswith("logits_")
    ]
    main = getattr(_torch_class(class_name), "main_input_name", None)
    first = [name for name in (main, *_TEXT_INPUTS) if name in inputs and main == "input_ids"]
    first = first or [name for name in inputs if name == main]
    return tuple(dict.fromkeys([*first, *inputs]))


def _torch_class(class_name: str) -> type:
    torch_class = getattr(transformers, class_name, None)
    if torch_class is None:
        raise UsageError(
            f"transformers {transformers.__version__} has no class '{class_name}' (an optional "
            "dependency of the class may be missing)"
        )
    return torch_class


@functools.cache
def bridged_class(class_name: str) -> type[FlaxBridgedPreTrainedModel]:
    """Returns the Flax class that runs a PyTorch class of Transformers.

    Args:
        class_name: Name of the PyTorch class, such as ``"DetrForObjectDetection"``.
    """
    torch_class: Any = _torch_class(class_name)
    names = input_names(class_name)
    is_seq2seq = "decoder_input_ids" in names and "input_ids" in names
    module_base = BridgedSeq2SeqModule if is_seq2seq else BridgedModule
    base = FlaxBridgedSeq2SeqPreTrainedModel if is_seq2seq else FlaxBridgedPreTrainedModel
    module_class = type(
        f"{class_name}Module",
        (module_base,),
        {
            "torch_class_name": class_name,
            "__call__": _module_call(module_base.__call__, names),
            "__module__": __name__,
        },
    )
    mixin = generation_mixin(torch_class, is_seq2seq, names)
    ties = getattr(torch_class, "_tied_weights_keys", None) or {}
    content = {
        "__doc__": f"Runs the PyTorch code of Transformers' {class_name} in JAX.",
        "__module__": "hfseq_plugins.bridge.classes",
        "config_class": torch_class.config_class,
        "module_class": module_class,
        "base_model_prefix": torch_class.base_model_prefix or "",
        "main_input_name": names[0]
        if torch_class.main_input_name not in names
        else torch_class.main_input_name,
        "weight_aliases": {a: n for a, n in ties.items() if a.replace(".", "_").isidentifier()}
        if isinstance(ties, dict)
        else {},
    }
    if not is_seq2seq:
        content["__call__"] = _model_call(names)
    return type(f"Flax{class_name}", (*mixin, base), content)


def _module_call(run: Callable[..., Any], names: tuple[str, ...]) -> Callable[..., Any]:
    """Returns a method that runs the module, with a signature that lists its inputs."""

    def call(self: BridgedModule, **inputs: Any) -> Any:
        return run(self, **inputs)

    keyword = inspect.Parameter.KEYWORD_ONLY
    options = ("rngs", "output_attentions", "output_hidden_states", "segment_ids")
    parameters = [inspect.Parameter("self", inspect.Parameter.POSITIONAL_OR_KEYWORD)]
    parameters += [
        inspect.Parameter(name, keyword, default=None) for name in dict.fromkeys((*names, *options))
    ]
    call.__signature__ = inspect.Signature(parameters)  # type: ignore[attr-defined]
    return call


#: The arguments of model calls that are not inputs, in the order of `FlaxModel.__call__`.
_CALL_OPTIONS = {
    "params": None,
    "dropout_rng": None,
    "train": False,
    "output_attentions": None,
    "output_hidden_states": None,
    "return_dict": None,
    "past_key_values": None,
    "extra": None,
}


def _model_call(names: tuple[str, ...]) -> Callable[..., Any]:
    """Returns the method `__call__` of a model class, with the inputs of PyTorch's class."""
    positional = inspect.Parameter.POSITIONAL_OR_KEYWORD
    parameters = [inspect.Parameter("self", positional)]
    parameters += [inspect.Parameter(name, positional, default=None) for name in names]
    parameters += [
        inspect.Parameter(name, positional, default=default)
        for name, default in _CALL_OPTIONS.items()
    ]
    parameters.append(inspect.Parameter("inputs", inspect.Parameter.VAR_KEYWORD))
    signature = inspect.Signature(parameters)

    def call(self: FlaxBridgedPreTrainedModel, *args: Any, **kwargs: Any) -> Any:
        arguments = signature.bind(self, *args, **kwargs).arguments
        arguments.pop("self")
        other_inputs = arguments.pop("inputs", {})
        options = {name: arguments.pop(name) for name in _CALL_OPTIONS if name in arguments}
        return self.run({**arguments, **other_inputs}, **options)

    call.__signature__ = signature  # type: ignore[attr-defined]
    call.__doc__ = "Runs the model; see `FlaxPreTrainedModel.run`."
    return call
