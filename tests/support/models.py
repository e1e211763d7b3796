"""Tiny models and checkpoints that tests share."""

from __future__ import annotations

import copy
import importlib
import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import jax
import numpy as np

#: Options of BERT and of the encoders with a similar architecture.
TINY = {
    "vocab_size": 64,
    "hidden_size": 32,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "intermediate_size": 48,
    "max_position_embeddings": 40,
    "type_vocab_size": 2,
}
_SIZES = {name: size for name, size in TINY.items() if name != "type_vocab_size"}
_TOKENS = {"pad_token_id": 0, "bos_token_id": 1, "eos_token_id": 2}
#: Options of Llama and of the families with a similar architecture.
_DECODER = {**_SIZES, **_TOKENS, "num_key_value_heads": 2, "initializer_range": 0.2}
_ROPE = {"rope_parameters": {"rope_type": "default", "rope_theta": 100.0}}
#: Options of decoders, other than the defaults of the families so that each one has an effect.
_ROW = {**_DECODER, **_ROPE, "hidden_act": "gelu", "rms_norm_eps": 1e-3}
_LAYER_NORM_ROW = {**_DECODER, **_ROPE, "hidden_act": "gelu", "layer_norm_eps": 1e-3}
_BIASES = {"attention_bias": True, "attention_dropout": 0.1}
#: Two layers with full attention, followed by two layers with sliding-window attention.
_QWEN_WINDOWS = {
    "use_sliding_window": True,
    "sliding_window": 5,
    "max_window_layers": 2,
    "num_hidden_layers": 4,
}
_GEMMA_WINDOWS = {
    "head_dim": 12,
    "query_pre_attn_scalar": 7,
    "sliding_window": 5,
    "num_hidden_layers": 4,
}
_FOUR_LAYERS = {"num_hidden_layers": 4, "layer_types": ["sliding_attention", "full_attention"] * 2}
_SIDES = {
    "vocab_size": 64,
    "d_model": 32,
    "max_position_embeddings": 40,
    **{
        f"{side}_{name}": size
        for side in ("encoder", "decoder")
        for name, size in (("layers", 2), ("attention_heads", 4), ("ffn_dim", 48))
    },
}
_T5 = {"vocab_size": 64, "d_model": 32, "d_kv": 8, "d_ff": 48, "num_layers": 2, "num_heads": 4}
# Such narrow layers have large initial values, so a factor reduces them. Otherwise, the gradient of
# a key bias, which is zero in theory, would have larger rounding errors than the checks allow.
_CLIP = {
    "hidden_size": 32,
    "intermediate_size": 48,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "projection_dim": 24,
    "initializer_factor": 0.5,
}
_PICTURES = {"image_size": 12, "patch_size": 4}
_VIT = {
    **{name: _CLIP[name] for name in ("hidden_size", "intermediate_size", "num_hidden_layers")},
    "num_attention_heads": 4,
    "num_labels": 3,
    **_PICTURES,
}
_CONVOLUTIONS = {"embedding_size": 8, "hidden_sizes": [16, 24], "depths": [2, 1], "num_labels": 3}


def _tiny(
    class_name: str, module: str = "transformers", *, words: bool = True, **options: Any
) -> Callable[..., Any]:
    """Returns a function that creates a tiny configuration.

    Args:
        class_name: Name of the configuration class.
        module: Module of the class, which is imported at the first call.
        words: Whether the model has a vocabulary. If not, the function ignores `vocab_size`.
        **options: Options of the configuration. Keywords of the function replace options or add
            further ones.
    """

    def make(**changes: Any) -> Any:
        if not words:
            changes.pop("vocab_size", None)
        config_class = getattr(importlib.import_module(module), class_name)
        return config_class(**copy.deepcopy(options) | changes)

    return make


