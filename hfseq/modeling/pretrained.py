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
from hfseq.checkpoints import files, quantized, weights
from hfseq.errors import CheckpointError, UsageError, WeightsError, did_you_mean
from hfseq.modeling import lora
from hfseq.modeling.base import FlaxModel, Input
from hfseq.modeling.keywords import translate_keywords
from hfseq.modeling.sentence import (
    MODULES_KEY,
    RetrievalConfig,
    SentenceConfig,
    SentenceEncoder,
    read_config,
)
from hfseq.nn import kv_cache, sharding, trees
from hfseq.nn.layers import Linear
from hfseq.nn.modules import BUFFERS, Buffer
from hfseq.nn.qwix import quantize_kernel
from hfseq.nn.random import Keys
from hfseq.nn.sharding import complete_mesh

if TYPE_CHECKING:
    from transformers import PreTrainedConfig, PreTrainedTokenizerBase


logger = logging.getLogger("hfseq.modeling")

#: A function that returns the sharding of a variable, given its path and shape.
ShardingFn = Callable[[trees.Path, tuple[int, ...]], jax.sharding.Sharding]


class _CheckpointReader(NamedTuple):
    """An opened checkpoint whose tensors are matched with the variables of a model.

    Attributes:
        names: The weight map of the model.
        slots: Maps each variable, or part of a variable, to its tensor in the checkpoint.
        missing: Paths of variables for which the checkpoint has no tensor.
        native: Whether the tensors have Flax names instead of PyTorch names.
        on_device: Whether to place variables on the default device instead of the host's CPU.
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
        """Reads one variable and places it on its devices.

        Args:
            path: Path of the variable.
            shape: Shape of the variable.
            dtype: The dtype of the result, or `None` for the dtype in the file.
            sharding: A function that returns the sharding of the variable. If it is passed, each
                process reads only the slices that its devices need.
        """
        if dtype is None:
            dtype = next(tensor.dtype for slot, tensor in self.slots.items() if slot.path == path)
        dtype = jax.dtypes.canonicalize_dtype(jnp.dtype(dtype))
        if sharding is None:
            array = self.names.read_param(self.slots, path, native=self.native)
            array = np.asarray(array).astype(dtype, copy=False)
            # On CPUs, device_put does not copy an array that was read from a file. asarray would.
            return jax.device_put(array, None if self.on_device else jax.devices("cpu")[0])

        def part(index: Any) -> np.ndarray:
            values = self.names.read_param(self.slots, path, index, native=self.native)
            return np.asarray(values, order="C").astype(dtype, copy=False)

        return jax.make_array_from_callback(shape, sharding(path, shape), part)


_HISTORY_SUFFIX = "_amax_history"
_Names = Callable[[Mapping[trees.Path, tuple[int, ...]]], weights.WeightMap]


@dataclasses.dataclass(frozen=True)
class Sidecar:
    """A collection that is saved in its own file, such as the scales of FP8 training.

    Attributes:
        file: Name of the file.
        shapes: Shape of every variable of the collection.
        kernels: The weight map of the kernels that the collection belongs to. The file contains the
            shapes of these kernels, so that loading detects a file of a model of another size.
        names: A function that creates the weight map of variables from their shapes.
    """

    file: str
    shapes: Mapping[trees.Path, tuple[int, ...]]
    kernels: weights.WeightMap
    names: _Names

    def write(self, folder: Path, leaves: Mapping[trees.Path, Any], recipe: str) -> None:
        """Writes the variables, and the shapes of the kernels that they belong to.

        Args:
            folder: The directory.
            leaves: The variables by path.
            recipe: Name of the precision recipe, which is stored in the file.
        """
        from safetensors.numpy import save_file

        metadata = {"format": "hfseq", "recipe": recipe, "kernels": json.dumps(self._sizes())}
        save_file(self.names(self.shapes).to_torch(leaves), folder / self.file, metadata)

    def read(self, path: str, fresh: Mapping[trees.Path, Any]) -> dict[trees.Path, Any]:
        """Reads the variables. A history of another length is truncated, or padded with zeros.

        Args:
            path: The file.
            fresh: Newly initialized variables. They are used where the file has no variable.

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
                f"cannot read {path}: {error}. If you delete the file, the scales are measured "
                "again"
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
                "%s lacks %d of the %d scales and histories of this model. The missing ones are "
                "newly initialized",
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
        # The file may have been saved with another head of the same base model. Entries of that
        # head are ignored.
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
                problems.append(
                    f"  {name}: measured on a kernel {size}, but this model's kernel is {ours}"
                )
        if problems:
            omitted = [f"  and {len(problems) - 6} more"] if len(problems) > 6 else []
            raise WeightsError(
                f"{path} belongs to another model, or was saved with other --precision_sites:\n"
                + "\n".join((*problems[:6], *omitted))
                + "\nIf you delete the file, the scales are measured again. Alternatively, pass "
                "the --precision_sites that the file was created with"
            )


