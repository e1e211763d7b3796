"""What every model is: an NNX module inside, ``model(..., params=)`` outside.

A model owns a configuration, a module's structure and (usually) parameters, as the Flax classes of
Transformers 4 did. ``model.params`` is a nested dict with string keys; calling the model is a pure
function of the arguments, so it works under ``jit``, ``grad`` and ``eval_shape``.
"""

from __future__ import annotations

import dataclasses
import inspect
import logging
import sys
from collections.abc import Callable, Mapping, Sequence
from typing import TYPE_CHECKING, Any, ClassVar

import jax
import jax.numpy as jnp
import numpy as np
from flax import nnx
from jax.typing import DTypeLike

from hfseq.errors import UsageError
from hfseq.generation import FlaxGenerationMixin
from hfseq.nn import kv_cache, sharding, trees
from hfseq.nn.attention import resolve_attention
from hfseq.nn.context import Options, options
from hfseq.nn.layers import Dropout, height_and_width
from hfseq.nn.precision import Precision, apply_precision, resolve_precision
from hfseq.nn.random import Keys, make_keys, provide_adapter_keys
from hfseq.nn.stack import stack_layers, stacked_paths

if TYPE_CHECKING:
    from transformers import PreTrainedConfig

    from hfseq.modeling.lora import LoraConfig

logger = logging.getLogger(__name__)

#: Inputs that are no tokens: pictures, spectrograms, waves.
MEDIA_INPUTS = ("pixel_values", "input_features", "input_values")

#: What a model takes for ids, masks and positions: an array, or nested lists of numbers.
Input = jax.Array | np.ndarray | Sequence[Any] | None


def _accepts(parameters: Mapping[str, inspect.Parameter], name: str) -> bool:
    return name in parameters or any(p.kind is p.VAR_KEYWORD for p in parameters.values())


_NO_PARAMS = (
    "`params` cannot be {} when the model is created with `_do_init=False`: it holds none. Keep "
    "them outside and pass them, `model(..., params=params)`; `model.init_weights(rng)` makes them"
)


