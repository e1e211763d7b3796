"""Options that describe how each Llama-style family differs from Llama.

A configuration contains the properties of a single model, such as its sizes. `FAMILY_OPTIONS`
contains the properties that all models of a family share, such as the names and positions of norms.
"""

from __future__ import annotations

import dataclasses

from transformers import PreTrainedConfig

from hfseq import nn
from hfseq.errors import UsageError

FULL, SLIDING = "full_attention", "sliding_attention"


@dataclasses.dataclass(frozen=True)
class NormNames:
    """Names of the norms of a layer. `None` stands for a position without a norm.

    Attributes:
        before_attention: The norm of the input of attention.
        after_attention: The norm of the output of attention, before it is added to the residual.
        before_mlp: The norm of the input of the feed-forward block.
        after_mlp: The norm of the output of the feed-forward block.
    """

    before_attention: str | None = "input_layernorm"
    after_attention: str | None = None
    before_mlp: str | None = "post_attention_layernorm"
    after_mlp: str | None = None


@dataclasses.dataclass(frozen=True)
class ExpertOptions:
    """Properties of the mixtures of experts of a family.

    Attributes:
        block_name: Name of the block with the router and the experts in checkpoints.
        router_name: Name of the router.
        router_bias: Whether the router has a bias.
        normalize: Whether the weights of the chosen experts are divided by their sum. A string is
            the name of the attribute of the configuration that contains this value.
        inner_size: Name of the attribute of the configuration that contains the number of inner
            features of an expert.
        shared_expert: Whether an additional expert processes all tokens. Its output is multiplied
            by the sigmoid of a linear function of the token.
        clamped: Whether the experts are those of gpt-oss, which have biases, another layout, and a
            clamped activation function.
    """

    block_name: str = "mlp"
    router_name: str = "gate"
    router_bias: bool = False
    normalize: bool | str = True
    inner_size: str = "intermediate_size"
    shared_expert: bool = False
    clamped: bool = False


