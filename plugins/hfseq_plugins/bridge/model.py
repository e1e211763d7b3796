"""Model classes that run a PyTorch class of Transformers as a JAX function.

A bridged model is an ordinary `FlaxPreTrainedModel`. Its NNX module holds the parameters of the
PyTorch model (`hfseq_plugins.bridge.structure`). A call of the module runs the Python code of the
PyTorch model on jax arrays (`hfseq_plugins.bridge.trace`).
"""

from __future__ import annotations

import copy
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
from transformers.modeling_outputs import BaseModelOutput

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
from hfseq_plugins.bridge.heads import torch_heads
from hfseq_plugins.bridge.initialization import initial_values
from hfseq_plugins.bridge.layout import sharding_rules
from hfseq_plugins.bridge.names import BridgedWeightMap
from hfseq_plugins.bridge.structure import Structure, forward_signature, new_layer, structure_of
from hfseq_plugins.bridge.variables import Holder

logger = logging.getLogger("hfseq")

#: Arguments of PyTorch's forward passes that callers of a bridged model cannot pass.
_NOT_INPUTS = ("labels", "return_dict", "use_cache", "cache", "cache_params", "state", "kwargs")
#: Arguments of PyTorch's forward passes that are options, not inputs, in hfseq's models.
_OPTIONS = ("output_attentions", "output_hidden_states")
#: Inputs of text models in the order in which they precede all other inputs.
_TEXT_INPUTS = ("input_ids", "attention_mask", "token_type_ids", "position_ids")
#: Ends of the names of inputs whose values determine the shapes of arrays. These inputs are
#: constants of the compiled program.
_STATIC_INPUTS = (
    *("grid_thw", "image_sizes", "spatial_shapes", "grid_hws", "image_num_patches"),
    "target_sizes",
)


class BridgedModule(nnx.Module):
    """An NNX module with the parameters of a PyTorch model. Calling it runs the PyTorch code.

    Args:
        config: The configuration.
        rngs: Random number generators.

    Attributes:
        torch_class_name: Name of the PyTorch class in Transformers.
    """

    torch_class_name: ClassVar[str]
    #: The dtype in which PyTorch's code computes, or `None` for the dtype of the parameters.
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
        """Returns the submodule with a PyTorch name. It is created if it does not exist."""
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
        """Returns the arguments `tensors` and `layers` of `trace.call`.

        Returns:
            The parameters and buffers by PyTorch name and in PyTorch's layout, and the hfseq layers
            by the PyTorch name of the module that they replace.
        """
        structure, dtype = self.structure, self.compute_dtype
        tensors: dict[str, jax.Array] = {}
        layers: dict[str, trace.Layer] = {}
        for layer in structure.layers:
            module = self._holder(layer.name)
            for leaf, path_leaf in layer.leaves.items():
                name = f"{layer.name}.{leaf}" if layer.name else leaf
                if path_leaf == "kernel":
                    # The hfseq layer computes with the kernel itself. XLA removes this
                    # transposition unless PyTorch code also uses the weight directly.
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
            if name.endswith("num_batches_tracked"):  # PyTorch's code increments it in training
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
            **inputs: The inputs of PyTorch's forward pass. ``segment_ids`` are the numbers of the
                packed documents, `(batch, length)`.
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
        """Runs the PyTorch model, updates its buffers in training, and returns its outputs."""
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
                "the adapters of %s have no effect in this call, because the PyTorch code of the "
                "model uses the weights of these layers without calling the layers",
                ", ".join(unused[:5]) + (f" and {len(unused) - 5} more" if unused[5:] else ""),
            )
        for name, value in buffers.items():
            if name in structure.buffer_paths and call_options.train:
                variable = self._variable(structure.buffer_paths[name])
                variable.set_value(jax.lax.stop_gradient(value).astype(variable[...].dtype))
        return values if isinstance(values, outputs.FlaxModelOutput) else _plain_output(values)


def _recording(layer: trace.Layer, called: set[str], name: str) -> trace.Layer:
    """Returns a function that calls a layer and adds its name to the set `called`."""

    def call(x: jax.Array) -> jax.Array:
        called.add(name)
        return layer(x)

    return call