_ALTERNATING = {"num_hidden_layers": 2, "layer_types": ["sliding_attention", "full_attention"]}
_FEWEST_LAYERS: dict[str, dict[str, Any]] = {
    **dict.fromkeys(
        (
            *("cohere2", "exaone4", "gemma2", "gemma3_text", "gpt_oss", "ministral", "modernbert"),
            *("modernbert-decoder", "olmo3", "qwen2", "qwen3", "smollm3"),
        ),
        _ALTERNATING,
    ),
    **dict.fromkeys(("deberta-v2", "qwen3_moe", "wavlm"), {"num_hidden_layers": 2}),
    **dict.fromkeys(("bloom", "gptj"), {"n_layer": 1}),
    "bart": {"encoder_layers": 1, "decoder_layers": 1},
    "distilbert": {"n_layers": 1},
    "gpt_neo": {"num_layers": 2, "attention_types": [[["global", "local"], 1]]},
    "longt5": {"num_layers": 1},
    "qwen2_moe": {"num_hidden_layers": 2, "max_window_layers": 1},
}


def fewest_layers(name: str) -> dict[str, Any]:
    """Returns options for a family with one layer of each kind."""
    return copy.deepcopy(_FEWEST_LAYERS.get(name, {"num_hidden_layers": 1}))


