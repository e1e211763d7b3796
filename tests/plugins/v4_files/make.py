r"""Writes a tiny model of each family with the Flax classes of Transformers 4.57.

Run once in a separate environment:

    pip install transformers==4.57.6 torch==2.13.0 jax==0.10.2 flax==0.12.8 numpy
    python tests/plugins/v4_files/make.py [NAME ...]

Each folder contains config.json, flax_model.msgpack and numbers.safetensors. The latter contains
inputs, and the outputs of the PyTorch class of Transformers 4.57 for them and these weights, since
PyTorch is the reference where Flax differs. The script prints the differences of the Flax class.
"""

from __future__ import annotations

import json
import sys
from pathlib import Path

import jax
import numpy as np
import torch
import transformers
from flax.traverse_util import flatten_dict, unflatten_dict
from safetensors.numpy import save_file
from transformers.modeling_flax_pytorch_utils import load_flax_weights_in_pytorch_model

HERE = Path(__file__).parent
_clip = jax.numpy.clip
#: Newer jax versions have no `a_max`, which the Flax classes use.
jax.numpy.clip = lambda x, *args, a_max=None, **kwargs: (
    _clip(x, *args, max=a_max, **kwargs) if (a_max is not None) else _clip(x, *args, **kwargs)
)
SMALL = {
    "vocab_size": 48,
    "hidden_size": 16,
    "num_hidden_layers": 2,
    "num_attention_heads": 2,
    "intermediate_size": 24,
    "max_position_embeddings": 40,
    "pad_token_id": 1,
    "bos_token_id": 0,
    "eos_token_id": 2,
}
BART = {
    "vocab_size": 48,
    "d_model": 16,
    "encoder_layers": 1,
    "decoder_layers": 1,
    "encoder_attention_heads": 2,
    "decoder_attention_heads": 2,
    "encoder_ffn_dim": 24,
    "decoder_ffn_dim": 24,
    "max_position_embeddings": 40,
    "pad_token_id": 1,
    "bos_token_id": 0,
    "eos_token_id": 2,
    "decoder_start_token_id": 2,
}
NET = {"embedding_size": 8, "hidden_sizes": [16, 24], "depths": [2, 1]}
TOWER = {
    "hidden_size": 16,
    "intermediate_size": 24,
    "num_hidden_layers": 2,
    "num_attention_heads": 2,
}
IMAGE = TOWER | {"image_size": 12, "patch_size": 4}
WORDS = TOWER | {
    "vocab_size": 48,
    "max_position_embeddings": 20,
    "bos_token_id": 0,
    "eos_token_id": 47,
    "pad_token_id": 1,
}
AUDIO = {"vocab_size": 20, "hidden_size": 16, "num_hidden_layers": 2, "num_attention_heads": 2,
         "intermediate_size": 24, "conv_dim": (8, 12), "conv_stride": (5, 2), "conv_kernel": (6, 3),
         "num_conv_pos_embeddings": 4, "num_conv_pos_embedding_groups": 2, "codevector_dim": 8,
         "num_codevectors_per_group": 4, "num_codevector_groups": 2, "proj_codevector_dim": 6,
         "do_stable_layer_norm": True, "feat_extract_norm": "layer", "conv_bias": True,
         "output_hidden_size": 12, "num_adapter_layers": 1}  # fmt: skip
SPECTROGRAMS = {n: value for n, value in BART.items() if n != "max_position_embeddings"} | {
    "num_mel_bins": 6,
    "max_source_positions": 8,
    "max_target_positions": 12,
    "begin_suppress_tokens": None,
    "suppress_tokens": None,
}
DECODER = {"is_decoder": True, "add_cross_attention": True}

