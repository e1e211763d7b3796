"""Collections beside the parameters: statistics, scales and other variables that are not trained.

A module declares them as a variable type of its own. Outside they are ``model.extra``, a nested
dict for each collection, which the training loop carries and never looks into: what they mean is
known to the model class alone, through the hooks below.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import TYPE_CHECKING, Any, ClassVar

import jax
from flax import nnx

from hfseq import trees, weights
from hfseq.errors import UsageError
from hfseq.sidecar import Sidecar


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
        found = {}
        for name, (kind, tree) in self._extra_types.items():
            if file := getattr(kind, "sidecar", None):
                shapes = {path: leaf.shape for path, leaf in trees.flatten(tree).items()}
                owners = {path[: path.index("dot_general")] for path in shapes}
                kernels = {
                    path: leaf.shape
                    for path, leaf in self._paths.items()
                    if path[:-1] in owners and path[-1] == "kernel"
                }
                found[name] = Sidecar(file, shapes, self._names(kernels), self._names)
        return found

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


__all__ = ["ExtraMixin"]