def _lookup(layer: nn.Embed, padding_idx: int | None) -> Callable[[jax.Array], jax.Array]:
    """Returns a function that looks up embeddings. As in PyTorch, padding gets no gradient."""
    if padding_idx is None:
        return layer

    def lookup(ids: jax.Array) -> jax.Array:
        rows = layer(ids)
        is_padding = (ids == padding_idx)[..., None]
        return jnp.where(is_padding, jax.lax.stop_gradient(rows), rows)

    return lookup


def _static(name: str, value: Any) -> Any:
    """Converts an input to a NumPy array if its values determine shapes and are not traced."""
    is_static = name.endswith(_STATIC_INPUTS)
    if is_static and isinstance(value, jax.Array) and not isinstance(value, jax.core.Tracer):
        return np.asarray(value)
    return value


def _output(torch_class: type, values: Mapping[str, Any]) -> Any:
    """Returns an hfseq output with the fields of a PyTorch output class, without loss and cache."""
    names = [field.name for field in dataclasses.fields(torch_class)]
    names = [name for name in names if name != "loss"]
    fields = {n: v for n, v in values.items() if n in names and not _is_cache(n)}
    return _output_class(torch_class.__name__, tuple(names))(**fields)


def _is_cache(name: str) -> bool:
    return name in ("past_key_values", "cache", "cache_params", "state")


def _plain_output(values: Any) -> Any:
    """Returns an hfseq output for PyTorch code that returns a tensor, a tuple or a dictionary."""
    if not isinstance(values, Mapping):
        values = values if isinstance(values, tuple) else (values,)
        values = {f"output_{number}": value for number, value in enumerate(values)}
    return _output_class("Output", tuple(values))(**values)


def _field_names(output_class: Any) -> set[str]:
    return {field.name for field in dataclasses.fields(output_class)}


@functools.cache
def _output_class(class_name: str, field_names: tuple[str, ...]) -> Any:
    """Returns hfseq's output class with the name and fields of a PyTorch output class."""
    native_class = getattr(outputs, f"Flax{class_name}", None)
    names = [name for name in field_names if not _is_cache(name)]
    if native_class is not None and {*names} <= _field_names(native_class):
        return native_class
    names.append("past_key_values")  # the cache, which hfseq sets in generation
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

    #: Patterns of the names of buffers that old checkpoints may contain. Transformers does not read
    #: them, but computes them from the configuration.
    ignored_weights = (*FlaxPreTrainedModel.ignored_weights, r"inv_freq$")

    def _set_structure(self) -> None:
        self.structure = structure_of(self._config, self.torch_class_name())
        is_pair = getattr(self._config, "is_encoder_decoder", False)
        if is_pair and not self.structure.module.config.is_encoder_decoder:
            # The class is the decoder of an encoder-decoder, such as BartForCausalLM.
            self._config = copy.deepcopy(self._config)
            self._config.is_decoder, self._config.is_encoder_decoder = True, False
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
        """Draws the initial parameters from the distributions that the PyTorch class uses."""
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
            integers=self.structure.tables,
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
        """The paths of the parameters that are trained.

        Parameters that PyTorch's class sets to ``requires_grad=False`` are not trained.
        """
        frozen = {p for p, name in self.structure.names.items() if name in self.structure.frozen}
        return super().trainable_paths - frozen

    def sharding_rules(self) -> Any:
        """Returns sharding rules that follow Transformers' tensor- and expert-parallel plans.

        `hfseq_plugins.bridge.layout.sharding_rules` describes them.
        """
        return sharding_rules(self)

    def max_length(self) -> int | None:
        """Returns the maximum length in tokens, without positions that are reserved for padding."""
        length = super().max_length()
        return length - self.structure.first_position() if isinstance(length, int) else length

    def image_shape(self) -> tuple[int, int, int] | None:
        """Returns the channels, height and width of images, or `None` if they are not fixed."""
        try:
            return super().image_shape()
        except (TypeError, ValueError):  # the configuration does not state one height and width
            return None

    def _check_images(self, images: Any) -> None:
        """Does nothing, because PyTorch's code checks the shapes of images, patches and videos."""

    def __getattr__(self, name: str) -> Any:
        """Provides the method `_get_feat_extract_output_lengths` of an audio model.

        The method returns the number of frames for a number of audio samples.
        """
        if name == "_get_feat_extract_output_lengths":
            method = getattr(self.structure.module, name, None)
            if method is not None:
                return functools.partial(_count_frames, method)
        return super().__getattr__(name)  # type: ignore[misc]

    def has_input(self, name: str) -> bool:
        """Returns whether the forward pass of the PyTorch class has an input with this name."""
        return name in input_names(self.torch_class_name())

    @classmethod
    def can_generate(cls) -> bool:
        """Returns whether the PyTorch class can generate."""
        return issubclass(cls, BridgedCausalGeneration | BridgedSeq2SeqGeneration)

    @classmethod
    def is_class_of(cls, model_type: str) -> bool:
        """Returns whether Transformers uses the PyTorch class for a model type.

        Some model types have the class of another one. For example, EXAONE models are Llama models.
        """
        return cls.torch_class_name() in torch_heads(model_type).values()

    @classmethod
    def torch_class_name(cls) -> str:
        """Returns the name of the PyTorch class."""
        return cls.module_class.torch_class_name


