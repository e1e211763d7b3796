"""``save_pretrained``: from the parameter tree and the collections beside it to checkpoints."""

from __future__ import annotations

import copy
import logging
from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np

from hfseq import checkpoint_files as files
from hfseq import trees, weights
from hfseq.errors import CheckpointError, UsageError
from hfseq.sidecar import Sidecar

logger = logging.getLogger("hfseq.modeling")


class SavingMixin:
    """Saving for :class:`hfseq.modeling.FlaxPreTrainedModel`, which has all below."""

    params: Any
    extra: dict[str, Any]
    precision: Any
    generation_config: Any

    if TYPE_CHECKING:

        @property
        def config(self) -> Any: ...  # noqa: D102

        @property
        def file_map(self) -> weights.WeightMap: ...  # noqa: D102

        def _stored_leaves(self, extra: Mapping[str, Any] | None) -> dict[trees.Path, Any]: ...

        def _require_extra(self, extra: Mapping[str, Any]) -> Mapping[str, Any]: ...

        def sidecars(self) -> dict[str, Sidecar]: ...  # noqa: D102

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
        params: Any = None,
        push_to_hub: bool = False,
        max_shard_size: int | str = "5GB",
        token: str | None = None,
        safe_serialization: bool = True,
        *,
        extra: Mapping[str, Any] | None = None,
        **kwargs: Any,
    ) -> None:
        """Save configuration and weights so that PyTorch's ``AutoModel*`` loads them as they are.

        **Arguments:** ``params`` and the collections ``extra`` instead of the model's own;
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
        flat = trees.flatten(trees.thaw(params if params is not None else self.params))
        flat |= self._stored_leaves(extra)
        with files.staged(folder) as stage:
            if safe_serialization:
                self._write_torch(stage, flat, max_shard_size)
            else:
                files.write_msgpack(stage, self.file_map.listed(flat), max_shard_size)
            for name, sidecar in self.sidecars().items():
                kept = self._require_extra(self.extra if extra is None else extra)[name]
                sidecar.write(stage, trees.flatten(kept), self.precision.name)
            self.save_config(stage)
        if push_to_hub:
            self.push_to_hub(
                kwargs.pop("repo_id", folder.name), folder=folder, token=token, **kwargs
            )

    def _write_torch(self, folder: Path, flat: Mapping[trees.Path, Any], limit: int | str) -> None:
        names, derived = self.file_map, self.derived_weights()
        sizes = names.sizes({path: np.dtype(leaf.dtype).itemsize for path, leaf in flat.items()})
        dtype = np.dtype(next(iter(flat.values())).dtype)
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
        config, generation = self._parted_configs()
        config.save_pretrained(folder)
        if generation is not None:
            generation.save_pretrained(folder)

    def _parted_configs(self) -> tuple[Any, Any]:
        """Move options of generation that v4 programs set on the model's configuration.

        Transformers 5 refuses to save them there.
        """
        config, generation = self.stored_config(), self.generation_config
        found = config._get_generation_parameters()
        if not found:
            return config, generation
        config = copy.deepcopy(config)
        for name in found:
            setattr(config, name, None)
        if generation is None:
            logger.warning(
                "%s cannot generate: %s of its configuration are not saved",
                type(self).__name__, ", ".join(found),
            )  # fmt: skip
            return config, None
        generation = copy.deepcopy(generation)
        if getattr(generation, "_from_model_config", False):
            generation.update(**found)
        return config, generation

    @classmethod
    def torch_class_name(cls) -> str:
        """The name of the class that PyTorch users load the same checkpoint with."""
        return cls.__name__.removeprefix("Flax")

    def push_to_hub(
        self,
        repo_id: str,
        *,
        params: Any = None,
        extra: Mapping[str, Any] | None = None,
        folder: str | Path | None = None,
        private: bool = False,
        token: str | None = None,
        commit_message: str | None = None,
        revision: str | None = None,
        **_: Any,
    ) -> str:
        """Upload the model as one commit and return the commit's address."""
        import tempfile

        from hfseq import hub

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


__all__ = ["SavingMixin"]
