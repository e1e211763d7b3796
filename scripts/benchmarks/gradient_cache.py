"""Measures the memory of a contrastive training step that encodes its batch in chunks.

The step is that of `hfseq train embedding` for a model of the size of MiniLM-L6. It is compiled,
but not run. The table contains the temporary memory that XLA reports for the gradient, in MiB:

    python scripts/benchmarks/gradient_cache.py --batches 64 512 --chunks 8 32 128
"""

from __future__ import annotations

import argparse
from typing import Any

import jax
import jax.numpy as jnp
from transformers import BertConfig

from hfseq import FlaxAutoModel
from hfseq.modeling.sentence import SentenceConfig
from hfseq.nn.random import batch_keys
from hfseq.objectives import retrieval_losses
from hfseq.objectives.chunks import map_chunks


def temporary_bytes(model: Any, rows: int, length: int, chunk: int | None) -> int:
    """Returns the temporary memory of the gradient for a batch of pairs of texts."""
    config = SentenceConfig()

    def loss(params: Any, ids: jax.Array) -> jax.Array:
        def encode(part: tuple[jax.Array, Any]) -> jax.Array:
            texts, keys = part
            flat = texts.reshape(-1, length)
            mask = jnp.ones_like(flat)
            output = model(flat, attention_mask=mask, params=params, dropout_rng=keys, train=True)
            return config(output.last_hidden_state, mask).reshape(*texts.shape[:2], -1)

        keys = batch_keys(jax.random.key(0), jnp.arange(rows))
        vectors = map_chunks(encode, (ids, keys), chunk)
        valid = jnp.ones(rows, bool)
        return retrieval_losses.multiple_negatives_ranking(vectors, valid, chunk_rows=chunk).mean

    ids = jax.ShapeDtypeStruct((rows, 2, length), jnp.int32)
    step = jax.jit(jax.grad(loss)).lower(model.abstract_params, ids).compile()
    return step.memory_analysis().temp_size_in_bytes


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.split("\n")[0])
    parser.add_argument("--batches", type=int, nargs="+", default=[64, 512])
    parser.add_argument("--chunks", type=int, nargs="+", default=[8, 32, 128])
    parser.add_argument("--layers", type=int, default=6)
    parser.add_argument("--length", type=int, default=64, help="Tokens per text.")
    options = parser.parse_args()
    config = BertConfig(
        hidden_size=384,
        num_hidden_layers=options.layers,
        num_attention_heads=12,
        intermediate_size=1536,
    )
    model = FlaxAutoModel.from_config(config, _do_init=False)
    print("pairs per batch | micro-batch | temporary memory in MiB")
    for rows in options.batches:
        for chunk in (*options.chunks, None):
            size = temporary_bytes(model, rows, options.length, chunk) / 2**20
            print(f"{rows:>15} | {chunk or 'whole':>11} | {size:,.0f}", flush=True)


if __name__ == "__main__":
    main()
