"""Generation with bridged models.

A model stores one of these types of caches between two steps. `plan_cache` selects the type by
tracing the model:

* Keys: the keys and values of each attention layer, in buffers of a fixed length. Encoder-decoders
  also store the keys and values of cross-attention, which are computed once.
* States: the states of linear-attention and state-space layers.
* Hybrid: the states of some layers, and the keys and values of the attention layers.
* History: all tokens of the sequence. Each step runs the model on the whole sequence. This is
  slower, but every causal model supports it.

Outside of the module, a cache is a nested dict as in all models of hfseq (`hfseq.nn.kv_cache`).
"""

from __future__ import annotations

import copy
import dataclasses
import functools
import inspect
import logging
from collections.abc import Callable, Container, Mapping
from typing import Any, Literal

import jax
import jax.numpy as jnp
import numpy as np
import torch
from flax import nnx
from transformers import GenerationMixin
from transformers.cache_utils import (
    Cache,
    CacheLayerMixin,
    DynamicCache,
    DynamicLayer,
    DynamicSlidingWindowLayer,
    EncoderDecoderCache,
    LinearAttentionAndFullAttentionLayer,
    LinearAttentionLayer,
)

from hfseq.errors import UsageError
from hfseq.generation import CausalGeneration
from hfseq.modeling.seq2seq import Seq2SeqGeneration
from hfseq.nn import outputs
from hfseq.nn.context import current_options
from hfseq.nn.kv_cache import CacheSize
from hfseq_plugins.bridge import trace
from hfseq_plugins.bridge.refusals import UnsupportedModel
from hfseq_plugins.bridge.structure import Structure
from hfseq_plugins.bridge.variables import Holder

logger = logging.getLogger("hfseq")

#: Attributes of a bridged module that hold the cache: the keys, values and states of the layers, or
#: all tokens. PyTorch's modules do not have attributes with these names.
LAYERS, HISTORY = "cached_layers", "token_history"
#: Attribute that holds the keys and values of cross-attention.
ENCODER_LAYERS = "cached_encoder_layers"
#: Image and audio inputs of models, which `generate` accepts in addition to the prompt.
MEDIA = ("pixel_values", "input_features", "input_values", "image_grid_thw", "pixel_mask")

CacheType = Literal["keys", "states", "hybrid", "history"]
#: The classes of cache layers in Transformers that the bridge supports: those with keys and values,
#: and those with states.
_KEY_LAYERS = (DynamicLayer, DynamicSlidingWindowLayer, LinearAttentionAndFullAttentionLayer)
_STATE_LAYERS = (LinearAttentionLayer, LinearAttentionAndFullAttentionLayer)
Shapes = Mapping[str, tuple[int, ...]]


class FixedLayer(CacheLayerMixin):
    """The keys and values of a layer in buffers of a fixed length.

    Args:
        key: Keys, `(batch, length, heads, features)`.
        value: Values, `(batch, length, heads, value features)`.
        index: Number of tokens in the buffers.
    """

    is_compileable = True
    is_sliding = False

    def __init__(self, key: jax.Array, value: jax.Array, index: jax.Array):
        super().__init__()
        self.key, self.value, self.index = key, value, index
        self.new_tokens, self.is_initialized = 0, True

    def lazy_initialization(self, key_states: torch.Tensor, value_states: torch.Tensor) -> None:
        """Does nothing, because the buffers already exist."""

    def update(
        self, key_states: torch.Tensor, value_states: torch.Tensor, *args: Any, **kwargs: Any
    ) -> tuple[torch.Tensor, torch.Tensor]:
        """Writes new keys and values into the buffers, and returns the whole buffers."""
        del args, kwargs
        new_key, new_value = trace.as_arrays((key_states, value_states))
        self.new_tokens = new_key.shape[2]
        self.key = _write(self.key, new_key.swapaxes(1, 2), self.index)
        self.value = _write(self.value, new_value.swapaxes(1, 2), self.index)
        key = self.key.swapaxes(1, 2).astype(new_key.dtype)
        value = self.value.swapaxes(1, 2).astype(new_value.dtype)
        return tuple(trace.as_tensors((key, value)))

    def get_mask_sizes(self, query_length: int) -> tuple[int, int]:
        """Returns the number of keys in the buffers, and the position of the first key."""
        del query_length
        return self.key.shape[1], 0

    def get_seq_length(self) -> Any:
        """Returns the number of tokens that were in the buffers before this call."""
        return trace.as_tensors(self.index)

    def get_max_length(self) -> int:
        """Returns the number of tokens that fit into the buffers."""
        return self.key.shape[1]