@dataclasses.dataclass(frozen=True)
class FamilyOptions:
    """Differences between a family and Llama that the configuration does not describe.

    An option of the type `bool | str` is either the value itself, or the name of the attribute of
    the configuration that contains the value.

    Attributes:
        causal: Whether attention is causal.
        sliding_window: Whether every layer uses the configuration's `sliding_window`, if it is set.
        window_required: Whether a model with sliding layers needs a `sliding_window`.
        softcap: Whether attention scores are capped by the configuration's
            `attn_logit_softcapping`.
        embeddings_name: Name of the token embeddings.
        attention_name: Name of the attention module of a layer.
        fused_qkv: Name of the projection that computes queries, keys and values together, or `""`.
        qkv_per_head: The order of the outputs of this projection. If true, the outputs contain
            query, key and value of the first head, then those of the next head. Otherwise, the
            queries of all heads precede all keys, and these precede all values.
        qkv_bias: Whether the query, key and value projections have biases.
        output_bias: Whether the output projection of attention has a bias.
        output_name: Name of the output projection of attention.
        square_output: Whether the output projection must have as many inputs as outputs.
        clip_qkv: Whether queries, keys and values are clipped to the range from `-clip_qkv` to
            `clip_qkv` of the configuration.
        qk_norm: How queries and keys are normalized before rotary embeddings are applied.

            * `""`: They are not normalized.
            * `"rms"`: RMSNorm of each head. All heads share the weights.
            * `"rms_all_heads"`: RMSNorm of all heads together.
            * `"layer"`: LayerNorm of each head. All heads share the weights.
            * `"layer_per_head"`: LayerNorm of each head. The weights are a matrix with a row per
              head.
            * `"layer_list"`: LayerNorm of each head. The weights are in a separate module per head.
        qk_norm_enabled: Whether the norm in `qk_norm` is used.
        qk_norm_name: Suffix of the names of these norms, which start with `q_` and `k_`.
        rotary: The layers with rotary embeddings: `"all"`, or `"sliding"` for layers with a sliding
            window. With `"sliding"`, a model without a `sliding_window` has rotary embeddings in
            all layers, unless `window_required` is set.
        partial_rotary: Whether only the fraction `partial_rotary_factor` of each head is rotated.
        interleaved: Whether rotary embeddings rotate pairs of adjacent features. Otherwise, they
            pair the features of the first half of a head with those of the second half.
        mlp_bias: Whether the projections of the feed-forward block have biases.
        fused_mlp: Whether one projection computes the gate and the gated features of the
            feed-forward block (`gate_up_proj`).
        mlp_names: Names of the input and output projection of a feed-forward block without a gate.
            Empty for gated blocks.
        norm: Type of the norms: `"rms"`, `"layer"`, `"layer_without_bias"` or
            `"layer_without_weights"`.
        norm_epsilon: The epsilon of the norms, or the name of the attribute of the configuration
            that contains it.
        norm_offset: Number that is added to the weights of norms.
        norm_names: Names and positions of the norms of a layer.
        final_norm_name: Name of the norm after the last layer.
        parallel: Whether attention and the feed-forward block run in parallel on the input of the
            layer, instead of one after the other.
        shared_norm: Whether attention and the feed-forward block of a parallel layer share one
            norm. Otherwise, each of them has its own norm.
        scale_embeddings: Whether embeddings are multiplied by the square root of the hidden size.
        multipliers: Whether the configuration contains the factors of embeddings, attention scores,
            residual branches and logits (Granite).
        logit_scale: Whether logits are multiplied by the configuration's `logit_scale`.
        head_bias: Whether the language modeling head has a bias.
        embedding_dropout: Name of the attribute of the configuration that contains the dropout rate
            of the embeddings, or `""` for no dropout.
        attention_output_dropout: As `embedding_dropout`, for the output of attention.
        mlp_dropout: As `embedding_dropout`, for the output of the feed-forward block.
        sinks: Whether each head has an attention sink: a trained score that is part of the softmax
            but belongs to no key.
        experts: Properties of mixtures of experts, or `None` for a family without them.
    """

    causal: bool = True
    sliding_window: bool = False
    window_required: bool = False
    softcap: bool = False
    embeddings_name: str = "embed_tokens"
    attention_name: str = "self_attn"
    fused_qkv: str = ""
    qkv_per_head: bool = False
    qkv_bias: bool | str = False
    output_bias: bool | str = False
    output_name: str = "o_proj"
    square_output: bool = False
    clip_qkv: bool = False
    qk_norm: str = ""
    qk_norm_enabled: bool | str = True
    qk_norm_name: str = "norm"
    rotary: str = "all"
    partial_rotary: bool = False
    interleaved: bool = False
    mlp_bias: bool | str = False
    fused_mlp: bool = False
    mlp_names: tuple[str, ...] = ()
    norm: str = "rms"
    norm_epsilon: float | str = "rms_norm_eps"
    norm_offset: float = 0.0
    norm_names: NormNames = NormNames()
    final_norm_name: str = "norm"
    parallel: bool | str = False
    shared_norm: bool = True
    scale_embeddings: bool = False
    multipliers: bool = False
    logit_scale: bool = False
    head_bias: bool = False
    embedding_dropout: str = ""
    attention_output_dropout: str = ""
    mlp_dropout: str = ""
    sinks: bool = False
    experts: ExpertOptions | None = None


