"""Loading and saving of models: ``from_pretrained`` and ``save_pretrained``."""

from __future__ import annotations

import copy
import dataclasses
import json
import logging
import math
import re
from collections.abc import Callable, Iterable, Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any, ClassVar, Literal, NamedTuple, Self, overload

import jax
import jax.numpy as jnp
import numpy as np
from flax import nnx
from jax.typing import DTypeLike

from hfseq import plugins
from hfseq.checkpoints import config as configs
from hfseq.checkpoints import files, weights
from hfseq.errors import CheckpointError, UsageError, WeightsError, did_you_mean
from hfseq.modeling import lora
from hfseq.modeling.base import FlaxModel, Input
from hfseq.modeling.keywords import translate_keywords
from hfseq.modeling.sentence import SentenceConfig, SentenceEncoder
from hfseq.nn import sharding, trees
from hfseq.nn.layers import Linear
from hfseq.nn.qwix import quantize_kernel
from hfseq.nn.random import Keys
from hfseq.nn.sharding import complete_mesh

if TYPE_CHECKING:
    from transformers import PreTrainedConfig, PreTrainedTokenizerBase


logger = logging.getLogger("hfseq.modeling")

#: Returns the sharding of a variable from its path and shape.
ShardingFn = Callable[[trees.Path, tuple[int, ...]], jax.sharding.Sharding]


class _CheckpointReader(NamedTuple):
    """An opened checkpoint whose tensors are matched with the variables of a model.

    Attributes:
        names: The weight map of the model.
        slots: The tensor of each variable or part of a variable.
        missing: Variables without a tensor.
        native: Whether the tensors have Flax names.
        on_device: Whether to read onto the default device instead of the host's CPU.
    """

    names: weights.WeightMap
    slots: Mapping[weights.Slot, weights.Tensor]
    missing: set[trees.Path]
    native: bool
    on_device: bool

    def __call__(
        self,
        path: trees.Path,
        shape: tuple[int, ...],
        dtype: DTypeLike | None,
        sharding: ShardingFn | None,
    ) -> jax.Array:
        """Reads one variable onto its devices.

        Args:
            path: Path of the variable.
            shape: Shape of the variable.
            dtype: The dtype, or `None` for that of the file.
            sharding: Returns the sharding of the variable. Each process then reads only its slices.
        """
        if dtype is None:
            dtype = next(tensor.dtype for slot, tensor in self.slots.items() if slot.path == path)
        dtype = jax.dtypes.canonicalize_dtype(jnp.dtype(dtype))
        if sharding is None:
            array = self.names.read_param(self.slots, path, native=self.native)
            array = np.asarray(array).astype(dtype, copy=False)
            # Unlike asarray, device_put does not copy an array of a file on CPUs.
            return jax.device_put(array, None if self.on_device else jax.devices("cpu")[0])

        def part(index: Any) -> np.ndarray:
            values = self.names.read_param(self.slots, path, index, native=self.native)
            return np.asarray(values, order="C").astype(dtype, copy=False)

        return jax.make_array_from_callback(shape, sharding(path, shape), part)


_HISTORY_SUFFIX = "_amax_history"
_Names = Callable[[Mapping[trees.Path, tuple[int, ...]]], weights.WeightMap]


@dataclasses.dataclass(frozen=True)
class Sidecar:
    """A collection that is saved in its own file.

    Attributes:
        file: Name of the file.
        shapes: Shape of every variable.
        kernels: The weight map of the kernels that the collection belongs to, to detect a file of a
            model of another size.
        names: Creates weight maps.
    """

    file: str
    shapes: Mapping[trees.Path, tuple[int, ...]]
    kernels: weights.WeightMap
    names: _Names

    def write(self, folder: Path, leaves: Mapping[trees.Path, Any], recipe: str) -> None:
        """Writes the variables, and the shapes of the kernels that they were measured on."""
        from safetensors.numpy import save_file

        metadata = {"format": "hfseq", "recipe": recipe, "kernels": json.dumps(self._sizes())}
        save_file(self.names(self.shapes).to_torch(leaves), folder / self.file, metadata)

    def read(self, path: str, fresh: Mapping[trees.Path, Any]) -> dict[trees.Path, Any]:
        """Reads the variables. A history of another length is truncated, or padded with zeros.

        Args:
            path: The file.
            fresh: Newly initialized variables, used where the file has none.

        Raises:
            WeightsError: The file belongs to another model.
            CheckpointError: The file cannot be read.
        """
        from safetensors import SafetensorError, safe_open

        names = self.names(self.shapes)
        length = max(
            leaf[-1]
            for variable_path, leaf in self.shapes.items()
            if variable_path[-1].endswith(_HISTORY_SUFFIX)
        )
        try:
            with safe_open(path, framework="numpy") as opened:
                arrays = {name: opened.get_tensor(name) for name in opened.keys()}  # noqa: SIM118
                metadata = opened.metadata() or {}
        except (OSError, SafetensorError) as error:
            raise CheckpointError(
                f"cannot read {path}: {error}. If you delete it, the scales are measured again"
            ) from error
        for name, array in arrays.items():
            if name.endswith(_HISTORY_SUFFIX):  # the newest entry is the first
                history = array.reshape(-1)[:length]
                arrays[name] = np.pad(history, (0, length - len(history)))
        tensors = {name: files.tensor_from_array(array) for name, array in arrays.items()}
        slots, report = names.match(tensors)
        self._check(path, metadata, report)
        if report.missing:
            logger.warning(
                "%s lacks %d of the %d scales and histories of this model, which are newly "
                "initialized",
                path,
                len(report.missing),
                len(self.shapes),
            )
        missing = set(report.missing)
        return {
            p: leaf if p in missing else names.read_param(slots, p) for p, leaf in fresh.items()
        }

    def _sizes(self) -> dict[str, list[int]]:
        return {
            slot.name: list(self.kernels.shapes[slot.path][slot.layer is not None :])
            for slot in self.kernels.slots
        }

    def _check(self, path: str, metadata: Mapping[str, str], report: weights.LoadReport) -> None:
        variable_names, prefix = [".".join(path) for path in self.shapes], f"{self.kernels.prefix}."
        measured = json.loads(metadata.get("kernels", "{}"))
        # The file may belong to another head of the same base model, whose weights are not used.
        has_other_head = bool(self.kernels.prefix) and any(
            name.startswith(prefix) for name in measured
        )
        problems = [
            f"  {name}: this model has no such FP8 layer{did_you_mean(name, variable_names)}"
            for name in report.unexpected
            if not has_other_head or name.startswith(prefix)
        ]
        problems += [
            f"  {name}: {file_shape}, not {model_shape}"
            for name, file_shape, model_shape in report.mismatched
        ]
        sizes = {name.removeprefix(prefix): size for name, size in self._sizes().items()}
        for name, size in measured.items():
            ours = sizes.get(name.removeprefix(prefix), size)
            if ours != size:
                problems.append(f"  {name}: measured on a kernel {size}, but this kernel is {ours}")
        if problems:
            omitted = [f"  and {len(problems) - 6} more"] if len(problems) > 6 else []
            raise WeightsError(
                f"{path} belongs to another model, or to other FP8 sites:\n"
                + "\n".join((*problems[:6], *omitted))
                + "\nIf you delete it, the scales are measured again. Alternatively pass the "
                "--precision_sites that it was created with"
            )