#: Folder: class name without "Flax", class and fields of the configuration, type of the inputs.
MODELS = {
    "albert": ("AlbertForPreTraining", "AlbertConfig",
               SMALL | {"embedding_size": 12, "num_hidden_layers": 3, "inner_group_num": 2},
               "ids types"),
    "beit": ("BeitForImageClassification", "BeitConfig",
             IMAGE | {"num_labels": 3, "use_relative_position_bias": True}, "images"),
    "beit_shared": ("BeitForMaskedImageModeling", "BeitConfig",
                    IMAGE | {"vocab_size": 24, "use_shared_relative_position_bias": True,
                               "use_absolute_position_embeddings": True, "use_mask_token": True,
                               "use_mean_pooling": False}, "hidden"),
    "big_bird": ("BigBirdForMaskedLM", "BigBirdConfig",
                 SMALL | {"attention_type": "block_sparse", "block_size": 2, "num_random_blocks": 1,
                          "use_bias": True}, "ids types even"),
    "big_bird_qa": ("BigBirdForQuestionAnswering", "BigBirdConfig",
                    SMALL | {"attention_type": "original_full", "rescale_embeddings": True},
                    "question"),
    "blenderbot": ("BlenderbotForConditionalGeneration", "BlenderbotConfig", BART, "pairs"),
    "blenderbot_small": ("BlenderbotSmallForConditionalGeneration", "BlenderbotSmallConfig", BART,
                         "pairs"),
    "bloom": ("BloomForCausalLM", "BloomConfig",
              {"vocab_size": 48, "hidden_size": 16, "n_layer": 2, "n_head": 4, "pad_token_id": 3},
              "ids"),
    "clip": ("CLIPModel", "CLIPConfig",
             {"text_config": WORDS, "vision_config": IMAGE, "projection_dim": 8}, "clip"),
    "clip_text": ("CLIPTextModel", "CLIPTextConfig", WORDS | {"eos_token_id": 2}, "words"),
    "clip_text_projection": ("CLIPTextModelWithProjection", "CLIPTextConfig",
                             WORDS | {"projection_dim": 8}, "words"),
    "clip_vision": ("CLIPVisionModel", "CLIPVisionConfig", IMAGE, "images"),
    "dinov2": ("Dinov2ForImageClassification", "Dinov2Config",
               {"hidden_size": 16, "mlp_ratio": 2, "num_hidden_layers": 2, "num_labels": 3,
                "num_attention_heads": 2, "image_size": 12, "patch_size": 4,
                "layerscale_value": 0.5, "use_swiglu_ffn": True}, "images"),
    "distilbert": ("DistilBertForMaskedLM", "DistilBertConfig",
                   {"vocab_size": 48, "dim": 16, "n_layers": 2, "n_heads": 2, "hidden_dim": 24,
                    "max_position_embeddings": 40}, "ids"),
    "distilbert_sinusoidal": ("DistilBertForSequenceClassification", "DistilBertConfig",
                              {"vocab_size": 48, "dim": 16, "n_layers": 1, "n_heads": 2,
                               "hidden_dim": 24, "max_position_embeddings": 40,
                               "sinusoidal_pos_embds": True}, "ids"),
    "electra": ("ElectraForPreTraining", "ElectraConfig", SMALL | {"embedding_size": 12},
                "ids types"),
    "electra_generator": ("ElectraForMaskedLM", "ElectraConfig", SMALL | {"embedding_size": 12},
                          "ids types"),
    "encoder_decoder": ("EncoderDecoderModel", "EncoderDecoderConfig",
                        {"encoder": SMALL | {"model_type": "bert"},
                         "decoder": SMALL | DECODER | {"model_type": "roberta"}}, "pairs"),
    "gemma": ("GemmaForCausalLM", "GemmaConfig",
              SMALL | {"head_dim": 12, "num_key_value_heads": 1}, "decoded"),
    "gpt_neo": ("GPTNeoForCausalLM", "GPTNeoConfig",
                {"vocab_size": 48, "hidden_size": 16, "num_layers": 2, "num_heads": 2,
                 "attention_types": [[["global", "local"], 1]], "window_size": 4,
                 "max_position_embeddings": 40, "bos_token_id": 0, "eos_token_id": 2}, "decoded"),
    "gptj": ("GPTJForCausalLM", "GPTJConfig",
             {"vocab_size": 48, "n_embd": 16, "n_layer": 2, "n_head": 2, "rotary_dim": 4,
              "n_positions": 40, "bos_token_id": 0, "eos_token_id": 2,
              "tie_word_embeddings": False}, "decoded"),
    "llama": ("LlamaForCausalLM", "LlamaConfig", SMALL | {"num_key_value_heads": 1}, "decoded"),
    "longt5": ("LongT5ForConditionalGeneration", "LongT5Config",
               {"vocab_size": 48, "d_model": 16, "d_kv": 8, "d_ff": 24, "num_layers": 1,
                "num_heads": 2, "local_radius": 3, "decoder_start_token_id": 0}, "pairs"),
    "longt5_global": ("LongT5ForConditionalGeneration", "LongT5Config",
                      {"vocab_size": 48, "d_model": 16, "d_kv": 8, "d_ff": 24, "num_layers": 1,
                       "num_heads": 2, "local_radius": 3, "global_block_size": 4,
                       "encoder_attention_type": "transient-global",
                       "decoder_start_token_id": 0}, "pairs"),
    "mbart": ("MBartForConditionalGeneration", "MBartConfig", BART | {"scale_embedding": True},
              "pairs"),
    "mistral": ("MistralForCausalLM", "MistralConfig",
                SMALL | {"num_key_value_heads": 1, "sliding_window": 4}, "decoded"),
    "mt5": ("MT5ForConditionalGeneration", "MT5Config",
            {"vocab_size": 48, "d_model": 16, "d_kv": 8, "d_ff": 24, "num_layers": 1,
             "num_heads": 2, "decoder_start_token_id": 0}, "pairs"),
    "opt": ("OPTForCausalLM", "OPTConfig",
            {"vocab_size": 48, "hidden_size": 16, "num_hidden_layers": 2, "ffn_dim": 24,
             "num_attention_heads": 2, "max_position_embeddings": 40, "word_embed_proj_dim": 12,
             "do_layer_norm_before": True, "pad_token_id": 1, "bos_token_id": 0,
             "eos_token_id": 2}, "ids"),
    "regnet": ("RegNetForImageClassification", "RegNetConfig",
               NET | {"num_labels": 3, "groups_width": 4}, "images"),
    "resnet": ("ResNetForImageClassification", "ResNetConfig", NET | {"num_labels": 3},
               "images"),
    "roberta_prelayernorm": ("RobertaPreLayerNormForMaskedLM", "RobertaPreLayerNormConfig", SMALL,
                             "ids"),
    "roformer": ("RoFormerForMaskedLM", "RoFormerConfig", SMALL | {"rotary_value": True},
                 "ids types"),
    "speech_encoder_decoder": (
        "SpeechEncoderDecoderModel", "SpeechEncoderDecoderConfig",
        {"encoder": AUDIO | {"model_type": "wav2vec2", "add_adapter": True,
                             "output_hidden_size": 16},
         "decoder": SMALL | DECODER | {"model_type": "bert", "max_position_embeddings": 128,
                                       "hidden_size": 12}}, "spoken"),
    "vision_encoder_decoder": (
        "VisionEncoderDecoderModel", "VisionEncoderDecoderConfig",
        {"encoder": IMAGE | {"model_type": "vit", "hidden_size": 12},
         "decoder": DECODER | {"model_type": "gpt2", "vocab_size": 48, "n_embd": 16, "n_layer": 1,
                               "n_head": 2, "n_positions": 40}}, "captions"),
    "vision_text_dual_encoder": (
        "VisionTextDualEncoderModel", "VisionTextDualEncoderConfig",
        {"vision_config": IMAGE | {"model_type": "vit"}, "projection_dim": 8,
         "text_config": SMALL | {"model_type": "bert"}}, "clip"),
    "vision_text_dual_encoder_clip": (
        "VisionTextDualEncoderModel", "VisionTextDualEncoderConfig",
        {"vision_config": IMAGE | {"model_type": "clip_vision_model"}, "projection_dim": 8,
         "text_config": SMALL | {"model_type": "roberta", "num_hidden_layers": 1}}, "clip"),
    "vit": ("ViTForImageClassification", "ViTConfig", IMAGE | {"num_labels": 3}, "images"),
    "wav2vec2": ("Wav2Vec2ForPreTraining", "Wav2Vec2Config", AUDIO | {"output_hidden_size": 16},
                 "audio"),
    "wav2vec2_ctc": ("Wav2Vec2ForCTC", "Wav2Vec2Config", AUDIO | {"add_adapter": True}, "audio"),
    "whisper": ("WhisperForConditionalGeneration", "WhisperConfig", SPECTROGRAMS,
                "spectrograms"),
    "whisper_labels": ("WhisperForAudioClassification", "WhisperConfig",
                       SPECTROGRAMS | {"num_labels": 3, "classifier_proj_size": 12}, "labels"),
    "xglm": ("XGLMForCausalLM", "XGLMConfig",
             {"vocab_size": 48, "d_model": 16, "ffn_dim": 24, "num_layers": 2,
              "attention_heads": 2, "max_position_embeddings": 40}, "decoded"),
    "xlm_roberta": ("XLMRobertaForMaskedLM", "XLMRobertaConfig", SMALL, "ids"),
}  # fmt: skip