class FlaxModel(FlaxGenerationMixin):
    """A model without files; :class:`hfseq.modeling.FlaxPreTrainedModel` loads and saves it."""

    config_class: ClassVar[Any] = None
    module_class: ClassVar[Any] = None
    main_input_name: ClassVar[str] = "input_ids"
    # The attribute of the configuration that sizes a table of positions: longer rows are refused.
    # By default "max_position_embeddings" where the module has such a table; "" where rows may be
    # longer all the same.
    position_table: str | None = None
    # A cache whose size does not depend on the length, and which cannot be rewound.
    fixed_state: ClassVar[bool] = False
    # The calls of the module: the whole, and what else the model class runs of it.
    module_methods: ClassVar[tuple[str, ...]] = ("__call__", "encode", "decode")
    # Whether pictures may have other sizes than that of the configuration.
    any_image_size: ClassVar[bool] = False
    # Linears beside those in the layers that train in FP8 under its recipes, as expressions.
    precision_sites: ClassVar[tuple[str, ...]] = ()
    # The attributes of the configuration that count heads: each device gets whole ones.
    head_counts: ClassVar[tuple[str, ...]] = (
        *("num_attention_heads", "n_head", "num_heads", "num_key_value_heads"),
        *("encoder_attention_heads", "decoder_attention_heads"),
    )
    # Whether users have the collections beside the parameters in one tree, as version 4's models
    # with batch norm: {"params": ..., "batch_stats": ...}.
    params_include_collections: ClassVar[bool] = False
    framework = "flax"
    peft_config: LoraConfig | None = None
    _linen_class: ClassVar[type[FlaxModule]]
    _weight_axes: Mapping[trees.Path, sharding.Axes] = {}
    _auto_class: ClassVar[str | None] = None

    def __init__(
        self,
        config: PreTrainedConfig,
        input_shape: tuple[Any, ...] | None = None,
        seed: int = 0,
        dtype: DTypeLike = jnp.float32,
        _do_init: bool = True,
        *,
        precision: str | Precision | None = None,
        scan_layers: bool = False,
        gradient_checkpointing: bool = False,
        remat_policy: Callable[..., bool] | None = None,
        attn_implementation: str | None = None,
        peft_config: LoraConfig | None = None,
        **module_kwargs: Any,
    ):
        if config is None:
            raise ValueError("config cannot be None")
        self._config: Any = config
        self._module_kwargs = module_kwargs
        self.seed, self.dtype = seed, jnp.dtype(dtype)
        self.key = jax.random.PRNGKey(seed)
        self.scan_layers = scan_layers
        self.precision = resolve_precision(precision, dtype)
        self._options = Options(
            remat=gradient_checkpointing,
            remat_policy=remat_policy,
            attention=resolve_attention(attn_implementation),
        )
        self.peft_config, self._stacked = peft_config, {}
        module = nnx.eval_shape(lambda: self._build(nnx.Rngs(0)))
        self._graph, params, extra = trees.split(module)
        self._abstract = trees.to_dict(params)
        self._paths = trees.flatten(self._abstract)
        self._extra_types = trees.collections(extra)
        self._stacked = stacked_paths(module)
        if self.position_table is None and self._has_position_table():
            self.position_table = "max_position_embeddings"
        self._accepted = {
            name: dict(inspect.signature(getattr(self.module_class, name)).parameters)
            for name in self.module_methods
            if hasattr(self.module_class, name)
        }
        self.input_shape = self._example_shape() if input_shape is None else input_shape
        self._has_dropout = any(
            isinstance(part, Dropout) and part.rate > 0 for _, part in nnx.iter_graph(module)
        )
        self._is_initialized = _do_init
        self._params: dict[str, Any] | None = None
        self.extra: dict[str, Any] = {}
        if _do_init:
            self._params, self.extra = self._initialize(self.key)
        self.generation_config: Any = None
        if self.can_generate():
            from transformers import GenerationConfig

            self.generation_config = GenerationConfig.from_model_config(config)

    def __init_subclass__(cls, **kwargs: Any) -> None:
        """Put the module class beside its model, under its v4 name (``FlaxBertModule``)."""
        super().__init_subclass__(**kwargs)
        if cls.module_class is not None and cls.__module__ in sys.modules:
            name = f"{cls.__name__.removesuffix('Model')}Module"
            content = {
                "__doc__": f"The structure of {cls.__name__}, with Linen's init and apply.",
                "__module__": cls.__module__,
                "model_class": cls,
            }
            cls._linen_class = type(name, (FlaxModule,), content)
            vars(sys.modules[cls.__module__]).setdefault(name, cls._linen_class)

    def _build(self, rngs: nnx.Rngs, cache: kv_cache.CacheSize | None = None) -> nnx.Module:
        module = self.module_class(self._config, rngs=rngs, **self._module_kwargs)
        apply_precision(module, self.precision, self.precision_sites)
        if self.peft_config is not None:
            self._adapt(module, rngs)
        if cache:
            kv_cache.add_cache(module, cache, self.precision.compute_dtype or jnp.float32)
        if self.scan_layers:
            stack_layers(module)
        sharding.assign_weight_axes(module, self._weight_axes)
        return module

    def _adapt(self, module: nnx.Module, rngs: nnx.Rngs) -> None:
        """Add the adapters of ``peft_config``; models with files do."""
        raise UsageError(f"{type(self).__name__} has no checkpoints, by whose paths layers adapt")

    def _initialize(self, rng: jax.Array) -> tuple[dict[str, Any], dict[str, Any]]:
        _, params, extra = trees.split(self._build(nnx.Rngs(rng)))
        return trees.to_dict(params), trees.by_collection(extra)

    # -- properties

    @property
    def config(self) -> Any:
        """The Hugging Face configuration."""
        return self._config

    @property
    def module(self) -> FlaxModule:
        """The model's structure with Linen's ``init`` and ``apply``, as in v4."""
        return self._linen_class.of(self)

    @property
    def params(self) -> dict[str, Any]:
        """The parameters: a nested dict with string keys, the tree of the v4 Flax classes."""
        if not self._is_initialized:
            raise ValueError(_NO_PARAMS.format("accessed from model"))
        assert self._params is not None
        return self.join_collections(self._params)

    @params.setter
    def params(self, params: Mapping[str, Any]) -> None:
        if not self._is_initialized:
            raise ValueError(_NO_PARAMS.format("set from model"))
        given, extra = self.split_collections(params)
        params = trees.thaw(given)
        missing = self._paths.keys() - trees.flatten(params).keys()
        if missing:
            names = ", ".join(sorted("/".join(path) for path in missing))
            raise ValueError(
                f"Some parameters are missing. Make sure that `params` include: {names}"
            )
        self._params = params
        self.extra = self.extra if extra is None else trees.thaw(extra)

    def join_collections(self, params: dict[str, Any]) -> dict[str, Any]:
        """Put the model's collections beside ``params``, where its users have both in one tree."""
        return {"params": params, **self.extra} if self.params_include_collections else params

    def split_collections(self, params: trees.Params) -> tuple[trees.Params, trees.Params | None]:
        """Return the parameters of what users have, and the collections beside them, if any."""
        if not self.params_include_collections or "params" not in params:
            return params, None
        return params["params"], {name: params[name] for name in params if name != "params"} or None

    @property
    def required_params(self) -> set[tuple[str, ...]]:
        """The paths that a parameter tree must have."""
        return set(trees.flatten(self.params_shape_tree))

    @property
    def params_shape_tree(self) -> dict[str, Any]:
        """What ``params`` is, with ``jax.ShapeDtypeStruct`` leaves."""
        joined = self.params_include_collections
        return {"params": self._abstract, **self.extra_shape_tree} if joined else self._abstract

    @property
    def abstract_params(self) -> dict[str, Any]:
        """The parameters alone, without collections beside them, as ``jax.ShapeDtypeStruct``."""
        return self._abstract

    # -- structure

    def init_weights(
        self,
        rng: jax.Array,
        input_shape: tuple[Any, ...] | None = None,
        params: trees.Params | None = None,
    ) -> dict[str, Any]:
        """Make a fresh parameter tree from ``rng``; with ``params`` only what is missing there."""
        fresh, extra = self._initialize(rng)
        if self.params_include_collections:
            fresh = {"params": fresh, **extra}
        if params is None:
            return fresh
        return trees.unflatten({**trees.flatten(fresh), **trees.flatten(trees.thaw(params))})

    @property
    def stacked_prefixes(self) -> tuple[trees.Path, ...]:
        """The paths of layers that are stacked for scanning (none unless ``scan_layers``)."""
        return tuple(self._stacked)

    def use_mesh(
        self,
        mesh: jax.sharding.Mesh | None,
        axes: Mapping[trees.Path, sharding.Axes] | None = None,
        sequence_parallel: bool = False,
    ) -> None:
        """Compute on ``mesh``: layers divide their work over it, and lay out what they return.

        ``axes`` are those that split each weight (``Layout.axes``), by its path;
        ``sequence_parallel`` splits the length between the blocks over ``tensor``
        (:mod:`hfseq.nn.sharding`).
        """
        self._options = dataclasses.replace(
            self._options, mesh=mesh, sequence_parallel=sequence_parallel
        )
        self._weight_axes = dict(axes or {})
        self._graph = trees.split(nnx.eval_shape(lambda: self._build(nnx.Rngs(0))))[0]

    @property
    def sequence_parallel(self) -> bool:
        """Whether the length is split over ``tensor`` between the blocks."""
        return self._options.sequence_parallel

    @property
    def text_config(self) -> Any:
        """The part of the configuration that describes what reads tokens: mostly all of it."""
        return getattr(self._config, "text_config", self._config)

    def max_length(self) -> int | None:
        """The longest sequence that the position table allows; ``None`` where nothing limits it."""
        return getattr(self.text_config, self.position_table or "max_position_embeddings", None)

    def max_source_length(self) -> int | None:
        """The longest input of the encoder, where there is one."""
        return self.max_length()

    def _has_position_table(self) -> bool:
        """Tell whether an embedding has as many rows as the configuration has positions.

        A table that is named for its positions may have more: OPT's and BART's have two.
        """
        size, words = getattr(self.text_config, "max_position_embeddings", None), self.vocab_size()
        if not isinstance(size, int) or size < 1:
            return False
        tables = [
            (leaf.shape[0], "pos" in trees.join(path[-2:-1]))
            for path, leaf in self._paths.items()
            if path[-1] == "embedding" and len(leaf.shape) == 2
        ]
        return any(rows == size != words or named and rows >= size for rows, named in tables)

    def vocab_size(self, name: str = "input_ids") -> int | None:
        """The number of tokens that ``input_ids`` or ``decoder_input_ids`` may hold."""
        return getattr(self.text_config, "vocab_size", None)

    def image_shape(self) -> tuple[int, int, int] | None:
        """Channels, height and width that ``pixel_values`` must have; ``None`` for any."""
        config = getattr(self._config, "vision_config", self._config)
        size = getattr(config, "image_size", None)
        if size is None:
            return None
        return getattr(config, "num_channels", 3), *height_and_width(size)

    def _example_shape(self) -> tuple[Any, ...]:
        """The ``input_shape`` of v4: of ids, of pictures with their channels last, or of both."""
        if not self.has_input("pixel_values"):
            return (1, 1)
        channels, *size = self.image_shape() or (3, 224, 224)
        pictures = (1, *size, channels)
        return ((1, 1), pictures) if self.has_input("input_ids") else pictures

    def has_input(self, name: str) -> bool:
        """Tell whether ``input_ids`` or ``pixel_values`` are among the arguments of the model."""
        given = inspect.signature(self.__call__).parameters.get(name)
        return given is not None and given.kind is not given.VAR_KEYWORD

    def accepts(self, name: str, method: str = "__call__") -> bool:
        """Tell whether the module's call (or its ``encode``, ``decode``) accepts ``name``."""
        return _accepts(self._accepted[method], name)

    def enable_gradient_checkpointing(self) -> None:
        """Recompute every layer in the backward pass instead of keeping its activations."""
        self._options = dataclasses.replace(self._options, remat=True)

    def init_cache(self, batch_size: int, max_length: int, *_: Any, **__: Any) -> dict[str, Any]:
        """Return an empty key-value cache for ``past_key_values``, mirroring the parameter tree."""
        return self._empty_cache(kv_cache.CacheSize(batch_size, max_length))

    def _empty_cache(self, size: kv_cache.CacheSize) -> dict[str, Any]:
        module = nnx.eval_shape(lambda: self._build(nnx.Rngs(0), size))
        shapes = trees.to_dict(nnx.split(module, nnx.Cache, ...)[1])
        if not shapes:
            raise UsageError(
                f"{type(self).__name__} has no cache: it has no nn.StateAttention and no causal "
                "nn.CachedAttention (BERT and its kin need is_decoder=True)"
            )
        return kv_cache.empty_cache(module, shapes, size.batch_size)

    def to_bf16(self, params: trees.Params, mask: trees.Params | None = None) -> Any:
        """Return ``params`` with floating leaves in bfloat16 where ``mask`` (if any) is True."""
        return trees.cast_floating(params, jnp.bfloat16, mask)

    def to_fp16(self, params: trees.Params, mask: trees.Params | None = None) -> Any:
        """Return ``params`` with floating leaves in float16 where ``mask`` (if any) is True."""
        return trees.cast_floating(params, jnp.float16, mask)

    def to_fp32(self, params: trees.Params, mask: trees.Params | None = None) -> Any:
        """Return ``params`` with floating leaves in float32 where ``mask`` (if any) is True."""
        return trees.cast_floating(params, jnp.float32, mask)

    @classmethod
    def can_generate(cls) -> bool:
        """Tell whether the class overrides ``prepare_inputs_for_generation``."""
        return cls.prepare_inputs_for_generation is not FlaxModel.prepare_inputs_for_generation

    def prepare_inputs_for_generation(self, *args: Any, **kwargs: Any) -> dict[str, Any]:
        """Prepare the first step of generation; overridden by classes that can generate."""
        raise UsageError(f"{type(self).__name__} has no language-modelling head to generate with")

    @classmethod
    def _from_config(cls, config: PreTrainedConfig, **kwargs: Any) -> FlaxModel:
        return cls(config, **kwargs)

    @classmethod
    def register_for_auto_class(cls, auto_class: str = "FlaxAutoModel") -> None:
        """Name the Auto class that loads this one from custom code on the Hub."""
        cls._auto_class = auto_class

    # -- the call

    def __call__(
        self,
        input_ids: Input,
        attention_mask: Input = None,
        token_type_ids: Input = None,
        position_ids: Input = None,
        params: trees.Params | None = None,
        dropout_rng: jax.Array | Keys | None = None,
        train: bool = False,
        output_attentions: bool | None = None,
        output_hidden_states: bool | None = None,
        return_dict: bool | None = None,
        past_key_values: trees.Params | None = None,
        extra: trees.Params | None = None,
        **inputs: Any,
    ) -> Any:
        """Run the model; families with other arguments override this and call :meth:`run`."""
        given = {
            "input_ids": input_ids,
            "attention_mask": attention_mask,
            "token_type_ids": token_type_ids,
            "position_ids": position_ids,
            **inputs,
        }
        return self.run(
            given,
            params,
            dropout_rng,
            train,
            output_attentions,
            output_hidden_states,
            return_dict,
            past_key_values,
            extra,
        )

    def run(
        self,
        inputs: dict[str, Any],
        params: trees.Params | None = None,
        dropout_rng: jax.Array | Keys | None = None,
        train: bool = False,
        output_attentions: bool | None = None,
        output_hidden_states: bool | None = None,
        return_dict: bool | None = None,
        past_key_values: trees.Params | None = None,
        extra: trees.Params | None = None,
        method: str = "__call__",
        fill_encoder_cache: bool = False,
    ) -> Any:
        """Merge ``params`` (and a cache, and ``extra`` collections) into the module and call it.

        With ``extra`` the result is a pair (outputs, the collections after the call); without it
        the model's own collections are read and their changes dropped, but while training with
        ``joined_params``. ``method`` is the module's
        entry: ``encode`` and ``decode`` are the halves of an encoder-decoder.
        """
        positions = "decoder_position_ids" if method == "decode" else "position_ids"
        if past_key_values and positions in inputs and inputs[positions] is None:
            raise UsageError(f"past_key_values needs {positions}: where the new tokens stand")
        if train and dropout_rng is None and self._has_dropout:
            raise UsageError("train=True with dropout needs dropout_rng=jax.random.key(...)")
        asked = {
            "output_attentions": output_attentions,
            "output_hidden_states": output_hidden_states,
        }
        flags = {name: bool(self._or_config(value, name, False)) for name, value in asked.items()}
        wanted = self._inputs(inputs, flags, method)
        own, beside = self.split_collections(params or self.params)
        asks = extra is not None or train and self.params_include_collections
        extra = extra if extra is not None else self.extra if beside is None else beside
        module = nnx.merge(
            self._graph,
            trees.to_state(own, self._abstract, nnx.Param),
            *self._extra_states(extra),
        )
        if past_key_values:
            kv_cache.check_capacity(past_key_values, wanted)
            trees.attach_cache(module, past_key_values)
        keys = make_keys(dropout_rng) if train else None
        chosen = dataclasses.replace(
            self._options, fill_encoder_cache=fill_encoder_cache, train=train
        )
        with options(chosen), provide_adapter_keys(keys):
            output = getattr(module, method)(**wanted, rngs=keys)
        if past_key_values:
            output.past_key_values = trees.to_dict(nnx.split(module, nnx.Cache, ...)[1])
        if not self._or_config(return_dict, "return_dict", True):
            output = output.to_tuple()
        if not asks:
            return output
        return output, trees.by_collection(trees.split(module, nnx.Cache)[3])

    def _or_config(self, value: bool | None, name: str, default: bool) -> bool:
        return getattr(self._config, name, default) if value is None else value

    def _inputs(
        self, inputs: dict[str, Any], flags: dict[str, bool], method: str
    ) -> dict[str, Any]:
        taken, owner = self._accepted[method], type(self).__name__
        wanted: dict[str, Any] = {}
        for name, value in inputs.items():
            if value is None:
                continue
            if isinstance(value, (str, bytes)):
                raise TypeError(
                    f"{name} must be an array of numbers, not text: call the tokenizer first"
                )
            if isinstance(value, (list, tuple)) and value and not isinstance(value[0], jax.Array):
                try:
                    value = np.asarray(value)
                except ValueError:
                    raise UsageError(
                        f"{name} has rows of different lengths: pad them (tokenizer(texts, "
                        'padding=True, return_tensors="np")) and pass the attention_mask too'
                    ) from None
            if name in ("input_ids", "decoder_input_ids"):
                self._check_ids(name, value)
            if name == "pixel_values":
                self._check_images(value)
            if name in MEDIA_INPUTS:
                value = jnp.asarray(value, jnp.float32)  # as in v4, bytes too
            # Integers become int32, as in v4; types of tracers and floats stay.
            if jnp.issubdtype(getattr(value, "dtype", float), jnp.integer):
                value = jnp.asarray(value, jnp.int32)
            wanted[name] = jnp.asarray(value) if isinstance(value, np.ndarray) else value
        wanted |= {name: flag for name, flag in flags.items() if flag or self.accepts(name, method)}
        if unknown := [name for name in wanted if not _accepts(taken, name)]:
            raise TypeError(f"{owner} takes no {', '.join(sorted(unknown))}")
        return wanted

    def _check_ids(self, name: str, ids: Any) -> None:
        """Refuse what would read outside of a table, which JAX answers with NaN and no error."""
        words, length = self.vocab_size(name), (0, *np.shape(ids))[-1]
        numbers = isinstance(ids, np.ndarray) and ids.size and ids.dtype.kind in "iuf"
        if words and numbers and not 0 <= ids.min() <= ids.max() < words:
            raise UsageError(
                f"{name} hold {ids.max() if ids.max() >= words else ids.min()}, outside of the "
                f"model's vocabulary of {words}: use the tokenizer that was trained with this model"
            )
        limit = self.max_length() if self.position_table else None
        if limit is not None and length > limit:
            table = f"{self.position_table}={getattr(self.text_config, self.position_table or '')}"
            raise UsageError(
                f"{name} have {length} tokens a row, {type(self).__name__} allows {limit} "
                f"({table}): truncate the input or use a model with a longer table of positions"
            )

    def _check_images(self, pictures: Any) -> None:
        """Refuse pictures of another size, or with their channels last."""
        wanted, shape, name = self.image_shape(), np.shape(pictures), type(self).__name__
        if len(shape) != 4:
            raise UsageError(
                f"pixel_values have shape {shape}; {name} takes (batch, channels, height, width): "
                "one picture is a batch of one, pixel_values[None]"
            )
        if wanted is None or shape[1:] == wanted:
            return
        channels, height, width = wanted
        if self.any_image_size and shape[1] == channels:
            config = getattr(self._config, "vision_config", self._config)
            least = height_and_width(config.patch_size)
            if shape[2] >= least[0] and shape[3] >= least[1]:
                return
        if shape[1] != channels and shape[3] == channels:
            remedy = "channels come first here: pixel_values.transpose(0, 3, 1, 2)"
        elif shape[1] != channels:
            remedy = f"this model reads {channels} channels: convert the pictures"
        else:
            remedy = f"resize them to {height} x {width}, as the checkpoint's image processor does"
        raise UsageError(
            f"pixel_values have shape {shape}; {name} takes (batch, {channels}, {height}, {width})"
            f": {remedy}"
        )

    # -- collections beside the parameters

    def check_training(self, tokens: int) -> None:
        """Raise a UsageError if ``tokens`` a step cannot train the collections."""

    def finalize_extra(self, extra: dict[str, Any]) -> dict[str, Any]:
        """Return the collections after an optimizer step.

        Called once a step, when all micro-batches have left their part in ``extra``; traced.
        """
        return extra

    def extra_metrics(self, extra: dict[str, Any]) -> dict[str, jax.Array]:
        """Return numbers worth logging (0-d arrays by name) on the collections; traced."""
        return {}

    @property
    def overwrite_with_gradient(self) -> tuple[str, ...]:
        """The collections whose next values the backward pass returns in place of gradients."""
        return tuple(
            name
            for name, (kind, _) in self._extra_types.items()
            if getattr(kind, "overwritten", False)
        )

    @property
    def statistics(self) -> tuple[str, ...]:
        """The collections in which a call counts the tokens that it sees."""
        moved = self.overwrite_with_gradient
        return tuple(name for name in self._extra_types if name not in moved)

    @property
    def extra_shape_tree(self) -> dict[str, Any]:
        """The collections with ``jax.ShapeDtypeStruct`` leaves; empty for most models."""
        return {name: shapes for name, (_, shapes) in self._extra_types.items()}

    def init_extra(self, rng: jax.Array) -> dict[str, Any]:
        """Make fresh collections from ``rng``, those of ``init_weights(rng)`` and its model.

        Only they are computed, not the parameters.
        """
        if not self._extra_types:
            return {}
        return jax.jit(lambda key: self._initialize(key)[1])(rng)

    def _require_extra(self, extra: Mapping[str, Any]) -> Mapping[str, Any]:
        missing = [name for name in self._extra_types if name not in extra]
        if missing:
            raise UsageError(
                f"{type(self).__name__} needs its collection {', '.join(missing)}, but `extra` has "
                f"{', '.join(extra) or 'none'}: a model created with `_do_init=False` holds none. "
                "Pass extra=model.init_extra(rng), or what training returned"
            )
        return extra

    def _extra_states(self, extra: Mapping[str, Any]) -> list[nnx.State]:
        """Return the collections as NNX wants them."""
        return [
            trees.to_state(self._require_extra(extra)[name], shapes, kind)
            for name, (kind, shapes) in self._extra_types.items()
        ]