_LLAMA = FamilyOptions(qkv_bias="attention_bias", output_bias="attention_bias", mlp_bias="mlp_bias")
_MISTRAL = FamilyOptions(sliding_window=True)
_QWEN3 = FamilyOptions(qkv_bias="attention_bias", output_bias="attention_bias", qk_norm="rms")
_GEMMA = FamilyOptions(
    qkv_bias="attention_bias",
    output_bias="attention_bias",
    norm_offset=1.0,
    scale_embeddings=True,
)
_GEMMA_NORMS = NormNames(
    "input_layernorm",
    "post_attention_layernorm",
    "pre_feedforward_layernorm",
    "post_feedforward_layernorm",
)
_NORMS_AFTER = NormNames(None, "post_attention_layernorm", None, "post_feedforward_layernorm")
_OLMO2 = FamilyOptions(
    qkv_bias="attention_bias",
    output_bias="attention_bias",
    qk_norm="rms_all_heads",
    norm_names=_NORMS_AFTER,
)
_GLM = FamilyOptions(
    qkv_bias="attention_bias", partial_rotary=True, interleaved=True, fused_mlp=True
)
_COHERE = FamilyOptions(
    qkv_bias="attention_bias",
    output_bias="attention_bias",
    qk_norm="layer_per_head",
    qk_norm_enabled="use_qk_norm",
    interleaved=True,
    norm="layer_without_bias",
    norm_epsilon="layer_norm_eps",
    parallel=True,
    logit_scale=True,
)

_QWEN_EXPERTS = ExpertOptions(normalize="norm_topk_prob", inner_size="moe_intermediate_size")