def inputs(input_type: str) -> dict[str, np.ndarray]:
    """Returns model inputs of a type, padded on the right."""
    random = np.random.default_rng(7)
    parts, length = input_type.split(), 26 if "even" in input_type else 13
    if input_type in ("images", "hidden"):
        values = {"pixel_values": random.normal(size=(2, 3, 12, 12)).astype(np.float32)}
        masked = {"bool_masked_pos": random.integers(0, 2, (2, 9)).astype(bool)}
        return values | (masked if input_type == "hidden" else {})
    if input_type in ("captions", "spoken"):
        values = inputs("images" if input_type == "captions" else "audio")
        values = {name.replace("input_values", "inputs"): value for name, value in values.items()}
        return values | {"decoder_input_ids": random.integers(5, 46, (2, 9))}
    if input_type == "audio":
        mask = (np.arange(90) < [[90], [60]]).astype(np.int64)
        audio = (random.normal(size=mask.shape) * mask).astype(np.float32)
        return {"input_values": audio, "attention_mask": mask}
    if input_type in ("spectrograms", "labels"):
        values = {"input_features": random.normal(size=(2, 6, 16)).astype(np.float32)}
        text = {"decoder_input_ids": random.integers(5, 46, (2, 9))}
        return values | (text if input_type == "spectrograms" else {})
    ids = random.integers(5, 46, (2, length))
    mask = np.ones_like(ids)
    if input_type in ("clip", "words"):
        ids[0, -4], ids[1, -1] = 47, 47  # the end-of-text token has the largest ID
        images = inputs("images") if input_type == "clip" else {}
        return {"input_ids": ids, "attention_mask": mask} | images
    mask[1, -3:] = 0
    ids = np.where(mask, ids, 1)
    values = {"input_ids": ids, "attention_mask": mask}
    if input_type == "question":
        ids[:, 4] = 66 % 48
        types = np.zeros_like(ids)
        types[:, 5:] = 1
        return values | {"token_type_ids": types}
    if input_type == "pairs":
        return values | {"decoder_input_ids": random.integers(5, 46, (2, 9))}
    if "types" in parts:
        values["token_type_ids"] = np.arange(length)[None].repeat(2, 0) % 2
    if "decoded" in parts:
        values["position_ids"] = np.arange(length)[None].repeat(2, 0)
    return values