albert_config = _tiny(
    "AlbertConfig",
    **_SIZES,
    pad_token_id=0,
    embedding_size=20,
    num_hidden_groups=1,
    classifier_dropout_prob=0.1,
)
bart_config = _tiny("BartConfig", **_SIDES)
beit_config = _tiny(
    "BeitConfig",
    **_VIT,
    vocab_size=24,
    use_relative_position_bias=True,
    use_mask_token=True,
    drop_path_rate=0.0,
)
bert_config = _tiny("BertConfig", **TINY)
big_bird_config = _tiny(
    "BigBirdConfig",
    **_SIZES | {"vocab_size": 70, "max_position_embeddings": 64},
    pad_token_id=0,
    attention_type="original_full",
    block_size=2,
    num_random_blocks=1,
)
blenderbot_config = _tiny("BlenderbotConfig", **_SIDES)
blenderbot_small_config = _tiny("BlenderbotSmallConfig", **_SIDES)
bloom_config = _tiny(
    "BloomConfig",
    **_TOKENS | {"pad_token_id": 3},
    vocab_size=64,
    hidden_size=32,
    n_layer=2,
    n_head=4,
    initializer_range=0.2,
)
camembert_config = _tiny("CamembertConfig", **TINY)
cohere_config = _tiny(
    "CohereConfig", **_LAYER_NORM_ROW, **_BIASES, use_qk_norm=True, logit_scale=0.5
)
cohere2_config = _tiny(
    "Cohere2Config",
    **_LAYER_NORM_ROW | _FOUR_LAYERS | _BIASES,
    sliding_window=5,
    logit_scale=0.5,
)
# The vocabulary is small, so that most random rows contain the end token. The end token is not 2,
# because models of Transformers treat the value 2 as a legacy case.
clip_text_model_config = _tiny(
    "CLIPTextConfig",
    **_CLIP,
    vocab_size=24,
    max_position_embeddings=24,
    pad_token_id=1,
    bos_token_id=0,
    eos_token_id=5,
)
clip_vision_model_config = _tiny("CLIPVisionConfig", words=False, **_CLIP, **_PICTURES)
data2vec_text_config = _tiny("Data2VecTextConfig", **TINY)
# As in DeBERTa-v3, and with the convolution of the largest DeBERTa-v2. Distances up to 4 have their
# own buckets. The convolution belongs to the first layer, and the other two can be scanned.
deberta_v2_config = _tiny(
    "DebertaV2Config",
    **_SIZES | {"num_hidden_layers": 3},
    pad_token_id=0,
    type_vocab_size=0,
    relative_attention=True,
    position_biased_input=False,
    max_relative_positions=64,
    pos_att_type=["p2c", "c2p"],
    position_buckets=8,
    share_att_key=True,
    norm_rel_ebd="layer_norm",
    conv_kernel_size=3,
    initializer_range=0.1,
)
dinov2_config = _tiny(
    "Dinov2Config",
    words=False,
    hidden_size=32,
    mlp_ratio=2,
    num_hidden_layers=2,
    num_attention_heads=4,
    num_labels=3,
    **_PICTURES,
)
dinov3_vit_config = _tiny(
    "DINOv3ViTConfig",
    words=False,
    **_PICTURES,
    hidden_size=32,
    intermediate_size=48,
    num_hidden_layers=2,
    num_attention_heads=4,
    hidden_act="gelu_new",
    layer_norm_eps=1e-3,
    initializer_range=0.2,
    rope_theta=10.0,
    key_bias=True,
    layerscale_value=0.5,
    use_gated_mlp=True,
    num_register_tokens=2,
)
distilbert_config = _tiny(
    "DistilBertConfig",
    vocab_size=64,
    dim=32,
    n_layers=2,
    n_heads=4,
    hidden_dim=48,
    max_position_embeddings=40,
    pad_token_id=0,
)
electra_config = _tiny("ElectraConfig", **_SIZES, pad_token_id=0, embedding_size=20)
ernie_config = _tiny("ErnieConfig", **TINY, use_task_id=True, task_type_vocab_size=4)
esm_config = _tiny(
    "EsmConfig",
    **_SIZES,
    pad_token_id=1,
    eos_token_id=2,
    mask_token_id=3,
    token_dropout=True,
    position_embedding_type="rotary",
    initializer_range=0.2,
)
eurobert_config = _tiny("EuroBertConfig", **_DECODER, mask_token_id=3)
ernie4_5_config = _tiny("Ernie4_5Config", **_ROW, head_dim=12, use_bias=True)
exaone4_config = _tiny(
    "Exaone4Config", **_ROW | _FOUR_LAYERS, sliding_window=5, attention_dropout=0.1
)
_MAMBA = {
    **_TOKENS,
    "vocab_size": 64,
    "hidden_size": 32,
    "state_size": 8,
    "num_hidden_layers": 2,
    "conv_kernel": 3,
    "hidden_act": "gelu",
    "layer_norm_epsilon": 1e-3,
    "initializer_range": 0.2,
    "time_step_min": 0.01,
    "time_step_max": 0.5,
}
falcon_mamba_config = _tiny(
    "FalconMambaConfig",
    **_MAMBA,
    time_step_rank=4,
    time_step_scale=2.0,
    mixer_rms_eps=1e-2,
    tie_word_embeddings=False,
)
falcon_config = _tiny(
    "FalconConfig",
    **_TOKENS,
    **_ROPE,
    vocab_size=64,
    hidden_size=32,
    num_hidden_layers=2,
    num_attention_heads=4,
    num_kv_heads=2,
    ffn_hidden_size=48,
    max_position_embeddings=40,
    initializer_range=0.2,
    new_decoder_architecture=True,
    bias=True,
    activation="gelu_new",
    layer_norm_epsilon=1e-3,
    attention_dropout=0.1,
    hidden_dropout=0.1,
)
fp8_encoder_config = _tiny("Fp8EncoderConfig", "hfseq_plugins.fp8_encoder.configuration", **TINY)
gemma_config = _tiny("GemmaConfig", **_DECODER, head_dim=12)
# The caps of the logits are small enough to have an effect.
gemma2_config = _tiny(
    "Gemma2Config",
    **_DECODER | _GEMMA_WINDOWS,
    attn_logit_softcapping=1.0,
    final_logit_softcapping=4.0,
)
gemma3_text_config = _tiny(
    "Gemma3TextConfig",
    **_DECODER | _GEMMA_WINDOWS,
    layer_types=["sliding_attention", "full_attention"] * 2,
)
glm_config = _tiny("GlmConfig", **_ROW, head_dim=12, attention_dropout=0.1)
glm4_config = _tiny("Glm4Config", **_ROW, head_dim=12, attention_dropout=0.1)
gpt2_config = _tiny(
    "GPT2Config", vocab_size=64, n_embd=32, n_layer=2, n_head=4, n_positions=40, **_TOKENS
)
gpt_neo_config = _tiny(
    "GPTNeoConfig",
    vocab_size=64,
    hidden_size=32,
    num_layers=4,
    num_heads=4,
    window_size=5,
    attention_types=[[["global", "local"], 2]],
    max_position_embeddings=40,
    **_TOKENS,
)
gpt_neox_config = _tiny(
    "GPTNeoXConfig",
    **_SIZES,
    **_TOKENS,
    **_ROPE,
    initializer_range=0.2,
    hidden_act="gelu_new",
    layer_norm_eps=1e-3,
    attention_dropout=0.1,
    hidden_dropout=0.1,
)
gptj_config = _tiny(
    "GPTJConfig",
    vocab_size=64,
    n_embd=32,
    n_layer=2,
    n_head=2,
    n_positions=40,
    rotary_dim=6,
    initializer_range=0.2,
    **_TOKENS,
)
granite_config = _tiny(
    "GraniteConfig",
    **_ROW,
    **_BIASES,
    mlp_bias=True,
    embedding_multiplier=3.0,
    attention_multiplier=0.3,
    residual_multiplier=0.4,
    logits_scaling=5.0,
)
helium_config = _tiny("HeliumConfig", **_ROW, **_BIASES, head_dim=8, mlp_bias=True)
llama_config = _tiny("LlamaConfig", **_DECODER)
# The initial values are small, so that activations do not magnify rounding errors of gradients.
_ROTARY_BERT = {**_SIZES, "pad_token_id": 0, "type_vocab_size": 2, "initializer_range": 0.1}
gte_config = _tiny("GteConfig", **_ROTARY_BERT)
jina_embeddings_v3_config = _tiny("JinaEmbeddingsV3Config", **_ROTARY_BERT)
new_config = _tiny("NewConfig", "hfseq_plugins.gte.configuration", **_ROTARY_BERT)
nomic_bert_config = _tiny("NomicBertConfig", **_ROTARY_BERT)
longt5_config = _tiny(
    "LongT5Config",
    **_T5,
    local_radius=3,
    decoder_start_token_id=0,
    pad_token_id=0,
    eos_token_id=1,
)
m2m_100_config = _tiny(
    "M2M100Config",
    **_SIDES,
    activation_function="gelu",
    encoder_layerdrop=0.0,
    decoder_layerdrop=0.0,
    activation_dropout=0.1,
    init_std=0.1,
)
mamba2_config = _tiny(
    "Mamba2Config",
    **_MAMBA,
    num_heads=8,
    head_dim=8,
    n_groups=2,
    chunk_size=5,
)
marian_config = _tiny(
    "MarianConfig", **_SIDES, pad_token_id=3, decoder_start_token_id=3, eos_token_id=0
)
mbart_config = _tiny("MBartConfig", **_SIDES)
megatron_bert_config = _tiny("MegatronBertConfig", **TINY)
ministral_config = _tiny(
    "MinistralConfig",
    **_ROW | _FOUR_LAYERS,
    head_dim=12,
    sliding_window=5,
    attention_dropout=0.1,
)
mistral_config = _tiny("MistralConfig", **_DECODER, sliding_window=5)
mobilebert_config = _tiny(
    "MobileBertConfig",
    **TINY,
    embedding_size=20,
    intra_bottleneck_size=24,
    num_feedforward_networks=2,
    initializer_range=0.1,
)
_MODERNBERT = {
    **_SIZES,
    "num_hidden_layers": 5,
    "local_attention": 6,
    **_TOKENS,
    "cls_token_id": 1,
    "sep_token_id": 2,
    "initializer_range": 0.2,
    "layer_types": ["full_attention", *["sliding_attention", "full_attention"] * 2],
}
modernbert_config = _tiny("ModernBertConfig", **_MODERNBERT)
modernbert_decoder_config = _tiny("ModernBertDecoderConfig", **_MODERNBERT)
mpnet_config = _tiny(
    "MPNetConfig",
    **_SIZES | {"hidden_size": 48, "num_attention_heads": 6, "max_position_embeddings": 42},
    initializer_range=0.2,
)
mt5_config = _tiny("MT5Config", **_T5, relative_attention_num_buckets=8)
_OLMO = {**_DECODER, **_ROPE, **_BIASES, "hidden_act": "gelu"}
olmo_config = _tiny("OlmoConfig", **_OLMO, clip_qkv=0.5)
olmo2_config = _tiny("Olmo2Config", **_OLMO, rms_norm_eps=1e-3)
# Only the layers with full attention use YaRN.
_OLMO3_ROPE = {
    "full_attention": {
        "rope_type": "yarn",
        "rope_theta": 1e4,
        "factor": 4.0,
        "original_max_position_embeddings": 10,
    },
    "sliding_attention": {"rope_type": "default", "rope_theta": 1e3},
}
olmo3_config = _tiny(
    "Olmo3Config",
    **_OLMO | _FOUR_LAYERS | {"rope_parameters": _OLMO3_ROPE},
    rms_norm_eps=1e-3,
    sliding_window=5,
)
opt_config = _tiny(
    "OPTConfig",
    vocab_size=64,
    hidden_size=32,
    num_hidden_layers=2,
    ffn_dim=48,
    num_attention_heads=4,
    max_position_embeddings=40,
    word_embed_proj_dim=32,
    pad_token_id=1,
    bos_token_id=2,
    eos_token_id=2,
    init_std=0.05,
)
pegasus_config = _tiny("PegasusConfig", **_SIDES)
phi_config = _tiny(
    "PhiConfig",
    **_LAYER_NORM_ROW,
    qk_layernorm=True,
    attention_dropout=0.1,
    embd_pdrop=0.1,
    resid_pdrop=0.1,
)
phi3_config = _tiny(
    "Phi3Config",
    **_ROW,
    sliding_window=5,
    partial_rotary_factor=0.75,
    attention_dropout=0.1,
    resid_pdrop=0.1,
)
qwen2_config = _tiny("Qwen2Config", **_DECODER | _QWEN_WINDOWS)
qwen3_config = _tiny("Qwen3Config", **_DECODER | _QWEN_WINDOWS, head_dim=12)
#: A tiny RegNet of type "y".
regnet_config = _tiny("RegNetConfig", words=False, **_CONVOLUTIONS, groups_width=4)
#: A tiny ResNet with blocks of three layers.
resnet_config = _tiny("ResNetConfig", words=False, **_CONVOLUTIONS)
roberta_config = _tiny("RobertaConfig", **TINY)
roberta_prelayernorm_config = _tiny("RobertaPreLayerNormConfig", **TINY)
roformer_config = _tiny("RoFormerConfig", **_SIZES, pad_token_id=0, embedding_size=32)
seed_oss_config = _tiny(
    "SeedOssConfig",
    **_ROW,
    head_dim=12,
    mlp_bias=True,
    attention_out_bias=True,
    residual_dropout=0.2,
)
#: Options of mixtures of experts.
_EXPERTS = {
    "num_experts": 5,
    "num_experts_per_tok": 2,
    "output_router_logits": True,
    "router_aux_loss_coef": 0.3,
}
_LOCAL_EXPERTS = {
    ("num_local_experts" if name == "num_experts" else name): value
    for name, value in _EXPERTS.items()
}
mixtral_config = _tiny("MixtralConfig", **_ROW, **_LOCAL_EXPERTS, head_dim=12, sliding_window=5)
qwen2_moe_config = _tiny(
    "Qwen2MoeConfig",
    **_ROW | _EXPERTS | _QWEN_WINDOWS,
    moe_intermediate_size=24,
    shared_expert_intermediate_size=20,
    mlp_only_layers=[1],
    norm_topk_prob=False,
)
qwen3_moe_config = _tiny(
    "Qwen3MoeConfig",
    **_ROW | _EXPERTS | _BIASES | {"num_hidden_layers": 3},
    head_dim=12,
    moe_intermediate_size=24,
    use_sliding_window=True,
    sliding_window=5,
    decoder_sparse_step=2,
    norm_topk_prob=True,
)
olmoe_config = _tiny("OlmoeConfig", **_ROW | _EXPERTS | _BIASES, clip_qkv=0.3)
granitemoe_config = _tiny(
    "GraniteMoeConfig",
    **_ROW | _LOCAL_EXPERTS | _BIASES,
    embedding_multiplier=3.0,
    residual_multiplier=0.5,
    attention_multiplier=0.4,
    logits_scaling=0.5,
)
_GPT_OSS = {name: value for name, value in _ROW.items() if name != "hidden_act"}
gpt_oss_config = _tiny(
    "GptOssConfig",
    **_GPT_OSS
    | _LOCAL_EXPERTS
    | {
        "num_hidden_layers": 4,
        "rope_parameters": {
            "rope_type": "yarn",
            "rope_theta": 100.0,
            "factor": 4.0,
            "truncate": False,
            "original_max_position_embeddings": 10,
        },
    },
    head_dim=12,
    sliding_window=5,
    attention_dropout=0.1,
    swiglu_limit=1.5,
    swiglu_alpha=1.2,
)
_SIGLIP = {
    "hidden_size": 32,
    "intermediate_size": 48,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "hidden_act": "gelu",
    "layer_norm_eps": 1e-3,
    "attention_dropout": 0.1,
}
siglip_text_model_config = _tiny(
    "SiglipTextConfig",
    **_SIGLIP,
    **_TOKENS,
    vocab_size=64,
    max_position_embeddings=24,
    projection_size=48,
)
siglip_vision_model_config = _tiny("SiglipVisionConfig", words=False, **_SIGLIP, **_PICTURES)
siglip2_text_model_config = _tiny(
    "Siglip2TextConfig",
    **_SIGLIP,
    **_TOKENS,
    vocab_size=64,
    max_position_embeddings=24,
    projection_size=48,
)
siglip2_vision_model_config = _tiny(
    "Siglip2VisionConfig", words=False, **_SIGLIP, patch_size=2, num_patches=9
)
smollm3_config = _tiny(
    "SmolLM3Config",
    **_DECODER | {"num_hidden_layers": 4},
    use_sliding_window=True,
    sliding_window=5,
    no_rope_layers=[1, 0] * 2,
)
stablelm_config = _tiny(
    "StableLmConfig",
    **_LAYER_NORM_ROW,
    qk_layernorm=True,
    use_qkv_bias=True,
    attention_dropout=0.1,
    hidden_dropout=0.1,
)
starcoder2_config = _tiny(
    "Starcoder2Config",
    **_DECODER,
    **_ROPE,
    hidden_act="gelu",
    norm_epsilon=1e-3,
    sliding_window=5,
    attention_dropout=0.1,
    residual_dropout=0.1,
    embedding_dropout=0.1,
)
t5_config = _tiny("T5Config", **_T5, decoder_start_token_id=0, relative_attention_num_buckets=8)
umt5_config = _tiny("UMT5Config", **_T5, relative_attention_num_buckets=8)
vit_config = _tiny("ViTConfig", words=False, **_VIT)
vq_transformer_config = _tiny(
    "VQTransformerConfig",
    "hfseq_plugins.vq_transformer.configuration",
    vocab_size=64,
    hidden_size=32,
    num_hidden_layers=2,
    head_dim=8,
    num_codes=8,
    window_size=4,
    block_size=4,
)
_SPEECH = {
    "vocab_size": 20,
    "hidden_size": 32,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "intermediate_size": 48,
    "hidden_act": "gelu_new",
    "layer_norm_eps": 1e-3,
    "conv_dim": (16, 24),
    "conv_stride": (5, 2),
    "conv_kernel": (6, 3),
    "num_conv_pos_embeddings": 4,
    "num_conv_pos_embedding_groups": 2,
    "feat_proj_dropout": 0.1,
    "classifier_proj_size": 24,
    "use_weighted_layer_sum": True,
    "layerdrop": 0.0,
}
hubert_config = _tiny(
    "HubertConfig", **_SPEECH, feat_proj_layer_norm=False, feat_extract_activation="relu"
)
wavlm_config = _tiny(
    "WavLMConfig",
    **_SPEECH,
    initializer_range=0.2,
    num_buckets=8,
    max_bucket_distance=6,
    feat_extract_norm="layer",
    do_stable_layer_norm=True,
    conv_bias=True,
)
wav2vec2_config = _tiny(
    "Wav2Vec2Config",
    vocab_size=20,
    hidden_size=32,
    num_hidden_layers=2,
    num_attention_heads=4,
    intermediate_size=48,
    conv_dim=(16, 24),
    conv_stride=(5, 2),
    conv_kernel=(6, 3),
    num_conv_pos_embeddings=4,
    num_conv_pos_embedding_groups=2,
    codevector_dim=16,
    num_codevectors_per_group=6,
    num_codevector_groups=2,
    proj_codevector_dim=12,
    num_adapter_layers=2,
)
whisper_config = _tiny(
    "WhisperConfig",
    **{name: size for name, size in _SIDES.items() if name != "max_position_embeddings"},
    num_mel_bins=8,
    max_source_positions=10,
    max_target_positions=40,
    pad_token_id=1,
    bos_token_id=1,
    eos_token_id=2,
    decoder_start_token_id=3,
    begin_suppress_tokens=None,
    suppress_tokens=None,
    classifier_proj_size=16,
    num_labels=3,
)
# The initial values are as small as those of the classes in Transformers. This also keeps rounding
# errors small.
wmt_transformer_config = _tiny(
    "WMTTransformerConfig",
    "hfseq_plugins.wmt_transformer.configuration",
    **_SIDES,
    kernel_init="normal",
    embedding_init_std=0.02,
)
xglm_config = _tiny(
    "XGLMConfig",
    vocab_size=64,
    d_model=32,
    num_layers=2,
    attention_heads=4,
    ffn_dim=48,
    max_position_embeddings=40,
)
xlm_roberta_config = _tiny("XLMRobertaConfig", **TINY)
xlm_roberta_xl_config = _tiny("XLMRobertaXLConfig", **TINY)