class RowsLayer(FixedLayer):
    """The keys and values of a layer, for rows of the batch with different numbers of tokens.

    Each call adds one token per row.

    Args:
        key: As in `FixedLayer`.
        value: As in `FixedLayer`.
        positions: Number of tokens in the buffers of each row, `(batch,)`.
    """

    def __init__(self, key: jax.Array, value: jax.Array, positions: jax.Array):
        super().__init__(key, value, positions.max())
        self.positions = positions

    def update(
        self, key_states: torch.Tensor, value_states: torch.Tensor, *args: Any, **kwargs: Any
    ) -> tuple[torch.Tensor, torch.Tensor]:
        """Writes one key and value per row into the buffers, and returns the whole buffers."""
        del args, kwargs
        new_key, new_value = trace.as_arrays((key_states, value_states))
        rows = jnp.arange(new_key.shape[0])
        self.key = self.key.at[rows, self.positions].set(new_key[:, :, 0].astype(self.key.dtype))
        new_values = new_value[:, :, 0].astype(self.value.dtype)
        self.value = self.value.at[rows, self.positions].set(new_values)
        key = self.key.swapaxes(1, 2).astype(new_key.dtype)
        value = self.value.swapaxes(1, 2).astype(new_value.dtype)
        return tuple(trace.as_tensors((key, value)))


class HybridLayer(LinearAttentionLayer, RowsLayer):  # type: ignore[override]
    """The cache of a layer that has both states and keys and values.

    Args:
        count: Number of states.
        key: As in `RowsLayer`.
        value: As in `RowsLayer`.
        positions: As in `RowsLayer`.
    """

    def __init__(self, count: int, key: jax.Array, value: jax.Array, positions: jax.Array):
        RowsLayer.__init__(self, key, value, positions)
        LinearAttentionLayer.__init__(self, number_of_states=count)


def _write(buffer: jax.Array, new: jax.Array, index: jax.Array) -> jax.Array:
    zero = jnp.zeros((), index.dtype)
    start = (zero, index, *(zero,) * (buffer.ndim - 2))
    return jax.lax.dynamic_update_slice(buffer, new.astype(buffer.dtype), start)


@dataclasses.dataclass(frozen=True)
class CachePlan:
    """Describes the cache of a model in generation.

    Attributes:
        cache_type: The type of the cache. The docstring of this module describes the types.
        layers: The shapes of the keys, values and states of each layer, for one example. Keys and
            values have a length of one token.
        reason: Why the model needs a cache of the type "history", or an empty string.
        encoder_layers: As `layers`, for the keys and values of cross-attention.
        first_position: The position number of the first token, or `None` if the PyTorch class
            generates without `position_ids`.
    """

    cache_type: CacheType
    layers: Mapping[str, Shapes]
    reason: str = ""
    encoder_layers: Mapping[str, Shapes] = dataclasses.field(default_factory=dict)
    first_position: int | None = 0


def plan_cache(structure: Structure, is_seq2seq: bool) -> CachePlan:
    """Selects the type of a model's cache by tracing its forward pass with Transformers' cache.

    Raises:
        UnsupportedModel: The PyTorch class generates with inputs that hfseq does not prepare.
    """
    plan = structure.cache_plan
    if plan is None:
        position = _first_position(structure.module)
        has_positions = position is not None and "position_ids" in structure.parameters.parameters
        plan = _probe(structure, is_seq2seq, has_positions)
        plan = dataclasses.replace(plan, first_position=position)
        structure.cache_plan = plan
        if plan.cache_type == "history":
            logger.warning(
                "%s generates without a cache: each step runs the model on the whole sequence (%s)",
                type(structure.module).__name__,
                plan.reason,
            )
    return plan


