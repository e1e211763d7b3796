"""The configuration of the VQ Transformer (Lingle, 2024), for PyTorch."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

from transformers import PretrainedConfig

CHOICES = {
    "head_type": ("shga", "mhga", "mha", "mqa", "gqa"),
    "attention_type": ("vq", "full", "vq_quadratic"),
    "reduction": ("recurrent", "serial", "matmul", "associative_scan"),
}
DROPOUTS = ("embedding_dropout", "sinusoid_dropout", "residual_dropout", "layer_dropout")
POSITIVE = (
    *("vocab_size", "hidden_size", "num_hidden_layers", "head_dim", "num_codes", "block_size"),
    *("sinusoid_base", "rms_norm_eps", "count_floor"),
)
COUNTS = ("num_attention_heads", "num_key_value_heads", "value_dim", "intermediate_size")
NOT_NEGATIVE = ("commitment_cost", "initializer_scale", "embedding_initializer_range")


class VQTransformerConfig(PretrainedConfig):
    """Configuration of a VQ Transformer.

    Each query attends to the last `window_size` tokens with relative positions, and to all older
    tokens through their codes.

    Args:
        head_type: Type of attention heads. With `"shga"` (one gated head) and `"mhga"` (several
            gated heads), a layer has two attention blocks and no MLP. With `"mha"`, `"mqa"` and
            `"gqa"`, a layer has an attention block and an MLP.
        head_dim: Width of queries and keys.
        value_dim: Width of the values of a key head. The default `None` means `head_dim`, or with
            gated heads a total of `2 * hidden_size` for all heads.
        num_codes: Number of codes per key head.
        window_size: Number of earlier tokens that queries attend to individually.
        block_size: Number of tokens per block. It only affects speed and memory.
        reduction: Only used by the JAX version.
        attention_type: `"vq"`, `"full"` (attention to the original keys, with quadratic cost) or
            `"vq_quadratic"` (the same as `"vq"` in PyTorch).

    Raises:
        ValueError: At least one value is invalid. The message lists all of them.
    """

    model_type = "vq_transformer"
    keys_to_ignore_at_inference = ["past_key_values", "cache"]

    vocab_size: int = 259
    hidden_size: int = 768
    num_hidden_layers: int = 24
    head_type: str = "shga"
    num_attention_heads: int | None = None
    num_key_value_heads: int | None = None
    head_dim: int = 128
    value_dim: int | None = None
    intermediate_size: int | None = None
    num_codes: int = 512
    window_size: int = 512
    block_size: int = 512
    reduction: str = "recurrent"
    attention_type: str = "vq"
    use_compressive_cache: bool = True
    stop_gradient_cache: bool = False
    sinusoid_base: float | int = 1e5
    absolute_positions: bool = False
    norm_affine: bool = True
    rms_norm_eps: float = 1e-6
    final_norm: bool = True
    tie_word_embeddings: bool = False
    head_bias: bool = False
    scale_head_bias: bool = True
    logit_scale: float | int = 1.0
    commitment_cost: float | int = 1e-4
    ema_decay: float | int = 0.99
    count_floor: float | int = 0.01
    embedding_dropout: float | int = 0.0
    sinusoid_dropout: float | int = 0.0
    residual_dropout: float | int = 0.0
    layer_dropout: float | int = 0.0
    initializer_scale: float | int = 1.0
    embedding_initializer_range: float | int = 1.0
    use_cache: bool = True
    pad_token_id: int | None = 0
    bos_token_id: int | None = None
    eos_token_id: int | list[int] | None = 1

    def __post_init__(self, **kwargs: Any) -> None:
        super().__post_init__(**kwargs)
        self.check()

    # -- derived sizes
    # -----------------------------------------------------------------------------------

    @property
    def gated(self) -> bool:
        """Whether heads are gated. Layers with gated heads have a second attention, but no MLP."""
        return self.head_type in ("shga", "mhga")

    @property
    def query_heads(self) -> int:
        """The number of query heads."""
        if self.head_type == "shga":
            return 1
        return self.num_attention_heads or max(1, self.hidden_size // self.head_dim)

    @property
    def key_heads(self) -> int:
        """The number of key-value heads. Each has a codebook."""
        if self.head_type in ("shga", "mqa"):
            return 1
        return self.num_key_value_heads or self.query_heads

    @property
    def value_width(self) -> int:
        """The width of the values of one key head."""
        if self.value_dim is not None:
            return self.value_dim
        return 2 * self.hidden_size // self.query_heads if self.gated else self.head_dim

    @property
    def inner_width(self) -> int:
        """The inner width of the MLP, if there is one."""
        return self.intermediate_size or self.hidden_size * (5 if self.head_type == "mqa" else 4)

    # -- validation
    # -----------------------------------------------------------------------------------

    def check(self) -> None:
        """Raises a ValueError that lists all invalid options."""
        problems = list(self._wrong_options())
        sizes = (self.hidden_size, self.head_dim, self.query_heads, self.key_heads)
        if min(sizes) > 0 and self.head_type in CHOICES["head_type"]:
            problems += self._wrong_heads()
        if problems:
            raise ValueError("VQTransformerConfig: " + "; ".join(problems))

    def _wrong_options(self) -> Iterator[str]:
        for name, choices in CHOICES.items():
            if getattr(self, name) not in choices:
                yield f"{name}='{getattr(self, name)}' is unknown (known: {', '.join(choices)})"
        for name in POSITIVE:
            if not getattr(self, name) > 0:
                yield f"{name}={getattr(self, name)} has to be greater than 0"
        for name in COUNTS:
            value = getattr(self, name)
            if value is not None and value < 1:
                yield f"{name}={value} has to be at least 1"
        if self.window_size < 0:
            yield f"window_size={self.window_size} has to be 0 or more"
        for name in DROPOUTS:
            if not 0 <= getattr(self, name) < 1:
                yield f"{name}={getattr(self, name)} has to be in [0, 1)"
        if not 0 <= self.ema_decay <= 1:
            yield f"ema_decay={self.ema_decay} has to be in [0, 1]"
        for name in NOT_NEGATIVE:
            if not getattr(self, name) >= 0:
                yield f"{name}={getattr(self, name)} has to be 0 or more"
        if self.hidden_size % 2:
            yield f"hidden_size={self.hidden_size} is odd, but sinusoids need an even width"

    def _wrong_heads(self) -> Iterator[str]:
        head_type = self.head_type
        queries = self.num_attention_heads
        keys = self.num_key_value_heads
        if head_type == "shga" and (queries or 1) != 1:
            yield f"head_type=shga has one head, but num_attention_heads={queries}. Use mhga"
        if head_type in ("shga", "mqa") and (keys or 1) != 1:
            yield f"head_type={head_type} has one key head, but num_key_value_heads={keys}. Use gqa"
        if head_type in ("mha", "mhga") and keys not in (None, self.query_heads):
            yield (
                f"head_type={head_type} has a key head for each of num_attention_heads="
                f"{self.query_heads}, but num_key_value_heads={keys}. Use gqa"
            )
        if self.query_heads % self.key_heads:
            yield (
                f"num_attention_heads={self.query_heads} is not a multiple of "
                f"num_key_value_heads={self.key_heads}"
            )
        if not self.gated and queries is None and self.hidden_size % self.head_dim:
            yield (
                f"hidden_size={self.hidden_size} is not a multiple of head_dim={self.head_dim}. "
                "Set num_attention_heads"
            )
        if self.gated and self.value_dim is None and 2 * self.hidden_size % self.query_heads:
            yield (
                f"2 * hidden_size={2 * self.hidden_size} is not a multiple of "
                f"num_attention_heads={self.query_heads}. Set value_dim"
            )
