"""Collections that lie in a file of their own beside the weights (``fp8_params.safetensors``).

PyTorch's classes never look at it, and a checkpoint without it loads: then the collection begins
fresh. Names are those of the weights, one entry a layer, so that scanned and unscanned models, and
base model and head, read one another's files.
"""

from __future__ import annotations

import dataclasses
import json
import logging
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Any, ClassVar

import jax
import numpy as np
from flax import nnx

from hfseq.checkpoints import files, weights
from hfseq.errors import CheckpointError, UsageError, WeightsError, nearest
from hfseq.nn import trees

logger = logging.getLogger("hfseq.modeling")

HISTORY = "_amax_history"


Names = Callable[[Mapping[trees.Path, tuple[int, ...]]], weights.WeightMap]


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
    names: Names

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
        length = max(leaf[-1] for where, leaf in self.shapes.items() if where[-1].endswith(HISTORY))
        try:
            with safe_open(path, framework="numpy") as opened:
                arrays = {name: opened.get_tensor(name) for name in opened.keys()}  # noqa: SIM118
                metadata = opened.metadata() or {}
        except (OSError, SafetensorError) as error:
            raise CheckpointError(
                f"cannot read {path}: {error}. Delete it, and the scales are measured afresh"
            ) from error
        for name, array in arrays.items():
            if name.endswith(HISTORY):  # its newest entry is the first
                kept = array.reshape(-1)[:length]
                arrays[name] = np.pad(kept, (0, length - len(kept)))
        tensors = {name: files.in_memory(array) for name, array in arrays.items()}
        slots, report = names.match(tensors)
        self._check(path, metadata, report)
        if report.missing:
            logger.warning(
                "%s has nothing for %d of the %d scales and histories of this model, which begin "
                "fresh", path, len(report.missing), len(self.shapes),
            )  # fmt: skip
        missing = set(report.missing)
        return {
            where: leaf if where in missing else names.fill(slots, where)
            for where, leaf in fresh.items()
        }

    def _of_a_head(self, name: str, metadata: Mapping[str, str]) -> bool:
        """Tell whether ``name`` is beside the base model, in a file whose base model is this one.

        Another head, or none, has no use for it; the weights of that head were not taken either.
        """
        prefix = f"{self.kernels.prefix}."
        stored = json.loads(metadata.get("kernels", "{}"))
        inside = any(kernel.startswith(prefix) for kernel in stored)
        return bool(self.kernels.prefix) and inside and not name.startswith(prefix)

    def _sizes(self) -> dict[str, list[int]]:
        return {
            slot.name: list(self.kernels.shapes[slot.path][slot.layer is not None :])
            for slot in self.kernels.slots
        }

    def _check(self, path: str, metadata: Mapping[str, str], report: weights.LoadReport) -> None:
        known = [".".join(path) for path in self.shapes]
        problems = [
            f"  {name}: this model has no FP8 product there{nearest(name, known)}"
            for name in report.unexpected
            if not self._of_a_head(name, metadata)
        ]
        problems += [f"  {name}: {given}, not {due}" for name, given, due in report.mismatched]
        prefix = f"{self.kernels.prefix}."
        sizes = {name.removeprefix(prefix): size for name, size in self._sizes().items()}
        for name, size in json.loads(metadata.get("kernels", "{}")).items():
            ours = sizes.get(name.removeprefix(prefix))
            if ours is not None and ours != size:
                problems.append(f"  {name}: measured on a kernel {size}, but this one is {ours}")
        if problems:
            more = [f"  and {len(problems) - 6} more"] if len(problems) > 6 else []
            raise WeightsError(
                f"{path} belongs to another model, or to other FP8 sites:\n"
                + "\n".join((*problems[:6], *more))
                + "\nDelete it, and the scales are measured afresh; or give the --precision_sites "
                "that it was made with"
            )


class ExtraMixin:
    """What :class:`hfseq.modeling.FlaxPreTrainedModel` does with its collections."""

    # What checkpoints hold of collections: name -> the last components of the variables stored.
    stored_collections: ClassVar[Mapping[str, tuple[str, ...]]] = {}
    extra: dict[str, Any]
    _extra_types: dict[str, tuple[type[nnx.Variable], dict[str, Any]]]
    _paths: dict[trees.Path, Any]

    def check_training(self, tokens: int) -> None:
        """Raise a UsageError if ``tokens`` a step cannot train the collections."""

    def settle_extra(self, extra: dict[str, Any]) -> dict[str, Any]:
        """Return the collections after an optimizer step.

        Called once a step, when all micro-batches have left their part in ``extra``; traced.
        """
        return extra

    def extra_metrics(self, extra: dict[str, Any]) -> dict[str, jax.Array]:
        """Return numbers worth logging (0-d arrays by name) on the collections; traced."""
        return {}

    @property
    def overwritten_extra(self) -> tuple[str, ...]:
        """The collections whose next values the backward pass returns in place of gradients."""
        return tuple(
            name
            for name, (kind, _) in self._extra_types.items()
            if getattr(kind, "overwritten", False)
        )

    @property
    def statistics(self) -> tuple[str, ...]:
        """The collections in which a call counts the tokens that it sees."""
        moved = self.overwritten_extra
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

    def _initialize(self, rng: jax.Array) -> tuple[dict[str, Any], dict[str, Any]]:
        raise NotImplementedError

    if TYPE_CHECKING:

        def _names(self, shapes: Mapping[trees.Path, Any]) -> weights.WeightMap: ...

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
        return {path: flat[name][path] for path, (name, _) in stored.items()}

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
