"""The configuration of the WMT Transformer, its presets, and its conversion to Transformers."""

# No `from __future__ import annotations` here: `strict` cannot check types that are strings.

from typing import Any, ClassVar

from huggingface_hub.dataclasses import strict
from transformers import PreTrainedConfig

from hfseq.errors import UsageError
from hfseq_plugins.common import Presets, invalid_choices, options_not_in_twin

CHOICES = {
    "norm": ("pre", "post"),
    "positions": ("sinusoidal", "learned"),
    "attention": ("softmax", "differential"),
    "kernel_init": ("xavier_uniform", "normal"),
}
# Options of PegasusConfig and MarianConfig that follow from other options of this configuration.
TWIN_ONLY = (
    *("hfseq", "tie_word_embeddings", "share_encoder_decoder_embeddings", "decoder_vocab_size"),
    "static_position_embeddings",
)


def _both(name: str) -> property:
    """Creates a property that sets the same option of the encoder and of the decoder.

    Reading the property returns the option of the encoder.
    """

    def read(self: PreTrainedConfig) -> int:
        return getattr(self, f"encoder_{name}")

    def write(self: PreTrainedConfig, value: int) -> None:
        setattr(self, f"encoder_{name}", value)
        setattr(self, f"decoder_{name}", value)

    return property(read, write)


def _sizes(width: int, heads: int, inner: int, layers: int) -> dict[str, int]:
    """Returns the options of an encoder and a decoder of the same size."""
    sizes = {"attention_heads": heads, "ffn_dim": inner, "layers": layers}
    options = {f"{side}_{n}": v for side in ("encoder", "decoder") for n, v in sizes.items()}
    return {"d_model": width, **options}