def _computation_dtype(dtype: DTypeLike | None) -> DTypeLike:
    """Returns the dtype for a name such as ``"torch.bfloat16"``. `None` is float32."""
    if not isinstance(dtype, str) and not str(dtype).startswith("torch."):
        return jnp.float32 if dtype is None else dtype
    dtype = str(dtype)
    try:
        return jnp.dtype(dtype.removeprefix("torch."))
    except TypeError:
        raise UsageError(
            f"dtype='{dtype}' is not a dtype: use 'float32', 'bfloat16', 'float16' or 'auto'"
        ) from None


def _checkpoint_dtype(config: PreTrainedConfig, tensors: Mapping[str, weights.Tensor]) -> str:
    """Returns the dtype of a checkpoint as Transformers 5 does for ``dtype="auto"``.

    It is the one in config.json, or that of the first floating-point tensor.
    """
    names = [str(getattr(config, "dtype", None)).removeprefix("torch.")]
    names += [tensor.dtype for tensor in tensors.values()]
    name = next((name for name in names if name in weights.FLOAT_DTYPES), "float32")
    return jax.dtypes.canonicalize_dtype(name).name


def _make_directory(path: str | Path) -> Path:
    folder = Path(path)
    if folder.is_file():
        raise UsageError(f"save_directory {folder} is a file: pass a directory")
    try:
        folder.mkdir(parents=True, exist_ok=True)
    except OSError as error:
        raise CheckpointError(f"cannot create the directory {folder}: {error}") from error
    return folder