def _computation_dtype(dtype: DTypeLike | None) -> DTypeLike:
    """Converts a name such as ``"torch.bfloat16"`` to a dtype. `None` means float32."""
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

    It is the dtype in config.json, or otherwise the dtype of the first floating-point tensor.
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
        dtype: The *computation* dtype. It does not change the dtype of the parameters, which are
            float32 in a new model, and otherwise have the dtype of the checkpoint.
        _do_init: Whether to initialize parameters. With ``False`` the model has no parameters, only
            their structure and shapes.
        precision: A precision recipe or the name of one. It replaces ``dtype``.
        scan_layers: Whether to stack the layers and scan over them.
        gradient_checkpointing: Whether to recompute layers in the backward pass.
        remat_policy: A policy of ``jax.checkpoint`` for the recomputed layers.
        attn_implementation: Name of a registered attention implementation.
        peft_config: Configuration of LoRA adapters.
        untied: Whether tensors that the configuration ties are separate parameters. This is for
            checkpoints in which the tied tensors have different values.

    Attributes:
        base_model_prefix: In models with a task head, the name of the attribute that contains the
            base model.
        weight_aliases: Maps further PyTorch names of a tied tensor to the PyTorch name of its
            parameter.
        weight_fallbacks: Maps the PyTorch name of a parameter to the name of another tensor, which
            is read if the checkpoint does not contain the parameter.
        ignored_weights: Regular expressions for names of tensors in checkpoints that are not
            weights, such as buffers.
        weight_templates: Maps templates of hfseq's names to templates of PyTorch's names, for names
            that do not follow the general rule (checkpoints/weights.py). They are used for reading
            and writing.
        weight_synonyms: Maps templates of alternative tensor names to the names that hfseq writes.
            Tensors with alternative names can be read too. The templates are applied in order.
        module_templates: Maps templates of names in PyTorch files to the names in PyTorch's module
            tree, which adapters use. The templates are applied in order.
        joined_weights: Parameters that PyTorch files store in several tensors. Maps the PyTorch
            name of the parameter to the :class:`JoinedTensor` that describes these tensors.
        native_synonyms: Like ``weight_synonyms``, for files with Flax names.
        stored_collections: Collections that checkpoints contain. Maps the name of the collection to
            the last path components of the variables that are stored.
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
        """Returns whether an adapter saves its own version of a tied tensor.

        The tensor must then be untied.
        """
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
            pretrained_model_name_or_path: The directory, file or repository. It may contain an
                adapter instead of a model.
            dtype: The *computation* dtype. ``"auto"`` selects the dtype in config.json, or
                otherwise the dtype of the first floating-point tensor. It then also becomes the
                default of ``param_dtype``.
            *model_args: Positional arguments of the constructor.
            config: The configuration, or the directory, file or repository to load it from.
            ignore_mismatched_sizes: Whether to initialize parameters whose shapes differ from the
                checkpoint, instead of raising an error.
            from_pt: Whether to prefer ``pytorch_model.bin`` to ``flax_model.msgpack``. The default
                order is ``model.safetensors``, ``flax_model.msgpack``, ``pytorch_model.bin``.
            from_flax: Whether to read ``flax_model.msgpack`` and no other file.
            _do_init: Whether to store the parameters in the model. With ``False`` the result is
                ``(model, params)``, with the parameters on the host's CPU. The collections are in
                ``model.extra`` in both cases.
            param_dtype: The dtype of the parameters. By default, each parameter has the dtype of
                its tensor in the checkpoint.
            sharding: A function that returns the sharding of a parameter from its path and shape.
                If it is passed, each process reads only the part of the parameters that it needs.
            extra_sharding: Like ``sharding``, for the collections in the checkpoint. The dtypes of
                collections never change.
            mesh: A mesh with some of the axes ``data``, ``fsdp``, ``tensor`` and ``sequence``. The
                sharding rules of the architecture distribute the model over the mesh, as in
                :meth:`shard`.
            output_loading_info: Whether to return the pair of the model and a dictionary with
                "missing_keys", "unexpected_keys", "mismatched_keys" and "error_msgs".
            **kwargs: ``cache_dir``, ``force_download``, ``local_files_only``, ``token``,
                ``revision`` and ``subfolder`` work as in Transformers. If the source is an adapter,
                ``revision`` and ``subfolder`` apply to the adapter only, and the revision of the
                base model comes from adapter_config.json. Other arguments override attributes of
                the configuration or are passed to the constructor.

        Returns:
            The model, ``(model, params)``, or the model and its loading information.

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
        is_quantized = quantized.check_method(config, source) is not None
        checkpoint = configs.open_checkpoint(source, download, from_pt=from_pt, from_flax=from_flax)
        if is_quantized:
            checkpoint.tensors = quantized.dequantize(
                checkpoint.tensors,
                config,
                checkpoint.source,
                None if param_dtype is None else jnp.dtype(param_dtype).name,
            )
            config = quantized.dequantized_config(config, source)
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
        if unread := list(filter(quantized.QUANTIZED_TENSORS.search, report.unexpected)):
            quantized.raise_unknown(unread, checkpoint.source)
        weights.check_report(
            report, checkpoint.source, class_name, ignore_mismatched=ignore_mismatched_sizes
        )
        if not slots:
            raise WeightsError(
                f"{checkpoint.source} has no tensor of {class_name} (first tensor of the "
                f"checkpoint: {next(iter(checkpoint.tensors), 'none')}): is it a checkpoint of "
                "another architecture?"
            )
        missing = set(report.missing)
        reader = _CheckpointReader(self.file_map, slots, missing, checkpoint.native, on_device)
        return reader, report

    def match_tensors(
        self, tensors: Mapping[str, weights.Tensor], *, native: bool, compare: bool = True
    ) -> tuple[dict[weights.Slot, weights.Tensor], weights.LoadReport]:
        """Matches tensors with the variables of this model, as :meth:`WeightMap.match` does.

        A checkpoint may store a tied tensor several times with different values. This is a conflict
        if the model uses the copy. If the copy belongs to a head that this class does not have, the
        copy is only reported as an unexpected tensor.
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
        """Returns whether this class has a language modeling head.

        The class has one if its name says so or if it can generate.
        """
        named_so = re.search("(LM|LMHeadModel|PreTraining)$", cls.__name__) is not None
        return named_so or cls.can_generate()

    @classmethod
    def checkpoint_options(
        cls, tensors: Mapping[str, weights.Tensor], config: PreTrainedConfig
    ) -> dict[str, Any]:
        """Returns constructor arguments that depend on the checkpoint's tensors.

        If the configuration ties tensors that have different values in the checkpoint, the result
        is ``{"untied": True}``. The model then has a separate parameter for each of these tensors,
        as in PyTorch. Otherwise the result is ``{}``.

        Args:
            tensors: The tensors of the checkpoint by name.
            config: The configuration.
        """
        if not cls.weight_aliases or not getattr(config, "tie_word_embeddings", False):
            return {}
        copies = cls.different_copies(tensors)
        if not copies:
            return {}
        # Aliases may belong to heads of the family that this class does not have.
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
        """Finds tied tensors that a checkpoint stores several times with different values.

        Args:
            tensors: The tensors of the checkpoint by name.

        Returns:
            A dict that maps the name of each such tensor, a key of ``weight_aliases``, to the name
            of the tensor that it differs from.
        """
        return weights.different_copies(cls.weight_aliases, tensors, cls.base_model_prefix)

    @property
    def checkpoint_arguments(self) -> dict[str, Any]:
        """The constructor arguments from :meth:`checkpoint_options` that this model received."""
        return {**self._module_kwargs, **({"untied": True} if self._untied else {})}

    @classmethod
    def read_checkpoint_options(
        cls, source: str, config: PreTrainedConfig, **download: Any
    ) -> dict[str, Any]:
        """Returns :meth:`checkpoint_options` of the checkpoint at ``source`` without loading it."""
        _, base_source, base_download = lora.find_base(source, download)
        checkpoint = configs.open_checkpoint(base_source, base_download)
        tensors = quantized.dequantize(checkpoint.tensors, config, checkpoint.source)
        return cls.checkpoint_options(tensors, config)

    @property
    def weight_map(self) -> weights.WeightMap:
        """The names of this model's parameters in PyTorch checkpoints."""
        return self._names({path: leaf.shape for path, leaf in self._stored_params.items()})

    @property
    def _stored_params(self) -> dict[trees.Path, Any]:
        """The parameters that are in the weight files of the model, by path."""
        return {path: leaf for path, leaf in self._paths.items() if path[0] != MODULES_KEY}

    @property
    def file_map(self) -> weights.WeightMap:
        """The names of all variables in checkpoints: parameters and stored collections."""
        stored = {path: leaf for path, (_, leaf) in self._stored_paths().items()}
        paths = self._stored_params | stored
        return self._names({path: leaf.shape for path, leaf in paths.items()})

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
        """Returns, for each PyTorch name, the names of tensors to read if this tensor is missing.

        In an untied model, each of the tensors that the configuration ties can replace the other
        tensors.
        """
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
        """Reads every parameter that matches a tensor, and initializes all other parameters."""
        flat = {
            path: read(path, leaf.shape, param_dtype, sharding)
            for path, leaf in self._stored_params.items()
            if path not in read.missing
        }
        missing = [
            path for path in self._paths if path in read.missing or path in self.module_weights
        ]
        if missing and read.on_device:
            num_missing = sum(math.prod(self._paths[path].shape) for path in missing)
            num_read = sum(math.prod(tensor.shape) for tensor in read.slots.values())
            if num_missing > max(configs.FREE_NEW_VALUES, 4 * num_read):
                raise WeightsError(
                    f"the checkpoint contains {num_read} parameter values of this model and lacks "
                    f"{num_missing}: the configuration does not belong to this checkpoint. To "
                    "train from scratch, pass only the configuration"
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
        """Returns the variables of collections that checkpoints contain.

        Returns:
            A dict that maps the path of a variable to a pair: the name of its collection, and a
            ``jax.ShapeDtypeStruct`` of the variable.
        """
        return {
            path: (name, leaf)
            for name, leaves in self.stored_collections.items()
            for path, leaf in trees.flatten(self.extra_shape_tree.get(name, {})).items()
            if path[-1] in leaves
        }

    def _stored_leaves(self, extra: Mapping[str, Any] | None) -> dict[trees.Path, Any]:
        """Returns the leaves of ``extra`` that checkpoints contain.

        `None` stands for the model's own collections.
        """
        stored = self._stored_paths()
        collections = self._require_extra(self.extra if extra is None else extra) if stored else {}
        flat = {name: trees.flatten(tree) for name, tree in collections.items()}
        lacking = [trees.join(path) for path, (name, _) in stored.items() if path not in flat[name]]
        if lacking:
            logger.warning(
                "not saving variables of %s that are missing in the collections: %s",
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
        """Reads the stored variables of the collections, and initializes all other variables."""
        flat = {name: trees.flatten(tree) for name, tree in self.init_extra(self.key).items()}
        for path, (name, leaf) in self._stored_paths().items():
            if path not in read.missing:
                # Collections in the tree of the parameters keep the file's dtype.
                dtype = None if self.params_include_collections else leaf.dtype
                flat[name][path] = read(path, leaf.shape, dtype, sharding)
        return {name: trees.unflatten(leaves) for name, leaves in flat.items()}

    def _read_sidecars(self, source: str, download: dict[str, Any]) -> None:
        """Replaces collections that have their own files by the content of these files."""
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
        """Logs which parameters do not come from the checkpoint.

        The messages are those of Transformers 4.
        """
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
                "%s: the values of the checkpoint differ from those that %s computes for %s. The "
                "values of the checkpoint are ignored",
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
                "%s and %s have different values in the model checkpoint at %s. As in PyTorch, %s "
                "uses the first tensor and ignores the second",
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
                    "checkpoint at %s. To convert them, pass param_dtype=jnp.float32, or run "
                    "hfseq convert with --dtype float32",
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
                # PyTorch uses these options only if config.json contains them. MarianConfig sets a
                # default, but the checkpoints of opus-mt do not contain the option.
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

        Training may have replaced the end-of-sequence token of the base model by a different one.
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
        """Distributes the model over a mesh by the sharding rules of its architecture.

        The values of the parameters do not change. Model calls then split their work over the mesh.
        The batch axis of inputs may be sharded over ``data`` and ``fsdp``.

        Args:
            mesh: A mesh from ``jax.make_mesh`` with some of the axes ``data``, ``fsdp``, ``tensor``
                and ``sequence``. Missing axes get size 1. Axes of the type Explicit are converted
                to the type Auto.
            sequence_parallel: Whether to split hidden states by length over the axis ``tensor``
                between the layers.

        Returns:
            The mesh with all four axes. Use it to shard inputs.

        Raises:
            UsageError: An axis is unknown, or a dimension of a parameter or the number of attention
                heads is not a multiple of the size of the axis that splits it.
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
        """The paths of the parameters that training changes.

        Without adapters, these are all parameters. With adapters, :func:`lora.trainable_paths`
        returns the paths.
        """
        if self.peft_config is None:
            return set(self._paths)
        paths = lora.trainable_paths(self._stored_params, self.peft_config, self._names({}))
        return paths | set(self.module_weights)

    def quantize(self, params: trees.Params, quantization: str) -> dict[str, Any]:
        """Quantizes the kernels of linear layers, to train adapters with less memory.

        Embeddings, adapters and the language-modeling head are not quantized. The result can be
        passed to the model as ``params``, but the quantized kernels cannot be saved or trained.

        Args:
            params: Parameters of the model.
            quantization: ``"nf4"`` or ``"int8"`` (:func:`hfseq.nn.qwix.quantize_kernel`).
        """
        flat, vocab_size = trees.flatten(params), self.vocab_size()
        for keys, part in nnx.iter_graph(nnx.eval_shape(lambda: self._build(nnx.Rngs(0)))):
            path = (*map(str, keys), "kernel")
            is_linear = isinstance(part, Linear) and part.adaptable
            if is_linear and path in flat and not lora.is_adapter(path):
                if vocab_size not in part.kernel.shape:
                    flat[path] = quantize_kernel(flat[path], quantization, part.input_axis)
        return trees.unflatten(flat)

    def load_adapter(self, source: str | Path, **download: Any) -> Any:
        """Returns a new model that combines this model with the adapter at ``source``.

        The new model shares the arrays of this model, so several models with different adapters can
        be in memory at once. If this model has an adapter, the new model has the adapter at
        ``source`` instead.

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
        names.fallbacks = {}  # tensors that the adapter lacks come from this model
        slots, report = names.match(tensors)
        weights.check_report(report, adapter.source, type(self).__name__, ignore_mismatched=False)
        read = _CheckpointReader(names, slots, set(report.missing), False, True)
        own_params = trees.flatten(
            self.params if self.peft_config is None else self.split_collections(self.params)[0]
        )
        missing = read.missing | set(model.module_weights)
        flat = {
            path: own_params[path] if path in missing else read(path, leaf.shape, None, None)
            for path, leaf in model._paths.items()
        }
        model._is_initialized, model._params, model.extra = True, trees.unflatten(flat), self.extra
        # The following method may change the configuration of the new model.
        model._config = copy.deepcopy(self._config)
        model._load_adapter_generation_config(str(source), download)
        return model

    def _untied_tensors(self, names: weights.WeightMap) -> dict[str, weights.Tensor]:
        """Returns tensors for parameters that are tied in this model, but separate in ``names``."""
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
        """Returns a new model in which the adapters are added to the kernels.

        The new model has no adapters.

        Args:
            params: Parameters to use instead of the model's own.

        Raises:
            UsageError: The model has no adapter, or the adapter changes an embedding matrix that is
                tied to the output head.
        """
        if self.peft_config is None:
            raise UsageError(f"this {type(self).__name__} has no adapter to merge")
        tables = ((*path, "embedding") for path, layer in self._adapted.items() if not layer.linear)
        adapts_word_table = any(self._paths[path].shape[0] == self.vocab_size() for path in tables)
        if adapts_word_table and getattr(self.config, "tie_word_embeddings", False):
            raise UsageError(
                "the adapter changes the word embeddings, which are tied to the head, but it does "
                "not change the head. Merging the adapter would change both. Keep the adapter, or "
                "untie the embeddings before training "
                "(--config_overrides tie_word_embeddings=false)"
            )
        model = self._like()
        flat_params = trees.flatten(self.params if params is None else params)
        merged = lora.merge_adapters(flat_params, self._adapted, self._stacked)
        model._is_initialized, model._params = True, trees.unflatten(merged)
        model.extra = self.extra
        return model

    def _like(self, **changes: Any) -> Any:
        """Returns a model without parameters, with this model's options updated by ``changes``."""
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
        model._sentences = self._sentences
        if self.module_weights:
            weights, buffers = (
                trees.unflatten(flat).get(MODULES_KEY, {})
                for flat in (self.module_weights, self.module_buffers)
            )
            model.train_modules(weights, buffers)
        return model

    # -- sentences

    #: The source of the model and the options of its download.
    _source: tuple[str, dict[str, Any]] | None = None
    #: Parameters outside of the base model that the checkpoint did not contain.
    _fresh_head: Sequence[str] = ()
    _sentences: RetrievalConfig | None = None
    _encoder: tuple[str | None, SentenceEncoder] | None = None
    #: Initial weights of sentence-transformers' modules, if they are parameters of this model.
    module_weights: Mapping[trees.Path, np.ndarray] = {}
    #: Initial arrays of these modules that are not trained by gradients.
    module_buffers: Mapping[trees.Path, np.ndarray] = {}

    def set_source(self, source: str, **download: Any) -> None:
        """Sets the source of a model that was not loaded by ``from_pretrained``.

        The model then uses the settings in sentence-transformers' files at this source.

        Args:
            source: A directory or repository.
            **download: Options of downloads.
        """
        self._source = source, download

    @property
    def sentence_config(self) -> RetrievalConfig | None:
        """The content of sentence-transformers' files, or `None` if the model has no such files.

        Depending on the model type, the result is a :class:`SentenceConfig`,
        :class:`CrossEncoderConfig`, :class:`SparseConfig` or :class:`MultiVectorConfig`. If you set
        this property, ``save_pretrained`` writes these files.
        """
        if self._sentences is None and self._source is not None:
            self._sentences = read_config(*self._source)
            if self._sentences is None and self.peft_config is not None:
                self._sentences = read_config(str(self.peft_config.base_model_name_or_path), {})
        return self._sentences

    @sentence_config.setter
    def sentence_config(self, sentences: RetrievalConfig | None) -> None:
        self._sentences, self._encoder = sentences, None

    def train_sentence_modules(self) -> None:
        """Adds the weights of the modules in ``sentence_config`` to the parameters of this model.

        The modules are the dense layers after the encoder, an encoder of queries or an autoencoder.
        Their weights are in the entry "sentence_modules" of the parameters. They are trained with
        the model, and ``save_pretrained`` writes them into the folders of the modules. The
        statistics of an autoencoder are in the same entry of the collection "buffers".
        """
        config = self.sentence_config
        if config is None:
            self.train_modules({})
        else:
            self.train_modules(config.module_weights, config.module_buffers)

    def train_modules(
        self,
        weights: Mapping[str, Mapping[str, np.ndarray]],
        buffers: Mapping[str, Mapping[str, np.ndarray]] | None = None,
    ) -> None:
        """Adds the weights of modules to the parameters of this model, so that they are trained.

        The forward pass of the model does not use them. ``save_pretrained`` writes those of modules
        in ``sentence_config`` only.

        Args:
            weights: The initial weights by module and name.
            buffers: Arrays that the training updates without a gradient, by module and name.
        """
        flat: dict[trees.Path, np.ndarray] = {
            (MODULES_KEY, module, name): np.asarray(value, np.float32)
            for module, named in weights.items()
            for name, value in named.items()
        }
        self.module_weights = flat
        self.module_buffers = trees.flatten({MODULES_KEY: buffers}) if buffers else {}
        self._set_structure()
        if self._params is not None:
            arrays = {path: jnp.asarray(value) for path, value in flat.items()}
            self._params = trees.unflatten(trees.flatten(self._params) | arrays)
            self.extra = self.add_module_buffers(self.extra)

    def add_module_buffers(self, extra: Mapping[str, Any]) -> dict[str, Any]:
        """Returns collections with the initial buffers of the modules in :meth:`train_modules`."""
        if not self.module_buffers:
            return dict(extra)
        arrays = {path: jnp.asarray(value) for path, value in self.module_buffers.items()}
        buffers = trees.flatten(extra.get(BUFFERS, {})) | arrays
        return {**extra, BUFFERS: trees.unflatten(buffers)}

    def _build(self, rngs: nnx.Rngs, cache: kv_cache.CacheSize | None = None) -> nnx.Module:
        module: Any = super()._build(rngs, cache)
        if self.module_weights:
            parts: dict[str, nnx.Dict] = {}
            for (_, part, name), value in self.module_weights.items():
                parts.setdefault(part, nnx.Dict())[name] = nnx.Param(jnp.asarray(value))
            for (_, part, name), value in self.module_buffers.items():
                parts.setdefault(part, nnx.Dict())[name] = Buffer(jnp.asarray(value))
            setattr(module, MODULES_KEY, nnx.Dict(parts))
        return module

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
        """Returns sentence embeddings as sentence-transformers computes them.

        This is a shortcut for bi-encoders. :class:`hfseq.SentenceEncoder` has more options. Its
        method :meth:`~hfseq.SentenceEncoder.encode` describes the computation.

        Args:
            sentences: One sentence or several.
            prompt_name: Name of a stored prompt to prepend to each sentence.
            prompt: A prompt to prepend to each sentence.
            batch_size: Maximum number of sentences per batch.
            show_progress_bar: Whether to show a progress bar.
            normalize_embeddings: Whether to scale the vectors to length 1.
            truncate_dim: Number of leading features to keep. Truncated vectors are only scaled to
                length 1 if ``normalize_embeddings`` is set.
            pooling: Pooling mode (mean, cls, max, lasttoken, ...) for models without
                sentence-transformers' files.
            tokenizer: The tokenizer. The default is the one that is saved with the model.
            params: Parameters to use instead of the model's own.

        Returns:
            Float32 vectors, `(features,)` for a string and `(sentences, features)` for a sequence.

        Raises:
            UsageError: The pooling mode or ``prompt_name`` is unknown, or the model has a task
                head, so it does not return its last hidden states.
        """
        sentence_config = self.sentence_config if pooling is None else SentenceConfig((pooling,))
        if sentence_config is None:
            raise UsageError(
                "the model has no modules.json, which defines the pooling of token vectors: pass "
                'the pooling that the model was trained with, such as pooling="mean", "cls" or '
                '"lasttoken"'
            )
        if not isinstance(sentence_config, SentenceConfig):
            raise UsageError(
                f"the model is a {sentence_config.model_type}: load it with "
                "hfseq.RetrievalModel.from_pretrained to compute its vectors or scores"
            )
        prompt = sentence_config.find_prompt(prompt, prompt_name)
        encoder_pooling, encoder = self._encoder or (None, None)
        if (
            encoder is None
            or encoder_pooling != pooling
            or tokenizer not in (None, encoder.tokenizer)
        ):
            if tokenizer is None:
                if self._source is None:
                    raise UsageError(
                        "encode: pass the tokenizer, because the model was not loaded from a "
                        "checkpoint"
                    )
                from transformers import AutoTokenizer

                from hfseq.modeling import auto

                tokenizer = auto.load(AutoTokenizer, self._source[0], **self._source[1])
            encoder = SentenceEncoder(self, tokenizer, sentence_config)
            self._encoder = pooling, encoder
        return encoder.encode(
            sentences,
            prompt=prompt,
            batch_size=batch_size,
            show_progress_bar=show_progress_bar,
            normalize_embeddings=normalize_embeddings,
            truncate_dim=truncate_dim,
            params=params,
        )

    # -- saving

    def stored_config(self) -> Any:
        """Returns the configuration to save.

        Some architectures of hfseq are equivalent to an architecture of Transformers. Their model
        classes override this method and return a configuration of the Transformers architecture, so
        that PyTorch users can load the model. The entry ``hfseq`` of this configuration contains
        the model type and the options of the hfseq architecture. hfseq uses them to load the
        original architecture.
        """
        return self.config

    def derived_weights(self) -> Mapping[str, weights.DerivedTensor]:
        """Returns additional tensors that PyTorch's class stores, by their PyTorch names.

        hfseq does not need these tensors as parameters, because it computes them.
        ``save_pretrained`` writes them, and ``from_pretrained`` compares the computed tensors with
        the checkpoint.

        By default, these tensors are the batch counters of PyTorch's batch norms, which hfseq does
        not use.
        """
        means = [
            path
            for path, (collection, _) in self._stored_paths().items()
            if collection == "batch_stats" and path[-1] == "mean"
        ]
        names = (".".join((*path[:-1], "num_batches_tracked")) for path in means)
        counter = weights.DerivedTensor(np.zeros((), np.int64), unused=True)
        return dict.fromkeys(names, counter)

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

        Files are written under temporary names and renamed when all of them are complete. If the
        parameters are distributed over several processes, all processes must call this method.
        Process 0 then writes the files. Its memory contains at most one file and one parameter at a
        time.

        Args:
            save_directory: The directory.
            params: Parameters to save instead of the model's own. If parameters of the model are
                missing, or if there are leaves that the model does not have, a warning lists them
                and they are not saved.
            push_to_hub: Whether to upload the directory.
            max_shard_size: Maximum size of a file, in bytes or as a string such as ``"5GB"``.
            token: Token for the upload.
            safe_serialization: Whether to write ``model.safetensors``. ``False`` writes the legacy
                file ``flax_model.msgpack``.
            extra: Collections to save instead of the model's own.
            **kwargs: ``repo_id`` and other arguments of :meth:`push_to_hub`.

        Raises:
            UsageError: ``save_directory`` is a file, or ``params`` has no parameter of this model.
            CheckpointError: The files cannot be written.
        """
        own_params, joined_extra = self.split_collections(self.params if params is None else params)
        flat = self._known_leaves(own_params)
        replicated = sharding.replicate(
            {path: flat.pop(path) for path in list(flat) if path[0] == MODULES_KEY}
        )
        collections = joined_extra if extra is None else extra
        if self.module_buffers:
            buffers = (self.extra if collections is None else collections)[BUFFERS]
            replicated |= {
                path: leaf
                for path, leaf in trees.flatten(buffers).items()
                if path in self.module_buffers
            }
        if self.peft_config is None:
            flat |= self._stored_leaves(collections)
        shapes = self.file_map.shapes
        names = self._names({path: shapes[path] for path in shapes if path in flat})
        distributed = {path for path, leaf in flat.items() if sharding.is_distributed(leaf)}
        flat = {
            path: sharding.GatheredArray(leaf) if path in distributed else leaf
            for path, leaf in flat.items()
        }
        if distributed and jax.process_index():
            # Process 0 reads the parameters in this order.
            if self.peft_config is not None:
                names.to_torch(flat)
            elif safe_serialization:
                self._write_torch(None, names, flat, max_shard_size)
            else:
                names.unstack(flat)
            return
        folder = _make_directory(save_directory)
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
        arrays = {path: np.asarray(leaf, np.float32) for path, leaf in replicated.items()}
        self._write_sentence_config(folder, trees.unflatten(arrays).get(MODULES_KEY))
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
        """Writes the legacy file ``flax_model.msgpack``.

        If ``params_include_collections`` is set, the file includes the collections, as in
        Transformers 4.
        """
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

    def _write_sentence_config(
        self, folder: Path, module_weights: Mapping[str, Mapping[str, Any]] | None
    ) -> None:
        """Writes the files of sentence-transformers if ``sentence_config`` was set or read.

        If a model without a head was loaded from a directory, the files of that directory are kept.

        Args:
            folder: The directory of the model.
            module_weights: The trained weights of the modules, if there are any.
        """
        sentence_config = self._sentences
        is_base_model = type(self).__name__.endswith("Model")
        if self._source and Path(self._source[0]).is_dir() and is_base_model:
            sentence_config = self.sentence_config
        if sentence_config is not None:
            if module_weights:
                sentence_config = sentence_config.replace_weights(module_weights)
            sentence_config.write(folder, self)

    def _known_leaves(self, params: trees.Params) -> dict[trees.Path, Any]:
        """Returns the leaves of ``params`` that this model has.

        Logs missing parameters and unexpected leaves.
        """
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
                "params does not contain these parameters of %s, so they are not saved: %s",
                name,
                ", ".join(missing),
            )
        return known_leaves

    def _write_torch(
        self,
        folder: Path | None,
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
            values = {key: derived[key].value if key in derived else key for key in keys}
            return {
                key: names.to_torch(flat, [value])[value]
                if isinstance(value, str)
                else typed(value)
                for key, value in values.items()
            }

        files.write_safetensors(folder, sizes, make, limit, {"format": "pt"})

    def save_config(self, folder: Path) -> None:
        """Writes ``config.json``, which names the PyTorch class, and ``generation_config.json``."""
        self.config.architectures = [self.torch_class_name()]
        config, generation = self._split_configs()
        configs.write_config(config, folder)
        if generation is not None:
            generation.save_pretrained(folder)

    def _split_configs(self) -> tuple[Any, Any]:
        """Returns the model configuration and the generation configuration to save.

        Programs for Transformers 4 may set generation options on the model configuration, where
        Transformers 5 does not save them. This method moves them to the generation configuration.
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
                "%s cannot generate, so these generation options of its configuration are not "
                "saved: %s",
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
            folder: A directory to upload. By default, the model is saved to a temporary directory
                and uploaded from there.
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
    """Base class of image models.

    ``pixel_values`` are floats `(batch, channels, height, width)`, as in PyTorch and in the image
    processors. The NNX module receives the images in this layout. ``nn.embed_patches`` transposes
    them to channels last for convolutions.
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
