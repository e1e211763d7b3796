"""Sizes and inputs of tiny models for which `hfseq_plugins.bridge.tiny` has no rules."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import numpy as np
from transformers import PreTrainedConfig

#: A value in `SIZES` that keeps the default of the argument.
DEFAULT = object()

Inputs = Callable[[Any, np.random.Generator], dict[str, Any]]


def _normal(random: np.random.Generator, *shape: int) -> np.ndarray:
    return random.normal(size=shape).astype(np.float32)


def _tokens(random: np.random.Generator, *shape: int) -> np.ndarray:
    return random.integers(4, 60, shape).astype(np.int32)


def _text(random: np.random.Generator, length: int = 16) -> dict[str, Any]:
    mask = np.ones((2, length), np.int32)
    mask[1, 10:] = 0
    return {"input_ids": _tokens(random, 2, length), "attention_mask": mask}


def _video(frames: int, size: int = 32, name: str = "pixel_values") -> Inputs:
    return lambda config, random: {name: _normal(random, 2, frames, 3, size, size)}


def _mel(bins: int, frames: int) -> Inputs:
    return lambda config, random: {"input_features": _normal(random, 2, bins, frames)}


def _waveform(config: PreTrainedConfig, random: np.random.Generator) -> dict[str, Any]:
    return {"input_values": _normal(random, 2, 1, 2000)}


def _boxes(config: PreTrainedConfig, random: np.random.Generator) -> dict[str, Any]:
    low = random.integers(0, 400, (2, 16, 2))
    high = low + random.integers(1, 400, (2, 16, 2))
    return {"bbox": np.concatenate([low, high], -1).astype(np.int32)}


def _images(config: PreTrainedConfig, random: np.random.Generator) -> dict[str, Any]:
    return {"pixel_values": _normal(random, 2, 3, 32, 32)}


def _mel_frames(config: PreTrainedConfig, random: np.random.Generator) -> dict[str, Any]:
    frames = 2 * config.max_source_positions
    return {"input_features": _normal(random, 2, config.num_mel_bins, frames)}


def _siglip2(config: PreTrainedConfig, random: np.random.Generator) -> dict[str, Any]:
    return {
        "pixel_values": _normal(random, 2, 16, 192),
        "pixel_attention_mask": np.ones((2, 16), np.int32),
        "spatial_shapes": np.array([[4, 4], [4, 4]], np.int32),
    }


def _nested(name: str, sizes: dict[str, Any]) -> dict[str, Any]:
    return {f"{name}.{key}": value for key, value in sizes.items()}


#: Mamba sizes of hybrid models whose Mamba layers are twice as wide as the hidden size.
_MAMBA = {"mamba_n_heads": 8, "mamba_d_head": 8, "mamba_d_state": 8, "mamba_n_groups": 1}
_BACKBONE = {
    "hidden_sizes": [8, 16, 16, 16],
    "depths": [1, 1, 1, 1],
    "embedding_size": 8,
    "stage_names": None,
}
_MROPE_8 = {"rope_type": "default", "rope_theta": 10000.0, "mrope_section": [1, 1, 2]}
_MROPE_4 = {
    **_MROPE_8,
    "mrope_section": [1, 1, 0],
    "partial_rotary_factor": 0.5,
}
_GLM_TEXT = {"head_dim": 16, "rope_parameters": {**_MROPE_8, "partial_rotary_factor": 0.5}}
_GLM_VL = {f"text_config.{name}": value for name, value in _GLM_TEXT.items()}
_HUNYUAN = {"head_dim": 8}

_TIME_SERIES = {
    "prediction_length": 8,
    "context_length": 14,
    "lags_sequence": [1, 2],
    "num_time_features": 2,
    "feature_size": DEFAULT,
}
_EFFICIENTNET = {
    "in_channels": [32, 16, 24],
    "out_channels": [16, 24, 20],
    "kernel_sizes": [3, 3, 5],
    "strides": [1, 1, 2],
    "num_block_repeats": [1, 1, 2],
    "expand_ratios": [1, 6, 6],
    "depthwise_padding": [],
    "hidden_dim": 1280,
    "width_coefficient": 1.0,
    "depth_coefficient": 1.0,
}
_SWIN = {"image_size": 64, "depths": [1, 1, 1, 1]}
_HIERA = {
    "hidden_size": 16,
    "embed_dim_per_stage": [16, 32, 64, 128],
    "blocks_per_stage": [1, 1, 2, 1],
    "num_attention_heads_per_stage": [1, 2, 2, 2],
    "global_attention_blocks": [3],
}
#: The channels of a backbone must fit each other.
_HGNET = {
    "stem_channels": [3, 8, 8],
    "stage_in_channels": [8, 16, 16, 16],
    "stage_mid_channels": [8, 8, 8, 8],
    "stage_out_channels": [16, 16, 16, 16],
    "stage_num_blocks": [1, 1, 1, 1],
    "stage_numb_of_layers": [1, 1, 1, 1],
    "hidden_sizes": [16, 16, 16, 16],
    "depths": [1, 1, 1, 1],
    "embedding_size": 8,
}
_ROPE = {"rope_type": "default", "rope_theta": 10000.0}
_SAM2_VISION = {
    **_nested("backbone_config", _HIERA),
    "backbone_channel_list": [128, 64, 32, 16],
    "backbone_feature_sizes": [[8, 8], [4, 4], [2, 2]],
}
_COMPASS = {
    "layer_types": ["sliding_attention", "full_attention"],
    "rope_parameters": {
        "sliding_attention": {**_ROPE, "mrope_section": [2, 1, 1]},
        "full_attention": {**_ROPE, "mrope_section": [2, 1, 1]},
    },
}
_MIMI = {
    "num_filters": 8,
    "upsample_groups": 32,
    "codebook_dim": 32,
    "vector_quantization_hidden_dimension": 32,
}
_STAGES = {"backbone_config.out_features": ["stage2", "stage3", "stage4"]}
_DETECTOR = {
    **_nested("backbone_config", _HGNET),
    **_STAGES,
    "encoder_in_channels": [16, 16, 16],
    "decoder_in_channels": [32, 32, 32],
}
_RT_DETR = {
    **_nested("backbone_config", {"hidden_sizes": [8, 16, 16, 16], "depths": [1, 1, 1, 1]}),
    "backbone_config.embedding_size": 8,
    **_STAGES,
    "encoder_in_channels": [16, 16, 16],
    "decoder_in_channels": [32, 32, 32],
}
_SAM = {
    "vision_config.output_channels": 32,
    "vision_config.num_pos_feats": 16,
    "prompt_encoder_config.image_embedding_size": 4,
}
_VIBEVOICE = {"num_filters": 4, "downsampling_ratios": [2, 4], "depths": [1, 1, 1]}
_VQ = {"vocabulary_map": {"<image>": 4}}


#: Arguments of the configuration of each model type. Names with a dot, such as
#: `text_config.vocab_size`, are arguments of nested configurations.
SIZES: dict[str, dict[str, Any]] = {
    "align": {**_nested("vision_config", _EFFICIENTNET), "projection_dim": 24},
    "apertus1p5": {
        "image_token_offset": 40,
        "audio_token_offset": 56,
    },
    "autoformer": _TIME_SERIES,
    "bit": {"hidden_sizes": [8, 8, 16, 16], "depths": [1, 1, 1, 1], "num_groups": 2},
    "blt": {
        "encoder_hash_byte_group_vocab": 64,
        "encoder_hash_byte_group_size": [3, 4],
        "encoder_config.hidden_size_global": 32,
        "decoder_config.hidden_size_global": 32,
    },
    "bridgetower": {
        "hidden_size": 128,
        "text_config.hidden_size": 128,
        "vision_config.hidden_size": 128,
    },
    "bros": {"hidden_size": 64},
    "chameleon": _VQ,
    "clap": {
        "audio_config.spec_size": 64,
        "audio_config.num_mel_bins": 32,
        "audio_config.window_size": 4,
        "audio_config.patch_size": 4,
        "audio_config.patch_stride": [4, 4],
        "audio_config.patch_embeds_hidden_size": 16,
        "audio_config.hidden_size": 32,
        "audio_config.depths": [1, 1],
        "audio_config.num_attention_heads": [2, 2],
        "audio_config.num_hidden_layers": 2,
    },
    "clvp": {
        # The heads must have at least 32 features.
        "text_config.vocab_size": 300,
        "text_config.hidden_size": 128,
        "speech_config.vocab_size": 300,
        "speech_config.hidden_size": 128,
        "decoder_config.vocab_size": 300,
    },
    "cohere_compass": _nested("text_config", _COMPASS),
    "cohere_compass_text": _COMPASS,
    "csm": {"codec_config.upsample_groups": 32},
    "dbrx": {"attn_config.rope_theta": 10000.0, "attn_config.clip_qkv": 8.0},
    "donut-swin": _SWIN,
    "swin": _SWIN,
    "deepseek_ocr2": {
        "text_config.mlp_layer_types": ["dense", "sparse"],
        "text_config.num_experts_per_tok": 2,
        "text_config.n_routed_experts": 4,
        "text_config.n_shared_experts": 1,
    },
    "diffusion_gemma": {
        "text_config.num_experts": 4,
        "text_config.top_k_experts": 2,
        "text_config.moe_intermediate_size": 16,
    },
    "dory": {
        "num_hidden_layers": 3,
        "n_input_layers": 1,
        "n_recurrent_layers": 1,
        "n_output_layers": 1,
    },
    "efficientnet": _EFFICIENTNET,
    "ernie4_5_vl_moe": {
        "text_config.rope_parameters": {**_ROPE, "mrope_section": [1, 1, 2]},
        "text_config.head_dim": 8,
    },
    "fun_asr_nano": {"adaptor_config.intermediate_size": 8},
    "granite4_vision": {
        "deepstack_layer_map": [[0, 0]],
        "text_config.hidden_size": 64,
    },
    "hgnet_v2": _HGNET,
    "exaone4_5_vision": {"window_size": 32},
    "fastspeech2_conformer_with_hifigan": {"vocoder_config.model_in_dim": 16},
    "gemma3n_text": {
        "layer_types": ["sliding_attention", "full_attention"],
        "num_kv_shared_layers": 0,
    },
    "informer": _TIME_SERIES,
    "laguna": {"num_attention_heads_per_layer": [4, 4]},
    "levit": {
        "hidden_sizes": DEFAULT,
        "num_attention_heads": DEFAULT,
        "key_dim": DEFAULT,
        "image_size": 64,
        "patch_size": 16,
        "depths": [1, 1, 1],
    },
    "longcat_flash": {
        "head_dim": 8,
        "qk_rope_head_dim": 8,
        "qk_nope_head_dim": 8,
        "qk_head_dim": 16,
    },
    "mask2former": {
        "feature_size": 32,
        "mask_feature_size": 32,
        "hidden_dim": 32,
        "backbone_config.out_features": ["stage1", "stage2", "stage3", "stage4"],
    },
    "oneformer": {"backbone_config.out_features": ["stage1", "stage2", "stage3", "stage4"]},
    "mimi": _MIMI,
    "mimi_decoder": _MIMI,
    "mistral4": {
        "qk_rope_head_dim": 8,
        "qk_nope_head_dim": 8,
        "rope_parameters": {
            **_ROPE,
            "partial_rotary_factor": 0.5,
            "llama_4_scaling_beta": 0.1,
            "original_max_position_embeddings": 64,
        },
    },
    "molmo2": {"adapter_config.vision_feature_layer": [1, 0]},
    "muse_spark": _nested("audio_config", {"num_hidden_layers": 4}),
    "muse_spark_audio": {"num_hidden_layers": 4},
    "pp_doclayout_v4": _DETECTOR,
    "pp_ocrv5_server_rec": _nested("backbone_config", _HGNET),
    "qwen2_5_omni_thinker": {"text_config.rope_parameters": _MROPE_8},
    "rt_detr": _RT_DETR,
    "rt_detr_v2": _RT_DETR,
    "sam": _SAM,
    "sam_hq": _SAM,
    "tvp": {"max_img_size": 64, "visual_prompt_size": 4, "num_frames": 2},
    "vibevoice_acoustic_tokenizer": _VIBEVOICE,
    "vibevoice_acoustic_tokenizer_decoder": _VIBEVOICE,
    "vibevoice_acoustic_tokenizer_encoder": _VIBEVOICE,
    "vibevoice": {
        **_nested("audio_config", _VIBEVOICE),
        **_nested("semantic_model_config", _VIBEVOICE),
    },
    "vibevoice_asr": {
        **_nested("acoustic_tokenizer_encoder_config", _VIBEVOICE),
        **_nested("semantic_tokenizer_encoder_config", _VIBEVOICE),
    },
    "kimi_k25_vision": {"pos_emb_height": 8, "pos_emb_width": 8},
    "emu3": {
        **_VQ,
        "vq_config.base_channels": 32,
        "vq_config.channel_multiplier": [1, 1],
        "vq_config.codebook_size": 64,
        "vq_config.hidden_size": 32,
    },
    "janus": {
        "vq_config.base_channels": 32,
        "vq_config.channel_multiplier": [1, 1],
        "vq_config.latent_channels": 16,
        "vq_config.num_embeddings": 64,
        "vq_config.image_token_embed_dim": 32,
    },
    "blip-2": {"image_token_index": 5},
    "instructblip": {"image_token_index": 5},
    "instructblipvideo": {"video_token_index": 5},
    "deimv2": _DETECTOR,
    "d_fine": _DETECTOR,
    "step3p7": {"text_config.sliding_window": 8},
    "mobilevitv2": {"image_size": 64},
    "nemotron": {"num_key_value_heads": 2},
    "nemotron_h": {"n_groups": 2},
    "nemo_speechlm": {"text_config.n_groups": 2},
    "neomme": {"text_config.head_dim": 16, "head_dim": 16},
    "perceiver": {
        "d_model": 32,
        "d_latents": 32,
        "num_latents": 8,
        "num_self_attends_per_block": 1,
        "num_self_attention_heads": 2,
        "num_cross_attention_heads": 2,
        "qk_channels": 32,
        "v_channels": 32,
    },
    "pocket_tts_audio_tokenizer": {"upsample_groups": 32},
    "pocket_tts_audio_tokenizer_decoder": {"upsample_groups": 32},
    "qwen2_5_vl_vision": {"window_size": 32},
    "reformer": {
        "axial_pos_shape": [4, 4],
        "axial_pos_embds_dim": [16, 16],
        "attn_layers": ["local", "local"],
        "num_hidden_layers": 2,
        "chunk_size_lm_head": 0,
    },
    "sam2": {**_nested("vision_config", _SAM2_VISION), "prompt_encoder_config.patch_size": 16},
    "sam2_hiera_det_model": _HIERA,
    "sam2_vision_model": _SAM2_VISION,
    "seggpt": {"image_size": [64, 32], "intermediate_hidden_state_indices": [1], "merge_index": 0},
    "siglip2": {"vision_config.num_patches": 16},
    "siglip2_vision_model": {"num_patches": 16},
    "textnet": {"hidden_sizes": DEFAULT},
    "time_series_transformer": _TIME_SERIES,
    "bamba": _MAMBA | {"attn_layer_indices": [1]},
    "codegen": {"rotary_dim": 4, "n_embd": 32, "n_head": 4},
    "deepseek_v2": {"n_group": 1, "topk_group": 1, "num_experts_per_tok": 2},
    "dots1": {"n_routed_experts": 4, "n_shared_experts": 1, "num_experts_per_tok": 2},
    "esm": {"vocab_size": 33, "pad_token_id": 1, "mask_token_id": 32},
    "falcon_h1": _MAMBA | {"mamba_d_ssm": 64},
    "glm46v": _GLM_VL,
    "glm4v": _GLM_VL,
    "glm4v_moe": _GLM_VL,
    "glm4v_moe_text": _GLM_TEXT,
    "glm4v_text": _GLM_TEXT,
    "glm_image": _GLM_VL,
    "glm_image_text": _GLM_TEXT,
    "glm_ocr": _GLM_VL,
    "glm_ocr_text": _GLM_TEXT,
    "glmga": _GLM_VL,
    "gpt_neo": {"num_layers": 2, "attention_types": [[["global", "local"], 1]], "num_heads": 4},
    "gptj": {"rotary_dim": 4},
    "granite_speech5_ctc": {"context_size": 16, "encoder_config.context_size": 16},
    "granite_speech5_encoder": {"context_size": 16},
    "granitemoehybrid": _MAMBA | {"layer_types": ["mamba", "attention"]},
    "hunyuan_v1_dense": _HUNYUAN,
    "hunyuan_v1_moe": _HUNYUAN,
    "hunyuan_vl": {"text_config.head_dim": 8, "text_config.rope_parameters": _MROPE_8},
    "hunyuan_vl_text": {**_HUNYUAN, "rope_parameters": _MROPE_8},
    "kosmos-2": {"latent_query_num": 4},
    "layoutlmv3": {
        "coordinate_size": 6,
        "shape_size": 4,
        "rel_pos_bins": 4,
        "max_rel_pos": 16,
        "rel_2d_pos_bins": 4,
        "max_rel_2d_pos": 16,
        "max_2d_position_embeddings": 1024,
        "input_size": 32,
    },
    "lfm2_moe": {"layer_types": ["conv", "full_attention"], "num_dense_layers": 1},
    "lilt": {"hidden_size": 48, "max_2d_position_embeddings": 1024},
    "mamba2": {"num_heads": 8, "head_dim": 8, "expand": 2, "n_groups": 2},
    "ministral": {"head_dim": 8},
    "mobilebert": {
        "hidden_size": 32,
        "intra_bottleneck_size": 16,
        "true_hidden_size": 16,
        "embedding_size": 16,
        "intermediate_size": 48,
        "num_attention_heads": 4,
    },
    "moonshine": {
        "decoder_num_key_value_heads": 4,
        "encoder_num_key_value_heads": 4,
        "decoder_num_attention_heads": 4,
        "encoder_num_attention_heads": 4,
    },
    "paddleocr_vl": {"text_config.rope_parameters": _MROPE_8, "text_config.head_dim": 8},
    "qwen2_5_vl": {"text_config.rope_parameters": _MROPE_8},
    "qwen2_5_vl_text": {"rope_parameters": _MROPE_8},
    "qwen2_vl": {"text_config.rope_parameters": _MROPE_8},
    "qwen2_vl_text": {"rope_parameters": _MROPE_8},
    "zamba": {
        "num_hidden_layers": 3,
        "layers_block_type": ["mamba", "hybrid", "hybrid"],
        "attention_head_dim": 16,
        "attention_hidden_size": 64,
        "n_mamba_heads": 2,
        "mamba_dt_rank": 16,
    },
    "zamba2": {
        "layers_block_type": ["mamba", "hybrid"],
        "attention_hidden_size": 64,
        "attention_head_dim": 16,
        "mamba_ngroups": 1,
        "n_mamba_heads": 8,
        "mamba_headdim": 8,
        "num_mem_blocks": 1,
    },
}
#: Attributes of configurations that are set after the configuration has been created.
ATTRIBUTES: dict[str, dict[str, Any]] = {
    "moonshine_streaming": {"num_key_value_heads": 4},
    "qwen2_5_omni_thinker": {"vision_start_token_id": 70},
    "qwen3_omni_moe_thinker": {"vision_start_token_id": 70},
    "xmod": {"default_language": "en_XX"},
}
#: The PyTorch class to compare for model types whose model without a head has no forward pass.
CLASSES: dict[str, str] = {}
#: Seeds of the weights, other than 0. With the seed 0, results depend on rounding: the input of a
#: ReLU of MaskFormer is almost 0, and PP-DocLayoutV4 selects among almost equal logits.
SEEDS: dict[str, int] = {"maskformer": 5, "pp_doclayout_v4": 1}
#: Model types for which the comparison does not set `use_cache`.
OWN_CACHE_OPTION = frozenset({"mimi_encoder", "mimi_decoder", "pocket_tts_audio_tokenizer_encoder"})


def _time_series(config: PreTrainedConfig, random: np.random.Generator) -> dict[str, Any]:
    past = config.context_length + max(config.lags_sequence)
    features = config.num_time_features
    return {
        "past_values": _normal(random, 2, past),
        "past_time_features": _normal(random, 2, past, features),
        "past_observed_mask": np.ones((2, past), np.float32),
        "future_values": _normal(random, 2, config.prediction_length),
        "future_time_features": _normal(random, 2, config.prediction_length, features),
    }


def _text_and_image(size: int = 32) -> Inputs:
    def make(config: PreTrainedConfig, random: np.random.Generator) -> dict[str, Any]:
        return {**_text(random), "pixel_values": _normal(random, 2, 3, size, size)}

    return make


def _image_tokens(
    config: PreTrainedConfig, random: np.random.Generator, frames: int = 1
) -> dict[str, Any]:
    """Returns texts that start with the tokens of an image, which the model replaces."""
    inputs = {**_text(random), "pixel_values": _normal(random, 2, 3, 32, 32)}
    inputs["input_ids"] = np.maximum(inputs["input_ids"], 6)
    inputs["input_ids"][:, 1 : 1 + frames * config.num_query_tokens] = 5
    return inputs


#: For each model type, a function of the configuration and a random number generator that returns
#: inputs. They replace the default inputs. The value `None` removes an input.
INPUTS: dict[str, Inputs] = {
    "audioflamingo3_encoder": lambda config, random: {
        "input_features": _normal(random, 2, config.num_mel_bins, 2 * config.max_source_positions),
        "input_features_mask": np.ones((2, 2 * config.max_source_positions), np.int32),
    },
    "blip_2_qformer": lambda config, random: {
        "query_embeds": _normal(random, 2, 4, 32),
        "encoder_hidden_states": _normal(random, 2, 6, config.encoder_hidden_size),
    },
    "bridgetower": lambda config, random: {
        "pixel_values": _normal(random, 2, 3, 32, 32),
        "pixel_mask": np.ones((2, 32, 32), np.int32),
    },
    "gemma3n_audio": lambda config, random: {
        "audio_mel": _normal(random, 2, 64, config.input_feat_size),
        "audio_mel_mask": np.zeros((2, 64), bool),
    },
    "gemma4_vision": lambda config, random: {
        "pixel_values": _normal(random, 2, 16, 3 * config.patch_size**2),
        "pixel_position_ids": np.stack(np.meshgrid(np.arange(4), np.arange(4), indexing="xy"), -1)
        .reshape(1, 16, 2)
        .repeat(2, 0)
        .astype(np.int32),
    },
    "kimi_k25_vision": lambda config, random: {
        "pixel_values": _normal(random, 16, 3, config.patch_size, config.patch_size),
        "grid_thw": np.array([[1, 4, 4]], np.int32),
    },
    "minicpm_ocr_vision": lambda config, random: {"target_sizes": np.array([[4, 4]], np.int32)},
    "minicpmv4_7_vision": lambda config, random: {"target_sizes": np.array([[4, 4]], np.int32)},
    "instructblip": lambda config, random: {
        **_image_tokens(config, random),
        "qformer_input_ids": _tokens(random, 2, 8),
    },
    "instructblipvideo": lambda config, random: {
        **_image_tokens(config, random, frames=2),
        "pixel_values": _normal(random, 2, 2, 3, 32, 32),
        "qformer_input_ids": _tokens(random, 2, 8),
    },
    "moonshine_streaming": lambda config, random: {"decoder_input_ids": _tokens(random, 2, 8)},
    "muse_spark_audio": lambda config, random: {"input_values": _normal(random, 2, 3840)},
    "voxtral_realtime_encoder": _mel(16, 64),
    "wav2vec2-bert": lambda config, random: {
        "input_features": _normal(random, 2, 32, config.feature_projection_input_dim)
    },
    "vibevoice_acoustic_tokenizer": _waveform,
    "vibevoice_acoustic_tokenizer_decoder": lambda config, random: {
        "hidden_states": _normal(random, 2, config.hidden_size, 8)
    },
    "vibevoice_acoustic_tokenizer_encoder": lambda config, random: {
        "hidden_states": _normal(random, 2, 1, 800)
    },
    "wavtokenizer": _waveform,
    "wavtokenizer_encoder": _waveform,
    "xcodec": _waveform,
    "mimi_decoder": lambda config, random: {"latents": _normal(random, 2, 32, 8)},
    "nemotron3_5_transcribe_word_timestamp": lambda config, random: {
        "inputs_embeds": _normal(random, 2, 16, config.hidden_size)
    },
    "muse_glimmer_assistant": lambda config, random: {
        "noise_embeds": _normal(random, 2, 8, config.hidden_size),
        "context_hidden_states": _normal(random, 2, 8, 5 * config.hidden_size),
    },
    "oneformer": lambda config, random: {
        "pixel_values": _normal(random, 2, 3, 64, 64),
        "task_inputs": _tokens(random, 2, 77),
    },
    "tvp": lambda config, random: {
        "input_ids": _tokens(random, 1, 16),
        "attention_mask": np.ones((1, 16), np.int32),
        "pixel_values": _normal(random, 1, 2, 3, 64, 64),
    },
    "clvp": lambda config, random: {"input_features": _normal(random, 2, 16, 32)},
    "decision_transformer": lambda config, random: {
        "states": _normal(random, 2, 5, config.state_dim),
        "actions": _normal(random, 2, 5, config.act_dim),
        "rewards": _normal(random, 2, 5, 1),
        "returns_to_go": _normal(random, 2, 5, 1),
        "timesteps": random.integers(0, 10, (2, 5)).astype(np.int32),
        "attention_mask": np.ones((2, 5), np.int32),
    },
    "dia": lambda config, random: {"decoder_input_ids": _tokens(random, 2, 8, 9)},
    "granite_docling_vision": _images,
    "idefics3_vision": _images,
    "smolvlm_vision": _images,
    "glmasr_encoder": _mel(16, 64),
    "granite_speech5_ctc": lambda config, random: {"input_features": _normal(random, 2, 32, 64)},
    "granite_speech5_encoder": lambda config, random: {
        "input_features": _normal(random, 2, 32, 64)
    },
    "kyutai_speech_to_text": lambda config, random: {
        "input_ids": _tokens(random, 2, 16, config.num_codebooks + 1)
    },
    "kosmos-2": lambda config, random: {
        **_text(random),
        "image_embeds_position_mask": np.eye(1, 16, 1, dtype=np.int32).repeat(2, 0).astype(bool)
        | (np.arange(16) < 1 + config.latent_query_num)[None] & (np.arange(16) > 0)[None],
    },
    "moonshine": lambda config, random: {"decoder_input_ids": _tokens(random, 2, 8)},
    "moss_transcribe_diarize_audio": _mel_frames,
    "qwen2_audio_encoder": _mel_frames,
    "voxtral_encoder": _mel_frames,
    "omniasr_audio": _waveform,
    "omniasr_ctc": _waveform,
    "pe_audio": _waveform,
    "pe_audio_encoder": _waveform,
    "perceiver": lambda config, random: {
        "input_ids": None,
        "attention_mask": None,
        "inputs": _normal(random, 2, 16, config.d_model),
    },
    "pocket_tts_audio_tokenizer": _waveform,
    "pocket_tts_audio_tokenizer_encoder": _waveform,
    "diffusion_gemma": lambda config, random: {"decoder_input_ids": _tokens(random, 2, 8)},
    "fun_asr_nano_encoder": lambda config, random: {
        "input_features": _normal(random, 2, 32, config.input_size),
        "input_features_mask": np.ones((2, 32), np.int32),
    },
    "qwen3_asr_encoder": lambda config, random: {
        "input_features": _normal(random, 2, config.num_mel_bins, 200),
        "input_features_mask": np.ones((2, 200), np.int32),
    },
    "sam3": _text_and_image(),
    "sam3_lite_text": _text_and_image(),
    "sam3_lite_text_text_model": lambda config, random: _text(random),
    "seggpt": lambda config, random: {
        name: _normal(random, 2, 3, 32, 32)
        for name in ("pixel_values", "prompt_pixel_values", "prompt_masks")
    },
    "siglip2": _siglip2,
    "siglip2_vision_model": _siglip2,
    "speecht5": lambda config, random: {
        "input_values": _normal(random, 2, 16, 32),
        "decoder_input_values": _normal(random, 2, 8, 32),
    },
    "video_llama_3_vision": lambda config, random: {"merge_sizes": np.array([1], np.int32)},
    "videoprism": lambda config, random: {
        **_text(random),
        "pixel_values_videos": _normal(random, 2, 16, 3, 32, 32),
    },
    "videoprism_vision_model": _video(16, name="pixel_values_videos"),
    "aimv2": _text_and_image(),
    "audio-spectrogram-transformer": lambda config, random: {
        "input_values": _normal(random, 2, config.max_length, config.num_mel_bins)
    },
    "autoformer": _time_series,
    "informer": _time_series,
    "time_series_transformer": _time_series,
    "bros": lambda config, random: {"bbox": _normal(random, 2, 16, 8)},
    "clap": lambda config, random: {
        "input_features": _normal(random, 2, 1, 64, 32),
    },
    "dac": _waveform,
    "encodec": _waveform,
    "mimi": _waveform,
    "mimi_encoder": _waveform,
    "layoutlmv3": lambda config, random: {
        **_boxes(config, random),
        "pixel_values": _normal(random, 2, 3, 32, 32),
    },
    "layoutlm": _boxes,
    "lilt": _boxes,
    "lxmert": lambda config, random: {
        "visual_feats": _normal(random, 2, 4, config.visual_feat_dim),
        "visual_pos": _normal(random, 2, 4, config.visual_pos_dim),
    },
    "metaclip_2": _text_and_image(),
    "owlv2": _text_and_image(),
    "owlvit": _text_and_image(),
    "patchtsmixer": lambda config, random: {
        "past_values": _normal(random, 2, config.context_length, config.num_input_channels)
    },
    "patchtst": lambda config, random: {
        "past_values": _normal(random, 2, config.context_length, config.num_input_channels)
    },
    "timesformer": _video(8),
    "videomae": _video(16),
    "vivit": _video(32),
    "vjepa2": _video(2, name="pixel_values_videos"),
    "univnet": lambda config, random: {
        "noise_sequence": _normal(random, 2, 64, config.model_in_channels)
    },
    "vilt": _text_and_image(),
    "vit_mae": lambda config, random: {"noise": _normal(random, 2, 16)},
    "udop": lambda config, random: {"bbox": np.abs(_normal(random, 2, 16, 4)) % 1},
    "xclip": lambda config, random: {
        **_text(random),
        "pixel_values": _normal(random, 2, 8, 3, 32, 32),
    },
    "vision-text-dual-encoder": _text_and_image(),
    "idefics": lambda config, random: {
        "pixel_values": _normal(random, 2, 1, 3, 32, 32),
        "image_attention_mask": np.ones((2, 16, 1), np.int32),
    },
    "grounding-dino": _text_and_image(64),
    "mm-grounding-dino": _text_and_image(64),
    "blip-2": lambda config, random: _image_tokens(config, random),
}
#: Names of inputs that are constants of the program, for all model types.
STATIC_NAMES: tuple[str, ...] = (
    *("image_grid_thw", "video_grid_thw", "grid_thw", "grid_hws", "spatial_shapes", "image_sizes"),
    *("merge_sizes", "target_sizes"),
)
#: Names of further inputs that are constants of the program, for single model types.
STATIC: dict[str, tuple[str, ...]] = {
    # The number of tokens with global attention, which the mask states, is the size of an array.
    "led": ("attention_mask",),
    "longformer": ("attention_mask",),
    # The positions of patches that are padding determine the number of outputs.
    "gemma4_vision": ("pixel_position_ids",),
}