class FlaxPreTrainedModel(FlaxModel):
    """Base class of all models.

    Args:
        config: A Hugging Face configuration.
        input_shape: Kept for compatibility.
        seed: Seed of the initialization.
        dtype: The dtype of *computation*. Parameters stay float32, or keep the dtype of the
            checkpoint.
        _do_init: Whether to initialize parameters. ``False`` gives structure and shapes only.
        precision: Name of a precision recipe or a recipe, instead of ``dtype``.
        scan_layers: Whether to stack the layers and scan over them.
        gradient_checkpointing: Whether to recompute layers in the backward pass.
        remat_policy: A policy of ``jax.checkpoint`` for the recomputed layers.
        attn_implementation: Name of a registered attention implementation.
        peft_config: Configuration of LoRA adapters.
        untied: Whether to have separate parameters for tensors that the configuration ties, for
            checkpoints in which they differ.

    Attributes:
        base_model_prefix: The attribute under which heads contain the base model.
        weight_aliases: Other names of a tensor in PyTorch files: alias to the parameter's PyTorch
            name.
        weight_fallbacks: Tensors to read if a parameter is missing: PyTorch name to the name of
            another tensor.
        ignored_weights: Names in checkpoints without weights (buffers), as regular expressions.
        weight_templates: Exceptions to the naming rule: symmetric templates, hfseq's names to
            PyTorch's (checkpoints/weights.py).
        weight_synonyms: Further names that can be read: templates to the written name, applied in
            order.
        module_templates: Templates from names in files to those of PyTorch's modules in memory,
            which adapters use, applied in order.
        joined_weights: Parameters that files contain in parts: PyTorch name of the parameter to the
            :class:`JoinedTensor` that describes the parts.
        native_synonyms: The same for files with Flax names.
        stored_collections: Collections in checkpoints: name to the last path components of the
            stored variables.
    """

    base_model_prefix: ClassVar[str] = ""
    weight_aliases: ClassVar[Mapping[str, str]] = {}
    weight_fallbacks: ClassVar[Mapping[str, str]] = {}
    ignored_weights: ClassVar[tuple[str, ...]] = (
        r"position_ids$",
        r"\.masked_bias$",
        r"token_type_ids$",
    )
    weight_templates: ClassVar[Mapping[str, str]] = {}
    weight_synonyms: ClassVar[Mapping[str, str]] = {}
    module_templates: ClassVar[Mapping[str, str]] = {}
    joined_weights: ClassVar[Mapping[str, weights.JoinedTensor]] = {}
    native_synonyms: ClassVar[Mapping[str, str]] = {}
    stored_collections: ClassVar[Mapping[str, tuple[str, ...]]] = {}

    def __init__(
        self, config: PreTrainedConfig, *args: Any, untied: bool = False, **kwargs: Any
    ) -> None:
        untied = untied or self._saves_tied_tensor(config, kwargs.get("peft_config"))
        self._untied = untied
        if untied and getattr(config, "tie_word_embeddings", False):
            config = copy.deepcopy(config)
            config.tie_word_embeddings = False
        super().__init__(config, *args, **kwargs)

    @classmethod
    def _saves_tied_tensor(
        cls, config: PreTrainedConfig, peft_config: lora.LoraConfig | None, prefix: str = ""
    ) -> bool:
        """Returns whether an adapter has its own version of a tied tensor, which unties it."""
        if peft_config is None or not getattr(config, "tie_word_embeddings", False):
            return False
        return peft_config.unties(
            {
                f"{prefix}{alias}": f"{prefix}{name}"
                for alias, name in cls.weight_aliases.items()
                if ".embed" in alias or cls.has_lm_head()
            }
        )

    # -- loading

    @overload
    @classmethod
    def from_pretrained(
        cls,
        pretrained_model_name_or_path: str | Path,
        dtype: DTypeLike = ...,
        *model_args: Any,
        _do_init: Literal[False],
        **kwargs: Any,
    ) -> tuple[Self, dict[str, Any]]: ...

    @overload
    @classmethod
    def from_pretrained(
        cls,
        pretrained_model_name_or_path: str | Path,
        dtype: DTypeLike = ...,
        *model_args: Any,
        output_loading_info: Literal[True],
        **kwargs: Any,
    ) -> tuple[Self, dict[str, Any]]: ...

    @overload
    @classmethod
    def from_pretrained(
        cls, pretrained_model_name_or_path: str | Path, *args: Any, **kwargs: Any
    ) -> Self: ...

    @classmethod
    def from_pretrained(
        cls,
        pretrained_model_name_or_path: str | Path,
        dtype: DTypeLike = jnp.float32,
        *model_args: Any,
        config: PreTrainedConfig | str | Path | None = None,
        ignore_mismatched_sizes: bool = False,
        from_pt: bool = False,
        from_flax: bool = False,
        _do_init: bool = True,
        param_dtype: DTypeLike | None = None,
        sharding: ShardingFn | None = None,
        extra_sharding: ShardingFn | None = None,
        mesh: jax.sharding.Mesh | None = None,
        output_loading_info: bool = False,
        **kwargs: Any,
    ) -> Any:
        """Loads a model from a directory, a weight file or a repository on the Hub.

        Args:
            pretrained_model_name_or_path: The directory, file or repository. It may be an adapter.
            dtype: The dtype of *computation*. ``"auto"`` is the dtype of the checkpoint, for the
                parameters too: the one in config.json, or that of the first floating-point tensor.
            *model_args: Positional arguments of the constructor.
            config: The configuration, or where to load it from.
            ignore_mismatched_sizes: Whether to initialize parameters whose shapes differ, instead
                of raising an error.
            from_pt: Whether to prefer ``pytorch_model.bin`` to ``flax_model.msgpack``. The default
                order is ``model.safetensors``, ``flax_model.msgpack``, ``pytorch_model.bin``.
            from_flax: Whether to read ``flax_model.msgpack`` and no other file.
            _do_init: Whether to store the parameters in the model. ``False`` returns ``(model,
                params)`` with parameters on the host's CPU. The collections are in ``model.extra``
                in both cases.
            param_dtype: The dtype of the parameters. The default is that of each tensor in the
                checkpoint.
            sharding: Returns the sharding of a parameter from its path and shape. Each process then
                reads only its part.
            extra_sharding: The same for stored collections, whose dtypes never change.
            mesh: A mesh with some of the axes ``data``, ``fsdp``, ``tensor`` and ``sequence``, over
                which the model is distributed by its own rules, as :meth:`shard` does.
            output_loading_info: Whether to return the pair of the model and a dictionary with
                "missing_keys", "unexpected_keys", "mismatched_keys" and "error_msgs".
            **kwargs: ``cache_dir``, ``force_download``, ``local_files_only``, ``token``,
                ``revision`` and ``subfolder`` work as in Transformers; if the source is an adapter,
                they are those of the adapter, and adapter_config.json contains the base model's
                revision. Other arguments override the configuration or are passed to the
                constructor.

        Returns:
            The model, or ``(model, params)``.

        Raises:
            CheckpointError: Files are missing or damaged.
            WeightsError: The tensors do not fit the model.
        """
        source = str(pretrained_model_name_or_path)
        kwargs = translate_keywords(kwargs)
        dtype = kwargs.pop("dtype", dtype)
        is_auto = isinstance(dtype, str) and dtype == "auto"
        dtype = _computation_dtype(None if is_auto else dtype)
        download = configs.pop_download_options(kwargs)
        model_source = source, dict(download)
        adapter, source, download = lora.find_base(source, download)
        if adapter is not None:
            kwargs["peft_config"] = adapter.config
        elif (peft_config := kwargs.get("peft_config")) is not None:
            revision = None if Path(source).exists() else download.get("revision")
            kwargs["peft_config"] = dataclasses.replace(
                peft_config, base_model_name_or_path=source, revision=revision
            )

        config, kwargs = configs.load_config(cls, source, config, download, kwargs)
        checkpoint = configs.open_checkpoint(source, download, from_pt=from_pt, from_flax=from_flax)
        configs.check_quantization(config, checkpoint.tensors, checkpoint.source)
        configs.check_against_file(config, checkpoint.tensors, checkpoint.source)
        if is_auto:
            dtype = _checkpoint_dtype(config, checkpoint.tensors)
            param_dtype = param_dtype or dtype
        kwargs = {**cls.checkpoint_options(checkpoint.tensors, config), **kwargs}
        with configs.wrap_build_errors(source):
            model_class: Any = cls  # untyped, because model_args may contain dtype and _do_init
            model = model_class(config, *model_args, dtype=dtype, _do_init=False, **kwargs)

        if mesh is not None:
            mesh = complete_mesh(mesh)
            shardings = model._use_mesh_rules(mesh, sequence_parallel=False)
            replicated = jax.sharding.NamedSharding(mesh, jax.sharding.PartitionSpec())
            sharding = lambda path, shape: shardings.get(path, replicated)  # noqa: E731
            extra_sharding = lambda path, shape: replicated  # noqa: E731
        read, report = model._match_checkpoint(
            checkpoint, adapter, ignore_mismatched_sizes, on_device=_do_init
        )
        params = model._read(read, sharding, param_dtype)
        model.extra = model._read_extra(read, extra_sharding)
        model._read_sidecars(source, download)
        model._source = model_source
        # New adapters are expected to be missing in the checkpoint.
        report.missing = [path for path in report.missing if not lora.is_adapter(path)]
        model._warn(report, source, _do_init, keeps_dtype=param_dtype is None)
        model._fresh_head = [
            trees.join(path) for path in report.missing if path[0] != cls.base_model_prefix
        ]
        model.load_generation_config(source, **download)
        if adapter is not None:
            model._load_adapter_generation_config(*model_source)
        if not _do_init:
            return model, model.join_collections(params)
        model._is_initialized, model._params = True, params
        if not output_loading_info:
            return model
        loading_info = {
            "missing_keys": [trees.join(path) for path in report.missing],
            "unexpected_keys": list(report.unexpected),
            "mismatched_keys": list(report.mismatched),
            "error_msgs": [],
        }
        return model, loading_info

    def _match_checkpoint(
        self,
        checkpoint: files.OpenedWeights,
        adapter: lora.Adapter | None,
        ignore_mismatched_sizes: bool,
        on_device: bool,
    ) -> tuple[_CheckpointReader, weights.LoadReport]:
        """Matches the tensors of a checkpoint, and of an adapter, with the model's variables.

        Raises:
            WeightsError: The tensors do not fit, or the checkpoint has none of the model's tensors.
        """
        class_name = type(self).__name__
        if adapter is not None:
            checkpoint.tensors = lora.combine_tensors(
                adapter, checkpoint, self.file_map, self.vocab_size()
            )
        slots, report = self.match_tensors(checkpoint.tensors, native=checkpoint.native)
        weights.check_derived(report, checkpoint.source)
        if quantized := list(filter(configs.QUANTIZED_TENSORS.search, report.unexpected)):
            configs.raise_quantized(None, quantized, checkpoint.source)
        weights.check_report(
            report, checkpoint.source, class_name, ignore_mismatched=ignore_mismatched_sizes
        )
        if not slots:
            raise WeightsError(
                f"{checkpoint.source} has no tensor of {class_name} (its tensors: for example "
                f"{next(iter(checkpoint.tensors), 'none at all')}): is it a checkpoint of another "
                "architecture?"
            )
        missing = set(report.missing)
        reader = _CheckpointReader(self.file_map, slots, missing, checkpoint.native, on_device)
        return reader, report

    def match_tensors(
        self, tensors: Mapping[str, weights.Tensor], *, native: bool, compare: bool = True
    ) -> tuple[dict[weights.Slot, weights.Tensor], weights.LoadReport]:
        """Matches tensors with the variables of this model, see :meth:`WeightMap.match`.

        Copies of tied tensors that differ from them are unexpected if they belong to a head that
        this class lacks, and otherwise conflicts.
        """
        names = self.file_map
        slots, report = names.match(tensors, native=native, compare=compare)
        for pair in list(report.conflicts):
            other = pair[1]
            if names.is_alias(other) and ".embed" not in other and not self.has_lm_head():
                report.conflicts.remove(pair)
                report.unexpected.append(other)
        if compare:
            report.derived = weights.different_derived(
                self.derived_weights(), tensors, type(self).base_model_prefix
            )
        return slots, report

    @classmethod
    def has_lm_head(cls) -> bool:
        """Returns whether this class has a language modeling head, according to its name."""
        named_so = re.search("(LM|LMHeadModel|PreTraining)$", cls.__name__) is not None
        return named_so or cls.can_generate()

    @classmethod
    def checkpoint_options(
        cls, tensors: Mapping[str, weights.Tensor], config: PreTrainedConfig
    ) -> dict[str, Any]:
        """Returns constructor arguments that depend on the checkpoint's tensors.

        By default these are ``{"untied": True}`` if the configuration ties tensors that have
        different values in the checkpoint, and otherwise ``{}``. Like PyTorch, the model then has a
        parameter for each of them.

        Args:
            tensors: The tensors of the checkpoint by name.
            config: The configuration.
        """
        if not cls.weight_aliases or not getattr(config, "tie_word_embeddings", False):
            return {}
        copies = cls.different_copies(tensors)
        if not copies:
            return {}
        # Some of the aliases belong to other heads of the family.
        untied = cls(config, _do_init=False, untied=True).weight_map
        separate = [alias for alias in copies if untied.has_parameter(alias)]
        if not separate:
            return {}
        logger.warning(
            "the configuration of this %s ties tensors that have different values in the "
            "checkpoint, so they are not tied: %s. Saved models have tie_word_embeddings=False",
            cls.__name__,
            ", ".join(f"{alias} and {copies[alias]}" for alias in separate),
        )
        return {"untied": True}

    @classmethod
    def different_copies(cls, tensors: Mapping[str, weights.Tensor]) -> dict[str, str]:
        """Returns the keys of ``weight_aliases`` whose values in a checkpoint differ.

        Args:
            tensors: The tensors of the checkpoint by name.

        Returns:
            The name of the tensor that each of them differs from.
        """
        return weights.different_copies(cls.weight_aliases, tensors, cls.base_model_prefix)

    @property
    def checkpoint_arguments(self) -> dict[str, Any]:
        """The arguments of :meth:`checkpoint_options` that this model was created with."""
        return {**self._module_kwargs, **({"untied": True} if self._untied else {})}

    @classmethod
    def read_checkpoint_options(
        cls, source: str, config: PreTrainedConfig, **download: Any
    ) -> dict[str, Any]:
        """Returns :meth:`checkpoint_options` of the checkpoint at ``source`` without loading it."""
        _, base_source, base_download = lora.find_base(source, download)
        tensors = configs.open_checkpoint(base_source, base_download).tensors
        return cls.checkpoint_options(tensors, config)

    @property
    def weight_map(self) -> weights.WeightMap:
        """The names of this model's parameters in PyTorch checkpoints."""
        return self._names({path: leaf.shape for path, leaf in self._paths.items()})

    @property
    def file_map(self) -> weights.WeightMap:
        """The names of everything in checkpoints: parameters and stored collections."""
        stored = {path: leaf for path, (_, leaf) in self._stored_paths().items()}
        return self._names({path: leaf.shape for path, leaf in (self._paths | stored).items()})

    def _names(self, shapes: Mapping[trees.Path, tuple[int, ...]]) -> weights.WeightMap:
        prefix = f"{self.base_model_prefix}."
        derived = [re.escape(name.removeprefix(prefix)) for name in self.derived_weights()]
        return weights.WeightMap(
            shapes,
            prefix=self.base_model_prefix,
            aliases=self.weight_aliases,
            fallbacks=self._fallbacks(),
            ignored=(*self.ignored_weights, *(rf"(^|\.){name}$" for name in derived)),
            templates=self.weight_templates,
            synonyms=self.weight_synonyms,
            native_synonyms=self.native_synonyms,
            stacked=self._stacked,
            joined=self.joined_weights,
            modules=self.module_templates,
        )

    def _fallbacks(self) -> dict[str, list[str]]:
        """Returns the names to read if a tensor is missing. Untied tensors replace each other."""
        fallbacks = {name: [other] for name, other in self.weight_fallbacks.items()}
        if not self._untied:
            return fallbacks
        groups: dict[str, list[str]] = {}
        for alias, name in self.weight_aliases.items():
            groups.setdefault(name, [name]).append(alias)
        return fallbacks | {
            name: [other for other in group if other != name]
            for group in groups.values()
            for name in group
        }

    def _read(
        self, read: _CheckpointReader, sharding: ShardingFn | None, param_dtype: DTypeLike | None
    ) -> dict[str, Any]:
        """Reads every matched parameter and initializes the others."""
        flat = {
            path: read(path, leaf.shape, param_dtype, sharding)
            for path, leaf in self._paths.items()
            if path not in read.missing
        }
        missing = [path for path in self._paths if path in read.missing]
        if missing and read.on_device:
            num_missing = sum(math.prod(self._paths[path].shape) for path in missing)
            num_read = sum(math.prod(tensor.shape) for tensor in read.slots.values())
            if num_missing > max(configs.FREE_NEW_VALUES, 4 * num_read):
                raise WeightsError(
                    f"the checkpoint contains {num_read} values of this model and lacks "
                    f"{num_missing}: the configuration does not belong to it. To train from "
                    "scratch, pass only the configuration"
                )
            flat |= self._fresh(missing, sharding)
        return trees.unflatten({path: flat[path] for path in self._paths if path in flat})

    def sidecars(self) -> dict[str, Sidecar]:
        """Returns the collections that are saved in their own files, by name."""
        sidecars = {}
        for name, (variable_type, tree) in self._extra_types.items():
            if file := getattr(variable_type, "sidecar", None):
                shapes = {path: leaf.shape for path, leaf in trees.flatten(tree).items()}
                owners = {path[: path.index("dot_general")] for path in shapes}
                kernels = {
                    path: leaf.shape
                    for path, leaf in self._paths.items()
                    if path[:-1] in owners and path[-1] == "kernel"
                }
                sidecars[name] = Sidecar(file, shapes, self._names(kernels), self._names)
        return sidecars

    def _stored_paths(self) -> dict[trees.Path, tuple[str, Any]]:
        """Returns the stored variables of collections: path to (collection, shape and dtype)."""
        return {
            path: (name, leaf)
            for name, leaves in self.stored_collections.items()
            for path, leaf in trees.flatten(self.extra_shape_tree.get(name, {})).items()
            if path[-1] in leaves
        }

    def _stored_leaves(self, extra: Mapping[str, Any] | None) -> dict[trees.Path, Any]:
        """Returns the stored leaves of ``extra``, or of the model's own collections."""
        stored = self._stored_paths()
        collections = self._require_extra(self.extra if extra is None else extra) if stored else {}
        flat = {name: trees.flatten(tree) for name, tree in collections.items()}
        lacking = [trees.join(path) for path, (name, _) in stored.items() if path not in flat[name]]
        if lacking:
            logger.warning(
                "ignoring variables of %s that are missing in the collections: %s",
                type(self).__name__,
                ", ".join(lacking),
            )
        return {p: flat[name][p] for p, (name, _) in stored.items() if p in flat[name]}

    def _fresh(self, paths: list[trees.Path], sharding: ShardingFn | None) -> dict[trees.Path, Any]:
        """Initializes only ``paths``. The compiler drops the rest of the initialization."""

        def pick(key: jax.Array) -> list[Any]:
            flat = trees.flatten(self._initialize(key)[0])
            return [flat[path] for path in paths]

        shardings = [sharding(p, self._paths[p].shape) for p in paths] if sharding else None
        values = jax.jit(pick, out_shardings=shardings)(self.key)
        return dict(zip(paths, values, strict=True))

    def _read_extra(self, read: _CheckpointReader, sharding: ShardingFn | None) -> dict[str, Any]:
        """Reads the stored variables of the collections and initializes the others."""
        flat = {name: trees.flatten(tree) for name, tree in self.init_extra(self.key).items()}
        for path, (name, leaf) in self._stored_paths().items():
            if path not in read.missing:
                # Collections in the tree of the parameters keep the file's dtype.
                dtype = None if self.params_include_collections else leaf.dtype
                flat[name][path] = read(path, leaf.shape, dtype, sharding)
        return {name: trees.unflatten(leaves) for name, leaves in flat.items()}

    def _read_sidecars(self, source: str, download: dict[str, Any]) -> None:
        """Replaces collections by the content of their files, if there are any."""
        sidecars = self.sidecars()
        if not sidecars:
            return
        folder = str(Path(source).parent) if Path(source).is_file() else source
        fetch = configs.fetcher(folder, download)
        for name, sidecar in sidecars.items():
            path, fresh = fetch(sidecar.file), trees.flatten(self.extra[name])
            if path is None:
                logger.info("%s has no %s: %s are newly initialized", source, sidecar.file, name)
                continue
            read = sidecar.read(path, fresh)
            placed = {p: jax.device_put(leaf, fresh[p].sharding) for p, leaf in read.items()}
            self.extra[name] = trees.unflatten(placed)

    def _warn(
        self, report: weights.LoadReport, source: str, initialized: bool, keeps_dtype: bool
    ) -> None:
        """Logs which parameters do not come from the checkpoint, with the messages of v4."""
        name = type(self).__name__
        if report.unexpected:
            logger.warning(
                "Some weights of the model checkpoint at %s were not used when initializing %s: %s",
                source,
                name,
                sorted(report.unexpected),
            )
        if report.derived:
            logger.warning(
                "%s has other values than %s computes for %s, which are ignored",
                source,
                name,
                ", ".join(report.derived),
            )
        if report.ignored:
            logger.info(
                "ignoring tensors of %s that %s does not use: %s",
                source,
                name,
                ", ".join(sorted(report.ignored)),
            )
        for used, unused in report.unused_biases:
            logger.warning(
                "%s and %s have different values in the model checkpoint at %s. Like PyTorch, %s "
                "uses the first and ignores the second",
                used,
                unused,
                source,
                name,
            )
        if report.mismatched:
            lines = (
                f"- {n}: found shape {file_shape} in the checkpoint and {model_shape} in the model"
                for n, file_shape, model_shape in report.mismatched
            )
            logger.warning(
                "Some weights of %s were not initialized from the model checkpoint at %s and are "
                "newly initialized because the shapes did not match:\n%s",
                name,
                source,
                "\n".join(lines),
            )
        if absent := weights.describe_missing(report):
            logger.warning(
                "Some weights of %s were not initialized from the model checkpoint at %s and are "
                "%s:\n%s\nYou should probably TRAIN this model on a down-stream task to be able to "
                "use it for predictions and inference.",
                name,
                source,
                "newly initialized"
                if initialized
                else "missing from the returned parameters "
                "(model.init_weights(rng, params=params) initializes them)",
                absent,
            )
        for half in ("float16", "bfloat16"):
            if report.dtypes.get(half) and keeps_dtype:
                logger.warning(
                    "Some of the weights of %s were initialized in %s precision from the model "
                    "checkpoint at %s. To convert them, pass param_dtype=jnp.float32",
                    name,
                    half,
                    source,
                )

    def load_generation_config(self, source: str, **download: Any) -> None:
        """Loads the generation options of the checkpoint at ``source``, if it has any."""
        if not self.can_generate() or not Path(source).is_dir() and Path(source).exists():
            return
        from transformers import GenerationConfig

        # Old checkpoints have the options in config.json, where Transformers 5 does not read them.
        generation_config_path = configs.fetcher(source, download)("generation_config.json")
        legacy_options: dict[str, Any] = {
            "config_file_name": "config.json",
            "_from_model_config": True,
        }
        with configs.wrap_read_errors(generation_config_path or source):
            if not generation_config_path:
                # PyTorch uses these only if the file contains them: MarianConfig has a default that
                # the files of opus-mt lack.
                stored, _ = self.config_class.get_config_dict(source, **download)
                for name in {"forced_bos_token_id", "forced_eos_token_id"} - stored.keys():
                    if getattr(self.config, name, None) is not None:
                        setattr(self.config, name, None)
            self.generation_config = GenerationConfig.from_pretrained(
                source, **({} if generation_config_path else legacy_options), **download
            )
        self._remember_generation_values()

    def _load_adapter_generation_config(self, source: str, download: Mapping[str, Any]) -> None:
        """Loads the generation options that an adapter was saved with, if it has any.

        Training may have given the model another end-of-text token than that of its base.
        """
        if not self.can_generate() or not configs.fetcher(source, download)(
            "generation_config.json"
        ):
            return
        self.load_generation_config(source, **download)
        eos_token_id = self.generation_config.eos_token_id
        ids = [] if eos_token_id is None else np.ravel(eos_token_id).tolist()
        if ids and getattr(self.config, "eos_token_id", None) != ids[0]:
            self.config.eos_token_id = ids[0]

    def sharding_rules(self) -> sharding.Rules | None:
        """Returns the sharding rules that the architecture was registered with, if any."""
        return plugins.load().architectures.get(self.config.model_type).load_sharding()

    def _use_mesh_rules(
        self, mesh: jax.sharding.Mesh, sequence_parallel: bool
    ) -> dict[trees.Path, jax.sharding.NamedSharding]:
        """Makes the model compute on a mesh, and returns the sharding of each parameter."""
        shapes = {path: leaf.shape for path, leaf in self._paths.items()}
        # Parameters keep their shapes, so a vocabulary that does not divide evenly is not split.
        layout = sharding.Layout(
            mesh,
            self.sharding_rules(),
            self.vocab_size(),
            self.stacked_prefixes,
            shapes,
            pad_vocabulary=False,
        )
        sharding.check_heads(self, mesh)
        self.use_mesh(mesh, layout.axes(shapes), sequence_parallel)
        return layout.shardings(shapes)

    def shard(self, mesh: jax.sharding.Mesh, sequence_parallel: bool = False) -> jax.sharding.Mesh:
        """Distributes the model over a mesh by the rules of its architecture.

        The parameters are laid out in place, and calls split their work over the mesh. Rows of the
        inputs may be sharded over ``data`` and ``fsdp``.

        Args:
            mesh: A mesh of ``jax.make_mesh`` with some of the axes ``data``, ``fsdp``, ``tensor``
                and ``sequence``. A missing axis has size 1, and explicit axes are treated as
                automatic ones.
            sequence_parallel: Whether to split hidden states by length over the axis ``tensor``
                between the layers.

        Returns:
            The mesh with all four axes, to shard inputs with.

        Raises:
            UsageError: An axis is unknown, or does not divide the model.
        """
        mesh = complete_mesh(mesh)
        shardings = self._use_mesh_rules(mesh, sequence_parallel)
        if not self._is_initialized:
            return mesh
        replicated = jax.sharding.NamedSharding(mesh, jax.sharding.PartitionSpec())
        self._params = trees.unflatten(
            {
                path: jax.device_put(leaf, shardings.get(path, replicated))
                for path, leaf in trees.flatten(self._params or {}).items()
            }
        )
        self.extra = jax.device_put(self.extra, replicated)
        return mesh

    # -- adapters

    def _adapt(self, module: nnx.Module, rngs: nnx.Rngs) -> None:
        assert self.peft_config is not None
        settled = lora.complete_config(
            self.peft_config, type(self).__name__, self.config.model_type
        )
        self.peft_config, self._adapted = lora.add_adapters(
            module, settled, self._names({}), rngs, self.vocab_size()
        )

    @property
    def trainable_paths(self) -> set[trees.Path]:
        """The parameters that training changes: all of them, or those of the adapters."""
        if self.peft_config is None:
            return set(self._paths)
        return lora.trainable_paths(self._paths, self.peft_config, self._names({}))

    def quantize(self, params: trees.Params, quantization: str) -> dict[str, Any]:
        """Returns ``params`` with quantized kernels of linear layers, as the base of adapters.

        Embeddings, adapters and the language-modeling head are not quantized. The model accepts the
        result as parameters, but it cannot be saved or trained.

        Args:
            params: Parameters of the model.
            quantization: ``"nf4"`` or ``"int8"`` (:func:`hfseq.nn.qwix.quantize_kernel`).
        """
        flat, vocab_size = trees.flatten(params), self.vocab_size()
        for keys, part in nnx.iter_graph(nnx.eval_shape(lambda: self._build(nnx.Rngs(0)))):
            path = (*map(str, keys), "kernel")
            if isinstance(part, Linear) and path in flat and not lora.is_adapter(path):
                if vocab_size not in part.kernel.shape:
                    flat[path] = quantize_kernel(flat[path], quantization, part.input_axis)
        return trees.unflatten(flat)

    def load_adapter(self, source: str | Path, **download: Any) -> Any:
        """Returns a model with the adapter at ``source`` that shares the arrays of this model.

        Several adapters can be in memory at once, each as its own model. If this model has an
        adapter, the new one replaces it.

        Raises:
            CheckpointError: There is no adapter at ``source``.
            WeightsError: The adapter does not fit this model.
        """
        adapter = lora.find_adapter(str(source), download)
        if adapter is None:
            raise CheckpointError(f"'{source}' is not an adapter: it has no {lora.CONFIG_NAME}")
        model = self._like(peft_config=adapter.config)
        tensors = {
            **self._untied_tensors(model.weight_map),
            **lora.combine_tensors(adapter, None, model.file_map, model.vocab_size()),
        }
        names = model.file_map
        names.fallbacks = {}  # other tensors come from this model
        slots, report = names.match(tensors)
        weights.check_report(report, adapter.source, type(self).__name__, ignore_mismatched=False)
        read = _CheckpointReader(names, slots, set(report.missing), False, True)
        own_params = trees.flatten(
            self.params if self.peft_config is None else self.split_collections(self.params)[0]
        )
        flat = {
            path: own_params[path] if path in read.missing else read(path, leaf.shape, None, None)
            for path, leaf in model._paths.items()
        }
        model._is_initialized, model._params, model.extra = True, trees.unflatten(flat), self.extra
        # The base keeps its own configuration.
        model._config = copy.deepcopy(self._config)
        model._load_adapter_generation_config(str(source), download)
        return model

    def _untied_tensors(self, names: weights.WeightMap) -> dict[str, weights.Tensor]:
        """Returns the tensors of parameters that are tied in this model, but not in ``names``."""
        own_names = self.weight_map
        untied = {
            name: source
            for name, sources in names.fallbacks.items()
            for source in sources
            if names.has_parameter(name)
            and not own_names.has_parameter(name)
            and own_names.has_parameter(source)
        }
        if not untied:
            return {}
        params = trees.flatten(self.split_collections(self.params)[0])
        sources = {own_names.resolve_name(source) for source in untied.values()}
        arrays = own_names.to_torch(params, sources)
        return {
            name: files.tensor_from_array(arrays[own_names.resolve_name(source)])
            for name, source in untied.items()
        }

    def merge_adapter(self, params: trees.Params | None = None) -> Any:
        """Returns a model without adapters, in which they are added to the kernels.

        Raises:
            UsageError: The model has no adapter, or adapts an embedding that is tied to the head.
        """
        if self.peft_config is None:
            raise UsageError(f"this {type(self).__name__} has no adapter to merge")
        tables = ((*path, "embedding") for path, layer in self._adapted.items() if not layer.linear)
        adapts_word_table = any(self._paths[path].shape[0] == self.vocab_size() for path in tables)
        if adapts_word_table and getattr(self.config, "tie_word_embeddings", False):
            raise UsageError(
                "the adapted word embeddings are tied to the head, which the adapter does not "
                "change: merging it would change both. Keep the adapter, or untie them before "
                "training (--config_overrides tie_word_embeddings=false)"
            )
        model = self._like()
        flat_params = trees.flatten(self.params if params is None else params)
        merged = lora.merge_adapters(flat_params, self._adapted, self._stacked)
        model._is_initialized, model._params = True, trees.unflatten(merged)
        model.extra = self.extra
        return model

    def _like(self, **changes: Any) -> Any:
        """Returns a model with the same options except ``changes``, without parameters."""
        model = type(self)(
            self.config,
            seed=self.seed,
            dtype=self.dtype,
            _do_init=False,
            precision=self.precision,
            scan_layers=self.scan_layers,
            **self.checkpoint_arguments,
            **changes,
        )
        model._options, model.generation_config = self._options, self.generation_config
        return model

    # -- sentences

    #: The source of the model and the options of its download.
    _source: tuple[str, dict[str, Any]] | None = None
    #: Parameters outside of the base model that the checkpoint lacks.
    _fresh_head: Sequence[str] = ()
    _sentences: SentenceConfig | None = None
    _encoder: tuple[str | None, SentenceEncoder] | None = None

    @property
    def sentence_config(self) -> SentenceConfig | None:
        """The content of sentence-transformers' files, or `None`. If set, it is saved."""
        if self._sentences is None and self._source is not None:
            self._sentences = SentenceConfig.read(*self._source)
            if self._sentences is None and self.peft_config is not None:
                self._sentences = SentenceConfig.read(
                    str(self.peft_config.base_model_name_or_path), {}
                )
        return self._sentences

    @sentence_config.setter
    def sentence_config(self, sentences: SentenceConfig) -> None:
        self._sentences, self._encoder = sentences, None

    @property
    def name_or_path(self) -> str:
        """The directory, file or repository of the model, or "" for a new model."""
        return self._source[0] if self._source else super().name_or_path

    def encode(
        self,
        sentences: str | Sequence[str],
        prompt_name: str | None = None,
        prompt: str | None = None,
        batch_size: int = 32,
        show_progress_bar: bool = False,
        normalize_embeddings: bool = False,
        truncate_dim: int | None = None,
        *,
        pooling: str | None = None,
        tokenizer: PreTrainedTokenizerBase | None = None,
        params: trees.Params | None = None,
    ) -> np.ndarray:
        """Returns sentence vectors as sentence-transformers computes them.

        Sentences are sorted by length and padded to a few widths, each of which is compiled once.
        Longer sentences than the model accepts are truncated with a warning.

        Args:
            sentences: One sentence or several.
            prompt_name: Name of a stored prompt to prepend to each sentence.
            prompt: A prompt to prepend to each sentence.
            batch_size: Maximum number of sentences per batch.
            show_progress_bar: Whether to show a progress bar.
            normalize_embeddings: Whether to scale the vectors to length 1.
            truncate_dim: Number of leading features to keep.
            pooling: Pooling mode (mean, cls, max, lasttoken, ...) for models without
                sentence-transformers' files.
            tokenizer: The tokenizer. The default is the one that is saved with the model.
            params: Parameters to use instead of the model's own.

        Returns:
            Float32 vectors, `(features,)` for one sentence and `(sentences, features)` for several.

        Raises:
            UsageError: The pooling mode is unknown, the model has no last hidden states, or
                ``prompt_name`` does not exist.
        """
        sentence_config = self.sentence_config if pooling is None else SentenceConfig((pooling,))
        if sentence_config is None:
            raise UsageError(
                "the model has no modules.json, which defines the pooling of token vectors: pass "
                'the pooling that it was trained with, such as pooling="mean", "cls" or "lasttoken"'
            )
        name = prompt_name if prompt_name is not None else sentence_config.default_prompt_name
        if prompt is None and name is not None and name not in sentence_config.prompts:
            raise UsageError(
                f"unknown prompt_name '{name}' (known: {', '.join(sentence_config.prompts)})"
            )
        if prompt is None:
            prompt = sentence_config.prompts[name] if name is not None else ""
        encoder_pooling, encoder = self._encoder or (None, None)
        if (
            encoder is None
            or encoder_pooling != pooling
            or tokenizer not in (None, encoder.tokenizer)
        ):
            if tokenizer is None:
                if self._source is None:
                    raise UsageError(
                        "encode: pass the tokenizer, because the model is not from a checkpoint"
                    )
                from transformers import AutoTokenizer

                from hfseq.modeling import auto

                tokenizer = auto.load(AutoTokenizer, self._source[0], **self._source[1])
            encoder = SentenceEncoder(self, tokenizer, sentence_config)
            self._encoder = pooling, encoder
        vectors = encoder(
            [sentences] if isinstance(sentences, str) else sentences,
            prompt,
            batch_size,
            normalize_embeddings,
            truncate_dim,
            show_progress_bar,
            params,
        )
        return vectors[0] if isinstance(sentences, str) else vectors

    # -- saving

    def stored_config(self) -> Any:
        """Returns the configuration to save.

        An architecture that is exactly equivalent to a stock architecture returns the configuration
        of that architecture, with its own model type and options under the key ``hfseq``, from
        which hfseq restores it.
        """
        return self.config

    def derived_weights(self) -> Mapping[str, weights.DerivedTensor]:
        """Returns additional tensors that PyTorch's class stores, by PyTorch names.

        ``save_pretrained`` writes them and ``from_pretrained`` verifies them.
        """
        return {}

    def save_pretrained(
        self,
        save_directory: str | Path,
        params: trees.Params | None = None,
        push_to_hub: bool = False,
        max_shard_size: int | str = "5GB",
        token: str | None = None,
        safe_serialization: bool = True,
        *,
        extra: trees.Params | None = None,
        **kwargs: Any,
    ) -> None:
        """Saves the configuration and the weights so that PyTorch's ``AutoModel*`` can load them.

        Files are written under temporary names and renamed when all of them are complete.

        Args:
            save_directory: The directory.
            params: Parameters to save instead of the model's own. Missing and unexpected leaves are
                left out with a warning.
            push_to_hub: Whether to upload the directory.
            max_shard_size: Maximum size of a file, in bytes or as ``"5GB"``.
            token: Token for the upload.
            safe_serialization: ``False`` writes the legacy ``flax_model.msgpack``.
            extra: Collections to save instead of the model's own.
            **kwargs: ``repo_id`` and other arguments of :meth:`push_to_hub`.

        Raises:
            UsageError: ``save_directory`` is a file, or ``params`` has no parameter of this model.
            CheckpointError: The files cannot be written.
        """
        folder = _make_directory(save_directory)
        own_params, joined_extra = self.split_collections(self.params if params is None else params)
        flat = self._known_leaves(own_params)
        if self.peft_config is None:
            flat |= self._stored_leaves(joined_extra if extra is None else extra)
        shapes = self.file_map.shapes
        names = self._names({path: shapes[path] for path in shapes if path in flat})
        with files.staging_directory(folder) as stage:
            if self.peft_config is not None:
                lora.write_adapter(stage, self.peft_config, self._adapted, names, flat)
                if self.generation_config is not None:
                    self._split_configs()[1].save_pretrained(stage)
            else:
                if safe_serialization:
                    self._write_torch(stage, names, flat, max_shard_size)
                else:
                    self._write_msgpack(stage, names, flat, max_shard_size)
                self._write_sidecars(stage, extra)
                self.save_config(stage)
        self._write_sentence_config(folder)
        if push_to_hub:
            self.push_to_hub(
                kwargs.pop("repo_id", folder.name), folder=folder, token=token, **kwargs
            )

    def _write_msgpack(
        self,
        folder: Path,
        names: weights.WeightMap,
        flat: Mapping[trees.Path, Any],
        max_shard_size: int | str,
    ) -> None:
        """Writes the legacy file, with the collections in it if v4's file has them."""
        leaves = names.unstack(flat)
        if self.params_include_collections:
            stored = self._stored_paths()
            leaves = {
                (stored[path][0] if path in stored else "params", *path): leaf
                for path, leaf in leaves.items()
            }
        files.write_msgpack(folder, leaves, max_shard_size)

    def _write_sidecars(self, folder: Path, extra: trees.Params | None) -> None:
        """Writes the collections that have their own files."""
        for name, sidecar in self.sidecars().items():
            collection = self._require_extra(self.extra if extra is None else extra)[name]
            sidecar.write(folder, trees.flatten(collection), self.precision.name)

    def _write_sentence_config(self, folder: Path) -> None:
        """Writes the files of sentence-transformers if they were set or loaded.

        A base model that was loaded from a directory keeps the files of that directory.
        """
        sentence_config = self._sentences
        is_base_model = type(self).__name__.endswith("Model")
        if self._source and Path(self._source[0]).is_dir() and is_base_model:
            sentence_config = self.sentence_config
        if sentence_config is not None:
            sentence_config.write(folder, self.text_config.hidden_size)

    def _known_leaves(self, params: trees.Params) -> dict[trees.Path, Any]:
        """Returns the leaves of ``params`` that this model has, and logs the others."""
        flat, name, paths = trees.flatten(trees.thaw(params)), type(self).__name__, self._paths
        if self.peft_config is not None:
            trained = self.trainable_paths
            paths = {path: leaf for path, leaf in paths.items() if path in trained}
        known_leaves = {path: flat[path] for path in paths if path in flat}
        if not known_leaves:
            raise UsageError(f"params has no parameter of {name}, so there is nothing to save")
        different = [
            f"{trees.join(path)} has shape {leaf.shape}, not {paths[path].shape}"
            for path, leaf in known_leaves.items()
            if leaf.shape != paths[path].shape
        ]
        if different:
            raise UsageError(
                f"params do not match the configuration of {name}, so nothing was saved: "
                + "; ".join(different)
            )
        missing = [trees.join(path) for path in paths if path not in flat]
        if unexpected := [trees.join(path) for path in flat if path not in self._paths]:
            listed = ", ".join(f"{path}{did_you_mean(path, missing)}" for path in unexpected)
            logger.warning("ignoring unexpected keys in params of %s: %s", name, listed)
        if missing:
            logger.warning(
                "params lacks these parameters of %s, which are not saved: %s",
                name,
                ", ".join(missing),
            )
        return known_leaves

    def _write_torch(
        self,
        folder: Path,
        names: weights.WeightMap,
        flat: Mapping[trees.Path, Any],
        limit: int | str,
    ) -> None:
        sizes = names.sizes({path: np.dtype(leaf.dtype).itemsize for path, leaf in flat.items()})
        dtype = np.dtype(next(iter(flat.values())).dtype)
        derived = {
            name: entry
            for name, entry in self.derived_weights().items()
            if not isinstance(entry.value, str) or entry.value in sizes
        }

        def typed(value: np.ndarray) -> np.ndarray:
            """Casts floating-point values to the dtype of the parameters."""
            return value.astype(dtype) if np.issubdtype(value.dtype, np.floating) else value

        for name, entry in derived.items():
            value = entry.value
            sizes[name] = sizes[value] if isinstance(value, str) else typed(value).nbytes

        def make(keys: Iterable[str]) -> dict[str, np.ndarray]:
            sources = {key: derived[key].value if key in derived else key for key in keys}
            tensors = names.to_torch(flat, {v for v in sources.values() if isinstance(v, str)})
            return {
                key: tensors[value] if isinstance(value, str) else typed(value)
                for key, value in sources.items()
            }

        files.write_safetensors(folder, sizes, make, limit, {"format": "pt"})

    def save_config(self, folder: Path) -> None:
        """Writes ``config.json``, with the PyTorch class, and ``generation_config.json``."""
        self.config.architectures = [self.torch_class_name()]
        config, generation = self._split_configs()
        configs.write_config(config, folder)
        if generation is not None:
            generation.save_pretrained(folder)

    def _split_configs(self) -> tuple[Any, Any]:
        """Moves generation options that v4 programs set on the model's configuration.

        Transformers 5 refuses to save them there.
        """
        config, generation = self.stored_config(), self.generation_config
        moved = config._get_generation_parameters()
        if not moved:
            return config, generation
        config = copy.deepcopy(config)
        for name in moved:
            setattr(config, name, None)
        if generation is None:
            logger.warning(
                "%s cannot generate, so %s of its configuration are not saved",
                type(self).__name__,
                ", ".join(moved),
            )
            return config, None
        generation = copy.deepcopy(generation)
        if getattr(generation, "_from_model_config", False):
            generation.update(**moved)
        return config, generation

    @classmethod
    def torch_class_name(cls) -> str:
        """Returns the name of the PyTorch class that loads the same checkpoint."""
        return cls.__name__.removeprefix("Flax")

    def push_to_hub(
        self,
        repo_id: str,
        *,
        params: trees.Params | None = None,
        extra: trees.Params | None = None,
        folder: str | Path | None = None,
        private: bool = False,
        token: str | None = None,
        commit_message: str | None = None,
        revision: str | None = None,
        **_: Any,
    ) -> str:
        """Uploads the model as one commit.

        Args:
            repo_id: Name of the repository.
            params: Parameters to save instead of the model's own.
            extra: Collections to save instead of the model's own.
            folder: A directory to upload instead of saving the model.
            private: Whether a new repository is private.
            token: Token for the upload.
            commit_message: Message of the commit.
            revision: Branch to commit to.

        Returns:
            The URL of the commit.
        """
        import tempfile

        from hfseq.checkpoints import hub

        message = commit_message or f"Upload {type(self).__name__}"
        with tempfile.TemporaryDirectory() as temporary:
            if folder is None:
                self.save_pretrained(temporary, params=params, extra=extra)
            return hub.push_folder(
                folder or temporary,
                repo_id,
                private=private,
                token=token,
                message=message,
                revision=revision,
            )


class FlaxVisionPreTrainedModel(FlaxPreTrainedModel):
    """Base class of image models, whose module receives ``pixel_values`` as the user passes them.

    Images are floats `(batch, channels, height, width)`, the layout of PyTorch and of the image
    processors. ``nn.embed_patches`` transposes them to channels last for convolutions.
    """

    main_input_name = "pixel_values"

    def __call__(  # type: ignore[override]
        self,
        pixel_values: Input,
        params: trees.Params | None = None,
        dropout_rng: jax.Array | Keys | None = None,
        train: bool = False,
        output_attentions: bool | None = None,
        output_hidden_states: bool | None = None,
        return_dict: bool | None = None,
        *,
        extra: trees.Params | None = None,
        **inputs: Any,
    ) -> Any:
        """Runs the model; see :meth:`FlaxPreTrainedModel.run`."""
        return self.run(
            {"pixel_values": pixel_values, **inputs},
            params,
            dropout_rng,
            train,
            output_attentions,
            output_hidden_states,
            return_dict,
            extra=extra,
        )
