"""``from_pretrained`` and ``save_pretrained``: parameters and collections, from files and back."""

from __future__ import annotations

import copy
import dataclasses
import json
import logging
import math
import re
from collections.abc import Callable, Iterable, Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any, ClassVar, NamedTuple

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
from hfseq.modeling.sentence import SentenceConfig, SentenceEncoder
from hfseq.nn import sharding, trees
from hfseq.nn.layers import Linear
from hfseq.nn.qwix import quantize_kernel
from hfseq.nn.random import Keys

if TYPE_CHECKING:
    from transformers import PreTrainedConfig, PreTrainedTokenizerBase


logger = logging.getLogger("hfseq.modeling")

#: Where a variable lies, by its path and shape.
ShardingFn = Callable[[trees.Path, tuple[int, ...]], jax.sharding.Sharding]


class _CheckpointReader(NamedTuple):
    """An opened checkpoint whose tensors have found their places; ``missing`` have none."""

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
        """Read one variable onto its devices; with a sharding each process reads its slices only.

        ``dtype`` is that of the file if None.
        """
        if dtype is None:
            dtype = next(tensor.dtype for slot, tensor in self.slots.items() if slot.path == path)
        dtype = jax.dtypes.canonicalize_dtype(jnp.dtype(dtype))
        if sharding is None:
            array = self.names.read_param(self.slots, path, native=self.native)
            array = np.asarray(array).astype(dtype, copy=False)
            # Unlike asarray, this takes an array of a file over where it lies, on CPUs.
            return jax.device_put(array, None if self.on_device else jax.devices("cpu")[0])

        def part(index: Any) -> np.ndarray:
            values = self.names.read_param(self.slots, path, index, native=self.native)
            return np.asarray(values, order="C").astype(dtype, copy=False)

        return jax.make_array_from_callback(shape, sharding(path, shape), part)


_HISTORY_SUFFIX = "_amax_history"
_Names = Callable[[Mapping[trees.Path, tuple[int, ...]]], weights.WeightMap]