class FlaxModule:
    """The module classes of Transformers 4: ``FlaxBertModule(config).apply({"params": p}, ids)``.

    They are Linen's ``init`` and ``apply`` of a model without parameters of its own, for programs
    that worked below ``FlaxPreTrainedModel``. Each model class has one, under v4's name, in its
    module.
    """

    model_class: ClassVar[Any]

    def __init__(self, config: PreTrainedConfig, dtype: DTypeLike = jnp.float32, **options: Any):
        self.model = self.model_class(config, dtype=dtype, _do_init=False, **options)

    @classmethod
    def of(cls, model: Any) -> FlaxModule:
        """Wrap an existing model."""
        module = cls.__new__(cls)
        module.model = model
        return module

    @property
    def config(self) -> Any:
        """The Hugging Face configuration."""
        return self.model.config

    @property
    def dtype(self) -> Any:
        """The type of computation."""
        return self.model.dtype

    def init(self, rngs: jax.Array | Mapping[str, jax.Array], *_: Any, **__: Any) -> dict[str, Any]:
        """Return fresh variables, ``{"params": tree}``; example inputs are not needed."""
        key = rngs["params"] if isinstance(rngs, Mapping) else rngs
        made = self.model.init_weights(key)
        return made if self.model.params_include_collections else {"params": made}

    def apply(
        self,
        variables: Mapping[str, Any],
        *args: Any,
        rngs: jax.Array | Mapping[str, jax.Array] | None = None,
        mutable: bool | Sequence[str] = False,
        deterministic: bool = True,
        method: str | Callable[..., Any] | None = None,
        **kwargs: Any,
    ) -> Any:
        """Run the model on ``variables`` ({"params": ..., "cache": ...}).

        ``rngs`` is a key or ``{"dropout": key}``; ``method`` is ``"encode"`` or ``"decode"``, or a
        function of that name; with ``mutable=["cache"]`` the result is a pair with the new cache.
        Pictures have their channels last, as for v4's modules.
        """
        entry = method if isinstance(method, str) else getattr(method, "__name__", "__call__")
        args, named = self._named(entry, args)
        kwargs = self._channels_first({**named, **kwargs})
        deterministic = kwargs.pop("deterministic", deterministic)
        if variables.get("cache"):
            kwargs["past_key_values"] = variables["cache"]
        key = rngs.get("dropout") if isinstance(rngs, Mapping) else rngs
        params = variables if self.model.params_include_collections else variables["params"]
        output = getattr(self.model, entry)(
            *args, params=params, train=not deterministic, dropout_rng=key, **kwargs
        )
        if self.model.params_include_collections and not deterministic:
            return output if mutable else output[0]
        return (output, {"cache": output["past_key_values"]}) if mutable else output

    def _named(self, entry: str, args: tuple[Any, ...]) -> tuple[tuple[Any, ...], dict[str, Any]]:
        """Name what came by position: inputs, and behind them the flags of v4's modules.

        Modules with a cache had their flags in an order of their own: theirs keep their places.
        """
        names = list(inspect.signature(getattr(self.model, entry)).parameters)
        if "past_key_values" in names or "params" not in names:
            return args, {}
        flags = ["deterministic", "output_attentions", "output_hidden_states", "return_dict"]
        flags = [name for name in flags if name == "deterministic" or name in names]
        return (), dict(zip((*names[: names.index("params")], *flags), args, strict=False))

    @staticmethod
    def _channels_first(given: dict[str, Any]) -> dict[str, Any]:
        """Turn pictures from the layout of v4's modules to that of its model classes."""
        if given.get("pixel_values") is None:
            return given
        turned = jnp.transpose(jnp.asarray(given["pixel_values"]), (0, 3, 1, 2))
        return {**given, "pixel_values": turned}