def clip_config(**changes: Any) -> Any:
    """Returns the configuration of a tiny CLIP. ``changes`` apply to text and vision model."""
    from transformers import CLIPConfig

    text = clip_text_model_config(**changes)
    vision = clip_vision_model_config(**{"hidden_size": 48, **changes})
    return CLIPConfig(text_config=text, vision_config=vision, projection_dim=24)


def _siglip(
    class_name: str, text_config: Callable[..., Any], vision_config: Callable[..., Any]
) -> Callable[..., Any]:
    """Returns a function that creates the configuration of a tiny SigLIP.

    The keywords of the function apply to text and vision model.
    """

    def make(**changes: Any) -> Any:
        config_class = getattr(importlib.import_module("transformers"), class_name)
        labels = {"num_labels": changes.pop("num_labels", 2)}
        text = text_config(**changes)
        vision = vision_config(**{"hidden_size": 48, **changes})
        return config_class(
            text_config=text, vision_config=vision, initializer_factor=2.0, **labels
        )

    return make


siglip_config = _siglip("SiglipConfig", siglip_text_model_config, siglip_vision_model_config)
siglip2_config = _siglip("Siglip2Config", siglip2_text_model_config, siglip2_vision_model_config)


def patches(rows: int = 8, count: int = 9, features: int = 12) -> dict[str, np.ndarray]:
    """Returns images of different shapes as patches, for SigLIP 2."""
    shapes = np.array([[3, 3], [2, 4], [4, 2], [1, 7], [3, 2], [2, 2], [1, 1], [9, 1]])[:rows]
    pixels = np.random.default_rng(0).normal(size=(rows, count, features)).astype(np.float32)
    mask = (np.arange(count) < shapes.prod(-1, keepdims=True)).astype(np.int32)
    return {"pixel_values": pixels, "pixel_attention_mask": mask, "spatial_shapes": shapes}


