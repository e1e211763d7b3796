"""``from_pretrained`` and ``save_pretrained``: parameters and collections, from files and back."""

from __future__ import annotations

import copy
import logging
import math
import re
from collections.abc import Callable, Iterable, Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Any, ClassVar, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from jax.typing import DTypeLike

from hfseq import errors
from hfseq.checkpoints import config as configs
from hfseq.checkpoints import files, weights
from hfseq.errors import CheckpointError, UsageError, nearest
from hfseq.modeling.collections import Sidecar
from hfseq.nn import trees
from hfseq.nn.precision import Precision

if TYPE_CHECKING:
    from transformers import PreTrainedConfig

logger = logging.getLogger("hfseq.modeling")

#: Where a variable lies, by its path and shape.
ShardingOf = Callable[[trees.Path, tuple[int, ...]], jax.sharding.Sharding]


class _Reader(NamedTuple):
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
        sharding: ShardingOf | None,
    ) -> jax.Array:
        """Read one variable onto its devices; with a sharding each process reads its slices only.

        ``dtype`` is that of the file if None.
        """
        if dtype is None:
            dtype = next(tensor.dtype for slot, tensor in self.slots.items() if slot.path == path)
        dtype = jax.dtypes.canonicalize_dtype(jnp.dtype(dtype))
        if sharding is None:
            array = self.names.fill(self.slots, path, native=self.native)
            array = np.asarray(array).astype(dtype, copy=False)
            # Unlike asarray, this takes an array of a file over where it lies, on CPUs.
            return jax.device_put(array, None if self.on_device else jax.devices("cpu")[0])

        def part(index: Any) -> np.ndarray:
            values = self.names.fill(self.slots, path, index, native=self.native)
            return np.asarray(values, order="C").astype(dtype, copy=False)

        return jax.make_array_from_callback(shape, sharding(path, shape), part)

    def check_share(self, fresh: Iterable[int]) -> None:
        """Refuse to make a model afresh of which the file holds next to nothing."""
        made, held = sum(fresh), sum(math.prod(tensor.shape) for tensor in self.slots.values())
        if made > max(configs.AFRESH, 4 * held):
            raise errors.WeightsError(
                f"the file holds {held} numbers of this model and lacks {made}: the configuration "
                "does not belong to it. To train from scratch give the configuration alone"
            )


