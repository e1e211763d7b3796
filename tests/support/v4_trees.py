"""Parameters and checkpoints of Flax classes of Transformers 4.

The classes themselves are not installed, so the structure of their parameters is written here.
"""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np


def bart_tree(config: Any, tied: bool = True) -> dict[str, Any]:
    """Returns random parameters as a tree of ``FlaxBartForConditionalGeneration``.

    If the model type of ``config`` is "pegasus", the tree is that of the Pegasus class. Pegasus has
    no learned position embeddings, and has a layer norm after the layers instead of before them.

    Args:
        config: The configuration.
        tied: Whether the output projection is tied to the embeddings.
    """
    random, width = np.random.default_rng(7), config.d_model
    pegasus = config.model_type == "pegasus"

    def array(*shape: int) -> np.ndarray:
        return random.normal(size=shape).astype(np.float32) * 0.2

    def linear(a: int, b: int) -> dict[str, Any]:
        return {"kernel": array(a, b), "bias": array(b)}

    def norm() -> dict[str, Any]:
        return {"scale": 1 + array(width), "bias": array(width)}

    def attention() -> dict[str, Any]:
        names = ("k_proj", "v_proj", "q_proj", "out_proj")
        return {name: linear(width, width) for name in names}

    def layer(inner: int, crossed: bool) -> dict[str, Any]:
        tree = {
            "self_attn": attention(),
            "self_attn_layer_norm": norm(),
            "fc1": linear(width, inner),
            "fc2": linear(inner, width),
            "final_layer_norm": norm(),
        }
        return tree | (
            {"encoder_attn": attention(), "encoder_attn_layer_norm": norm()} if crossed else {}
        )

    def side(depth: int, inner: int, crossed: bool) -> dict[str, Any]:
        layers = {"layers": {str(i): layer(inner, crossed) for i in range(depth)}}
        if pegasus:
            return layers | {"layer_norm": norm()}
        table = array(config.max_position_embeddings + 2, width)
        return layers | {"embed_positions": {"embedding": table}, "layernorm_embedding": norm()}

    tree = {
        "model": {
            "shared": {"embedding": array(config.vocab_size, width)},
            "encoder": side(config.encoder_layers, config.encoder_ffn_dim, False),
            "decoder": side(config.decoder_layers, config.decoder_ffn_dim, True),
        },
        "final_logits_bias": array(1, config.vocab_size),
    }
    return tree if tied else tree | {"lm_head": {"kernel": array(width, config.vocab_size)}}


def write_v4(folder: Path, config: Any, tree: dict[str, Any]) -> None:
    """Writes a checkpoint of Transformers 4: config.json and flax_model.msgpack."""
    from flax.serialization import msgpack_serialize

    config.save_pretrained(folder)
    (folder / "flax_model.msgpack").write_bytes(msgpack_serialize(tree))
