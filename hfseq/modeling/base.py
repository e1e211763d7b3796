"""The base class of all models: the interface of Transformers 4 around a Flax NNX module.

Like the Flax classes of Transformers 4, a model has a configuration, the structure of a module and
usually parameters. ``model.params`` is a nested dict with string keys. A call such as ``model(...,
params=params)`` is a pure function of its arguments, so it works under ``jit``, ``grad`` and
``eval_shape``.

Variables of the module that are not parameters, such as the running statistics of batch norm, are
grouped in collections. They are stored in ``model.extra``.
"""

from __future__ import annotations

import dataclasses
import functools
import inspect
import logging
import math
import re
import sys
from collections.abc import Callable, Mapping, Sequence
from typing import TYPE_CHECKING, Any, ClassVar, Literal

import jax
import jax.numpy as jnp
import numpy as np
from flax import nnx
from flax.nnx import Module as NNXModule
from flax.nnx import State as NNXState
from jax.typing import DTypeLike

from hfseq.errors import UsageError, did_you_mean
from hfseq.generation import FlaxGenerationMixin
from hfseq.nn import kv_cache, sharding, trees
from hfseq.nn.attention import resolve_attention
from hfseq.nn.context import Options, options
from hfseq.nn.inputs import as_array, check_masks
from hfseq.nn.layers import Dropout, height_and_width
from hfseq.nn.precision import Precision, apply_precision, resolve_precision
from hfseq.nn.random import Keys, make_keys, provide_adapter_keys
from hfseq.nn.stack import stack_layers, stacked_paths

if TYPE_CHECKING:
    from transformers import PreTrainedConfig

    from hfseq.modeling.lora import LoraConfig

logger = logging.getLogger(__name__)

#: Inputs that are not tokens: images, spectrograms and waveforms.
MEDIA_INPUTS = ("pixel_values", "input_features", "input_values")

#: Token IDs, masks and positions: an array, or nested lists of numbers.
Input = jax.Array | np.ndarray | Sequence[Any] | None


#: Methods of PyTorch's models that hfseq's models do not have, and what to use instead.
TORCH_METHODS = {
    "to": (
        "Transformers' pipelines require PyTorch: use hfseq.pipeline. To move the model, use "
        "model.shard(mesh), jax.device_put(model.params, device) or model.to_bf16(model.params)"
    ),
    "cuda": "JAX computes on its default device; see jax.devices()",
    "cpu": "JAX computes on its default device; see jax.devices()",
    "eval": "Calls are in evaluation mode unless they have train=True",
    "train": "Pass train=True and dropout_rng=jax.random.key(...) to the call",
    "half": "Use dtype=jnp.float16 in from_pretrained, or model.to_fp16(model.params)",
    "parameters": "The parameters are model.params, a nested dict",
    "named_parameters": "The parameters are model.params, a nested dict",
    "state_dict": "The parameters are model.params, a nested dict",
    "load_state_dict": "Set model.params, or use from_pretrained",
    "gradient_checkpointing_enable": "Use model.enable_gradient_checkpointing()",
    "resize_token_embeddings": "Load the checkpoint with another vocab_size and "
    "ignore_mismatched_sizes=True, or resize the model in PyTorch",
}

#: Attributes that are computed from the other attributes. Pickles and deep copies leave them out,
#: and they are computed again when a model is restored.
DERIVED_STATE = (
    *("_graph", "_abstract", "_paths", "_param_paths", "_extra_types", "_extra_paths"),
    *("_stacked", "_accepted", "_has_dropout", "_generation_programs", "_encoder"),
)


def _accepts(parameters: Mapping[str, inspect.Parameter], name: str) -> bool:
    return name in parameters or any(p.kind is p.VAR_KEYWORD for p in parameters.values())


_NO_PARAMS = (
    "`params` cannot be {} when the model is created with `_do_init=False`. Keep the parameters "
    "outside of the model and pass them, `model(..., params=params)`; `model.init_weights(rng)` "
    "initializes them"
)


def _one_key() -> nnx.Rngs:
    """Returns random keys for modules without arrays: all are the same, which traces faster."""
    rngs: Any = nnx.Rngs(0)
    key = rngs.params()
    rngs.params = lambda: key
    return rngs