def _first_position(module: Any) -> int | None:
    """Compares how a PyTorch class prepares the inputs of generation with Transformers' default.

    hfseq prepares the inputs as the default methods do.

    Returns:
        The attribute `first_position` of the plan.

    Raises:
        UnsupportedModel: The methods of the class prepare other inputs.
    """
    torch_class = type(module)
    hooks = ("prepare_inputs_for_generation", "_prepare_position_ids_for_generation")
    if not any(overrides(torch_class, hook) for hook in hooks):
        return 0
    ids, mask = torch.tensor([[4, 5, 6], [7, 8, 9]]), torch.tensor([[0, 1, 1], [1, 1, 1]])
    module = copy.deepcopy(module)  # the methods may store values in the module

    def prepare(owner: Any) -> dict[str, torch.Tensor]:
        inputs: dict[str, Any] = {"attention_mask": mask, "use_cache": False}
        if not module.config.is_encoder_decoder:
            positions = owner._prepare_position_ids_for_generation(module, ids, inputs)
            inputs |= {} if positions is None else {"position_ids": positions}
        method = functools.partial(owner.prepare_inputs_for_generation, module, ids, **inputs)
        prepared = method(is_first_iteration=True)
        if "cache" in inspect.signature(torch_class.forward).parameters:
            next_inputs = method(next_sequence_length=1)
            prepared |= {
                f"{n} of the next step": next_inputs.get(n) for n in prepared if "ids" in n
            }
        return {n: value for n, value in prepared.items() if isinstance(value, torch.Tensor)}

    default = prepare(GenerationMixin)
    try:
        inputs = prepare(torch_class)
    except Exception as error:
        raise _own_method(torch_class, hooks[0], _first_line(error)) from error
    positions, expected = inputs.pop("position_ids", None), default.pop("position_ids", None)
    tokens = {n for n in inputs.keys() | default.keys() if "position" not in n}
    changed = [n for n in sorted(tokens) if not _equal(n, inputs, default)]
    first: set[int | None] = {None if expected is not None else 0}
    if positions is not None and expected is not None:
        first = {int(n) for n in (positions - expected)[..., mask.bool()].unique()}
        changed += ["position_ids"] if len(first) > 1 else []
    if changed:
        reason = f"the values of {', '.join(changed)} differ from Transformers' default"
        raise _own_method(torch_class, hooks[0], reason)
    return first.pop()


def overrides(torch_class: Any, name: str) -> bool:
    """Returns whether a PyTorch class has its own version of a method of `GenerationMixin`."""
    return getattr(torch_class, name, None) is not getattr(GenerationMixin, name)


def _equal(name: str, a: Mapping[str, torch.Tensor], b: Mapping[str, torch.Tensor]) -> bool:
    return name in a and name in b and torch.equal(a[name], b[name])


def _own_method(torch_class: Any, name: str, reason: str) -> UnsupportedModel:
    """Returns the error for a class whose version of a method of `GenerationMixin` matters."""
    method = getattr(torch_class, name, torch_class.generate)
    return UnsupportedModel(
        f"{torch_class.__name__} has its own method {name}, which hfseq does not run ({reason})",
        operator=f"generation with its own {name}",
        solution="Calls of the model are supported, but generation needs a native implementation",
        code=inspect.unwrap(method).__code__,
    )


def _probe(structure: Structure, is_seq2seq: bool, has_positions: bool) -> CachePlan:
    """Selects the type of a model's cache by tracing its forward pass twice.

    The first trace uses Transformers' cache and returns the shapes of the keys, values and states.
    The second trace uses buffers of a fixed length. It fails if the code of the model needs the
    number of cached tokens as a Python number.
    """
    module: Any = structure.module
    if "cache" not in structure.parameters.parameters:
        return CachePlan("history", {}, "its forward pass has no argument `cache`")
    if is_seq2seq:
        return _probe_seq2seq(structure)
    layers: dict[str, dict[str, tuple[int, ...]]] = {}
    ids, has_window = jnp.ones((1, 2), jnp.int32), False
    inputs: dict[str, Any] = {"input_ids": ids}
    if "attention_mask" in structure.parameters.parameters:
        inputs["attention_mask"] = np.ones((1, 2), np.int32)  # a constant: code may check for zeros

    def run(clone: Any, **inputs: Any) -> Any:
        cache = DynamicCache(config=clone.config)
        clone(**inputs, cache=cache, use_cache=True)
        nonlocal has_window
        for number, layer in enumerate(cache.layers):
            layers[str(number)] = _entry_shapes(layer)
            has_window = has_window or isinstance(layer, DynamicSlidingWindowLayer)
        return {}

    def forward(tensors: Mapping[str, jax.Array]) -> Any:
        return trace.call(module, tensors, inputs, function=run)[0]

    def step(tensors: Mapping[str, jax.Array], index: jax.Array) -> Any:
        arguments = {"input_ids": ids, **_fixed_cache(layers, index)}
        if has_positions:
            arguments["position_ids"] = index + jnp.arange(2)[None]
        return trace.call(module, tensors, arguments)[0]

    try:
        jax.eval_shape(forward, abstract_tensors(structure))
        if all(name.startswith("cached") for name in _entry_names(layers)):
            jax.eval_shape(step, abstract_tensors(structure), jnp.int32(0))
    except Exception as error:  # an unsupported cache class or operator
        return CachePlan("history", {}, _first_line(error))
    if len(layers) > layer_count(module):
        return CachePlan("history", {}, "some layers are applied several times to each token")
    kinds = {"keys" if name.startswith("cached") else "states" for name in _entry_names(layers)}
    if len(kinds) == 1:
        return CachePlan("keys" if kinds == {"keys"} else "states", layers)
    if has_window:
        return CachePlan(
            "history", {}, "some layers have states, and others attend to a sliding window"
        )
    return CachePlan("hybrid", layers)