class PretrainedMixin:
    """Loading and saving for :class:`hfseq.modeling.FlaxPreTrainedModel`, which has all below."""

    config_class: ClassVar[Any]
    base_model_prefix: ClassVar[str]
    weight_aliases: ClassVar[Mapping[str, str]]
    weight_fallbacks: ClassVar[Mapping[str, str]]
    ignored_weights: ClassVar[tuple[str, ...]]
    weight_templates: ClassVar[Mapping[str, str]]
    params: Any
    extra: dict[str, Any]
    precision: Precision
    generation_config: Any
    key: jax.Array
    _paths: dict[trees.Path, Any]
    _stacked: dict[trees.Path, tuple[trees.Path, ...]]
    _is_initialized: bool
    _params: dict[str, Any] | None

    if TYPE_CHECKING:

        def __init__(self, config: PreTrainedConfig, *args: Any, **kwargs: Any) -> None: ...

        @property
        def config(self) -> Any: ...  # noqa: D102

        @classmethod
        def can_generate(cls) -> bool: ...  # noqa: D102

        def init_extra(self, rng: jax.Array) -> dict[str, Any]: ...  # noqa: D102

        def sidecars(self) -> dict[str, Sidecar]: ...  # noqa: D102

        def _initialize(self, rng: jax.Array) -> tuple[dict[str, Any], dict[str, Any]]: ...

        def _stored_paths(self) -> dict[trees.Path, tuple[str, Any]]: ...

        def _stored_leaves(self, extra: trees.Params | None) -> dict[trees.Path, Any]: ...

        def _require_extra(self, extra: trees.Params) -> trees.Params: ...

    # -- loading
    # ------------------------------------------------------------------------------------

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
        sharding: ShardingOf | None = None,
        extra_sharding: ShardingOf | None = None,
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
        :class:`~hfseq.errors.WeightsError` for tensors that do not fit.
        """
        source = str(pretrained_model_name_or_path)
        if dtype is None or isinstance(dtype, str):
            named = str(dtype or "auto").removeprefix("torch.")
            dtype = jnp.float32 if named == "auto" else jnp.dtype(named)
        download = configs.download_options(kwargs)
        config, kwargs = configs.load_config(cls, source, config, download, kwargs)
        opened = configs.open_source(source, download, from_pt)
        configs.check_against_file(config, opened.tensors, opened.source)
        kwargs = {**cls.checkpoint_options(opened.tensors), **kwargs}
        with configs.building(source):
            model = cls(config, *model_args, dtype=dtype, _do_init=False, **kwargs)
        weights.check_derived(
            model.derived_weights(), opened.tensors, cls.base_model_prefix, opened.source
        )
        slots, report = model.file_map.match(opened.tensors, native=opened.native)
        weights.check(
            report, opened.source, cls.__name__, ignore_mismatched=ignore_mismatched_sizes
        )
        if not slots:
            raise errors.WeightsError(
                f"{opened.source} has no tensor that {cls.__name__} knows (for example "
                f"{next(iter(opened.tensors), 'none at all')}): is it a checkpoint of another "
                "architecture?"
            )
        read = _Reader(model.file_map, slots, set(report.missing), opened.native, _do_init)
        params = model._read(read, sharding, param_dtype)
        model.extra = model._read_extra(read, extra_sharding)
        model._read_sidecars(source, download)
        model._warn(report, source, _do_init, kept=param_dtype is None)
        model.load_generation_config(source, **download)
        if not _do_init:
            return model, params
        model._is_initialized, model._params = True, params
        return model

    @classmethod
    def checkpoint_options(cls, tensors: Mapping[str, weights.Tensor]) -> dict[str, Any]:
        """Return constructor arguments that only the checkpoint's tensors can tell; mostly none."""
        return {}

    @classmethod
    def options_of(cls, source: str, **download: Any) -> dict[str, Any]:
        """Return :meth:`checkpoint_options` of the checkpoint at ``source``, without loading it."""
        return cls.checkpoint_options(configs.open_source(source, download, False).tensors)

    @property
    def weight_map(self) -> weights.WeightMap:
        """The names of this model's parameters in PyTorch checkpoints."""
        return self._names({path: leaf.shape for path, leaf in self._paths.items()})

    @property
    def file_map(self) -> weights.WeightMap:
        """The names of all that checkpoints hold: parameters and stored collections."""
        shapes = {path: leaf.shape for path, leaf in self._paths.items()}
        return self._names(shapes | self._stored_shapes())

    def _stored_shapes(self) -> dict[trees.Path, tuple[int, ...]]:
        return {path: leaf.shape for path, (_, leaf) in self._stored_paths().items()}

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
            stacked=self._stacked,
        )

    def _read(
        self, read: _Reader, sharding: ShardingOf | None, param_dtype: DTypeLike | None
    ) -> dict[str, Any]:
        """Read every matched parameter, and initialise the others."""
        flat = {
            path: read(path, leaf.shape, param_dtype, sharding)
            for path, leaf in self._paths.items()
            if path not in read.missing
        }
        missing = [path for path in self._paths if path in read.missing]
        if missing and read.on_device:
            read.check_share(math.prod(self._paths[path].shape) for path in missing)
            flat |= self._fresh(missing, sharding)
        return trees.unflatten({path: flat[path] for path in self._paths if path in flat})

    def _fresh(self, paths: list[trees.Path], sharding: ShardingOf | None) -> dict[trees.Path, Any]:
        """Initialise only ``paths``; the compiler drops the rest of the initialisation."""

        def pick(key: jax.Array) -> list[Any]:
            flat = trees.flatten(self._initialize(key)[0])
            return [flat[path] for path in paths]

        shardings = [sharding(p, self._paths[p].shape) for p in paths] if sharding else None
        values = jax.jit(pick, out_shardings=shardings)(self.key)
        return dict(zip(paths, values, strict=True))

    def _read_extra(self, read: _Reader, sharding: ShardingOf | None) -> dict[str, Any]:
        """Read the stored variables of the collections, and initialise the others."""
        flat = {name: trees.flatten(tree) for name, tree in self.init_extra(self.key).items()}
        for path, (name, leaf) in self._stored_paths().items():
            if path not in read.missing:
                flat[name][path] = read(path, leaf.shape, leaf.dtype, sharding)
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
                source, name, sorted(report.unexpected),
            )  # fmt: skip
        if report.mismatched:
            lines = (
                f"- {n}: found shape {given} in the checkpoint and {expected} in the model"
                for n, given, expected in report.mismatched
            )
            logger.warning(
                "Some weights of %s were not initialized from the model checkpoint at %s and are "
                "newly initialized because the shapes did not match:\n%s",
                name, source, "\n".join(lines),
            )  # fmt: skip
        if absent := weights.describe_missing(report):
            logger.warning(
                "Some weights of %s were not initialized from the model checkpoint at %s and are "
                "%s:\n%s\nYou should probably TRAIN this model on a down-stream task to be able to "
                "use it for predictions and inference.", name, source,
                "newly initialized" if initialised else "missing from the returned parameters "
                "(model.init_weights(rng, params=params) makes them)",
                absent,
            )  # fmt: skip
        for half in ("float16", "bfloat16"):
            if report.dtypes.get(half) and kept:
                logger.warning(
                    "Some of the weights of %s were initialized in %s precision from the model "
                    "checkpoint at %s: if that is not wanted, cast them (param_dtype=jnp.float32)",
                    name, half, source,
                )  # fmt: skip

    def load_generation_config(self, source: str, **download: Any) -> None:
        """Take the options of generation from the checkpoint at ``source``, if it has any."""
        if not self.can_generate() or not Path(source).is_dir() and Path(source).exists():
            return
        from transformers import GenerationConfig

        # Old checkpoints keep the options in config.json, where Transformers 5 does not read them.
        written = configs.fetcher(source, download)("generation_config.json")
        old: dict[str, Any] = {"config_file_name": "config.json", "_from_model_config": True}
        with configs.reading(written or source):
            if not written:
                self._drop_unwritten_options(source, download)
            self.generation_config = GenerationConfig.from_pretrained(
                source, **({} if written else old), **download
            )

    def _drop_unwritten_options(self, source: str, download: dict[str, Any]) -> None:
        """Forget tokens that only the defaults of the configuration's class force.

        PyTorch reads options of generation from the file: MarianConfig forces an end that the files
        of opus-mt do not name, and nothing happens.
        """
        stored, _ = self.config_class.get_config_dict(source, **download)
        for name in ("forced_bos_token_id", "forced_eos_token_id"):
            if name not in stored and getattr(self.config, name, None) is not None:
                setattr(self.config, name, None)

    # -- saving
    # -------------------------------------------------------------------------------------

    def stored_config(self) -> Any:
        """Return the configuration to write: the model's own, unless it is stored as another's.

        An architecture with an exact twin among the stock ones returns that one's configuration,
        with its own model type and options under ``hfseq``, by which hfseq finds back.
        """
        return self.config

    def derived_weights(self) -> Mapping[str, weights.Derived]:
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
        flat = self._known_leaves(self.params if params is None else params)
        names = self._names(
            {path: self._paths[path].shape for path in flat} | self._stored_shapes()
        )
        flat |= self._stored_leaves(extra)
        with files.staged(folder) as stage:
            if safe_serialization:
                self._write_torch(stage, names, flat, max_shard_size)
            else:
                files.write_msgpack(stage, names.listed(flat), max_shard_size)
            for name, sidecar in self.sidecars().items():
                kept = self._require_extra(self.extra if extra is None else extra)[name]
                sidecar.write(stage, trees.flatten(kept), self.precision.name)
            self.save_config(stage)
        if push_to_hub:
            self.push_to_hub(
                kwargs.pop("repo_id", folder.name), folder=folder, token=token, **kwargs
            )

    def _known_leaves(self, params: trees.Params) -> dict[trees.Path, Any]:
        """Return the leaves of ``params`` that this model has; say what is too many or missing."""
        flat, name = trees.flatten(trees.thaw(params)), type(self).__name__
        known = {path: flat[path] for path in self._paths if path in flat}
        if not known:
            raise UsageError(f"params holds no parameter of {name}, so there is nothing to save")
        ours = [trees.join(path) for path in self._paths if path not in flat]
        if surplus := [trees.join(path) for path in flat if path not in self._paths]:
            listed = ", ".join(f"{path}{nearest(path, ours)}" for path in surplus)
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
        for name, entry in derived.items():
            value = entry.value
            sizes[name] = sizes[value] if isinstance(value, str) else value.size * dtype.itemsize

        def make(keys: Iterable[str]) -> dict[str, np.ndarray]:
            wanted = {key: derived[key].value if key in derived else key for key in keys}
            tensors = names.to_torch(flat, {v for v in wanted.values() if isinstance(v, str)})
            return {
                key: tensors[value] if isinstance(value, str) else value.astype(dtype)
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
                type(self).__name__, ", ".join(moved),
            )  # fmt: skip
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
        options: dict[str, Any] = {
            "private": private,
            "token": token,
            "message": message,
            "revision": revision,
        }
        if folder is not None:
            return hub.push_folder(folder, repo_id, **options)
        with tempfile.TemporaryDirectory() as temporary:
            self.save_pretrained(temporary, params=params, extra=extra)
            return hub.push_folder(temporary, repo_id, **options)


def count_parameters(params: trees.Params) -> int:
    """Return the number of numbers in a parameter tree."""
    return sum(math.prod(leaf.shape) for leaf in jax.tree.leaves(params))