#: The options of each family, by model type.
FAMILY_OPTIONS = {
    "llama": _LLAMA,
    "mistral": _MISTRAL,
    "ministral": FamilyOptions(),
    "qwen2": FamilyOptions(qkv_bias=True),
    "qwen3": _QWEN3,
    "smollm3": _LLAMA,
    "gemma": _GEMMA,
    "gemma2": dataclasses.replace(_GEMMA, norm_names=_GEMMA_NORMS, softcap=True),
    "gemma3_text": dataclasses.replace(_GEMMA, norm_names=_GEMMA_NORMS, qk_norm="rms"),
    "eurobert": dataclasses.replace(_LLAMA, causal=False),
    "olmo": FamilyOptions(
        qkv_bias="attention_bias",
        output_bias="attention_bias",
        clip_qkv=True,
        norm="layer_without_weights",
        norm_epsilon=1e-5,
    ),
    "olmo2": _OLMO2,
    "olmo3": dataclasses.replace(_OLMO2, window_required=True),
    "phi": FamilyOptions(
        qkv_bias=True,
        output_bias=True,
        output_name="dense",
        qk_norm="layer",
        qk_norm_enabled="qk_layernorm",
        qk_norm_name="layernorm",
        partial_rotary=True,
        mlp_bias=True,
        mlp_names=("fc1", "fc2"),
        norm="layer",
        norm_epsilon="layer_norm_eps",
        final_norm_name="final_layernorm",
        parallel=True,
        head_bias=True,
        embedding_dropout="embd_pdrop",
        attention_output_dropout="resid_pdrop",
        mlp_dropout="resid_pdrop",
    ),
    "phi3": FamilyOptions(
        sliding_window=True,
        fused_qkv="qkv_proj",
        fused_mlp=True,
        partial_rotary=True,
        attention_output_dropout="resid_pdrop",
        mlp_dropout="resid_pdrop",
    ),
    "granite": dataclasses.replace(_LLAMA, multipliers=True),
    "glm": _GLM,
    "glm4": dataclasses.replace(
        _GLM,
        norm_names=NormNames(
            "input_layernorm",
            "post_self_attn_layernorm",
            "post_attention_layernorm",
            "post_mlp_layernorm",
        ),
    ),
    "cohere": _COHERE,
    "cohere2": dataclasses.replace(
        _COHERE, qk_norm="", qk_norm_enabled=True, rotary="sliding", window_required=True
    ),
    "stablelm": FamilyOptions(
        qkv_bias="use_qkv_bias",
        qk_norm="layer_list",
        qk_norm_enabled="qk_layernorm",
        qk_norm_name="layernorm",
        partial_rotary=True,
        norm="layer",
        norm_epsilon="layer_norm_eps",
        parallel="use_parallel_residual",
        mlp_dropout="hidden_dropout",
    ),
    "starcoder2": FamilyOptions(
        sliding_window=True,
        qkv_bias="use_bias",
        output_bias="use_bias",
        mlp_bias="use_bias",
        mlp_names=("c_fc", "c_proj"),
        norm="layer",
        norm_epsilon="norm_epsilon",
        embedding_dropout="embedding_dropout",
        attention_output_dropout="residual_dropout",
        mlp_dropout="residual_dropout",
    ),
    "gpt_neox": FamilyOptions(
        embeddings_name="embed_in",
        attention_name="attention",
        fused_qkv="query_key_value",
        qkv_per_head=True,
        qkv_bias="attention_bias",
        output_bias="attention_bias",
        output_name="dense",
        partial_rotary=True,
        mlp_bias=True,
        mlp_names=("dense_h_to_4h", "dense_4h_to_h"),
        norm="layer",
        norm_epsilon="layer_norm_eps",
        final_norm_name="final_layer_norm",
        parallel="use_parallel_residual",
        shared_norm=False,
        embedding_dropout="hidden_dropout",
        attention_output_dropout="hidden_dropout",
        mlp_dropout="hidden_dropout",
    ),
    "falcon": FamilyOptions(),  # the task heads read it; hfseq_plugins.falcon defines the layers
    "exaone4": FamilyOptions(qk_norm="rms", rotary="sliding", norm_names=_NORMS_AFTER),
    "ernie4_5": FamilyOptions(
        qkv_bias="use_bias", output_bias="use_bias", mlp_bias="use_bias", interleaved=True
    ),
    "seed_oss": FamilyOptions(
        qkv_bias="attention_bias",
        output_bias="attention_out_bias",
        mlp_bias="mlp_bias",
        attention_output_dropout="residual_dropout",
        mlp_dropout="residual_dropout",
    ),
    "helium": FamilyOptions(
        qkv_bias="attention_bias", square_output=True, mlp_bias="mlp_bias", interleaved=True
    ),
    "mixtral": dataclasses.replace(_MISTRAL, experts=ExpertOptions(block_name="block_sparse_moe")),
    "qwen2_moe": FamilyOptions(
        qkv_bias="qkv_bias", experts=dataclasses.replace(_QWEN_EXPERTS, shared_expert=True)
    ),
    "qwen3_moe": dataclasses.replace(_QWEN3, sliding_window=True, experts=_QWEN_EXPERTS),
    "olmoe": FamilyOptions(
        qkv_bias="attention_bias",
        output_bias="attention_bias",
        clip_qkv=True,
        qk_norm="rms_all_heads",
        experts=ExpertOptions(normalize="norm_topk_prob"),
    ),
    "granitemoe": FamilyOptions(
        qkv_bias="attention_bias",
        output_bias="attention_bias",
        multipliers=True,
        experts=ExpertOptions(block_name="block_sparse_moe", router_name="router"),
    ),
    "gpt_oss": FamilyOptions(
        qkv_bias="attention_bias",
        output_bias="attention_bias",
        window_required=True,
        sinks=True,
        experts=ExpertOptions(router_name="router", router_bias=True, clamped=True),
    ),
}


def family_options(config: PreTrainedConfig) -> FamilyOptions:
    """Returns the options of the family that a configuration belongs to.

    If its model type is not in `FAMILY_OPTIONS`, the model type of a parent class is used.
    """
    types = (vars(parent).get("model_type") for parent in type(config).__mro__)
    return next(FAMILY_OPTIONS[name] for name in types if name in FAMILY_OPTIONS)


def is_enabled(config: PreTrainedConfig, option: bool | str) -> bool:
    """Returns the value of an option, which is a bool or the name of an attribute of `config`."""
    return bool(getattr(config, option, False)) if isinstance(option, str) else option