def vision_text_dual_encoder_config(**changes: Any) -> Any:
    """Returns the configuration of BERT and ViT as a pair. ``changes`` apply to both models."""
    from transformers import VisionTextDualEncoderConfig

    text, vision = bert_config(**changes), vit_config(**changes)
    # The logit scale is small. Tests compute the sine of the logits, and with CLIP's large scale,
    # the sine would magnify rounding errors.
    return VisionTextDualEncoderConfig(
        text_config=text.to_dict(),
        vision_config=vision.to_dict(),
        projection_dim=24,
        logit_scale_init_value=1.0,
    )


def spectrograms(rows: int = 2, frames: int = 20, seed: int = 0) -> np.ndarray:
    return np.random.default_rng(seed).normal(size=(rows, 8, frames)).astype(np.float32)


def _pair(
    class_name: str, encoder: Callable[..., Any], decoder: Callable[..., Any]
) -> Callable[..., Any]:
    """Returns a function that creates the configuration of an encoder-decoder pair.

    The keywords of the function apply to the encoder and to the decoder.
    """

    def make(**changes: Any) -> Any:
        config_class = getattr(importlib.import_module("transformers"), class_name)
        tokens = {"pad_token_id": 0, "decoder_start_token_id": 1, "eos_token_id": 2}
        sides = encoder(**changes), decoder(**changes)
        return config_class.from_encoder_decoder_configs(*sides, **tokens)

    return make


