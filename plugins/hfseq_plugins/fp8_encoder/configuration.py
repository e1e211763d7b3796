"""The configuration of the FP8 encoder, its presets, and its twin among the stock models."""

# Types are not postponed here (``from __future__``): as texts they would not be checked.

from typing import Any, ClassVar

from huggingface_hub.dataclasses import strict
from transformers import PretrainedConfig

from hfseq.errors import UsageError
from hfseq_plugins.common import Presets, invalid_choices, options_not_in_twin

CHOICES = {
    "positions": ("learned", "none"),
    "head": ("pooled", "te_flatten"),
    "kernel_init": ("normal", "lecun_normal"),
}
# Activations that gate: the name of the whole, and the activation of the gating half.
GATED = {"geglu": "gelu_pytorch_tanh", "swiglu": "silu"}
# Options that the stock configuration does not have.
NATIVE = (
    *("positions", "use_bias", "gated_mlp", "final_norm", "head", "flatten_length"),
    *("kernel_init", "embedding_init_std", "embedding_dropout_prob"),
)
# Options of the stock configuration that this one does not have.
TWIN_ONLY = ("hfseq", "is_decoder", "add_cross_attention", "use_cache")
# The size of the twin's table of token types where this model has none.
TWIN_TYPE_VOCAB_SIZE = 2


def _sizes(width: int, heads: int, inner: int, layers: int) -> dict[str, int]:
    names = ("hidden_size", "num_attention_heads", "intermediate_size", "num_hidden_layers")
    return dict(zip(names, (width, heads, inner, layers), strict=True))


@strict
class Fp8EncoderConfig(Presets, PretrainedConfig):
    """A pre-norm BERT; sizes are those of its base model, see ``presets``.

    Options have the names of ``MegatronBertConfig`` where it has them. Beside them: ``positions``
    (learned, none), ``use_bias`` (biases of the projections inside the layers), ``gated_mlp`` (a
    second wide projection multiplies the activated one; ``hidden_act="geglu"`` sets it),
    ``final_norm`` (a norm ends the stack), ``head`` of classification (pooled, or te_flatten: all
    positions side by side through three products), ``flatten_length`` (positions that such a head
    reads), ``embedding_dropout_prob`` (``hidden_dropout_prob`` if None), ``kernel_init`` inside the
    layers (normal with ``initializer_range``, lecun_normal) and ``embedding_init_std``
    (``initializer_range`` if None). ``type_vocab_size=0`` leaves token types out. The preset ``te``
    is the encoder of TransformerEngine's examples/jax/encoder.

    **Raises:** UsageError (a ValueError) that lists every value that cannot work.
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

    def __post_init__(self, **kwargs: Any):
        for name in TWIN_ONLY:
            kwargs.pop(name, None)
        if self.hidden_act in GATED:
            self.hidden_act, self.gated_mlp = GATED[self.hidden_act], True
        super().__post_init__(**kwargs)
        self.check()

    # -- what can work
    # -----------------------------------------------------------------------------------

    def check(self) -> None:
        """Raise one UsageError that lists every option that cannot work."""
        problems = [
            *invalid_choices(self, CHOICES),
            *(self._wrong_sizes() or self._wrong_together()),
        ]
        if problems:
            raise UsageError("Fp8EncoderConfig: " + "; ".join(problems))

    def _wrong_sizes(self) -> list[str]:
        sizes = [*_sizes(0, 0, 0, 0), "vocab_size", "max_position_embeddings", "flatten_length"]
        given = {name: getattr(self, name) for name in sizes if getattr(self, name) is not None}
        found = [f"{name}={size} has to be at least 1" for name, size in given.items() if size < 1]
        if self.type_vocab_size < 0:
            found.append(f"type_vocab_size={self.type_vocab_size} has to be 0 (no types) or more")
        for name in (
            "hidden_dropout_prob",
            "attention_probs_dropout_prob",
            "embedding_dropout_prob",
        ):
            rate = getattr(self, name)
            if rate is not None and not 0 <= rate < 1:
                found.append(f"{name}={rate} is no probability below 1")
        for name in ("initializer_range", "embedding_init_std", "layer_norm_eps"):
            value = getattr(self, name)
            if value is not None and value <= 0:
                found.append(f"{name}={value} has to be above 0")
        return found

    def _wrong_together(self) -> list[str]:
        found, heads, length = [], self.num_attention_heads, self.flatten_length
        if self.hidden_size % heads:
            found.append(
                f"hidden_size={self.hidden_size} is not a multiple of num_attention_heads={heads}"
            )
        if self.head == "te_flatten" and length is None:
            found.append(
                "head='te_flatten' needs flatten_length, the number of tokens in a row (32 in the "
                "preset 'te')"
            )
        places = self.max_position_embeddings if self.positions == "learned" else None
        if length is not None and places is not None and length > places:
            found.append(f"flatten_length={length} exceeds max_position_embeddings={places}")
        return found

    # -- the twin
    # ----------------------------------------------------------------------------------------

    twin_type: ClassVar[str] = "megatron-bert"

    def twin_problems(self) -> list[str]:
        """Return why MegatronBERT does not compute the same; an empty list where it does."""
        problems = []
        if self.head == "te_flatten":
            problems.append("head='te_flatten' reads all positions, stock classifiers the first")
        if self.gated_mlp:
            problems.append("gated_mlp=True (GEGLU) is in no stock BERT")
        if not self.final_norm:
            problems.append("final_norm=False leaves out a norm that MegatronBERT always has")
        return problems

    def twin(self) -> Any:
        """Return the ``MegatronBertConfig`` of the stock model that computes the same.

        Its attribute ``hfseq`` holds what leads back here.

        **Raises:** UsageError where there is none, with the reasons of :meth:`twin_problems`.
        """
        from transformers import MegatronBertConfig

        if problems := self.twin_problems():
            raise UsageError("no stock twin: " + "; ".join(problems))
        described = {
            **self.to_dict(),
            "type_vocab_size": self.type_vocab_size or TWIN_TYPE_VOCAB_SIZE,
        }
        for name in ("model_type", "transformers_version", *NATIVE):
            described.pop(name, None)
        twin = MegatronBertConfig.from_dict(described)
        twin.architectures = self.architectures
        twin.hfseq = options_not_in_twin(self, twin.to_diff_dict())
        return twin