def _probe_seq2seq(structure: Structure) -> CachePlan:
    """Selects the type of an encoder-decoder's cache as `_probe` does."""
    module: Any = structure.module
    ids = jnp.ones((1, 2), jnp.int32)
    inputs = {"input_ids": ids, "decoder_input_ids": ids}
    layers: dict[str, dict[str, tuple[int, ...]]] = {}
    encoder_layers: dict[str, dict[str, tuple[int, ...]]] = {}

    def probe(clone: Any, **inputs: Any) -> Any:
        cache = EncoderDecoderCache(DynamicCache(), DynamicCache())
        clone(**inputs, cache=cache, use_cache=True)
        for number, layer in enumerate(cache.self_attention_cache.layers):
            layers[str(number)] = _entry_shapes(layer)
        for number, layer in enumerate(cache.cross_attention_cache.layers):
            encoder_layers[str(number)] = _entry_shapes(layer)
        return {}

    def forward(tensors: Mapping[str, jax.Array]) -> Any:
        return trace.call(module, tensors, inputs, function=probe)[0]

    def step(tensors: Mapping[str, jax.Array], index: jax.Array) -> Any:
        arguments = _fixed_cache(layers, index)
        arguments["cache"] = EncoderDecoderCache(arguments["cache"], DynamicCache())
        arguments["decoder_attention_mask"] = arguments.pop("attention_mask")
        return trace.call(module, tensors, inputs | arguments)[0]

    try:
        tensors = abstract_tensors(structure)
        jax.eval_shape(forward, tensors)
        jax.eval_shape(step, tensors, jnp.int32(0))
    except Exception as error:  # an unsupported cache class, or code that needs a Python number
        return CachePlan("history", {}, _first_line(error))
    return CachePlan("keys", layers, encoder_layers=encoder_layers)


def _fixed_cache(layers: Mapping[str, Shapes], index: jax.Array) -> dict[str, Any]:
    """Returns the arguments of a call with buffers of a fixed length for one example."""
    buffers: list[Any] = []
    length = 4
    for shapes in layers.values():
        key, value = (jnp.zeros((1, length, *shape[2:])) for shape in shapes.values())
        buffers.append(FixedLayer(key, value, index))
    mask = jnp.ones((1, length), jnp.int32)
    return {"cache": Cache(layers=buffers), "attention_mask": mask, "use_cache": True}


def _entry_names(layers: Mapping[str, Shapes]) -> set[str]:
    return {name for shapes in layers.values() for name in shapes}


def abstract_tensors(structure: Structure) -> dict[str, jax.ShapeDtypeStruct]:
    """Returns the shape and dtype of each PyTorch tensor of a model, for `jax.eval_shape`."""
    tensors = {n: jax.ShapeDtypeStruct(s, jnp.float32) for n, s in structure.shapes.items()}
    for name, value in structure.statistics.items():
        tensors[name] = jax.ShapeDtypeStruct(value.shape, value.dtype)
    return tensors


def _entry_shapes(layer: Any) -> dict[str, tuple[int, ...]]:
    """Returns the shapes of the states, keys and values in a layer of Transformers' cache."""
    shapes: dict[str, tuple[int, ...]] = {}
    if type(layer) in _STATE_LAYERS:
        for name, states in _states_of(layer).items():
            shapes[name] = tuple(states.shape)
    if type(layer) in _KEY_LAYERS and layer.keys is not None and layer.keys.ndim == 4:
        for name, x in (("cached_key", layer.keys), ("cached_value", layer.values)):
            shapes[name] = (x.shape[0], 1, x.shape[1], x.shape[3])
    if not shapes:
        raise ValueError(f"the cache class {type(layer).__name__} of a layer is not supported")
    return shapes