class FlaxModel(FlaxGenerationMixin):
    """A model that cannot be loaded from files or saved.

    :class:`hfseq.modeling.FlaxPreTrainedModel` adds loading and saving.

    Attributes:
        config_class: The Hugging Face configuration class.
        module_class: The NNX module class.
        main_input_name: Name of the first argument of calls.
        position_table: The attribute of the configuration that contains the number of position
            embeddings. Longer inputs raise an error. The default `None` means
            ``"max_position_embeddings"`` if the module has an embedding matrix of this size, and
            otherwise no limit. ``""`` means no limit.
        fixed_state: Whether the cache is a state whose size does not depend on the number of
            tokens. Such a cache cannot be rewound to an earlier token.
        module_methods: The methods of the module that the model class calls.
        any_image_size: Whether the size of images may differ from the ``image_size`` of the
            configuration.
        is_video_model: Whether ``pixel_values`` may have an axis of frames, `(batch, frames,
            channels, height, width)`.
        precision_sites: Regular expressions for the paths of further linear layers that FP8 recipes
            compute in FP8. By default, these recipes only include the linear layers inside of
            numbered layers.
        head_counts: The attributes of the configuration that contain a number of attention heads.
            These numbers must be multiples of the size of the mesh axis ``tensor``.
        params_include_collections: Whether ``params`` includes the collections, as in the models
            with batch norm of Transformers 4: ``{"params": ..., "batch_stats": ...}``.
    """

    config_class: ClassVar[Any] = None
    module_class: ClassVar[Any] = None
    main_input_name: ClassVar[str] = "input_ids"
    position_table: str | None = None
    fixed_state: ClassVar[bool] = False
    module_methods: ClassVar[tuple[str, ...]] = ("__call__", "encode", "decode")
    any_image_size: ClassVar[bool] = False
    is_video_model: ClassVar[bool] = False
    precision_sites: ClassVar[tuple[str, ...]] = ()
    head_counts: ClassVar[tuple[str, ...]] = (
        *("num_attention_heads", "n_head", "num_heads", "num_key_value_heads"),
        *("encoder_attention_heads", "decoder_attention_heads"),
    )
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
        self.peft_config = peft_config
        self._set_structure()
        if self.position_table is None and self._has_position_table():
            self.position_table = "max_position_embeddings"
        self.input_shape = self._example_shape() if input_shape is None else input_shape
        self._is_initialized = _do_init
        self._params: dict[str, Any] | None = None
        self.extra: dict[str, Any] = {}
        if _do_init:
            self._params, self.extra = self._initialize(self.key)
        self.generation_config: Any = None
        if self.can_generate():
            from transformers import GenerationConfig

            self.generation_config = GenerationConfig.from_model_config(config)
        self._remember_generation_values()

    def _remember_generation_values(self) -> None:
        """Records the current values of the generation options in ``config``.

        ``generate`` compares them with later values to recognize options that the user has changed.
        """
        values = getattr(self.generation_config, "__dict__", {})
        self.original_generation_values: dict[str, Any] = {
            name: getattr(self.config, name, value)
            for name, value in values.items()
            if not name.startswith("_")
        }

    def _set_structure(self) -> None:
        """Builds the module without arrays, and sets the attributes that describe its structure."""
        self._stacked: Mapping[Any, Any] = {}
        module = nnx.eval_shape(lambda: self._build(_one_key()))
        self._graph, params, extra = trees.split(module)
        self._abstract = trees.to_dict(params)
        self._paths = trees.flatten(self._abstract)
        self._extra_types = trees.collections(extra)
        paths = trees.nnx_paths(extra)
        self._extra_paths = {
            name: {path: paths[path] for path in trees.flatten(shapes)}
            for name, (_, shapes) in self._extra_types.items()
        }
        self._param_paths = trees.nnx_paths(params)
        self._stacked = stacked_paths(module)
        self._accepted = {
            name: dict(inspect.signature(getattr(self.module_class, name)).parameters)
            for name in self.module_methods
            if hasattr(self.module_class, name)
        }
        self._has_dropout = any(
            isinstance(part, Dropout) and part.rate > 0 for _, part in nnx.iter_graph(module)
        )

    def __init_subclass__(cls, **kwargs: Any) -> None:
        """Adds the module class of Transformers 4 (such as ``FlaxBertModule``) for a model class.

        It is added to the Python module that defines the model class.
        """
        super().__init_subclass__(**kwargs)
        jax.tree_util.register_pytree_node(cls, FlaxModel._flatten, _Structure.unflatten)
        if cls.module_class is not None and cls.__module__ in sys.modules:
            name = f"{cls.__name__.removesuffix('Model')}Module"
            content = {
                "__doc__": f"The module of {cls.__name__}, with Linen's methods init and apply.",
                "__module__": cls.__module__,
                "model_class": cls,
            }
            cls._linen_class = type(name, (FlaxModule,), content)
            vars(sys.modules[cls.__module__]).setdefault(name, cls._linen_class)

    def _build(self, rngs: nnx.Rngs, cache: kv_cache.CacheSize | None = None) -> nnx.Module:
        module = self.module_class(self._config, rngs=rngs, **self._module_kwargs)
        self._apply_is_causal(module)
        apply_precision(module, self.precision, self.precision_sites)
        if self.peft_config is not None:
            self._adapt(module, rngs)
        if cache:
            kv_cache.add_cache(module, cache, self.precision.compute_dtype or jnp.float32)
        if self.scan_layers:
            stack_layers(module)
        sharding.assign_weight_axes(module, self._weight_axes)
        return module

    def _apply_is_causal(self, module: nnx.Module) -> None:
        kv_cache.apply_is_causal(module, self._config)

    def _adapt(self, module: nnx.Module, rngs: nnx.Rngs) -> None:
        """Adds the adapters of ``peft_config``. :class:`FlaxPreTrainedModel` implements this."""
        raise UsageError(
            f"{type(self).__name__} does not support adapters, because it is not a subclass of "
            "FlaxPreTrainedModel, which maps parameters to the names in adapter files"
        )

    def _initialize(self, rng: jax.Array) -> tuple[dict[str, Any], dict[str, Any]]:
        _, params, extra = trees.split(self._build(nnx.Rngs(rng)))
        return trees.to_dict(params), trees.by_collection(extra)

    # -- the model as a value

    def _flatten(self) -> tuple[tuple[Any, Any], _Structure]:
        """Returns the arrays and the structure, because models are pytrees."""
        return (self._params, self.extra), _Structure(self)

    def __getstate__(self) -> dict[str, Any]:
        """Returns the state for a pickle or a deep copy, without compiled programs."""
        return {name: value for name, value in vars(self).items() if name not in DERIVED_STATE}

    def __setstate__(self, state: dict[str, Any]) -> None:
        """Restores the state, and builds the structure again."""
        vars(self).update(state)
        self._set_structure()

    def with_precision(self, precision: Precision) -> Any:
        """Returns a model with the same parameters and another precision."""
        model = self.__copy__()
        model.precision = precision
        model._set_structure()
        return model

    def __copy__(self) -> FlaxModel:
        """Returns a model with the same structure and arrays."""
        model = object.__new__(type(self))
        vars(model).update(vars(self))
        return model

    if not TYPE_CHECKING:  # type checkers report unknown attributes themselves

        def __getattr__(self, name: str) -> Any:
            """Raises an AttributeError. For a method of PyTorch models, it says what to use."""
            advice = TORCH_METHODS.get(name)
            hint = f". {advice}" if advice else ""
            raise AttributeError(f"{type(self).__name__} has no attribute '{name}'{hint}")

    def __repr__(self) -> str:
        """Returns the class, the number of parameters, their dtypes and their devices."""
        leaves = jax.tree.leaves(self._params if self._is_initialized else self._abstract)
        dtypes = ", ".join(sorted({str(leaf.dtype) for leaf in leaves}))
        devices = {device for leaf in leaves for device in getattr(leaf, "devices", set)()}
        names = sorted(map(str, devices), key=lambda name: (len(name), name))
        places = f" on {', '.join(names[:4])}{', …' if names[4:] else ''}" if names else ""
        source = f"{self.name_or_path!r}, " if self.name_or_path else ""
        state = "" if self._is_initialized else "no parameters (_do_init=False), "
        return (
            f"{type(self).__name__}({source}{state}{self.num_parameters():,} parameters in "
            f"{dtypes}{places}, computation in {self.dtype})"
        )

    def __dir__(self) -> list[str]:
        """Returns the public attribute names. Class attributes for model authors are left out."""
        author_names = {
            name
            for owner in type(self).__mro__
            for name, annotation in vars(owner).get("__annotations__", {}).items()
            if str(annotation).startswith("ClassVar")
        }
        return [name for name in super().__dir__() if name[0] != "_" and name not in author_names]

    @property
    def name_or_path(self) -> str:
        """The directory, file or repository of the model, or "" for a new model."""
        return getattr(self.config, "_name_or_path", "") or ""

    @property
    def device(self) -> jax.Device:
        """The first device of the parameters, or JAX's default device without parameters."""
        leaf = next(iter(jax.tree.leaves(self._params)), None)
        devices = leaf.devices() if isinstance(leaf, jax.Array) else [jnp.zeros(()).device]
        return min(devices, key=lambda device: device.id)

    def num_parameters(self, only_trainable: bool = False, exclude_embeddings: bool = False) -> int:
        """Returns the number of parameters.

        Args:
            only_trainable: Whether to count only the adapter parameters, if the model has adapters.
            exclude_embeddings: Whether to leave out embedding matrices.
        """
        paths = self._paths
        if only_trainable and self.peft_config is not None:
            paths = {path: leaf for path, leaf in paths.items() if "lora" in trees.join(path)}
        if exclude_embeddings:
            paths = {path: leaf for path, leaf in paths.items() if path[-1] != "embedding"}
        return sum(math.prod(leaf.shape) for leaf in paths.values())

    def tree(self, depth: int = 3) -> str:
        """Returns the parts of the model with their numbers of parameters, one per line.

        Args:
            depth: Number of levels of nested modules to show.
        """
        sizes: dict[trees.Path, int] = {}
        for path, leaf in self._paths.items():
            for level in range(1, min(depth, len(path)) + 1):
                sizes[path[:level]] = sizes.get(path[:level], 0) + math.prod(leaf.shape)
        lines = [f"{'  ' * (len(path) - 1)}{path[-1]}: {size:,}" for path, size in sizes.items()]
        return "\n".join([repr(self), *lines])

    def nnx(self, params: trees.Params | None = None) -> NNXModule:
        """Returns the Flax NNX module with the parameters and the collections.

        The module works with ``nnx.split``, ``nnx.state``, ``nnx.jit`` and ``nnx.Optimizer``. To
        call it, pass the inputs of the model as arrays by name. The module has its own variables.
        :meth:`update_from_nnx` copies their values back to the model.

        Args:
            params: Parameters to use instead of the model's own.
        """
        own_params, extra = self.split_collections(self.params if params is None else params)
        return nnx.merge(
            self._graph,
            trees.to_state(own_params, self._param_paths, nnx.Param),
            *self._extra_states(self.extra if extra is None else extra),
        )

    def update_from_nnx(self, module: NNXModule) -> None:
        """Copies the parameters and collections of a module from :meth:`nnx` to the model.

        Args:
            module: The module.

        Raises:
            UsageError: The parameters of the module have other names or shapes than those of the
                model.
        """
        _, params, extra = trees.split(module)
        new_params = trees.to_dict(params)
        shapes = {path: leaf.shape for path, leaf in trees.flatten(new_params).items()}
        if shapes != {path: leaf.shape for path, leaf in self._paths.items()}:
            raise UsageError(
                f"update_from_nnx requires a module of {type(self).__name__}, such as model.nnx() "
                f"returns, but the parameters of this {type(module).__name__} have other names or "
                "shapes"
            )
        self._params, self._is_initialized = new_params, True
        self.extra = trees.by_collection(extra)

    # -- properties

    @property
    def config(self) -> Any:
        """The Hugging Face configuration."""
        return self._config

    @property
    def module(self) -> FlaxModule:
        """The structure of the model with Linen's ``init`` and ``apply``, as in Transformers 4."""
        return self._linen_class.of(self)

    @property
    def params(self) -> dict[str, Any]:
        """The parameters, a nested dict with the structure of the Flax classes of Transformers 4.

        Raises:
            ValueError: The model was created with ``_do_init=False``, or parameters are missing in
                the dict that is assigned.
        """
        if not self._is_initialized:
            raise ValueError(_NO_PARAMS.format("accessed from model"))
        assert self._params is not None
        return self.join_collections(self._params)

    @params.setter
    def params(self, params: Mapping[str, Any]) -> None:
        if not self._is_initialized:
            raise ValueError(_NO_PARAMS.format("set from model"))
        own_params, extra = self.split_collections(params)
        params = trees.thaw(own_params)
        missing = self._paths.keys() - trees.flatten(params).keys()
        if missing:
            names = ", ".join(sorted("/".join(path) for path in missing))
            raise ValueError(
                f"Some parameters are missing. Make sure that `params` include: {names}"
            )
        self._params = params
        self.extra = self.extra if extra is None else trees.thaw(extra)

    def join_collections(self, params: dict[str, Any]) -> dict[str, Any]:
        """Adds the model's collections to ``params`` if ``params_include_collections`` is set."""
        return {"params": params, **self.extra} if self.params_include_collections else params

    def split_collections(self, params: trees.Params) -> tuple[trees.Params, trees.Params | None]:
        """Splits ``params`` into parameters and collections.

        The second result is `None` if ``params`` contains no collections.
        """
        if not self.params_include_collections or "params" not in params:
            return params, None
        return params["params"], {name: params[name] for name in params if name != "params"} or None

    @property
    def required_params(self) -> set[tuple[str, ...]]:
        """The paths that a parameter tree must have."""
        return set(trees.flatten(self.params_shape_tree))

    @property
    def params_shape_tree(self) -> dict[str, Any]:
        """The structure of ``params`` with ``jax.ShapeDtypeStruct`` leaves."""
        includes_collections = self.params_include_collections
        return (
            {"params": self._abstract, **self.extra_shape_tree}
            if includes_collections
            else self._abstract
        )

    @property
    def abstract_params(self) -> dict[str, Any]:
        """The parameters without collections, as ``jax.ShapeDtypeStruct``."""
        return self._abstract

    # -- structure

    def init_weights(
        self,
        rng: jax.Array,
        input_shape: tuple[Any, ...] | None = None,
        params: trees.Params | None = None,
    ) -> dict[str, Any]:
        """Initializes a parameter tree.

        Args:
            rng: A PRNG key.
            input_shape: Ignored. Kept for compatibility.
            params: Existing parameters. Only parameters that are missing here are initialized.

        Returns:
            The complete parameter tree.
        """
        fresh, extra = self._initialize(rng)
        if self.params_include_collections:
            fresh = {"params": fresh, **extra}
        if params is None:
            return fresh
        return trees.unflatten({**trees.flatten(fresh), **trees.flatten(trees.thaw(params))})

    @property
    def stacked_prefixes(self) -> tuple[trees.Path, ...]:
        """The paths of the stacked layers, or an empty tuple without ``scan_layers``."""
        return tuple(self._stacked)

    def use_mesh(
        self,
        mesh: jax.sharding.Mesh | None,
        axes: Mapping[trees.Path, sharding.Axes] | None = None,
        sequence_parallel: bool = False,
    ) -> None:
        """Makes the model compute on a mesh, where layers set the sharding of their activations.

        Args:
            mesh: The mesh, or `None` for a single device.
            axes: Maps the path of each weight to the mesh axes that split it, as returned by
                ``Layout.axes``.
            sequence_parallel: Whether the axis ``tensor`` also splits hidden states by length
                between the layers (:mod:`hfseq.nn.sharding`).
        """
        self._options = dataclasses.replace(
            self._options, mesh=mesh, sequence_parallel=sequence_parallel
        )
        self._weight_axes = dict(axes or {})
        self._graph = trees.split(nnx.eval_shape(lambda: self._build(_one_key())))[0]

    @property
    def mesh(self) -> jax.sharding.Mesh | None:
        """The mesh of :meth:`use_mesh`, or `None`."""
        return self._options.mesh

    @property
    def sequence_parallel(self) -> bool:
        """Whether the axis ``tensor`` splits hidden states by length between the layers."""
        return self._options.sequence_parallel

    @property
    def text_config(self) -> Any:
        """The configuration of the text model: ``text_config``, or the whole configuration."""
        return getattr(self._config, "text_config", self._config)

    def max_length(self) -> int | None:
        """Returns the maximum length in the configuration, or `None` if it contains none."""
        return getattr(self.text_config, self.position_table or "max_position_embeddings", None)

    def position_limit(self) -> int | None:
        """Returns the number of position embeddings, or `None` if the model has none.

        A model without position embeddings accepts sequences that are longer than
        :meth:`max_length`.
        """
        return self.max_length() if self.position_table else None

    def max_source_length(self) -> int | None:
        """Returns the maximum length of the encoder's input, or `None` without a limit."""
        return self.max_length()

    def _has_position_table(self) -> bool:
        """Returns whether the module has an embedding matrix with one row per position.

        The number of rows is ``max_position_embeddings`` of the configuration. A matrix with "pos"
        in its name may have more rows: OPT and BART reserve two rows for other purposes.
        """
        size = getattr(self.text_config, "max_position_embeddings", None)
        vocab_size = self.vocab_size()
        if not isinstance(size, int) or size < 1:
            return False
        tables = [
            (leaf.shape[0], "pos" in trees.join(path[-2:-1]))
            for path, leaf in self._paths.items()
            if path[-1] == "embedding" and len(leaf.shape) == 2
        ]
        return any(
            rows == size != vocab_size or is_position_table and rows >= size
            for rows, is_position_table in tables
        )

    def vocab_size(self, name: str = "input_ids") -> int | None:
        """Returns the vocabulary size of ``input_ids`` or ``decoder_input_ids``."""
        return getattr(self.text_config, "vocab_size", None)

    def image_shape(self) -> tuple[int, int, int] | None:
        """Returns the channels, height and width of ``pixel_values``, or `None` for any size."""
        config = getattr(self._config, "vision_config", self._config)
        size = getattr(config, "image_size", None)
        if size is None:
            return None
        return getattr(config, "num_channels", 3), *height_and_width(size)

    def _example_shape(self) -> tuple[Any, ...]:
        """Returns ``input_shape`` as in Transformers 4.

        It is the shape of token IDs, the shape of images with channels last, or a pair of both.
        """
        if not self.has_input("pixel_values"):
            return (1, 1)
        channels, *size = self.image_shape() or (3, 224, 224)
        image_shape = (1, *size, channels)
        return ((1, 1), image_shape) if self.has_input("input_ids") else image_shape

    def has_input(self, name: str) -> bool:
        """Returns whether ``name`` is a named argument of the model's ``__call__``."""
        parameter = inspect.signature(self.__call__).parameters.get(name)
        return parameter is not None and parameter.kind is not parameter.VAR_KEYWORD

    def accepts(self, name: str, method: str = "__call__") -> bool:
        """Returns whether a method of the module accepts an argument.

        Args:
            name: Name of the argument.
            method: ``"__call__"``, ``"encode"`` or ``"decode"``.
        """
        return _accepts(self._accepted[method], name)

    def enable_gradient_checkpointing(self) -> None:
        """Recomputes every layer in the backward pass instead of storing its activations."""
        self._options = dataclasses.replace(self._options, remat=True)

    def init_cache(self, batch_size: int, max_length: int, *_: Any, **__: Any) -> dict[str, Any]:
        """Returns an empty cache for the argument ``past_key_values``.

        It is a nested dict with the same module paths as the parameters.
        """
        return self._empty_cache(kv_cache.CacheSize(batch_size, max_length))

    def _empty_cache(self, size: kv_cache.CacheSize) -> dict[str, Any]:
        module = nnx.eval_shape(lambda: self._build(_one_key(), size))
        shapes = trees.to_dict(nnx.split(module, nnx.Cache, ...)[1])
        if not any(path[-1] in ("cache_index", "position") for path in trees.flatten(shapes)):
            raise UsageError(
                f"{type(self).__name__} has no cache: it has neither nn.StateAttention nor a "
                "causal nn.CachedAttention (BERT-like models require is_decoder=True, and no model "
                "may have is_causal=false in config.json)"
            )
        return kv_cache.empty_cache(module, shapes, size.batch_size)

    def to_bf16(self, params: trees.Params, mask: trees.Params | None = None) -> Any:
        """Casts floating-point leaves of ``params`` to bfloat16.

        With ``mask``, only the leaves are cast whose value in ``mask`` is true.
        """
        return trees.cast_floating(params, jnp.bfloat16, mask)

    def to_fp16(self, params: trees.Params, mask: trees.Params | None = None) -> Any:
        """Casts floating-point leaves of ``params`` to float16, as in :meth:`to_bf16`."""
        return trees.cast_floating(params, jnp.float16, mask)

    def to_fp32(self, params: trees.Params, mask: trees.Params | None = None) -> Any:
        """Casts floating-point leaves of ``params`` to float32, as in :meth:`to_bf16`."""
        return trees.cast_floating(params, jnp.float32, mask)

    @classmethod
    def can_generate(cls) -> bool:
        """Returns whether the class overrides ``prepare_inputs_for_generation``."""
        return cls.prepare_inputs_for_generation is not FlaxModel.prepare_inputs_for_generation

    def prepare_inputs_for_generation(self, *args: Any, **kwargs: Any) -> dict[str, Any]:
        """Prepares the first step of generation. Classes that can generate override it."""
        raise UsageError(
            f"{type(self).__name__} has no language-modeling head, so it cannot generate"
        )

    @classmethod
    def _from_config(cls, config: PreTrainedConfig, **kwargs: Any) -> FlaxModel:
        return cls(config, **kwargs)

    @classmethod
    def register_for_auto_class(cls, auto_class: str = "FlaxAutoModel") -> None:
        """Sets the Auto class that loads this class from custom code on the Hub."""
        cls._auto_class = auto_class

    # -- the call

    def __call__(
        self,
        input_ids: Input = None,
        attention_mask: Input = None,
        token_type_ids: Input = None,
        position_ids: Input = None,
        params: trees.Params | None = None,
        dropout_rng: jax.Array | Keys | Literal[False] | None = None,
        train: bool = False,
        output_attentions: bool | None = None,
        output_hidden_states: bool | None = None,
        return_dict: bool | None = None,
        past_key_values: trees.Params | None = None,
        extra: trees.Params | None = None,
        **inputs: Any,
    ) -> Any:
        """Runs the model. Families with other arguments override this method and call :meth:`run`.

        Args:
            input_ids: Token IDs, `(batch, length)`. If the model has no token IDs, the first
                positional argument is its main input, such as `input_values`.
            attention_mask: Mask of the tokens, `(batch, length)`. Zero hides a token.
            token_type_ids: Type of each token, `(batch, length)`.
            position_ids: Position of each token, `(batch, length)`.
            params: Parameters to use instead of the model's own.
            dropout_rng: PRNG key for dropout. Required for training with dropout. `False` trains
                without dropout.
            train: Whether to apply dropout and update collections.
            output_attentions: Whether to return attention weights. The default is the value in the
                configuration.
            output_hidden_states: Whether to return hidden states. The default is the value in the
                configuration.
            return_dict: Whether to return an output object instead of a tuple. The default is the
                value in the configuration.
            past_key_values: A cache from :meth:`init_cache`, or the cache in the output of an
                earlier call.
            extra: Collections to use instead of the model's own.
            **inputs: Other inputs of the module.
        """
        is_named = self.main_input_name in inputs
        has_token_ids = self.main_input_name == "input_ids" or self.accepts("input_ids")
        first = "input_ids" if has_token_ids and not is_named else self.main_input_name
        named_inputs = {
            first: input_ids,
            "attention_mask": attention_mask,
            "token_type_ids": token_type_ids,
            "position_ids": position_ids,
            **inputs,
        }
        return self.run(
            named_inputs,
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
        dropout_rng: jax.Array | Keys | Literal[False] | None = None,
        train: bool = False,
        output_attentions: bool | None = None,
        output_hidden_states: bool | None = None,
        return_dict: bool | None = None,
        past_key_values: trees.Params | None = None,
        extra: trees.Params | None = None,
        method: str = "__call__",
        fill_encoder_cache: bool = False,
    ) -> Any:
        """Merges the parameters, a cache and collections into the module and calls it.

        Args:
            inputs: Inputs of the module by name. Inputs that are `None` are not passed, so the
                module uses its defaults.
            params: See :meth:`__call__`.
            dropout_rng: See :meth:`__call__`.
            train: See :meth:`__call__`.
            output_attentions: See :meth:`__call__`.
            output_hidden_states: See :meth:`__call__`.
            return_dict: See :meth:`__call__`.
            past_key_values: See :meth:`__call__`.
            extra: See :meth:`__call__`.
            method: The method of the module to call. ``"encode"`` runs the encoder of an
                encoder-decoder model, and ``"decode"`` runs its decoder.
            fill_encoder_cache: Whether to compute the keys and values of cross-attention and store
                them in the cache.

        Returns:
            The output of the module. In two cases the result is a pair of the output and the
            collections after the call: if ``extra`` is passed, and if ``train`` is set for a model
            with ``params_include_collections``. In all other cases, changes of the collections are
            dropped.
        """
        positions = "decoder_position_ids" if method == "decode" else "position_ids"
        if past_key_values and positions in inputs and inputs[positions] is None:
            raise UsageError(
                f"past_key_values requires {positions}, the positions of the new tokens"
            )
        if train and dropout_rng is None and self._has_dropout:
            raise UsageError("train=True with dropout requires dropout_rng=jax.random.key(...)")
        if dropout_rng is False:
            dropout_rng = None
        output_options = {
            "output_attentions": output_attentions,
            "output_hidden_states": output_hidden_states,
        }
        flags = {
            name: bool(self._or_config(value, name, False))
            for name, value in output_options.items()
        }
        module_inputs = self._inputs(inputs, flags, method, bool(past_key_values))
        module_params, joined_extra = self.split_collections(
            self.params if params is None else params
        )
        returns_extra = extra is not None or train and self.params_include_collections
        extra = extra if extra is not None else self.extra if joined_extra is None else joined_extra
        if params is not None:
            module_params = jax.tree.map(
                functools.partial(sharding.with_automatic_axes, "params"), module_params
            )
        module = nnx.merge(
            self._graph,
            trees.to_state(module_params, self._param_paths, nnx.Param),
            *self._extra_states(extra),
        )
        if past_key_values:
            kv_cache.check_capacity(past_key_values, module_inputs)
            trees.attach_cache(module, past_key_values)
        keys = make_keys(dropout_rng) if train else None
        call_options = dataclasses.replace(
            self._options, fill_encoder_cache=fill_encoder_cache, train=train
        )
        with options(call_options), provide_adapter_keys(keys):
            try:
                output = getattr(module, method)(**module_inputs, rngs=keys)
            except TypeError as error:
                # If the module passes its keyword arguments to an inner module, the error names
                # the inner module. Name the model class instead.
                name = re.search(r"unexpected keyword argument '(\w+)'", str(error))
                if name is None or name[1] not in module_inputs:
                    raise
                raise TypeError(
                    f"{type(self).__name__} does not accept the argument {name[1]}"
                    f"{did_you_mean(name[1], inspect.signature(self.__call__).parameters)}"
                ) from error
        if past_key_values:
            output.past_key_values = trees.to_dict(nnx.split(module, nnx.Cache, ...)[1])
        if not self._or_config(return_dict, "return_dict", True):
            output = output.to_tuple()
        if not returns_extra:
            return output
        return output, trees.by_collection(trees.split(module, nnx.Cache)[3])

    def _or_config(self, value: bool | None, name: str, default: bool) -> bool:
        return getattr(self._config, name, default) if value is None else value

    def _inputs(
        self, inputs: dict[str, Any], flags: dict[str, bool], method: str, has_cache: bool
    ) -> dict[str, Any]:
        owner = type(self).__name__
        if method not in self._accepted:
            raise UsageError(f"{owner} does not support {method}(): call the model itself")
        accepted = self._accepted[method]
        module_inputs: dict[str, Any] = {}
        for name, value in inputs.items():
            if value is None:
                continue
            value = sharding.with_automatic_axes(name, as_array(name, value))
            if name in ("input_ids", "decoder_input_ids"):
                self._check_ids(name, value)
            if name == "pixel_values":
                self.check_images(value)
            if name in MEDIA_INPUTS:
                # As in Transformers 4, integers become float32 too.
                value = jnp.asarray(value, jnp.float32)
            # Integers become int32, as in Transformers 4. Floats keep their dtype.
            if jnp.issubdtype(getattr(value, "dtype", float), jnp.integer):
                value = jnp.asarray(value, jnp.int32)
            module_inputs[name] = jnp.asarray(value) if isinstance(value, np.ndarray) else value
        if "labels" in module_inputs:
            raise UsageError(
                f"{owner} does not compute a loss, so it does not accept labels. Compute the loss "
                "from output.logits, for example with optax (docs/losses.md), or train with "
                "hfseq.train"
            )
        if not has_cache:
            check_masks(module_inputs)
        module_inputs |= {
            name: flag for name, flag in flags.items() if flag or self.accepts(name, method)
        }
        if unknown := [name for name in module_inputs if not _accepts(accepted, name)]:
            raise TypeError(f"{owner} does not accept the arguments {', '.join(sorted(unknown))}")
        return module_inputs

    def _check_ids(self, name: str, ids: Any) -> None:
        """Raises a UsageError for token IDs or positions without an embedding.

        Without this check the result would contain NaN, because JAX does not check indices.
        """
        vocab_size, length = self.vocab_size(name), (0, *np.shape(ids))[-1]
        numbers = isinstance(ids, np.ndarray) and ids.size and ids.dtype.kind in "iuf"
        if vocab_size and numbers and not 0 <= ids.min() <= ids.max() < vocab_size:
            raise UsageError(
                f"{name} contains {ids.max() if ids.max() >= vocab_size else ids.min()}, which is "
                f"outside of the model's vocabulary of {vocab_size}: use the tokenizer of this "
                "model"
            )
        limit = self.position_limit()
        if limit is not None and length > limit:
            table = f"{self.position_table}={getattr(self.text_config, self.position_table or '')}"
            raise UsageError(
                f"{name} has {length} tokens per sequence, but {type(self).__name__} allows at "
                f"most {limit} ({table}): truncate the input, or use a model for longer sequences"
            )

    def check_images(self, images: Any) -> None:
        """Raises a UsageError for images of an unsupported size or with channels last."""
        expected, shape, name = self.image_shape(), np.shape(images), type(self).__name__
        if self.is_video_model and len(shape) == 5:
            return
        if len(shape) != 4:
            raise UsageError(
                f"pixel_values has the shape {shape}, but {name} requires (batch, channels, "
                "height, width): add a batch axis to a single image, pixel_values[None]"
            )
        if expected is None or shape[1:] == expected:
            return
        channels, height, width = expected
        if self.any_image_size and shape[1] == channels:
            config = getattr(self._config, "vision_config", self._config)
            least = height_and_width(config.patch_size)
            if shape[2] >= least[0] and shape[3] >= least[1]:
                return
        if shape[1] != channels and shape[3] == channels:
            remedy = "move the channels to the front, pixel_values.transpose(0, 3, 1, 2)"
        elif shape[1] != channels:
            remedy = f"convert the images to {channels} channels"
        else:
            remedy = f"resize them to {height} x {width}, as the checkpoint's image processor does"
        raise UsageError(
            f"pixel_values has the shape {shape}, but {name} requires (batch, {channels}, "
            f"{height}, {width}): {remedy}"
        )

    # -- collections

    def check_training(self, tokens: int) -> None:
        """Raises a UsageError if the collections cannot be trained with this number of tokens.

        The base class does not raise. Families with such collections override this method.

        Args:
            tokens: Number of tokens per training step.
        """

    def finalize_extra(self, extra: dict[str, Any]) -> dict[str, Any]:
        """Returns the collections after an optimizer step.

        The training step calls and traces this method once, after all micro-batches have updated
        ``extra``.
        """
        return extra

    def extra_metrics(self, extra: dict[str, Any]) -> dict[str, jax.Array]:
        """Returns metrics that are computed from the collections, for logging.

        The training step traces this method. The result maps names to scalar arrays.
        """
        return {}

    @property
    def overwrite_with_gradient(self) -> tuple[str, ...]:
        """Names of the collections for which the backward pass returns new values, not gradients.

        The training step replaces the old values by the new values. An example is the FP8 state of
        :mod:`hfseq.nn.fp8`.
        """
        return tuple(
            name
            for name, (variable_type, _) in self._extra_types.items()
            if getattr(variable_type, "overwritten", False)
        )

    @property
    def statistics(self) -> tuple[str, ...]:
        """Names of the collections that the forward pass updates, such as running statistics."""
        overwritten = self.overwrite_with_gradient
        return tuple(name for name in self._extra_types if name not in overwritten)

    @property
    def extra_shape_tree(self) -> dict[str, Any]:
        """The collections with ``jax.ShapeDtypeStruct`` leaves. Most models have no collections."""
        return {name: shapes for name, (_, shapes) in self._extra_types.items()}

    def init_extra(self, rng: jax.Array) -> dict[str, Any]:
        """Initializes the collections without computing the parameters.

        Args:
            rng: A PRNG key. A model that is initialized with this key has the same collections.
        """
        if not self._extra_types:
            return {}
        return jax.jit(lambda key: self._initialize(key)[1])(rng)

    def _require_extra(self, extra: Mapping[str, Any]) -> Mapping[str, Any]:
        missing = [name for name in self._extra_types if name not in extra]
        if missing:
            raise UsageError(
                f"{type(self).__name__} requires the collections {', '.join(missing)}, but `extra` "
                f"has {', '.join(extra) or 'none'}. Models that are created with `_do_init=False` "
                "have no collections: pass extra=model.init_extra(rng), or the collections that "
                "training returned"
            )
        return extra

    def _extra_states(self, extra: Mapping[str, Any]) -> list[NNXState]:
        """Returns the collections as NNX states."""
        return [
            trees.to_state(self._require_extra(extra)[name], self._extra_paths[name], variable_type)
            for name, (variable_type, _) in self._extra_types.items()
        ]


