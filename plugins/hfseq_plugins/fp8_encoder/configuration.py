"""The configuration of the FP8 encoder, its presets, and its conversion to MegatronBERT."""

# No `from __future__ import annotations` here: `strict` cannot check types that are strings.

from typing import Any, ClassVar

from huggingface_hub.dataclasses import strict
from transformers import PreTrainedConfig

from hfseq.errors import UsageError
from hfseq_plugins.common import Presets, invalid_choices, options_not_in_twin

CHOICES = {
    "positions": ("learned", "none"),
    "head": ("pooled", "te_flatten"),
    "kernel_init": ("normal", "lecun_normal"),
}
# Values of `hidden_act` for gated MLPs, with the activation function of the gate.
GATED = {"geglu": "gelu_pytorch_tanh", "swiglu": "silu"}
# Options that MegatronBertConfig does not have.
NATIVE = (
    *("positions", "use_bias", "gated_mlp", "final_norm", "head", "flatten_length"),
    *("kernel_init", "embedding_init_std", "embedding_dropout_prob"),
)
# Options of MegatronBertConfig that this configuration does not have.
TWIN_ONLY = ("hfseq", "is_decoder", "add_cross_attention", "use_cache")
# Number of token types of the MegatronBertConfig if this model has no token types.
TWIN_TYPE_VOCAB_SIZE = 2


def _sizes(width: int, heads: int, inner: int, layers: int) -> dict[str, int]:
    names = ("hidden_size", "num_attention_heads", "intermediate_size", "num_hidden_layers")
    return dict(zip(names, (width, heads, inner, layers), strict=True))