encoder_decoder_config = _pair("EncoderDecoderConfig", bert_config, bert_config)
vision_encoder_decoder_config = _pair("VisionEncoderDecoderConfig", vit_config, bert_config)
speech_encoder_decoder_config = _pair("SpeechEncoderDecoderConfig", wav2vec2_config, bert_config)


def images(rows: int = 2, shape: tuple[int, ...] = (3, 12, 12), seed: int = 0) -> np.ndarray:
    return np.random.default_rng(seed).normal(size=(rows, *shape)).astype(np.float32)


def waveforms(rows: int = 2, samples: int = 90, seed: int = 0) -> np.ndarray:
    return np.random.default_rng(seed).normal(size=(rows, samples)).astype(np.float32)


def ids(rows: int = 2, length: int = 12, seed: int = 0) -> np.ndarray:
    return np.random.default_rng(seed).integers(4, 64, (rows, length)).astype(np.int32)


def trees_equal(ours: Any, theirs: Any) -> bool:
    """Returns whether two trees have the same paths, dtypes and values."""
    a, b = jax.tree.flatten_with_path(ours)[0], jax.tree.flatten_with_path(theirs)[0]
    return [path for path, _ in a] == [path for path, _ in b] and all(
        x.dtype == y.dtype and np.array_equal(np.asarray(x), np.asarray(y))
        for (_, x), (_, y) in zip(a, b, strict=True)
    )