class _Structure:
    """The static part of the pytree of a model: everything except its arrays.

    Args:
        model: The model.
    """

    def __init__(self, model: FlaxModel):
        self.model = model
        state = vars(model)
        self.key = tuple(id(state[name]) for name in ("_config", "_graph", "_abstract"))
        self.options = model._options

    def __hash__(self) -> int:
        return hash(self.key)

    def __eq__(self, other: object) -> bool:
        return (
            isinstance(other, _Structure)
            and type(self.model) is type(other.model)
            and self.key == other.key
            and self.options == other.options
        )

    @staticmethod
    def unflatten(structure: _Structure, arrays: tuple[Any, Any]) -> FlaxModel:
        """Returns a model with this structure and the given arrays."""
        model = object.__new__(type(structure.model))
        vars(model).update(vars(structure.model))
        model._params, model.extra = arrays
        return model


class FlaxModule:
    """Base class of the module classes of Transformers 4, such as ``FlaxBertModule``.

    Programs for Transformers 4 may use the Linen module of a model directly:
    ``FlaxBertModule(config).apply({"params": params}, input_ids)``. A module class provides Linen's
    ``init`` and ``apply`` for such programs. Each model class has a module class, which is in the
    same Python module and has the same name as in Transformers 4.
    """

    model_class: ClassVar[Any]

    def __init__(self, config: PreTrainedConfig, dtype: DTypeLike = jnp.float32, **options: Any):
        self.model = self.model_class(config, dtype=dtype, _do_init=False, **options)

    @classmethod
    def of(cls, model: Any) -> FlaxModule:
        """Wraps an existing model."""
        module = cls.__new__(cls)
        module.model = model
        return module

    @property
    def config(self) -> Any:
        """The Hugging Face configuration."""
        return self.model.config

    @property
    def dtype(self) -> Any:
        """The computation dtype."""
        return self.model.dtype

    def init(self, rngs: jax.Array | Mapping[str, jax.Array], *_: Any, **__: Any) -> dict[str, Any]:
        """Returns newly initialized variables, ``{"params": tree}``.

        All arguments except the PRNG keys are ignored.
        """
        key = rngs["params"] if isinstance(rngs, Mapping) else rngs
        variables = self.model.init_weights(key)
        return variables if self.model.params_include_collections else {"params": variables}

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
        """Runs the model on ``variables``.

        Args:
            variables: ``{"params": ..., "cache": ...}``. The cache is optional.
            *args: Positional inputs and flags, in the order of the module in Transformers 4. Images
                have channels last.
            rngs: A PRNG key for dropout, or ``{"dropout": key}``.
            mutable: ``["cache"]`` to return the new cache too, or the names of the collections to
                return in the training of a model with batch norm.
            deterministic: Whether to disable dropout.
            method: ``"encode"``, ``"decode"``, or a function with one of these names. Default:
                ``__call__``.
            **kwargs: Inputs by name.

        Returns:
            The output. With ``mutable``, the result is a pair of the output and ``{"cache": ...}``.
            In the training of a model with batch norm, the second element of the pair contains the
            new collections instead.
        """
        entry = method if isinstance(method, str) else getattr(method, "__name__", "__call__")
        args, positional = self._named(entry, args)
        kwargs = self._channels_first({**positional, **kwargs})
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
        """Maps positional arguments to names: the inputs, then the flags of Transformers 4.

        The positional arguments of models with a cache are not mapped, because Transformers 4
        ordered their flags differently.
        """
        names = list(inspect.signature(getattr(self.model, entry)).parameters)
        if "past_key_values" in names or "params" not in names:
            return args, {}
        flags = ["deterministic", "output_attentions", "output_hidden_states", "return_dict"]
        flags = [name for name in flags if name == "deterministic" or name in names]
        return (), dict(zip((*names[: names.index("params")], *flags), args, strict=False))

    @staticmethod
    def _channels_first(inputs: dict[str, Any]) -> dict[str, Any]:
        """Transposes images from channels last to channels first.

        In Transformers 4, modules received images with channels last, and model classes received
        images with channels first.
        """
        if inputs.get("pixel_values") is None:
            return inputs
        pixel_values = jnp.transpose(jnp.asarray(inputs["pixel_values"]), (0, 3, 1, 2))
        return {**inputs, "pixel_values": pixel_values}