def _first_line(error: BaseException) -> str:
    text = error.problem if isinstance(error, UnsupportedModel) else str(error)
    lines = text.strip().splitlines()
    return lines[0] if lines else type(error).__name__


# -- the cache inside of a module


def layer_count(module: torch.nn.Module) -> int:
    """Returns the number of layers of a PyTorch model that can have a cache."""
    numbers = [getattr(part, "layer_idx", None) for part in module.modules()]
    return max((n for n in numbers if isinstance(n, int)), default=-1) + 1


def add_holders(module: Any) -> None:
    """Adds empty submodules to a bridged module, to which a cache can be attached."""
    count = layer_count(module.structure.module)
    for name in (LAYERS, ENCODER_LAYERS):
        layers = Holder()
        for number in range(count):
            setattr(layers, str(number), Holder())
        setattr(module, name, layers)
    setattr(module, HISTORY, Holder())


def cached_entries(module: Any, name: str = LAYERS) -> dict[str, dict[str, Any]]:
    """Returns the variables of the cache that is attached to a module.

    Returns:
        The variables by name, for the number of each layer that has any.
    """
    entries = {}
    for number, holder in vars(getattr(module, name)).items():
        if isinstance(holder, Holder):
            variables = {n: v for n, v in vars(holder).items() if isinstance(v, nnx.Cache)}
            if variables:
                entries[number] = variables
    return entries


def run_with_cache(run: Callable[..., Any], module: Any, inputs: dict[str, Any]) -> Any | None:
    """Runs a module with the cache that is attached to it.

    Args:
        run: Function that runs PyTorch's forward pass on inputs.
        module: The module. Its cache is updated.
        inputs: The inputs by name, which contain the new tokens.

    Returns:
        The output for the new tokens, or `None` if no cache is attached.
    """
    history = getattr(module, HISTORY)
    if isinstance(getattr(history, "cached_key", None), nnx.Cache):
        first_position = module.structure.cache_plan.first_position
        return _run_on_history(run, history, inputs, first_position)
    entries = cached_entries(module)
    if not entries:
        return None
    if any("position" in entry for entry in entries.values()):
        return _run_on_states(run, entries, inputs, module.structure.parameters.parameters)
    layers = {
        number: FixedLayer(*(entry[n][...] for n in ("cached_key", "cached_value", "cache_index")))
        for number, entry in entries.items()
    }
    cache: Any = Cache(layers=list(layers.values()))
    if "decoder_input_ids" in inputs:
        output = _run_seq2seq(run, cached_entries(module, ENCODER_LAYERS), cache, inputs)
    else:
        output = run({**inputs, "cache": cache, "use_cache": True})
    for number, layer in layers.items():
        entries[number]["cached_key"][...] = layer.key
        entries[number]["cached_value"][...] = layer.value
        entries[number]["cache_index"][...] = layer.index + layer.new_tokens
    return output


def _run_seq2seq(
    run: Callable[..., Any], entries: Mapping[str, Any], cache: Cache, inputs: dict[str, Any]
) -> Any:
    """Runs a decoder with cached keys and values of self-attention and cross-attention.

    If the call option `fill_encoder_cache` is set, PyTorch's code computes the keys and values of
    cross-attention, and the cache stores them. Otherwise they are read from the cache.
    """
    fills, rows = current_options().fill_encoder_cache, inputs["decoder_input_ids"].shape[0]
    encoder_cache = DynamicCache()
    if not fills:
        encoder_cache.layers = [_encoder_layer(entry, rows) for entry in entries.values()]
    caches = EncoderDecoderCache(cache, encoder_cache)
    # Without a mask, PyTorch's code would build one from the number of cached tokens, which is not
    # known in a trace.
    mask = jnp.ones((rows, cache.get_max_length()), jnp.int32)
    inputs = {"decoder_attention_mask": mask, **inputs}
    output = run({**inputs, "cache": caches, "use_cache": True})
    if fills:
        new_layers: list[Any] = encoder_cache.layers
        for layer, entry in zip(new_layers, entries.values(), strict=True):
            for name, tensor in (("cached_key", layer.keys), ("cached_value", layer.values)):
                array, old = trace.as_arrays(tensor).swapaxes(1, 2), entry[name][...]
                times = array.shape[0] // old.shape[0]  # all beams of an input share one row
                entry[name][...] = array[::times].astype(old.dtype)
    return output