def close(ours: Any, theirs: Any, tolerance: float = 1e-5) -> bool:
    """Returns whether max|a - b| <= tolerance * max(1, max|b|)."""
    a, b = np.asarray(ours, np.float64), np.asarray(theirs, np.float64)
    return a.shape == b.shape and np.abs(a - b).max() <= tolerance * max(1, np.abs(b).max())


def write_v4_msgpack(folder: Path, shards: list[dict[str, Any]], indexed: list[int]) -> None:
    """Writes a sharded checkpoint in the format of Transformers 4.

    Args:
        folder: The folder to write to.
        shards: The parameters of each shard, as nested dicts.
        indexed: The indices of the shards that are listed in the index file. Transformers 4 can
            write an empty first shard that is missing there.
    """
    from flax.serialization import msgpack_serialize
    from flax.traverse_util import flatten_dict

    weight_map, count = {}, len(shards)
    for number, shard in enumerate(shards):
        name = f"flax_model-{number + 1:05}-of-{count:05}.msgpack"
        (folder / name).write_bytes(msgpack_serialize(jax.tree.map(np.asarray, shard)))
        if number in indexed:
            weight_map |= {key: name for key in flatten_dict(shard, sep="/")}
    index = {"metadata": {"total_size": 0}, "weight_map": weight_map}
    (folder / "flax_model.msgpack.index.json").write_text(json.dumps(index))