@strict
class Fp8EncoderConfig(Presets, PreTrainedConfig):
    """Configuration of a pre-norm BERT for FP8 training.

    The defaults are the sizes of the base model, see `presets`. The preset `te` is the encoder of
    TransformerEngine's examples/jax/encoder. Options that are not described here have the same
    meaning as in `MegatronBertConfig`.

    Args:
        type_vocab_size: Number of token types. 0 for a model without token types.
        hidden_act: Activation function. `"geglu"` and `"swiglu"` also set `gated_mlp`.
        positions: `"learned"` or `"none"`.
        use_bias: Whether the projections inside the layers have biases.
        gated_mlp: Whether the activations of the MLP are multiplied by a second projection.
        final_norm: Whether a norm follows the last layer.
        head: Classification head: `"pooled"` for the first token, or `"te_flatten"` for the
            concatenation of all positions.
        flatten_length: Number of positions of the `"te_flatten"` head.
        embedding_dropout_prob: Dropout rate of the embeddings. `None` means `hidden_dropout_prob`.
        kernel_init: Initialization inside the layers: `"normal"` with standard deviation
            `initializer_range`, or `"lecun_normal"`.
        embedding_init_std: Standard deviation of initial embeddings. `None` means
            `initializer_range`.

    Raises:
        UsageError: At least one value is invalid. The message lists all invalid values. The error
            is also a ValueError.
    """

    model_type = "fp8_encoder"
    presets: ClassVar[dict[str, dict[str, Any]]] = {
        "tiny": _sizes(128, heads=4, inner=512, layers=2),
        "base": _sizes(768, heads=12, inner=3072, layers=12),
        "large": _sizes(1024, heads=16, inner=4096, layers=24),
        "te": {
            **_sizes(256, heads=8, inner=1024, layers=1),
            **{"hidden_act": "gelu_pytorch_tanh", "positions": "none", "type_vocab_size": 0},
            **{"use_bias": False, "final_norm": False, "embedding_dropout_prob": 0.0},
            **{"head": "te_flatten", "flatten_length": 32},
            **{"kernel_init": "lecun_normal", "embedding_init_std": 256**-0.5},
        },
    }

    vocab_size: int = 30522
    hidden_size: int = 768
    num_hidden_layers: int = 12
    num_attention_heads: int = 12
    intermediate_size: int = 3072
    hidden_act: str = "gelu"
    hidden_dropout_prob: float | int = 0.1
    attention_probs_dropout_prob: float | int = 0.1
    max_position_embeddings: int = 512
    type_vocab_size: int = 2
    initializer_range: float = 0.02
    layer_norm_eps: float = 1e-6
    pad_token_id: int | None = 0
    bos_token_id: int | None = None
    eos_token_id: int | list[int] | None = None
    tie_word_embeddings: bool = True
    positions: str = "learned"
    use_bias: bool = True
    gated_mlp: bool = False
    final_norm: bool = True
    head: str = "pooled"
    flatten_length: int | None = None
    kernel_init: str = "normal"
    embedding_init_std: float | None = None
    embedding_dropout_prob: float | int | None = None

    def __post_init__(self, **kwargs: Any) -> None:
        for name in TWIN_ONLY:
            kwargs.pop(name, None)
        if self.hidden_act in GATED:
            self.hidden_act, self.gated_mlp = GATED[self.hidden_act], True
        super().__post_init__(**kwargs)
        self.check()

    # -- validation
    # -----------------------------------------------------------------------------------

    def check(self) -> None:
        """Raises a UsageError that lists all invalid options."""
        problems = [
            *invalid_choices(self, CHOICES),
            *(self._wrong_sizes() or self._wrong_together()),
        ]
        if problems:
            raise UsageError("Fp8EncoderConfig: " + "; ".join(problems))

    def _wrong_sizes(self) -> list[str]:
        sizes = [*_sizes(0, 0, 0, 0), "vocab_size", "max_position_embeddings", "flatten_length"]
        values = {name: getattr(self, name) for name in sizes if getattr(self, name) is not None}
        problems = [
            f"{name}={size} has to be at least 1" for name, size in values.items() if size < 1
        ]
        if self.type_vocab_size < 0:
            problems.append(
                f"type_vocab_size={self.type_vocab_size} has to be 0 (no types) or more"
            )
        for name in (
            "hidden_dropout_prob",
            "attention_probs_dropout_prob",
            "embedding_dropout_prob",
        ):
            rate = getattr(self, name)
            if rate is not None and not 0 <= rate < 1:
                problems.append(f"{name}={rate} has to be in [0, 1)")
        for name in ("initializer_range", "embedding_init_std", "layer_norm_eps"):
            value = getattr(self, name)
            if value is not None and value <= 0:
                problems.append(f"{name}={value} has to be greater than 0")
        return problems

    def _wrong_together(self) -> list[str]:
        problems, heads, length = [], self.num_attention_heads, self.flatten_length
        if self.hidden_size % heads:
            problems.append(
                f"hidden_size={self.hidden_size} is not a multiple of num_attention_heads={heads}"
            )
        if self.head == "te_flatten" and length is None:
            problems.append(
                "head='te_flatten' needs flatten_length, the number of tokens per row (32 in the "
                "preset 'te')"
            )
        positions = self.max_position_embeddings if self.positions == "learned" else None
        if length is not None and positions is not None and length > positions:
            problems.append(f"flatten_length={length} exceeds max_position_embeddings={positions}")
        return problems

    # -- the twin, a MegatronBertConfig
    # ----------------------------------------------------------------------------------------

    twin_type: ClassVar[str] = "megatron-bert"

    def twin_problems(self) -> list[str]:
        """Returns the reasons why MegatronBERT cannot compute the same function, if any."""
        problems = []
        if self.head == "te_flatten":
            problems.append(
                "head='te_flatten' uses all positions, but MegatronBERT's head uses only the first"
            )
        if self.gated_mlp:
            problems.append("gated_mlp=True (GEGLU) is not an option of MegatronBERT")
        if not self.final_norm:
            problems.append("final_norm=False removes a norm that MegatronBERT always has")
        return problems

    def twin(self) -> Any:
        """Returns the `MegatronBertConfig` of a model that computes the same function.

        Its attribute `hfseq` contains the options that are needed to restore this configuration.

        Raises:
            UsageError: The configuration has no twin, for the reasons of :meth:`twin_problems`.
        """
        from transformers import MegatronBertConfig

        if problems := self.twin_problems():
            raise UsageError("no class of Transformers is equivalent: " + "; ".join(problems))
        options = {
            **self.to_dict(),
            "type_vocab_size": self.type_vocab_size or TWIN_TYPE_VOCAB_SIZE,
        }
        for name in ("model_type", "transformers_version", *NATIVE):
            options.pop(name, None)
        twin = MegatronBertConfig.from_dict(options)
        twin.architectures = self.architectures
        twin.hfseq = options_not_in_twin(self, twin.to_diff_dict())
        return twin
