"""Attention over a window of tokens and a cache of codes: of one token, many, or rows on a mesh."""

from __future__ import annotations

import jax

from hfseq_plugins.vq_transformer import one_token, parallel, sequence
from hfseq_plugins.vq_transformer.state import State
from hfseq_plugins.vq_transformer.tape import How, Inputs, Terms


def attend(
    inputs: Inputs, terms: Terms, how: How, state: State | None, lengths: jax.Array | None
) -> tuple[jax.Array, State | None]:
    """Return the values attended to, (B, Hk, G, T, V) float32, and the state after the call.

    ``lengths`` (B,) is how many tokens of each row are real, the others being at its end; None if
    all are. Without a ``state`` the text begins here, and none is returned.
    """
    if state is not None and inputs.code.shape[-1] == 1:
        return one_token.step(inputs, terms, how, state)
    mesh = sequence.mesh_for(inputs.code.shape[-1], how.block)
    if mesh is not None:
        return sequence.attend(mesh, inputs, terms, how, state, lengths)
    return parallel.attend_here(inputs, terms, how, state, lengths)
