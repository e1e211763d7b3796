"""The configuration of the WMT Transformer, its presets, and its twin among the stock models."""

# Types are not postponed here (``from __future__``): as texts they would not be checked.

from typing import Any, ClassVar

from huggingface_hub.dataclasses import strict
from transformers import PretrainedConfig

from hfseq.errors import UsageError
from hfseq_plugins.common import Presets, invalid_choices, options_not_in_twin

CHOICES = {
    "norm": ("pre", "post"),
    "positions": ("sinusoidal", "learned"),
    "attention": ("softmax", "differential"),
    "kernel_init": ("xavier_uniform", "normal"),
}
# Options of the stock twins that follow from ours.
TWIN_ONLY = (
    *("hfseq", "tie_word_embeddings", "share_encoder_decoder_embeddings", "decoder_vocab_size"),
    "static_position_embeddings",
)


def _both(name: str) -> property:
    """An option of encoder and decoder under one name, read from the encoder."""

    def read(self: PretrainedConfig) -> int:
        return getattr(self, f"encoder_{name}")

    def write(self: PretrainedConfig, value: int) -> None:
        setattr(self, f"encoder_{name}", value)
        setattr(self, f"decoder_{name}", value)

    return property(read, write)


def _sizes(width: int, heads: int, inner: int, layers: int) -> dict[str, int]:
    """Return the options of two alike sides."""
    both = {"attention_heads": heads, "ffn_dim": inner, "layers": layers}
    named = {f"{side}_{n}": v for side in ("encoder", "decoder") for n, v in both.items()}
    return {"d_model": width, **named}


@strict
class WMTTransformerConfig(Presets, PretrainedConfig):
    """The Transformer of flax/examples/wmt; sizes are those of its base model, see ``presets``.

    Options have the names of PEGASUS and Marian where these have them. Beside them: ``norm`` (pre,
    post), ``positions`` (sinusoidal, learned), ``share_embeddings`` (one table for source and
    target), ``logits_via_embedding`` (else the head has a kernel and a bias of its own),
    ``qkv_dim`` (width of all heads together, ``d_model`` if None), ``attention_bias``,
    ``attention`` (softmax, differential), ``kernel_init`` (xavier_uniform, normal with
    ``init_std``) and ``embedding_init_std`` (``d_model ** -0.5`` if None). The names of the
    reference are understood: ``emb_dim``, ``mlp_dim``, ``num_layers``, ``num_heads``,
    ``dropout_rate``, ``attention_dropout_rate``, ``max_len``.

    **Raises:** UsageError (a ValueError) that lists every value that cannot work.
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

    def __post_init__(self, **kwargs: Any):
        for name in TWIN_ONLY:
            kwargs.pop(name, None)
        super().__post_init__(**kwargs)
        self.check()

    @property
    def inner_width(self) -> int:
        """The width of all heads together."""
        return self.d_model if self.qkv_dim is None else self.qkv_dim

    @property
    def tied(self) -> bool:
        """Whether one table serves source, target and head."""
        return self.share_embeddings and self.logits_via_embedding

    # -- what can work
    # -----------------------------------------------------------------------------------

    def check(self) -> None:
        """Raise one UsageError that lists every option that cannot work."""
        problems = [*invalid_choices(self, CHOICES), *self._wrong_sizes()]
        if problems:
            raise UsageError("WMTTransformerConfig: " + "; ".join(problems))

    def _wrong_sizes(self) -> list[str]:
        sizes = ["vocab_size", "max_position_embeddings", "d_model"]
        sides = ("encoder", "decoder")
        sizes += [f"{s}_{n}" for s in sides for n in ("layers", "ffn_dim", "attention_heads")]
        sizes += [] if self.qkv_dim is None else ["qkv_dim"]
        found = [
            f"{n}={getattr(self, n)} has to be at least 1" for n in sizes if getattr(self, n) < 1
        ]
        if found:
            return found
        rates = ["dropout", "attention_dropout", "activation_dropout"]
        rates += [f"{side}_layerdrop" for side in sides]
        found += [
            f"{n}={getattr(self, n)} is no probability below 1"
            for n in rates
            if not 0 <= getattr(self, n) < 1
        ]
        stds = [
            "init_std",
            *(["embedding_init_std"] if self.embedding_init_std is not None else []),
        ]
        found += [
            f"{n}={getattr(self, n)} has to be above 0" for n in stds if getattr(self, n) <= 0
        ]
        return found + [line for side in sides for line in self._wrong_heads(side)]

    def _wrong_heads(self, side: str) -> list[str]:
        name, width = f"{side}_attention_heads", self.inner_width
        heads = getattr(self, name)
        widths = "d_model" if self.qkv_dim is None else "qkv_dim"
        if width % heads:
            return [f"{widths}={width} is not a multiple of {name}={heads}"]
        if self.attention == "differential" and heads % 2:
            return [f"attention='differential' takes heads in pairs: {name}={heads} is odd"]
        return []

    # -- the twin
    # ----------------------------------------------------------------------------------------

    def twin_problems(self) -> list[str]:
        """Return why no stock class computes the same; an empty list where one does."""
        problems = []
        if self.attention == "differential":
            problems.append("attention='differential' is in no stock class")
        if self.inner_width != self.d_model:
            problems.append(
                f"qkv_dim={self.qkv_dim} differs from d_model={self.d_model}, which stock "
                "attention cannot"
            )
        if self.norm == "post" and self.positions == "learned":
            problems.append(
                "positions='learned' with norm='post': Marian computes its positions and drops a "
                "table when it saves"
            )
        return problems

    @property
    def twin_type(self) -> str:
        """The model type of the twin."""
        return "pegasus" if self.norm == "pre" else "marian"

    def twin(self) -> Any:
        """Return the configuration of the stock model that computes the same.

        PEGASUS for ``norm="pre"``, Marian for ``norm="post"``; its attribute ``hfseq`` holds what
        leads back here.

        **Raises:** UsageError where there is none, with the reasons of :meth:`twin_problems`.
        """
        from transformers import MarianConfig, PegasusConfig

        if problems := self.twin_problems():
            raise UsageError("no stock twin: " + "; ".join(problems))
        described = {**self.to_dict(), "tie_word_embeddings": self.tied}
        for name in ("model_type", "transformers_version", *NATIVE):
            described.pop(name, None)
        if self.norm == "post":
            described["share_encoder_decoder_embeddings"] = self.share_embeddings
            described["tie_word_embeddings"] = self.logits_via_embedding
        kind = PegasusConfig if self.norm == "pre" else MarianConfig
        twin = kind.from_dict(described)
        twin.architectures = self.architectures
        twin.hfseq = options_not_in_twin(self, twin.to_diff_dict())
        return twin


NATIVE = (
    *("norm", "positions", "share_embeddings", "logits_via_embedding", "qkv_dim"),
    *("attention_bias", "attention", "kernel_init", "embedding_init_std"),
)
