"""Computing on a mesh of devices: what a model has to know for it."""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping
from typing import Any, ClassVar

import jax
from flax import nnx

from hfseq import trees
from hfseq.nn import shard
from hfseq.nn.stack import Options


class MeshMixin:
    """The part of a model that concerns where it computes."""

    # The attributes of the configuration that count heads: each device gets whole ones.
    head_counts: ClassVar[tuple[str, ...]] = (
        *("num_attention_heads", "n_head", "num_heads", "num_key_value_heads"),
        *("encoder_attention_heads", "decoder_attention_heads"),
    )
    _options: Options
    _build: Any
    _graph: Any
    _weight_axes: Mapping[trees.Path, shard.Axes] = {}

    def use_mesh(
        self,
        mesh: jax.sharding.Mesh | None,
        axes: Mapping[trees.Path, shard.Axes] | None = None,
        sequence_parallel: bool = False,
    ) -> None:
        """Compute on ``mesh``: layers divide their work over it, and lay out what they return.

        ``axes`` are those that split each weight (``Layout.axes``), by its path;
        ``sequence_parallel`` splits the length between the blocks over ``tensor``
        (:mod:`hfseq.nn.shard`).
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


__all__ = ["MeshMixin"]