@strict
class WMTTransformerConfig(Presets, PreTrainedConfig):
    """Configuration of the Transformer of flax/examples/wmt.

    The defaults are the sizes of the base model, see `presets`. Options that are not described here
    have the same meaning as in `PegasusConfig` and `MarianConfig`. The option names of the Flax
    example are accepted as aliases: `emb_dim`, `mlp_dim`, `num_layers`, `num_heads`,
    `dropout_rate`, `attention_dropout_rate`, `max_len`.

    Args:
        norm: Whether norms precede (`"pre"`) or follow (`"post"`) the blocks of a layer.
        positions: Position embeddings, `"sinusoidal"` or `"learned"`.
        share_embeddings: Whether source and target share their token embeddings.
        logits_via_embedding: Whether the head is tied to the target embeddings. Otherwise it has a
            kernel and a bias.
        qkv_dim: Total width of all attention heads. `None` means `d_model`.
        attention_bias: Whether the projections of attention have biases.
        attention: `"softmax"` or `"differential"`.
        kernel_init: `"xavier_uniform"`, or `"normal"` with standard deviation `init_std`.
        embedding_init_std: Standard deviation of initial token embeddings. `None` means
            `d_model ** -0.5`.

    Raises:
        UsageError: At least one value is invalid. The message lists all invalid values. The error
            is also a ValueError.
    """

    model_type = "wmt_transformer"
    keys_to_ignore_at_inference = ["past_key_values"]
    attribute_map = {
        "hidden_size": "d_model",
        "num_hidden_layers": "encoder_layers",
        "num_attention_heads": "encoder_attention_heads",
        "emb_dim": "d_model",
        "dropout_rate": "dropout",
        "attention_dropout_rate": "attention_dropout",
        "max_len": "max_position_embeddings",
    }
    presets: ClassVar[dict[str, dict[str, Any]]] = {
        "tiny": _sizes(128, heads=4, inner=512, layers=2),
        "base": _sizes(512, heads=8, inner=2048, layers=6),
        "big": _sizes(1024, heads=16, inner=4096, layers=6),
    }

    vocab_size: int = 32000
    max_position_embeddings: int = 1024
    d_model: int = 512
    encoder_layers: int = 6
    encoder_ffn_dim: int = 2048
    encoder_attention_heads: int = 8
    decoder_layers: int = 6
    decoder_ffn_dim: int = 2048
    decoder_attention_heads: int = 8
    encoder_layerdrop: float | int = 0.0
    decoder_layerdrop: float | int = 0.0
    activation_function: str = "relu"
    dropout: float | int = 0.1
    attention_dropout: float | int = 0.1
    activation_dropout: float | int = 0.1
    init_std: float = 0.02
    scale_embedding: bool = True
    use_cache: bool = True
    is_encoder_decoder: bool = True
    is_decoder: bool = False
    pad_token_id: int | None = 0
    bos_token_id: int | None = 1
    eos_token_id: int | list[int] | None = 2
    decoder_start_token_id: int | None = 0
    forced_eos_token_id: int | list[int] | None = None
    norm: str = "pre"
    positions: str = "sinusoidal"
    share_embeddings: bool = True
    logits_via_embedding: bool = True
    qkv_dim: int | None = None
    attention_bias: bool = True
    attention: str = "softmax"
    kernel_init: str = "xavier_uniform"
    embedding_init_std: float | None = None

    num_layers = _both("layers")
    num_heads = _both("attention_heads")
    mlp_dim = _both("ffn_dim")

    def __post_init__(self, **kwargs: Any) -> None:
        for name in TWIN_ONLY:
            kwargs.pop(name, None)
        super().__post_init__(**kwargs)
        self.check()

    @property
    def inner_width(self) -> int:
        """The total width of all attention heads."""
        return self.d_model if self.qkv_dim is None else self.qkv_dim

    @property
    def tied(self) -> bool:
        """Whether the source embeddings, the target embeddings and the head are all tied."""
        return self.share_embeddings and self.logits_via_embedding

    # -- validation
    # -----------------------------------------------------------------------------------

    def check(self) -> None:
        """Raises a UsageError that lists all invalid options."""
        problems = [*invalid_choices(self, CHOICES), *self._wrong_sizes()]
        if problems:
            raise UsageError("WMTTransformerConfig: " + "; ".join(problems))

    def _wrong_sizes(self) -> list[str]:
        sizes = ["vocab_size", "max_position_embeddings", "d_model"]
        sides = ("encoder", "decoder")
        sizes += [f"{s}_{n}" for s in sides for n in ("layers", "ffn_dim", "attention_heads")]
        sizes += [] if self.qkv_dim is None else ["qkv_dim"]
        problems = [
            f"{n}={getattr(self, n)} has to be at least 1" for n in sizes if getattr(self, n) < 1
        ]
        if problems:
            return problems
        rates = ["dropout", "attention_dropout", "activation_dropout"]
        rates += [f"{side}_layerdrop" for side in sides]
        problems += [
            f"{n}={getattr(self, n)} has to be in [0, 1)"
            for n in rates
            if not 0 <= getattr(self, n) < 1
        ]
        stds = [
            "init_std",
            *(["embedding_init_std"] if self.embedding_init_std is not None else []),
        ]
        problems += [
            f"{n}={getattr(self, n)} has to be greater than 0"
            for n in stds
            if getattr(self, n) <= 0
        ]
        return problems + [problem for side in sides for problem in self._wrong_heads(side)]

    def _wrong_heads(self, side: str) -> list[str]:
        name, width = f"{side}_attention_heads", self.inner_width
        heads = getattr(self, name)
        widths = "d_model" if self.qkv_dim is None else "qkv_dim"
        if width % heads:
            return [f"{widths}={width} is not a multiple of {name}={heads}"]
        if self.attention == "differential" and heads % 2:
            return [f"attention='differential' groups heads in pairs: {name}={heads} is odd"]
        return []

    # -- the twin, a PegasusConfig or MarianConfig
    # ----------------------------------------------------------------------------------------

    def twin_problems(self) -> list[str]:
        """Returns the reasons why no class of Transformers computes the same function, if any."""
        problems = []
        if self.attention == "differential":
            problems.append("PEGASUS and Marian have no option like attention='differential'")
        if self.inner_width != self.d_model:
            problems.append(
                f"qkv_dim={self.qkv_dim} differs from d_model={self.d_model}, which PEGASUS and "
                "Marian do not support"
            )
        if self.norm == "post" and self.positions == "learned":
            problems.append(
                "positions='learned' with norm='post' is not possible in Marian, which always has "
                "sinusoidal positions"
            )
        return problems

    @property
    def twin_type(self) -> str:
        """The model type of the twin."""
        return "pegasus" if self.norm == "pre" else "marian"

    def twin(self) -> Any:
        """Returns the configuration of a Transformers model that computes the same function.

        This model is PEGASUS for `norm="pre"` and Marian for `norm="post"`. The attribute `hfseq`
        of the result contains the options that are needed to restore this configuration.

        Raises:
            UsageError: The configuration has no twin, for the reasons of :meth:`twin_problems`.
        """
        from transformers import MarianConfig, PegasusConfig

        if problems := self.twin_problems():
            raise UsageError("no class of Transformers is equivalent: " + "; ".join(problems))
        options = {**self.to_dict(), "tie_word_embeddings": self.tied}
        for name in ("model_type", "transformers_version", *NATIVE):
            options.pop(name, None)
        if self.norm == "post":
            options["share_encoder_decoder_embeddings"] = self.share_embeddings
            options["tie_word_embeddings"] = self.logits_via_embedding
        config_class = PegasusConfig if self.norm == "pre" else MarianConfig
        twin = config_class.from_dict(options)
        twin.architectures = self.architectures
        twin.hfseq = options_not_in_twin(self, twin.to_diff_dict())
        return twin


# Options that PegasusConfig and MarianConfig do not have.
NATIVE = (
    *("norm", "positions", "share_embeddings", "logits_via_embedding", "qkv_dim"),
    *("attention_bias", "attention", "kernel_init", "embedding_init_std"),
)