@dataclasses.dataclass(frozen=True)
class Sidecar:
    """One collection and its file.

    **Arguments:** ``file`` its name; ``shapes`` the shape of every variable; ``kernels`` the weight
    map of the parameters that the collection belongs to, by which a file of a model of another size
    is recognised; ``names`` makes weight maps.
    """

    file: str
    shapes: Mapping[trees.Path, tuple[int, ...]]
    kernels: weights.WeightMap
    names: _Names

    def write(self, folder: Path, leaves: Mapping[trees.Path, Any], recipe: str) -> None:
        """Write the variables, and the shapes of the kernels that they were measured on."""
        from safetensors.numpy import save_file

        metadata = {"format": "hfseq", "recipe": recipe, "kernels": json.dumps(self._sizes())}
        save_file(self.names(self.shapes).to_torch(leaves), folder / self.file, metadata)

    def read(self, path: str, fresh: Mapping[trees.Path, Any]) -> dict[trees.Path, Any]:
        """Return the variables at ``path``, those of ``fresh`` where it has none.

        A history of another length is cut, or begins with fewer entries. WeightsError for a file
        that belongs to another model, CheckpointError for one that cannot be read.
        """
        from safetensors import SafetensorError, safe_open

        names = self.names(self.shapes)
        length = max(
            leaf[-1] for where, leaf in self.shapes.items() if where[-1].endswith(_HISTORY_SUFFIX)
        )
        try:
            with safe_open(path, framework="numpy") as opened:
                arrays = {name: opened.get_tensor(name) for name in opened.keys()}  # noqa: SIM118
                metadata = opened.metadata() or {}
        except (OSError, SafetensorError) as error:
            raise CheckpointError(
                f"cannot read {path}: {error}. Delete it, and the scales are measured afresh"
            ) from error
        for name, array in arrays.items():
            if name.endswith(_HISTORY_SUFFIX):  # its newest entry is the first
                kept = array.reshape(-1)[:length]
                arrays[name] = np.pad(kept, (0, length - len(kept)))
        tensors = {name: files.tensor_from_array(array) for name, array in arrays.items()}
        slots, report = names.match(tensors)
        self._check(path, metadata, report)
        if report.missing:
            logger.warning(
                "%s has nothing for %d of the %d scales and histories of this model, which begin "
                "fresh",
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
        known, prefix = [".".join(path) for path in self.shapes], f"{self.kernels.prefix}."
        measured = json.loads(metadata.get("kernels", "{}"))
        # Beside a base model that is this one stands another head, of which there is no use here;
        # its weights were not taken either.
        headed = bool(self.kernels.prefix) and any(name.startswith(prefix) for name in measured)
        problems = [
            f"  {name}: this model has no FP8 product there{did_you_mean(name, known)}"
            for name in report.unexpected
            if not headed or name.startswith(prefix)
        ]
        problems += [f"  {name}: {given}, not {due}" for name, given, due in report.mismatched]
        sizes = {name.removeprefix(prefix): size for name, size in self._sizes().items()}
        for name, size in measured.items():
            ours = sizes.get(name.removeprefix(prefix), size)
            if ours != size:
                problems.append(f"  {name}: measured on a kernel {size}, but this one is {ours}")
        if problems:
            more = [f"  and {len(problems) - 6} more"] if len(problems) > 6 else []
            raise WeightsError(
                f"{path} belongs to another model, or to other FP8 sites:\n"
                + "\n".join((*problems[:6], *more))
                + "\nDelete it, and the scales are measured afresh; or give the --precision_sites "
                "that it was made with"
            )


class FlaxPreTrainedModel(FlaxModel):
    """Base class of all models.

    **Arguments:** ``config`` a Hugging Face configuration; ``input_shape`` is kept for
    compatibility; ``seed`` of the initialisation; ``dtype`` the type of *computation* (parameters
    stay float32, or keep the type of the checkpoint); ``_do_init=False`` gives structure and shapes
    without parameters; ``precision`` a recipe name or object instead of ``dtype``; ``scan_layers``
    stacks the layers at rest and scans them; ``gradient_checkpointing`` recomputes layers in the
    backward pass; ``attn_implementation`` the name of a registered attention.
    """

    base_model_prefix: ClassVar[str] = ""
    # Other names a tensor has in PyTorch files: alias -> the name of our parameter.
    weight_aliases: ClassVar[Mapping[str, str]] = {}
    # Where to read a parameter that a file lacks: its PyTorch name -> that of another tensor.
    weight_fallbacks: ClassVar[Mapping[str, str]] = {}
    # Names in checkpoints that carry no weights of ours (buffers), as regular expressions.
    ignored_weights: ClassVar[tuple[str, ...]] = (
        r"position_ids$",
        r"\.masked_bias$",
        r"token_type_ids$",
    )
    # Exceptions to the naming rule: symmetric templates, ours -> theirs (checkpoints/weights.py).
    weight_templates: ClassVar[Mapping[str, str]] = {}
    # Names that are read too: templates, theirs -> the name that is written, one after the other.
    weight_synonyms: ClassVar[Mapping[str, str]] = {}
    # The same for files with Flax's own names.
    native_synonyms: ClassVar[Mapping[str, str]] = {}
    # What checkpoints hold of collections: name -> the last components of the variables stored.
    stored_collections: ClassVar[Mapping[str, tuple[str, ...]]] = {}

    # -- loading

    @classmethod
    def from_pretrained(
        cls,
        pretrained_model_name_or_path: str | Path,
        dtype: DTypeLike = jnp.float32,
        *model_args: Any,
        config: PreTrainedConfig | str | Path | None = None,
        ignore_mismatched_sizes: bool = False,
        from_pt: bool = False,
        _do_init: bool = True,
        param_dtype: DTypeLike | None = None,
        sharding: ShardingFn | None = None,
        extra_sharding: ShardingFn | None = None,
        **kwargs: Any,
    ) -> Any:
        """Load a model from a directory, a weight file or a repository on the Hub.

        **Arguments:** ``dtype`` is the type of *computation*; parameters keep the type of the
        checkpoint unless ``param_dtype`` is given. ``sharding(path, shape)`` returns where a
        parameter lies: then each process reads only its part; ``extra_sharding`` does so for stored
        collections, whose types never change. ``_do_init=False`` returns ``(model, params)`` with
        parameters on the host's CPU; the collections are in ``model.extra`` all the same.
        ``cache_dir``, ``force_download``, ``local_files_only``, ``token``, ``revision`` and
        ``subfolder`` work as in Transformers; other keywords change the configuration or go to the
        constructor.

        **Raises:** :class:`~hfseq.errors.CheckpointError` for files that are absent or damaged,
        :class:`~hfseq.WeightsError` for tensors that do not fit.
        """
        source = str(pretrained_model_name_or_path)
        if dtype is None or isinstance(dtype, str):
            named = str(dtype or "auto").removeprefix("torch.")
            dtype = jnp.float32 if named == "auto" else jnp.dtype(named)
        download = configs.pop_download_options(kwargs)
        adapter = lora.find_adapter(source, download)
        if adapter is not None:
            kwargs["peft_config"], source = adapter.config, adapter.base
        elif (wanted := kwargs.get("peft_config")) is not None:
            kwargs["peft_config"] = dataclasses.replace(wanted, base_model_name_or_path=source)
        config, kwargs = configs.load_config(cls, source, config, download, kwargs)
        opened = configs.open_checkpoint(source, download, from_pt)
        configs.check_against_file(config, opened.tensors, opened.source)
        kwargs = {**cls.checkpoint_options(opened.tensors), **kwargs}
        with configs.wrap_build_errors(source):
            made: Any = cls  # model_args may hold what the checker thinks are dtype and _do_init
            model = made(config, *model_args, dtype=dtype, _do_init=False, **kwargs)
        weights.check_derived(
            model.derived_weights(), opened.tensors, cls.base_model_prefix, opened.source
        )
        if adapter is not None:
            opened.tensors = lora.combine_tensors(adapter, opened, model.file_map)
        slots, report = model.file_map.match(opened.tensors, native=opened.native)
        weights.check_report(
            report, opened.source, cls.__name__, ignore_mismatched=ignore_mismatched_sizes
        )
        if not slots:
            raise WeightsError(
                f"{opened.source} has no tensor that {cls.__name__} knows (for example "
                f"{next(iter(opened.tensors), 'none at all')}): is it a checkpoint of another "
                "architecture?"
            )
        read = _CheckpointReader(
            model.file_map, slots, set(report.missing), opened.native, _do_init
        )
        params = model._read(read, sharding, param_dtype)
        model.extra = model._read_extra(read, extra_sharding)
        report.missing = [path for path in report.missing if not lora.is_adapter(path)]
        model._read_sidecars(source, download)
        model._source = str(pretrained_model_name_or_path), dict(download)
        model._warn(report, source, _do_init, kept=param_dtype is None)
        model.load_generation_config(source, **download)
        if not _do_init:
            return model, model.join_collections(params)
        model._is_initialized, model._params = True, params
        return model

    @classmethod
    def checkpoint_options(cls, tensors: Mapping[str, weights.Tensor]) -> dict[str, Any]:
        """Return constructor arguments that only the checkpoint's tensors can tell; mostly none."""
        return {}

    @classmethod
    def read_checkpoint_options(cls, source: str, **download: Any) -> dict[str, Any]:
        """Return :meth:`checkpoint_options` of the checkpoint at ``source``, without loading it."""
        adapter = lora.find_adapter(source, download)
        place = source if adapter is None else adapter.base
        return cls.checkpoint_options(configs.open_checkpoint(place, download, False).tensors)

    @property
    def weight_map(self) -> weights.WeightMap:
        """The names of this model's parameters in PyTorch checkpoints."""
        return self._names({path: leaf.shape for path, leaf in self._paths.items()})

    @property
    def file_map(self) -> weights.WeightMap:
        """The names of all that checkpoints hold: parameters and stored collections."""
        stored = {path: leaf for path, (_, leaf) in self._stored_paths().items()}
        return self._names({path: leaf.shape for path, leaf in (self._paths | stored).items()})

    def _names(self, shapes: Mapping[trees.Path, tuple[int, ...]]) -> weights.WeightMap:
        prefix = f"{self.base_model_prefix}."
        derived = [re.escape(name.removeprefix(prefix)) for name in self.derived_weights()]
        return weights.WeightMap(
            shapes,
            prefix=self.base_model_prefix,
            aliases=self.weight_aliases,
            fallbacks=self.weight_fallbacks,
            ignored=(*self.ignored_weights, *(rf"(^|\.){name}$" for name in derived)),
            templates=self.weight_templates,
            synonyms=self.weight_synonyms,
            native_synonyms=self.native_synonyms,
            stacked=self._stacked,
        )

    def _read(
        self, read: _CheckpointReader, sharding: ShardingFn | None, param_dtype: DTypeLike | None
    ) -> dict[str, Any]:
        """Read every matched parameter, and initialise the others."""
        flat = {
            path: read(path, leaf.shape, param_dtype, sharding)
            for path, leaf in self._paths.items()
            if path not in read.missing
        }
        missing = [path for path in self._paths if path in read.missing]
        if missing and read.on_device:
            made = sum(math.prod(self._paths[path].shape) for path in missing)
            held = sum(math.prod(tensor.shape) for tensor in read.slots.values())
            if made > max(configs.FREE_NEW_VALUES, 4 * held):
                raise WeightsError(
                    f"the file holds {held} numbers of this model and lacks {made}: the "
                    "configuration does not belong to it. To train from scratch give the "
                    "configuration alone"
                )
            flat |= self._fresh(missing, sharding)
        return trees.unflatten({path: flat[path] for path in self._paths if path in flat})

    def sidecars(self) -> dict[str, Sidecar]:
        """Return what checkpoints hold in files of their own, by collection."""
        sidecars = {}
        for name, (kind, tree) in self._extra_types.items():
            if file := getattr(kind, "sidecar", None):
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
        """Return the variables that checkpoints hold: path -> (collection, shape and type)."""
        return {
            path: (name, leaf)
            for name, leaves in self.stored_collections.items()
            for path, leaf in trees.flatten(self.extra_shape_tree.get(name, {})).items()
            if path[-1] in leaves
        }

    def _stored_leaves(self, extra: Mapping[str, Any] | None) -> dict[trees.Path, Any]:
        """Return the leaves of ``extra`` (default: the model's own) that checkpoints hold."""
        stored = self._stored_paths()
        given = self._require_extra(self.extra if extra is None else extra) if stored else {}
        flat = {name: trees.flatten(tree) for name, tree in given.items()}
        lacking = [trees.join(path) for path, (name, _) in stored.items() if path not in flat[name]]
        if lacking:
            logger.warning(
                "the collections lack variables of %s, not saved: %s",
                type(self).__name__,
                ", ".join(lacking),
            )
        return {p: flat[name][p] for p, (name, _) in stored.items() if p in flat[name]}

    def _fresh(self, paths: list[trees.Path], sharding: ShardingFn | None) -> dict[trees.Path, Any]:
        """Initialise only ``paths``; the compiler drops the rest of the initialisation."""

        def pick(key: jax.Array) -> list[Any]:
            flat = trees.flatten(self._initialize(key)[0])
            return [flat[path] for path in paths]

        shardings = [sharding(p, self._paths[p].shape) for p in paths] if sharding else None
        values = jax.jit(pick, out_shardings=shardings)(self.key)
        return dict(zip(paths, values, strict=True))

    def _read_extra(self, read: _CheckpointReader, sharding: ShardingFn | None) -> dict[str, Any]:
        """Read the stored variables of the collections, and initialise the others."""
        flat = {name: trees.flatten(tree) for name, tree in self.init_extra(self.key).items()}
        for path, (name, leaf) in self._stored_paths().items():
            if path not in read.missing:
                # What users have in one tree with the parameters keeps the file's type as they do.
                dtype = None if self.params_include_collections else leaf.dtype
                flat[name][path] = read(path, leaf.shape, dtype, sharding)
        return {name: trees.unflatten(leaves) for name, leaves in flat.items()}

    def _read_sidecars(self, source: str, download: dict[str, Any]) -> None:
        """Replace collections by those in files beside the weights, where there are such files."""
        sidecars = self.sidecars()
        if not sidecars:
            return
        folder = str(Path(source).parent) if Path(source).is_file() else source
        fetch = configs.fetcher(folder, download)
        for name, sidecar in sidecars.items():
            path, fresh = fetch(sidecar.file), trees.flatten(self.extra[name])
            if path is None:
                logger.info("%s has no %s: %s begin fresh", source, sidecar.file, name)
                continue
            read = sidecar.read(path, fresh)
            placed = {p: jax.device_put(leaf, fresh[p].sharding) for p, leaf in read.items()}
            self.extra[name] = trees.unflatten(placed)

    def _warn(self, report: weights.LoadReport, source: str, initialised: bool, kept: bool) -> None:
        """Say once, together, what did not come from the checkpoint, in v4's sentences."""
        name = type(self).__name__
        if report.unexpected:
            logger.warning(
                "Some weights of the model checkpoint at %s were not used when initializing %s: %s",
                source,
                name,
                sorted(report.unexpected),
            )
        if report.mismatched:
            lines = (
                f"- {n}: found shape {given} in the checkpoint and {expected} in the model"
                for n, given, expected in report.mismatched
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
                if initialised
                else "missing from the returned parameters "
                "(model.init_weights(rng, params=params) makes them)",
                absent,
            )
        for half in ("float16", "bfloat16"):
            if report.dtypes.get(half) and kept:
                logger.warning(
                    "Some of the weights of %s were initialized in %s precision from the model "
                    "checkpoint at %s: if that is not wanted, cast them (param_dtype=jnp.float32)",
                    name,
                    half,
                    source,
                )

    def load_generation_config(self, source: str, **download: Any) -> None:
        """Take the options of generation from the checkpoint at ``source``, if it has any."""
        if not self.can_generate() or not Path(source).is_dir() and Path(source).exists():
            return
        from transformers import GenerationConfig

        # Old checkpoints keep the options in config.json, where Transformers 5 does not read them.
        written = configs.fetcher(source, download)("generation_config.json")
        old: dict[str, Any] = {"config_file_name": "config.json", "_from_model_config": True}
        with configs.wrap_read_errors(written or source):
            if not written:
                # PyTorch reads these from the file: MarianConfig forces an end that the files of
                # opus-mt do not name, and nothing happens.
                stored, _ = self.config_class.get_config_dict(source, **download)
                for name in {"forced_bos_token_id", "forced_eos_token_id"} - stored.keys():
                    if getattr(self.config, name, None) is not None:
                        setattr(self.config, name, None)
            self.generation_config = GenerationConfig.from_pretrained(
                source, **({} if written else old), **download
            )

    def sharding_rules(self) -> sharding.Rules | None:
        """Return how the architecture is split over devices, as it was registered, if it was."""
        return plugins.load().architectures.get(self.config.model_type).load_sharding()

    # -- adapters

    def _adapt(self, module: nnx.Module, rngs: nnx.Rngs) -> None:
        assert self.peft_config is not None
        settled = lora.complete_config(
            self.peft_config, type(self).__name__, self.config.model_type
        )
        self.peft_config, self._adapted = lora.add_adapters(
            module, settled, self._names({}).torch_name, rngs, self.vocab_size()
        )

    @property
    def trainable_paths(self) -> set[trees.Path]:
        """The parameters that training changes: of a model with adapters these, else all."""
        if self.peft_config is None:
            return set(self._paths)
        return lora.trainable_paths(self._paths, self.peft_config, self._names({}).torch_name)

    def quantize(self, params: trees.Params, kind: str) -> dict[str, Any]:
        """Return ``params`` with the kernels of Linears stored in fewer bits: a base of adapters.

        ``kind`` is "nf4" or "int8" (:func:`hfseq.nn.qwix.quantize_kernel`). Tables, adapters and
        the head over the vocabulary stay as they are. The model takes the result wherever it takes
        parameters; nothing of it can be saved or trained.
        """
        flat, words = trees.flatten(params), self.vocab_size()
        for keys, part in nnx.iter_graph(nnx.eval_shape(lambda: self._build(nnx.Rngs(0)))):
            path = (*map(str, keys), "kernel")
            if isinstance(part, Linear) and path in flat and not lora.is_adapter(path):
                if words not in part.kernel.shape:
                    flat[path] = quantize_kernel(flat[path], kind, part.input_axis)
        return trees.unflatten(flat)

    def load_adapter(self, source: str | Path, **download: Any) -> Any:
        """Return this model with the adapter at ``source``; arrays of the base are shared.

        So several are in memory at once, and one is chosen by calling its model. Of a model that
        has an adapter, the other one takes its place.
        """
        adapter = lora.find_adapter(str(source), download)
        if adapter is None:
            raise CheckpointError(f"'{source}' is no adapter: it has no {lora.CONFIG_NAME}")
        made = self._like(peft_config=adapter.config)
        found = {n: t for n, t in lora.combine_tensors(adapter, None, made.file_map).items()}
        slots, report = made.file_map.match(found)
        weights.check_report(report, adapter.source, type(self).__name__, ignore_mismatched=False)
        read = _CheckpointReader(made.file_map, slots, set(report.missing), False, True)
        own = trees.flatten(
            self.params if self.peft_config is None else self.split_collections(self.params)[0]
        )
        flat = {
            path: own[path] if path in read.missing else read(path, leaf.shape, None, None)
            for path, leaf in made._paths.items()
        }
        made._is_initialized, made._params, made.extra = True, trees.unflatten(flat), self.extra
        return made

    def merge_adapter(self, params: trees.Params | None = None) -> Any:
        """Return a model without adapters, whose kernels have them added."""
        if self.peft_config is None:
            raise UsageError(f"this {type(self).__name__} has no adapter to merge")
        tables = ((*path, "embedding") for path, one in self._adapted.items() if not one.linear)
        words = any(self._paths[path].shape[0] == self.vocab_size() for path in tables)
        if words and getattr(self.config, "tie_word_embeddings", False):
            raise UsageError(
                "the adapted table of words is the head's, too, which its adapter leaves alone: "
                "merged it would change both. Keep the adapter, or untie them before training "
                "(--config_overrides tie_word_embeddings=false)"
            )
        made = self._like()
        given = trees.flatten(self.params if params is None else params)
        merged = lora.merge_adapters(given, self._adapted, self._stacked)
        made._is_initialized, made._params = True, trees.unflatten(merged)
        made.extra = self.extra
        return made

    def _like(self, **changes: Any) -> Any:
        """Return a model of the same structure but for ``changes``, without parameters."""
        made = type(self)(
            self.config,
            seed=self.seed,
            dtype=self.dtype,
            _do_init=False,
            precision=self.precision,
            scan_layers=self.scan_layers,
            **changes,
        )
        made._options, made.generation_config = self._options, self.generation_config
        return made

    # -- sentences

    #: Where the model was loaded from, and with which options of the Hub.
    _source: tuple[str, dict[str, Any]] | None = None
    _sentences: SentenceConfig | None = None
    _encoder: tuple[str | None, SentenceEncoder] | None = None

    @property
    def sentence_config(self) -> SentenceConfig | None:
        """What sentence-transformers' files beside the model say; set it to have them written."""
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
        """Return the vectors of sentences as sentence-transformers computes them, float32.

        One sentence gives (features,), several (sentences, features). ``prompt``, or the one that
        is stored as ``prompt_name``, goes before each; ``truncate_dim`` keeps the first features;
        ``pooling`` (mean, cls, max, lasttoken …) is for models without sentence-transformers'
        files; the ``tokenizer`` is loaded from beside the model unless it is given. Sentences are
        sorted by length and padded to few widths, each compiled once; what is longer than the model
        reads is cut, which is logged.

        **Raises:** UsageError for a model that does not say how to pool, or has no last hidden
        states, and for an unknown ``prompt_name``.
        """
        how = self.sentence_config if pooling is None else SentenceConfig((pooling,))
        if how is None:
            raise UsageError(
                "the model has no modules.json, which says how the vectors of tokens become one of "
                'a sentence: give pooling="mean", "cls" or "lasttoken", as it was trained'
            )
        name = prompt_name if prompt_name is not None else how.default_prompt_name
        if prompt is None and name is not None and name not in how.prompts:
            raise UsageError(f"prompt_name '{name}': the model has {', '.join(how.prompts)}")
        if prompt is None:
            prompt = how.prompts[name] if name is not None else ""
        known, made = self._encoder or (None, None)
        if made is None or known != pooling or tokenizer not in (None, made.tokenizer):
            if tokenizer is None:
                if self._source is None:
                    raise UsageError("encode: give the tokenizer, for a model that was not loaded")
                from transformers import AutoTokenizer

                from hfseq.modeling import auto

                tokenizer = auto.load(AutoTokenizer, self._source[0], **self._source[1])
            made = SentenceEncoder(self, tokenizer, how)
            self._encoder = pooling, made
        vectors = made(
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
        """Return the configuration to write: the model's own, unless it is stored as another's.

        An architecture with an exact twin among the stock ones returns that one's configuration,
        with its own model type and options under ``hfseq``, by which hfseq finds back.
        """
        return self.config

    def derived_weights(self) -> Mapping[str, weights.DerivedTensor]:
        """Return what PyTorch's class stores beside this model's parameters, by PyTorch names.

        ``save_pretrained`` writes it and ``from_pretrained`` verifies it.
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
        """Save configuration and weights so that PyTorch's ``AutoModel*`` loads them as they are.

        **Arguments:** ``params`` and the collections ``extra`` instead of the model's own; what a
        tree lacks is left out with a warning, and so is what this model does not know;
        ``max_shard_size`` bytes or ``"5GB"``; ``safe_serialization=False`` writes the legacy
        ``flax_model.msgpack``. Files are written under temporary names and renamed when all are
        complete.
        """
        folder = Path(save_directory)
        if folder.is_file():
            raise UsageError(f"save_directory {folder} is a file: give a directory")
        try:
            folder.mkdir(parents=True, exist_ok=True)
        except OSError as error:
            raise CheckpointError(f"cannot make the directory {folder}: {error}") from error
        own, beside = self.split_collections(self.params if params is None else params)
        flat = self._known_leaves(own)
        if self.peft_config is None:
            flat |= self._stored_leaves(beside if extra is None else extra)
        shapes = self.file_map.shapes
        names = self._names({path: shapes[path] for path in shapes if path in flat})
        with files.staging_directory(folder) as stage:
            if self.peft_config is not None:
                lora.write_adapter(stage, self.peft_config, self._adapted, names, flat)
            elif safe_serialization:
                self._write_torch(stage, names, flat, max_shard_size)
            else:
                listed = names.unstack(flat)
                if self.params_include_collections:
                    stored = self._stored_paths()
                    listed = {
                        (stored[path][0] if path in stored else "params", *path): leaf
                        for path, leaf in listed.items()
                    }
                files.write_msgpack(stage, listed, max_shard_size)
            for name, sidecar in self.sidecars().items() if self.peft_config is None else ():
                kept = self._require_extra(self.extra if extra is None else extra)[name]
                sidecar.write(stage, trees.flatten(kept), self.precision.name)
            if self.peft_config is None:
                self.save_config(stage)
        said = self._sentences
        if (
            self._source
            and Path(self._source[0]).is_dir()
            and type(self).__name__.endswith("Model")
        ):
            said = self.sentence_config
        if said is not None:
            said.write(folder, self.text_config.hidden_size)
        if push_to_hub:
            self.push_to_hub(
                kwargs.pop("repo_id", folder.name), folder=folder, token=token, **kwargs
            )

    def _known_leaves(self, params: trees.Params) -> dict[trees.Path, Any]:
        """Return the leaves of ``params`` that this model has; say what is too many or missing."""
        flat, name, paths = trees.flatten(trees.thaw(params)), type(self).__name__, self._paths
        if self.peft_config is not None:
            trained = self.trainable_paths
            paths = {path: leaf for path, leaf in paths.items() if path in trained}
        known = {path: flat[path] for path in paths if path in flat}
        if not known:
            raise UsageError(f"params holds no parameter of {name}, so there is nothing to save")
        ours = [trees.join(path) for path in paths if path not in flat]
        if surplus := [trees.join(path) for path in flat if path not in self._paths]:
            listed = ", ".join(f"{path}{did_you_mean(path, ours)}" for path in surplus)
            logger.warning("params has what %s has not, which is not saved: %s", name, listed)
        if ours:
            logger.warning("params lacks parameters of %s, not saved: %s", name, ", ".join(ours))
        return known

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
            """Return numbers in the type of the parameters, counts as they are."""
            return value.astype(dtype) if np.issubdtype(value.dtype, np.floating) else value

        for name, entry in derived.items():
            value = entry.value
            sizes[name] = sizes[value] if isinstance(value, str) else typed(value).nbytes

        def make(keys: Iterable[str]) -> dict[str, np.ndarray]:
            wanted = {key: derived[key].value if key in derived else key for key in keys}
            tensors = names.to_torch(flat, {v for v in wanted.values() if isinstance(v, str)})
            return {
                key: tensors[value] if isinstance(value, str) else typed(value)
                for key, value in wanted.items()
            }

        files.write_safetensors(folder, sizes, make, limit, {"format": "pt"})

    def save_config(self, folder: Path) -> None:
        """Write ``config.json``, which names the PyTorch class, and ``generation_config.json``."""
        self.config.architectures = [self.torch_class_name()]
        config, generation = self._split_configs()
        configs.write_config(config, folder)
        if generation is not None:
            generation.save_pretrained(folder)

    def _split_configs(self) -> tuple[Any, Any]:
        """Move options of generation that v4 programs set on the model's configuration.

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
                "%s cannot generate: %s of its configuration are not saved",
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
        """The name of the class that PyTorch users load the same checkpoint with."""
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
        """Upload the model as one commit and return the commit's address."""
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
    """Base of the models of pictures, whose module takes ``pixel_values`` as users give them.

    They are floats (batch, channels, height, width), the layout of PyTorch and of the image
    processors; ``nn.embed_patches`` turns them to channels last, which convolutions take.
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
        """Run the model; see :meth:`FlaxPreTrainedModel.run`."""
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