def dropout_rate(config: PreTrainedConfig, option: str) -> float:
    """Returns the dropout rate in the attribute `option` of `config`, 0 if `option` is empty."""
    return float(getattr(config, option) or 0.0) if option else 0.0


def is_causal(config: PreTrainedConfig) -> bool:
    """Returns whether attention is causal.

    As in Transformers, `is_causal=False` in the configuration makes a model of any family
    bidirectional. The configuration of EmbeddingGemma, a bidirectional Gemma 3, sets
    `use_bidirectional_attention` instead.
    """
    bidirectional = getattr(config, "use_bidirectional_attention", None)
    return family_options(config).causal and nn.is_causal(config) and not bidirectional


def layer_types(config: PreTrainedConfig) -> list[str]:
    """Returns the attention type of each layer, `full_attention` or `sliding_attention`.

    Raises:
        UsageError: The configuration's `layer_types` is too short or contains other values, or a
            layer has sliding attention without a `sliding_window` in the configuration.
    """
    num_layers, window = config.num_hidden_layers, getattr(config, "sliding_window", None)
    options = family_options(config)
    types = (
        getattr(config, "layer_types", None)
        or [SLIDING if options.sliding_window else FULL] * num_layers
    )
    if len(types) < num_layers or not set(types) <= {FULL, SLIDING}:
        raise UsageError(
            f"layer_types={types} in the configuration must contain '{FULL}' or '{SLIDING}' for "
            f"each of its {num_layers} layers"
        )
    types = types[:num_layers]
    if window is None and options.window_required and SLIDING in types:
        raise UsageError(
            f"sliding_window=None in the configuration, but its layer_types contain '{SLIDING}'. "
            f"Set sliding_window, or use '{FULL}' for all layers in layer_types"
        )
    return [FULL if window is None else layer_type for layer_type in types]


def num_experts(config: PreTrainedConfig) -> int:
    """Returns the number of experts of each mixture of experts.

    Raises:
        UsageError: `num_experts_per_tok` is less than 1 or exceeds the number of experts.
    """
    count = getattr(config, "num_local_experts", None)
    count = config.num_experts if count is None else count
    if not 1 <= config.num_experts_per_tok <= count:
        raise UsageError(
            f"num_experts_per_tok={config.num_experts_per_tok} in the configuration must be "
            f"between 1 and the number of experts, {count}"
        )
    return int(count)


def sparse_layers(config: PreTrainedConfig) -> list[bool]:
    """Returns for each layer whether its feed-forward block is a mixture of experts."""
    layers = range(config.num_hidden_layers)
    if family_options(config).experts is None:
        return [False for _ in layers]
    dense = set(getattr(config, "mlp_only_layers", None) or ())
    step = getattr(config, "decoder_sparse_step", 1)
    return [number not in dense and (number + 1) % step == 0 for number in layers]


def rotary_layers(config: PreTrainedConfig) -> list[bool]:
    """Returns for each layer whether it has rotary embeddings.

    A layer without them uses no position information.
    """
    types, options = layer_types(config), family_options(config)
    # Despite its name, no_rope_layers is 1 for layers with rotary embeddings.
    if enabled := getattr(config, "no_rope_layers", None):
        return [bool(value) for value in enabled]
    windows = options.window_required or getattr(config, "sliding_window", None) is not None
    if options.rotary == "sliding" and windows:
        return [layer_type == SLIDING for layer_type in types]
    return [True] * len(types)


def head_size(config: PreTrainedConfig) -> int:
    """Returns the number of features per attention head, by default `hidden_size / heads`."""
    width = getattr(config, "head_dim", None)
    return width or config.hidden_size // config.num_attention_heads


def rotary_size(config: PreTrainedConfig, layer_type: str) -> int:
    """Returns the number of features per head that are rotated in layers of type `layer_type`."""
    width = head_size(config)
    if not family_options(config).partial_rotary:
        return width
    return int(width * nn.rope_parameters(config, layer_type).get("partial_rotary_factor", 1.0))