def _count_frames(method: Callable[..., Any], samples: Any, add_adapter: bool = True) -> Any:
    """Calls PyTorch's method that computes the number of frames for a number of samples."""
    lengths = torch.as_tensor(np.asarray(samples, np.int64))
    options = {"add_adapter": add_adapter}
    parameters = inspect.signature(method).parameters
    frames = method(lengths, **{n: v for n, v in options.items() if n in parameters})
    return np.asarray(frames)


class FlaxBridgedSeq2SeqPreTrainedModel(FlaxBridgedPreTrainedModel, FlaxSeq2SeqPreTrainedModel):
    """Base class of bridged encoder-decoders."""


@dataclasses.dataclass
class EncoderOutput(BaseModelOutput):
    """The output of an encoder, as an input of a decoder.

    Mixtures of experts read `router_logits`, but only to compute a loss.
    """

    router_logits: Any = None


class BridgedSeq2SeqModule(BridgedModule):
    """An NNX module with the parameters of a PyTorch encoder-decoder."""

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

        In beam search, the decoder has several rows for each row of the encoder. The hidden states
        of the encoder are repeated for these rows.
        """
        rows = decoder_input_ids.shape[0]
        encoder_hidden_states = _repeat_rows(encoder_hidden_states, rows)
        if encoder_attention_mask is not None:
            encoder_attention_mask = _repeat_rows(encoder_attention_mask, rows)
        inputs: dict[str, Any] = {
            "encoder_outputs": EncoderOutput(trace.as_tensors(encoder_hidden_states)),
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
    """Returns the names of a PyTorch class's inputs, in the order of the model's arguments."""
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
            f"transformers {transformers.__version__} has no class '{class_name}'. If the class "
            "should exist, a package that it depends on may not be installed"
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
    """Returns a method that calls `run` and whose signature lists the inputs of the model."""

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
    """Returns a method `__call__` for a model class. Its arguments are the inputs in `names`."""
    positional = inspect.Parameter.POSITIONAL_OR_KEYWORD
    parameters = [inspect.Parameter("self", positional)]
    parameters += [inspect.Parameter(name, positional, default=None) for name in names]
    parameters += [
        inspect.Parameter(name, positional, default=default)
        for name, default in _CALL_OPTIONS.items()
    ]
    parameters.append(inspect.Parameter("other_inputs", inspect.Parameter.VAR_KEYWORD))
    signature = inspect.Signature(parameters)

    def call(self: FlaxBridgedPreTrainedModel, *args: Any, **kwargs: Any) -> Any:
        arguments = signature.bind(self, *args, **kwargs).arguments
        arguments.pop("self")
        other_inputs = arguments.pop("other_inputs", {})
        options = {name: arguments.pop(name) for name in _CALL_OPTIONS if name in arguments}
        return self.run({**arguments, **other_inputs}, **options)

    call.__signature__ = signature  # type: ignore[attr-defined]
    call.__doc__ = "Runs the model; see `FlaxPreTrainedModel.run`."
    return call