def _encoder_layer(entry: Mapping[str, Any], rows: int) -> DynamicLayer:
    """Returns the keys and values of cross-attention, repeated for the rows of the decoder."""
    layer: Any = DynamicLayer()
    arrays = (entry[name][...].swapaxes(1, 2) for name in ("cached_key", "cached_value"))
    layer.keys, layer.values = trace.as_tensors(
        tuple(jnp.repeat(array, rows // array.shape[0], axis=0) for array in arrays)
    )
    layer.dtype, layer.device, layer.is_initialized = layer.keys.dtype, layer.keys.device, True
    return layer


def _run_on_history(
    run: Callable[..., Any], history: Any, inputs: dict[str, Any], first_position: int
) -> Any:
    """Runs the model on all tokens of the sequence, and returns the logits of the new tokens."""
    prefix = "decoder_" if "decoder_input_ids" in inputs else ""
    ids = inputs[f"{prefix}input_ids"]
    index, length = history.cache_index[...], ids.shape[1]
    tokens = _write(history.cached_key[...], ids[..., None, None], index)
    history.cached_key[...] = tokens
    history.cache_index[...] = index + length
    tokens = tokens[..., 0, 0]
    is_written = jnp.arange(tokens.shape[1]) < index + length
    mask = inputs.get(f"{prefix}attention_mask")
    mask = jnp.broadcast_to(is_written if mask is None else (mask != 0) & is_written, tokens.shape)
    mask = mask.astype(jnp.int32)
    complete = {**inputs, f"{prefix}input_ids": tokens, f"{prefix}attention_mask": mask}
    if f"{prefix}position_ids" in inputs:
        positions = jnp.maximum(mask.cumsum(-1) - 1, 0) + first_position
        complete[f"{prefix}position_ids"] = positions
    output = run(complete)
    first = output.logits.shape[1] - tokens.shape[1]  # image tokens may precede the text
    logits = jax.lax.dynamic_slice_in_dim(output.logits, first + index, length, axis=1)
    return output.replace(logits=logits)


def _run_on_states(
    run: Callable[..., Any],
    entries: Mapping[str, Any],
    inputs: dict[str, Any],
    parameters: Container[str],
) -> Any:
    """Runs the model on one token at a time. Masked tokens do not change the cache."""
    ids, mask = inputs["input_ids"], inputs.get("attention_mask")
    mask = jnp.ones_like(ids) if mask is None else mask

    def step(states: Any, token: tuple[jax.Array, jax.Array]) -> tuple[Any, jax.Array]:
        new_ids, is_real = token
        layers = {number: _state_layer(entry) for number, entry in states.items()}
        cache = Cache(layers=[*layers.values()])
        arguments = {"input_ids": new_ids[:, None], "cache": cache, "use_cache": True}
        keys = [entry for entry in states.values() if "cached_key" in entry]
        if keys:
            positions, length = keys[0]["position"], keys[0]["cached_key"].shape[1]
            visible = jnp.arange(length) <= positions[:, None]
            arguments["attention_mask"] = visible.astype(jnp.int32)
            if "position_ids" in parameters:
                arguments["position_ids"] = positions[:, None]
        output = run(arguments)
        new_states = {}
        for number, old in states.items():
            new = _entries_of(layers[number]) | {"position": old["position"] + 1}
            new_states[number] = {
                name: jnp.where(
                    is_real.reshape(-1, *(1,) * (value.ndim - 1)) != 0,
                    new[name].astype(value.dtype),
                    value,
                )
                for name, value in old.items()
            }
        return new_states, output.logits[:, 0]

    states = {n: {k: v[...] for k, v in entry.items()} for n, entry in entries.items()}
    if ids.shape[1] == 1:
        states, logits = step(states, (ids[:, 0], mask[:, 0]))
        logits = logits[:, None]
    else:
        states, logits = jax.lax.scan(step, states, (ids.T, mask.T))
        logits = logits.swapaxes(0, 1)
    for number, entry in entries.items():
        for name, variable in entry.items():
            variable.set_value(states[number][name])
    return outputs.FlaxCausalLMOutputWithCrossAttentions(logits=logits)


def _state_layer(entry: Mapping[str, jax.Array]) -> Any:
    """Creates a layer of Transformers' cache from the cached arrays of that layer."""
    states = {name: value for name, value in entry.items() if "_state_" in name}
    keys = [entry[n] for n in ("cached_key", "cached_value", "position") if "cached_key" in entry]
    if not states:
        return RowsLayer(*keys)
    count = max(int(name.rpartition("_")[2]) for name in states) + 1
    layer = HybridLayer(count, *keys) if keys else LinearAttentionLayer(number_of_states=count)
    for name, value in states.items():
        state_name, _, number_text = name.rpartition("_state_")
        number, tensor = int(number_text), trace.as_tensors(value)
        if state_name == "conv":
            layer.conv_states[number] = tensor
            layer.conv_kernel_size[number] = value.shape[-1]
            layer.is_conv_states_initialized[number] = True
        else:
            layer.recurrent_states[number] = tensor
            layer.is_recurrent_states_initialized[number] = True
        layer.has_previous_state[number] = True
        layer.dtype, layer.device = tensor.dtype, tensor.device
    return layer


def _entries_of(layer: Any) -> dict[str, jax.Array]:
    """Returns the states, keys and values in a layer of Transformers' cache by name."""
    entries = _states_of(layer) if isinstance(layer, LinearAttentionLayer) else {}
    if isinstance(layer, RowsLayer):
        entries |= {"cached_key": layer.key, "cached_value": layer.value}
    return entries


def _states_of(layer: LinearAttentionLayer) -> dict[str, jax.Array]:
    groups = (("conv", layer.conv_states), ("recurrent", layer.recurrent_states))
    return {
        f"{name}_state_{number}": trace.as_arrays(state)
        for name, group in groups
        for number, state in group.items()
        if state is not None
    }


# -- model classes


def empty_cache(
    model: Any, batch_size: int, max_length: int, *, history: bool = False
) -> dict[str, Any]:
    """Returns an empty cache for a model.

    Args:
        model: The model.
        batch_size: Number of sequences.
        max_length: Maximum number of tokens per sequence.
        history: Whether to return a cache of the type "history", whatever the model supports.
    """
    is_seq2seq = isinstance(model, Seq2SeqGeneration)
    plan = plan_cache(model.structure, is_seq2seq)
    dtype = model.precision.compute_dtype or jnp.float32
    if history or plan.cache_type == "history":
        tokens = jnp.zeros((batch_size, max_length, 1, 1), jnp.int32)
        unused = jnp.zeros((batch_size, 1, 1, 1), jnp.int8)
        index = jnp.zeros((), jnp.int32)
        return {HISTORY: {"cached_key": tokens, "cached_value": unused, "cache_index": index}}
    layers: dict[str, Any] = {}
    for number, shapes in plan.layers.items():
        if plan.cache_type == "keys":
            layers[number] = {
                name: jnp.zeros((batch_size, max_length, *shape[2:]), dtype)
                for name, shape in shapes.items()
            } | {"cache_index": jnp.zeros((), jnp.int32)}
        else:
            layers[number] = {
                name: jnp.zeros(
                    (batch_size, max_length, *shape[2:])
                    if name.startswith("cached")
                    else (batch_size, *shape[1:]),
                    dtype,
                )
                for name, shape in shapes.items()
            } | {"position": jnp.zeros(batch_size, jnp.int32)}
    return {LAYERS: layers}


class BridgedCausalGeneration(CausalGeneration):
    """Prepares and updates the inputs of generation for bridged decoders."""

    @functools.cached_property
    def fixed_state(self) -> bool:
        """Whether the cache contains states, from which tokens cannot be removed again."""
        model: Any = self
        return plan_cache(model.structure, False).cache_type in ("states", "hybrid")

    def _empty_cache(self, size: CacheSize) -> dict[str, Any]:
        model: Any = self
        return empty_cache(model, size.batch_size, size.max_length)

    def prepare_inputs_for_generation(
        self,
        input_ids: jax.Array,
        max_length: int,
        attention_mask: jax.Array | None = None,
        **inputs: Any,
    ) -> dict[str, Any]:
        """Returns the keyword arguments of the call that processes the prompts.

        Args:
            input_ids: Prompts, `(batch, length)`.
            max_length: Number of tokens that the cache can contain.
            attention_mask: Mask of the prompts, `(batch, length)`.
            **inputs: Images and other inputs of the model, which are passed to the model in every
                step. With such inputs, the cache has the type "history".

        Raises:
            UnsupportedModel: The PyTorch class prepares the other inputs in its own way.
        """
        model: Any = self
        torch_class: Any = type(model.structure.module)
        for name in ("generate", "_prepare_position_ids_for_generation") if inputs else ():
            if overrides(torch_class, name):
                raise _own_method(torch_class, name, f"it reads {', '.join(inputs)}")
        if self.fixed_state:
            mask = jnp.ones_like(input_ids) if attention_mask is None else attention_mask
            cache = empty_cache(model, input_ids.shape[0], max_length)
            return {"past_key_values": cache, "attention_mask": jnp.asarray(mask, jnp.int32)}
        prepared = super().prepare_inputs_for_generation(input_ids, max_length, attention_mask)
        first_position = plan_cache(model.structure, False).first_position
        if first_position is None or not model.has_input("position_ids"):
            del prepared["position_ids"]
        else:
            prepared["position_ids"] += first_position
        if inputs:
            cache = empty_cache(model, input_ids.shape[0], max_length, history=True)
            prepared |= {**inputs, "past_key_values": cache}
        return prepared

    def update_inputs_for_generation(
        self, model_outputs: Any, model_kwargs: dict[str, Any]
    ) -> dict[str, Any]:
        """Returns the keyword arguments of the next call, with the new cache and positions."""
        updated = {**model_kwargs, "past_key_values": model_outputs.past_key_values}
        if self.fixed_state:
            rows = model_kwargs["attention_mask"].shape[0]
            return {**updated, "attention_mask": jnp.ones((rows, 1), jnp.int32)}
        if "position_ids" in updated:
            updated["position_ids"] = updated["position_ids"][:, -1:] + 1
        return updated


class BridgedSeq2SeqGeneration(Seq2SeqGeneration):
    """Prepares and updates the inputs of generation for bridged encoder-decoders."""

    def init_cache(
        self, batch_size: int, max_length: int, *arguments: Any, **options: Any
    ) -> dict[str, Any]:
        """Returns a cache for ``decode``; see `FlaxSeq2SeqPreTrainedModel.init_cache`."""
        model: Any = self
        if plan_cache(model.structure, True).cache_type == "history":
            return empty_cache(model, batch_size, max_length)
        return super().init_cache(batch_size, max_length, *arguments, **options)

    def _empty_cache(self, size: CacheSize) -> dict[str, Any]:
        model: Any = self
        cache = empty_cache(model, size.batch_size, size.max_length)
        plan = plan_cache(model.structure, True)
        if size.encoder is None or plan.cache_type == "history":
            return cache
        dtype = model.precision.compute_dtype or jnp.float32
        layers = {
            number: {
                n: jnp.zeros((*size.encoder, *shape[2:]), dtype) for n, shape in shapes.items()
            }
            for number, shapes in plan.encoder_layers.items()
        }
        return cache | {ENCODER_LAYERS: layers}


class UnsupportedSeq2SeqGeneration(BridgedCausalGeneration):
    """Refuses to generate with encoder-decoders whose encoder does not read token IDs."""

    def encode(self, *args: Any, **inputs: Any) -> Any:
        """Raises an error."""
        model: Any = self
        raise UsageError(
            f"generate: the bridge does not support encoder-decoders that read "
            f"{model.main_input_name} instead of input_ids, such as {type(self).__name__}"
        )


def generation_mixin(
    torch_class: Any, is_seq2seq: bool, names: tuple[str, ...]
) -> tuple[type, ...]:
    """Returns the base classes that prepare the inputs of generation.

    Args:
        torch_class: The PyTorch class.
        is_seq2seq: Whether the model is an encoder-decoder.
        names: The names of the model's inputs.

    Returns:
        One class, or an empty tuple if the PyTorch class cannot generate.
    """
    if not torch_class.can_generate():
        return ()
    if is_seq2seq:
        return (BridgedSeq2SeqGeneration,)
    if "decoder_input_ids" in names:
        return (UnsupportedSeq2SeqGeneration,)
    media = [name for name in names if name in MEDIA]
    if not media:
        return (BridgedCausalGeneration,)
    # `generate` accepts the inputs that the signature of this method names, so the signature must
    # name the image and audio inputs.
    base = BridgedCausalGeneration.prepare_inputs_for_generation

    @functools.wraps(base)
    def prepare(self: Any, *args: Any, **inputs: Any) -> dict[str, Any]:
        return base(self, *args, **{n: v for n, v in inputs.items() if v is not None})

    signature = inspect.signature(base)
    parameters = list(signature.parameters.values())[:-1]
    parameters += [
        inspect.Parameter(n, inspect.Parameter.KEYWORD_ONLY, default=None) for n in media
    ]
    prepare.__signature__ = signature.replace(parameters=parameters)  # type: ignore[attr-defined]
    content = {"prepare_inputs_for_generation": prepare, "__module__": __name__}
    return (type("BridgedMediaGeneration", (BridgedCausalGeneration,), content),)