def arrays(output: object) -> dict[str, np.ndarray]:
    """Returns the arrays of an output by name, without nested outputs and caches."""
    names = (
        "logits",
        "last_hidden_state",
        "pooler_output",
        "start_logits",
        "end_logits",
        "prediction_logits",
        "sop_logits",
        "logits_per_image",
        "text_embeds",
        "image_embeds",
        "projected_states",
        "projected_quantized_states",
    )
    values = {name: output[name] for name in names if output.get(name) is not None}
    return {name: np.asarray(getattr(x, "detach", lambda x=x: x)()) for name, x in values.items()}


def make(name: str) -> None:
    """Writes the folder `name`."""
    class_name, config_name, sizes, input_type = MODELS[name]
    config = getattr(transformers, config_name)(**sizes)
    model = getattr(transformers, f"Flax{class_name}")(config, seed=0)
    random = np.random.default_rng(3)
    leaves = {
        path: (leaf + 0.1 * random.normal(size=leaf.shape)).astype(np.float32)
        for path, leaf in sorted(flatten_dict(model.params).items())
    }
    model.params = jax.tree.map(jax.numpy.asarray, unflatten_dict(leaves))
    folder = HERE / name
    model.save_pretrained(folder)
    (folder / "generation_config.json").unlink(missing_ok=True)
    model_inputs = inputs(input_type)
    config._attn_implementation = "eager"
    torch_model = getattr(transformers, class_name)(config)
    load_flax_weights_in_pytorch_model(torch_model, model.params)
    torch_model.tie_weights()
    as_torch = {key: torch.tensor(value) for key, value in model_inputs.items()}
    if name in ("opt", "bloom"):
        as_torch.pop("position_ids", None)
    with torch.no_grad():
        expected = arrays(torch_model.eval()(**as_torch, return_dict=True))
    theirs = arrays(model(**model_inputs, return_dict=True))
    print(name, {key: float(np.abs(theirs[key] - expected[key]).max()) for key in expected})
    numbers = {f"input.{key}": value for key, value in model_inputs.items()}
    numbers |= {f"output.{key}": np.ascontiguousarray(value) for key, value in expected.items()}
    save_file(numbers, folder / "numbers.safetensors")
    stored = json.loads((folder / "config.json").read_text())
    stored["architectures"] = [class_name]
    (folder / "config.json").write_text(json.dumps(stored, indent=2, sort_keys=True) + "\n")


if __name__ == "__main__":
    for model_name in sys.argv[1:] or MODELS:
        make(model_name)
