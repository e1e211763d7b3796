"""Tiny models and checkpoints that tests share."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import jax
import numpy as np

TINY = {
    "vocab_size": 64,
    "hidden_size": 32,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "intermediate_size": 48,
    "max_position_embeddings": 40,
    "type_vocab_size": 2,
}


def bert_config(**changes: Any) -> Any:
    from transformers import BertConfig

    return BertConfig(**{**TINY, **changes})


def megatron_bert_config(**changes: Any) -> Any:
    from transformers import MegatronBertConfig

    return MegatronBertConfig(**{**TINY, **changes})


def fp8_encoder_config(**changes: Any) -> Any:
    from hfseq_plugins.fp8_encoder.configuration import Fp8EncoderConfig

    return Fp8EncoderConfig(**{**TINY, **changes})


def roberta_config(**changes: Any) -> Any:
    from transformers import RobertaConfig

    return RobertaConfig(**{**TINY, **changes})


def xlm_roberta_config(**changes: Any) -> Any:
    from transformers import XLMRobertaConfig

    return XLMRobertaConfig(**{**TINY, **changes})


def roberta_prelayernorm_config(**changes: Any) -> Any:
    from transformers import RobertaPreLayerNormConfig

    return RobertaPreLayerNormConfig(**{**TINY, **changes})


def gpt2_config(**changes: Any) -> Any:
    from transformers import GPT2Config

    sizes = {"vocab_size": 64, "n_embd": 32, "n_layer": 2, "n_head": 4, "n_positions": 40}
    tokens = {"bos_token_id": 1, "eos_token_id": 2, "pad_token_id": 0}
    return GPT2Config(**{**sizes, **tokens, **changes})


def llama_config(**changes: Any) -> Any:
    from transformers import LlamaConfig

    return LlamaConfig(**{**_decoder_sizes(), **changes})


def mistral_config(**changes: Any) -> Any:
    from transformers import MistralConfig

    return MistralConfig(**{**_decoder_sizes(), "sliding_window": 5, **changes})


def gemma_config(**changes: Any) -> Any:
    from transformers import GemmaConfig

    return GemmaConfig(**{**_decoder_sizes(), "head_dim": 12, **changes})


#: Two layers with full attention and two with a window.
_QWEN_WINDOWS = {
    "use_sliding_window": True,
    "sliding_window": 5,
    "max_window_layers": 2,
    "num_hidden_layers": 4,
}


def qwen2_config(**changes: Any) -> Any:
    from transformers import Qwen2Config

    return Qwen2Config(**{**_decoder_sizes(), **_QWEN_WINDOWS, **changes})


def qwen3_config(**changes: Any) -> Any:
    from transformers import Qwen3Config

    return Qwen3Config(**{**_decoder_sizes(), **_QWEN_WINDOWS, "head_dim": 12, **changes})


def smollm3_config(**changes: Any) -> Any:
    from transformers import SmolLM3Config

    windows = {
        "use_sliding_window": True,
        "sliding_window": 5,
        "no_rope_layers": [1, 0] * 2,
        "num_hidden_layers": 4,
    }
    return SmolLM3Config(**{**_decoder_sizes(), **windows, **changes})


def gemma2_config(**changes: Any) -> Any:
    from transformers import Gemma2Config

    # Caps that are small enough to have an effect.
    caps = {"attn_logit_softcapping": 1.0, "final_logit_softcapping": 4.0}
    other_options = {
        "head_dim": 12,
        "query_pre_attn_scalar": 7,
        "sliding_window": 5,
        "num_hidden_layers": 4,
    }
    return Gemma2Config(**{**_decoder_sizes(), **caps, **other_options, **changes})


def gemma3_text_config(**changes: Any) -> Any:
    from transformers import Gemma3TextConfig

    other_options = {
        "head_dim": 12,
        "query_pre_attn_scalar": 7,
        "sliding_window": 5,
        "num_hidden_layers": 4,
    }
    kinds = ["sliding_attention", "full_attention"] * 2
    return Gemma3TextConfig(
        **{**_decoder_sizes(), **other_options, "layer_types": kinds, **changes}
    )


def eurobert_config(**changes: Any) -> Any:
    from transformers import EuroBertConfig

    return EuroBertConfig(**{**_decoder_sizes(), "mask_token_id": 3, **changes})


def esm_config(**changes: Any) -> Any:
    from transformers import EsmConfig

    tokens = {"pad_token_id": 1, "eos_token_id": 2, "mask_token_id": 3, "token_dropout": True}
    other_options = {"position_embedding_type": "rotary", "initializer_range": 0.2}
    sizes = {name: TINY[name] for name in TINY if name != "type_vocab_size"}
    return EsmConfig(**{**sizes, **tokens, **other_options, **changes})


def modernbert_config(**changes: Any) -> Any:
    from transformers import ModernBertConfig

    sizes = {"vocab_size": 64, "hidden_size": 32, "intermediate_size": 48, "num_hidden_layers": 5}
    other_options = {"num_attention_heads": 4, "max_position_embeddings": 40, "local_attention": 6}
    tokens = {"pad_token_id": 0, "bos_token_id": 1, "eos_token_id": 2, "cls_token_id": 1}
    wide = {"sep_token_id": 2, "initializer_range": 0.2}
    kinds = ["full_attention", *["sliding_attention", "full_attention"] * 2]
    return ModernBertConfig(
        **{**sizes, **other_options, **tokens, **wide, "layer_types": kinds, **changes}
    )


def modernbert_decoder_config(**changes: Any) -> Any:
    from transformers import ModernBertDecoderConfig

    stored = modernbert_config().to_dict()
    names = ("vocab_size", "hidden_size", "intermediate_size", "num_hidden_layers",
             "num_attention_heads", "max_position_embeddings", "local_attention", "pad_token_id",
             "bos_token_id", "eos_token_id", "cls_token_id", "sep_token_id", "initializer_range",
             "layer_types")  # fmt: skip
    return ModernBertDecoderConfig(**{**{name: stored[name] for name in names}, **changes})


def gptj_config(**changes: Any) -> Any:
    from transformers import GPTJConfig

    sizes = {"vocab_size": 64, "n_embd": 32, "n_layer": 2, "n_head": 2, "n_positions": 40}
    tokens = {"pad_token_id": 0, "bos_token_id": 1, "eos_token_id": 2}
    other_options = {"rotary_dim": 6, "initializer_range": 0.2}
    return GPTJConfig(**{**sizes, **tokens, **other_options, **changes})


def _decoder_sizes() -> dict[str, Any]:
    sizes = {name: TINY[name] for name in TINY if name != "type_vocab_size"}
    tokens = {"pad_token_id": 0, "bos_token_id": 1, "eos_token_id": 2}
    return {**sizes, **tokens, "num_key_value_heads": 2, "initializer_range": 0.2}


def t5_config(**changes: Any) -> Any:
    from transformers import T5Config

    sizes = {"vocab_size": 64, "d_model": 32, "d_kv": 8, "d_ff": 48, "num_layers": 2}
    other_options = {
        "num_heads": 4,
        "decoder_start_token_id": 0,
        "relative_attention_num_buckets": 8,
    }
    return T5Config(**{**sizes, **other_options, **changes})


def mt5_config(**changes: Any) -> Any:
    from transformers import MT5Config

    sizes = {"vocab_size": 64, "d_model": 32, "d_kv": 8, "d_ff": 48, "num_layers": 2}
    return MT5Config(**{**sizes, "num_heads": 4, "relative_attention_num_buckets": 8, **changes})


def translation_sizes() -> dict[str, int]:
    sizes = {"vocab_size": 64, "d_model": 32, "max_position_embeddings": 40}
    for side in ("encoder", "decoder"):
        sizes |= {f"{side}_layers": 2, f"{side}_attention_heads": 4, f"{side}_ffn_dim": 48}
    return sizes


def bart_config(**changes: Any) -> Any:
    from transformers import BartConfig

    return BartConfig(**{**translation_sizes(), **changes})


def marian_config(**changes: Any) -> Any:
    from transformers import MarianConfig

    tokens = {"pad_token_id": 3, "decoder_start_token_id": 3, "eos_token_id": 0}
    return MarianConfig(**{**translation_sizes(), **tokens, **changes})


def pegasus_config(**changes: Any) -> Any:
    from transformers import PegasusConfig

    return PegasusConfig(**{**translation_sizes(), **changes})


def mbart_config(**changes: Any) -> Any:
    from transformers import MBartConfig

    return MBartConfig(**{**translation_sizes(), **changes})


def blenderbot_config(**changes: Any) -> Any:
    from transformers import BlenderbotConfig

    return BlenderbotConfig(**{**translation_sizes(), **changes})


def blenderbot_small_config(**changes: Any) -> Any:
    from transformers import BlenderbotSmallConfig

    return BlenderbotSmallConfig(**{**translation_sizes(), **changes})


def xglm_config(**changes: Any) -> Any:
    from transformers import XGLMConfig

    sizes = {"vocab_size": 64, "d_model": 32, "num_layers": 2, "attention_heads": 4, "ffn_dim": 48}
    return XGLMConfig(**{**sizes, "max_position_embeddings": 40, **changes})


def opt_config(**changes: Any) -> Any:
    from transformers import OPTConfig

    sizes = {
        "vocab_size": 64,
        "hidden_size": 32,
        "num_hidden_layers": 2,
        "ffn_dim": 48,
        "num_attention_heads": 4,
        "max_position_embeddings": 40,
        "word_embed_proj_dim": 32,
        "pad_token_id": 1,
        "bos_token_id": 2,
        "eos_token_id": 2,
        "init_std": 0.05,
    }
    return OPTConfig(**sizes | changes)


def bloom_config(**changes: Any) -> Any:
    from transformers import BloomConfig

    sizes = {
        "vocab_size": 64,
        "hidden_size": 32,
        "n_layer": 2,
        "n_head": 4,
        "pad_token_id": 3,
        "bos_token_id": 1,
        "eos_token_id": 2,
        "initializer_range": 0.2,
    }
    return BloomConfig(**sizes | changes)


def gpt_neo_config(**changes: Any) -> Any:
    from transformers import GPTNeoConfig

    sizes = {
        "vocab_size": 64,
        "hidden_size": 32,
        "num_layers": 4,
        "num_heads": 4,
        "window_size": 5,
        "attention_types": [[["global", "local"], 2]],
        "max_position_embeddings": 40,
        "bos_token_id": 1,
        "eos_token_id": 2,
        "pad_token_id": 0,
    }
    return GPTNeoConfig(**sizes | changes)


def distilbert_config(**changes: Any) -> Any:
    from transformers import DistilBertConfig

    sizes = {
        "vocab_size": 64,
        "dim": 32,
        "n_layers": 2,
        "n_heads": 4,
        "hidden_dim": 48,
        "max_position_embeddings": 40,
        "pad_token_id": 0,
    }
    return DistilBertConfig(**sizes | changes)


def electra_config(**changes: Any) -> Any:
    from transformers import ElectraConfig

    sizes = {
        "vocab_size": 64,
        "hidden_size": 32,
        "num_hidden_layers": 2,
        "num_attention_heads": 4,
        "intermediate_size": 48,
        "max_position_embeddings": 40,
        "pad_token_id": 0,
        "embedding_size": 20,
    }
    return ElectraConfig(**sizes | changes)


def albert_config(**changes: Any) -> Any:
    from transformers import AlbertConfig

    sizes = {
        "vocab_size": 64,
        "hidden_size": 32,
        "num_hidden_layers": 2,
        "num_attention_heads": 4,
        "intermediate_size": 48,
        "max_position_embeddings": 40,
        "pad_token_id": 0,
        "embedding_size": 20,
        "num_hidden_groups": 1,
        "classifier_dropout_prob": 0.1,
    }
    return AlbertConfig(**sizes | changes)


def roformer_config(**changes: Any) -> Any:
    from transformers import RoFormerConfig

    sizes = {
        "vocab_size": 64,
        "hidden_size": 32,
        "num_hidden_layers": 2,
        "num_attention_heads": 4,
        "intermediate_size": 48,
        "max_position_embeddings": 40,
        "pad_token_id": 0,
        "embedding_size": 32,
    }
    return RoFormerConfig(**sizes | changes)


def longt5_config(**changes: Any) -> Any:
    from transformers import LongT5Config

    sizes = {
        "vocab_size": 64,
        "d_model": 32,
        "d_kv": 8,
        "d_ff": 48,
        "num_layers": 2,
        "num_heads": 4,
        "local_radius": 3,
        "decoder_start_token_id": 0,
        "pad_token_id": 0,
        "eos_token_id": 1,
    }
    return LongT5Config(**sizes | changes)


def big_bird_config(**changes: Any) -> Any:
    from transformers import BigBirdConfig

    sizes = {
        "vocab_size": 70,
        "hidden_size": 32,
        "num_hidden_layers": 2,
        "num_attention_heads": 4,
        "intermediate_size": 48,
        "max_position_embeddings": 64,
        "pad_token_id": 0,
        "attention_type": "original_full",
        "block_size": 2,
        "num_random_blocks": 1,
    }
    return BigBirdConfig(**sizes | changes)


def vq_transformer_config(**changes: Any) -> Any:
    from hfseq_plugins.vq_transformer.configuration import VQTransformerConfig

    sizes = {"vocab_size": 64, "hidden_size": 32, "num_hidden_layers": 2, "head_dim": 8}
    other_options = {"num_codes": 8, "window_size": 4, "block_size": 4}
    return VQTransformerConfig(**{**sizes, **other_options, **changes})


def wmt_transformer_config(**changes: Any) -> Any:
    from hfseq_plugins.wmt_transformer.configuration import WMTTransformerConfig

    # Small values like those of the stock classes, so that rounding errors are as small.
    init = {"kernel_init": "normal", "embedding_init_std": 0.02}
    return WMTTransformerConfig(**{**translation_sizes(), **init, **changes})


# Such narrow layers have large initial values. Without a factor, the gradient of a key bias, which
# is zero, would have larger rounding errors than the checks allow.
_CLIP = {
    "hidden_size": 32,
    "intermediate_size": 48,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "projection_dim": 24,
    "initializer_factor": 0.5,
}
_PICTURES = {"image_size": 12, "patch_size": 4}


def clip_text_model_config(**changes: Any) -> Any:
    from transformers import CLIPTextConfig

    # A small vocabulary, so that most rows contain the end token, which is not the legacy one, 2.
    words = {"vocab_size": 24, "max_position_embeddings": 24}
    tokens = {"pad_token_id": 1, "bos_token_id": 0, "eos_token_id": 5}
    return CLIPTextConfig(**{**_CLIP, **words, **tokens, **changes})


def clip_vision_model_config(**changes: Any) -> Any:
    from transformers import CLIPVisionConfig

    changes.pop("vocab_size", None)
    return CLIPVisionConfig(**{**_CLIP, **_PICTURES, **changes})


def clip_config(**changes: Any) -> Any:
    """Returns a tiny CLIP. ``changes`` apply to both sides."""
    from transformers import CLIPConfig

    text = clip_text_model_config(**changes)
    vision = clip_vision_model_config(**{"hidden_size": 48, **changes})
    return CLIPConfig(text_config=text, vision_config=vision, projection_dim=24)


def vit_config(**changes: Any) -> Any:
    from transformers import ViTConfig

    changes.pop("vocab_size", None)
    sizes = {name: _CLIP[name] for name in ("hidden_size", "intermediate_size")}
    layers = {"num_hidden_layers": 2, "num_attention_heads": 4, "num_labels": 3}
    return ViTConfig(**{**sizes, **layers, **_PICTURES, **changes})


def dinov2_config(**changes: Any) -> Any:
    from transformers import Dinov2Config

    changes.pop("vocab_size", None)
    sizes = {"hidden_size": 32, "mlp_ratio": 2, "num_hidden_layers": 2, "num_attention_heads": 4}
    return Dinov2Config(**{**sizes, "num_labels": 3, **_PICTURES, **changes})


def beit_config(**changes: Any) -> Any:
    from transformers import BeitConfig

    sizes = {name: _CLIP[name] for name in ("hidden_size", "intermediate_size")}
    layers = {"num_hidden_layers": 2, "num_attention_heads": 4, "num_labels": 3, "vocab_size": 24}
    position_options = {
        "use_relative_position_bias": True,
        "use_mask_token": True,
        "drop_path_rate": 0.0,
    }
    return BeitConfig(**{**sizes, **layers, **position_options, **_PICTURES, **changes})


def resnet_config(**changes: Any) -> Any:
    """Returns a tiny ResNet with blocks of three layers."""
    from transformers import ResNetConfig

    changes.pop("vocab_size", None)
    sizes = {"embedding_size": 8, "hidden_sizes": [16, 24], "depths": [2, 1], "num_labels": 3}
    return ResNetConfig(**(sizes | changes))


def regnet_config(**changes: Any) -> Any:
    """Returns a tiny RegNet of type "y"."""
    from transformers import RegNetConfig

    changes.pop("vocab_size", None)
    sizes = {"embedding_size": 8, "hidden_sizes": [16, 24], "depths": [2, 1], "num_labels": 3}
    return RegNetConfig(**(sizes | {"groups_width": 4} | changes))


def vision_text_dual_encoder_config(**changes: Any) -> Any:
    """Returns BERT and ViT. ``changes`` apply to both sides."""
    from transformers import VisionTextDualEncoderConfig

    text, vision = bert_config(**changes), vit_config(**changes)
    # A small scale, because the sine of logits as large as CLIP's magnifies rounding errors.
    return VisionTextDualEncoderConfig(
        text_config=text.to_dict(),
        vision_config=vision.to_dict(),
        projection_dim=24,
        logit_scale_init_value=1.0,
    )


def wav2vec2_config(**changes: Any) -> Any:
    from transformers import Wav2Vec2Config

    sizes = {
        "vocab_size": 20,
        "hidden_size": 32,
        "num_hidden_layers": 2,
        "num_attention_heads": 4,
        "intermediate_size": 48,
        "conv_dim": (16, 24),
        "conv_stride": (5, 2),
        "conv_kernel": (6, 3),
        "num_conv_pos_embeddings": 4,
        "num_conv_pos_embedding_groups": 2,
        "codevector_dim": 16,
        "num_codevectors_per_group": 6,
        "num_codevector_groups": 2,
        "proj_codevector_dim": 12,
        "num_adapter_layers": 2,
    }
    return Wav2Vec2Config(**sizes | changes)


def whisper_config(**changes: Any) -> Any:
    from transformers import WhisperConfig

    sizes = {
        "vocab_size": 64, "d_model": 32, "encoder_layers": 2, "decoder_layers": 2,
        "encoder_attention_heads": 4, "decoder_attention_heads": 4, "encoder_ffn_dim": 48,
        "decoder_ffn_dim": 48, "num_mel_bins": 8, "max_source_positions": 10,
        "max_target_positions": 40, "pad_token_id": 1, "bos_token_id": 1, "eos_token_id": 2,
        "decoder_start_token_id": 3, "begin_suppress_tokens": None, "suppress_tokens": None,
        "classifier_proj_size": 16, "num_labels": 3,
    }  # fmt: skip
    return WhisperConfig(**{**sizes, **changes})


def spectrograms(rows: int = 2, frames: int = 20, seed: int = 0) -> np.ndarray:
    return np.random.default_rng(seed).normal(size=(rows, 8, frames)).astype(np.float32)


def encoder_decoder_config(**changes: Any) -> Any:
    """Returns two BERTs. ``changes`` apply to both sides."""
    from transformers import EncoderDecoderConfig

    return _pair(EncoderDecoderConfig, bert_config(**changes), bert_config(**changes))


def vision_encoder_decoder_config(**changes: Any) -> Any:
    """Returns ViT and BERT. ``changes`` apply to both sides."""
    from transformers import VisionEncoderDecoderConfig

    return _pair(VisionEncoderDecoderConfig, vit_config(**changes), bert_config(**changes))


def speech_encoder_decoder_config(**changes: Any) -> Any:
    """Returns Wav2Vec2 and BERT. ``changes`` apply to both sides."""
    from transformers import SpeechEncoderDecoderConfig

    return _pair(SpeechEncoderDecoderConfig, wav2vec2_config(**changes), bert_config(**changes))


def _pair(config_class: Any, encoder: Any, decoder: Any) -> Any:
    tokens = {"pad_token_id": 0, "decoder_start_token_id": 1, "eos_token_id": 2}
    return config_class.from_encoder_decoder_configs(encoder, decoder, **tokens)


def images(rows: int = 2, shape: tuple[int, ...] = (3, 12, 12), seed: int = 0) -> np.ndarray:
    return np.random.default_rng(seed).normal(size=(rows, *shape)).astype(np.float32)


def waveforms(rows: int = 2, samples: int = 90, seed: int = 0) -> np.ndarray:
    return np.random.default_rng(seed).normal(size=(rows, samples)).astype(np.float32)


def ids(rows: int = 2, length: int = 12, seed: int = 0) -> np.ndarray:
    return np.random.default_rng(seed).integers(4, 64, (rows, length)).astype(np.int32)


def trees_equal(ours: Any, theirs: Any) -> bool:
    """Returns whether structure, dtypes and bits are equal."""
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
    """Writes a sharded checkpoint like Transformers 4: nested shards, names joined by slashes.

    ``indexed`` are the shards in the index. Version 4 can write an empty first shard that is not in
    it.
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


def rewrite_tensors(path: Path, change: Any, metadata: dict[str, str] | None = None) -> None:
    """Applies ``change`` to the dict of tensors in a safetensors file."""
    from safetensors.numpy import load_file, save_file

    tensors = load_file(path)
    tensors = change(tensors) or tensors
    save_file(tensors, path, metadata=metadata or {"format": "pt"})
