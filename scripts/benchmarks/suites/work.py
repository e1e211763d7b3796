"""The least that a computation needs: floating-point operations, and bytes to and from memory.

Both are lower bounds from shapes alone, the same for every contestant: nothing is recomputed, no
activation leaves the caches, and every weight is read once where it is used. A share of the limit
can therefore be low for good reasons, but never too high.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from typing import Any

Shapes = Mapping[str, tuple[int, ...]]
#: Bytes a parameter of a training step: AdamW reads four arrays of float32 and writes three, the
#: gradient is written, and forward and backward pass read the weights.
TRAINING_BYTES = 4 * (4 + 3 + 1 + 2)
_TABLES = ("embed", "wpe", "wte", "shared", "relative_attention_bias")


def torch_shapes(module: Any) -> Shapes:
    """Return the shapes of a PyTorch model's parameters by name."""
    return {name: tuple(p.shape) for name, p in module.named_parameters()}


def jax_shapes(params: Any) -> Shapes:
    """Return the shapes of a parameter tree by name."""
    from hfseq.nn import trees

    return {".".join(map(str, path)): leaf.shape for path, leaf in trees.flatten(params).items()}


def parameters(shapes: Shapes) -> int:
    """Count parameters."""
    return sum(math.prod(shape) for shape in shapes.values())


def training_bytes(shapes: Shapes) -> float:
    """Return the bytes that a training step moves at least."""
    return float(TRAINING_BYTES * parameters(shapes))


def matrices(shapes: Shapes, vocab: int, side: str | None = None) -> int:
    """Count the weights that multiply every token: no tables, no biases, no norms.

    ``side`` takes those of the encoder or decoder alone.
    """
    return sum(
        math.prod(shape)
        for name, shape in shapes.items()
        if len(shape) >= 2 and vocab not in shape and not any(t in name for t in _TABLES)
        and (side is None or ("decoder" in name) == (side == "decoder"))
    )  # fmt: skip


def width_of(config: Any) -> int:
    """Return the width of the hidden states."""
    return getattr(config, "hidden_size", None) or config.d_model


def layers_of(config: Any) -> int:
    """Return the number of layers of a stack."""
    return config.num_hidden_layers


def forward_flops(shapes: Shapes, config: Any, rows: int, length: int) -> float:
    """Return the FLOPs of an encoder's forward pass without a head."""
    attention = 4.0 * layers_of(config) * width_of(config) * length
    return rows * length * (2.0 * matrices(shapes, config.vocab_size) + attention)


def forward_bytes(shapes: Shapes, config: Any, itemsize: int) -> float:
    """Return the bytes of an encoder's forward pass: every matrix is read once."""
    return float(itemsize * matrices(shapes, config.vocab_size))


def generation_work(
    shapes: Shapes, config: Any, rows: int, beams: int, prompt: int, new: int, itemsize: int
) -> dict[str, float]:
    """Return FLOPs and bytes of generating ``new`` tokens in each of ``rows``.

    Each new token reads the decoder's matrices, the head's table and what is cached: its own keys
    and values so far, and those of the source.
    """
    width, layers, vocab = width_of(config), layers_of(config), config.vocab_size
    two_sides = bool(config.is_encoder_decoder)
    decoder = matrices(shapes, vocab, "decoder" if two_sides else None) + vocab * width
    encoder = matrices(shapes, vocab, "encoder") if two_sides else 0
    before = rows * prompt * 2.0 * (encoder if two_sides else decoder - vocab * width)
    tokens = rows * beams * new
    seen = (0 if two_sides else prompt) + new / 2
    cached = 2 * layers * width * rows * (beams * seen + (prompt if two_sides else 0))
    attended = 4.0 * layers * width * (seen + (prompt if two_sides else 0))
    return {
        "flops": before + tokens * (2.0 * decoder + attended),
        "bytes": float(itemsize * (encoder + new * (decoder + cached))),
    }