def write_random_model(config: Any, folder: Path, task: str) -> Path:
    """Writes a model with random weights, without compiling its initialization.

    Args:
        config: The configuration.
        folder: The directory, which may exist.
        task: The head, such as "ForCausalLM".
    """
    from safetensors.numpy import save_file

    from hfseq import plugins

    cls = plugins.load().architectures.get(config.model_type).load_head(task)
    names, rng = cls(config, _do_init=False).weight_map, np.random.default_rng(1)
    tensors = {
        slot.name: 0.1 * rng.standard_normal(names.torch_shape(slot), np.float32)
        for slot in names.slots
    }
    folder.mkdir(exist_ok=True)
    save_file(tensors, folder / "model.safetensors", {"format": "pt"})
    config.architectures = [cls.torch_class_name()]
    config.save_pretrained(folder)
    return folder


def rewrite_tensors(path: Path, change: Any, metadata: dict[str, str] | None = None) -> None:
    """Rewrites a safetensors file.

    Args:
        path: The file.
        change: Function that receives the dict of tensors. It changes the dict or returns a new
            one.
        metadata: The metadata of the new file.
    """
    from safetensors.numpy import load_file, save_file

    tensors = load_file(path)
    tensors = change(tensors) or tensors
    save_file(tensors, path, metadata=metadata or {"format": "pt"})
