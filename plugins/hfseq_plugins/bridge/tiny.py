"""Tiny models and inputs for the model types of Transformers.

Rules for the names of attributes give the sizes in most configurations. `tiny_sizes` contains the
sizes and inputs of model types for which the rules are not sufficient. They follow the
configurations in Transformers' own tests.
"""

from __future__ import annotations

import copy
import inspect
import re
import typing
from collections.abc import Mapping
from typing import Any

import numpy as np
import torch
import transformers
from transformers import CONFIG_MAPPING, MODEL_MAPPING, PreTrainedConfig

from hfseq.errors import UsageError, did_you_mean
from hfseq_plugins.bridge import tiny_sizes

#: Maximum number of parameters of a tiny model.
MAX_PARAMETERS = 30_000_000

#: Patterns of attribute names, and the sizes of attributes whose name matches. The first pattern
#: that matches determines the size.
RULES: tuple[tuple[str, int], ...] = tuple(
    (re.compile(pattern), size)  # type: ignore[misc]
    for pattern, size in (
        (r"^(vocab_size(_per_layer_input)?|.*_vocab_size|num_embeddings)$", 99),
        (
            r"^(max_position_embeddings|n_positions|max_(source|target)_positions|seq_length"
            r"|max_sequence_length|n_ctx|context_length|max_seq_len|max_length)$",
            64,
        ),
        (r"^num_feat_extract_layers$", 99),  # the default, the number of convolutions, is smaller
        (r"^(type_vocab_size|type_sequence_label_size)$", 2),
        (r"(num_key_value_heads|num_kv_heads|n_head_kv|multi_query_group_num)$", 2),
        (r"(num_attention_heads|n_heads?|num_heads|attention_heads|num_q_heads|encoder_heads)$", 4),
        (r"^heads$", 4),
        (
            r"^((qk_nope_|qk_rope_|v_|qk_|global_|index_|swa_|attention_|mamba_|linear_key_"
            r"|linear_value_|linear_)?head_dim|d_head|d_kv|attention_head_size|kv_channels"
            r"|mamba_d_head)$",
            8,
        ),
        (r"^(q_lora_rank|kv_lora_rank|time_step_rank|mamba_dt_rank|lora_rank)$", 16),
        (r"^(linear_num_value_heads|linear_num_key_heads|mamba_n_heads|mamba_num_heads)$", 4),
        (r"^index_n_heads$", 4),
        (
            r"^(num_hidden_layers|n_layers?|num_layers|.*_layers|depth|num_blocks?|n_blocks)$",
            2,
        ),
        (r"(moe_|expert_|shared_expert_)(intermediate_size|ffn_hidden_size)$", 16),
        (
            r"(intermediate_size|ffn_dim|d_ff|n_inner|ffn_hidden_size|mlp_dim|dim_feedforward"
            r"|inner_dim|hidden_dim_ff|feed_forward_hidden_size|hidden_size_mlp)$",
            48,
        ),
        (
            r"(hidden_size|d_model|n_embd|embed_dim|hidden_dim|embedding_size|embedding_dim"
            r"|projection_dim|projection_size|proj_dim|d_embed|output_dim|width|encoder_dim"
            r"|decoder_dim|context_dim|cross_attention_dim|dim|latent_dim)$",
            32,
        ),
        (r"^(num_experts|num_local_experts|n_routed_experts|moe_num_experts)$", 4),
        (
            r"^(num_experts_per_tok|num_experts_per_token|moe_topk|moe_k|num_selected_experts"
            r"|moe_top_k|top_k_experts|num_shared_experts|n_shared_experts|moe_topk_group)$",
            2,
        ),
        (r"^(n_group|topk_group|num_expert_group)$", 1),
        (r"^(first_k_dense_replace|decoder_sparse_step|moe_layer_start_index)$", 1),
        (r"^(image_size|img_size|input_size|crop_size)$", 32),
        (r"^(patch_size|spatial_patch_size|encoder_patch_size)$", 8),
        (r"^(num_queries|num_query_tokens|num_latents|num_object_queries)$", 4),
        (r"^mm_tokens_per_image$", 4),
        (r"^(state_size|mamba_d_state|ssm_state_size|d_state)$", 8),
        (r"^(chunk_size|mamba_chunk_size|block_size|local_chunk_length|lsh_attn_chunk_length)$", 8),
        (
            r"^(sliding_window|attention_window|local_attention|window_size|attention_chunk_size)$",
            8,
        ),
        (r"^(num_mel_bins|feature_size|input_feat_per_channel)$", 16),
        (r"^(num_conv_pos_embeddings|conv_pos|conv_kernel_size_pos)$", 16),
        (r"^num_conv_pos_embedding_groups$", 2),
        (
            r"^(codebook_dim|codevector_dim|proj_codevector_dim|codebook_size|tdnn_dim"
            r"|num_codevectors_per_group|xvector_output_dim|classifier_proj_size)$",
            16,
        ),
    )
)
_TOKEN = re.compile(r"(_token_id|_token_index|_id)$|^(pad|bos|eos)")


def tiny_config(model_type: str) -> PreTrainedConfig:
    """Returns a configuration of a model type with small sizes.

    Args:
        model_type: A key of `transformers.CONFIG_MAPPING`.

    Raises:
        UsageError: Transformers does not have the model type.
    """
    if model_type not in CONFIG_MAPPING:
        names = list(CONFIG_MAPPING.keys())
        raise UsageError(
            f"Transformers {transformers.__version__} has no model type {model_type!r}"
            f"{did_you_mean(model_type, names)}"
        )
    sizes = tiny_sizes.SIZES.get(model_type, {})
    config = _shrink(CONFIG_MAPPING[model_type], sizes)
    for name, value in tiny_sizes.ATTRIBUTES.get(model_type, {}).items():
        setattr(config, name, value)
    return config


def _shrink(config_class: type[PreTrainedConfig], sizes: Mapping[str, Any]) -> PreTrainedConfig:
    """Returns a small configuration of a class.

    Args:
        config_class: The class.
        sizes: Arguments of the constructor, which replace those from the rules. A key with a dot,
            such as `text_config.vocab_size`, is an argument of a nested configuration. The value
            `tiny_sizes.DEFAULT` keeps the default of an argument.
    """
    defaults = config_class()
    values = {name: value for name, value in vars(defaults).items() if not name.startswith("_")}
    arguments: dict[str, Any] = {}
    for name, value in values.items():
        nested = {
            key.partition(".")[2]: size
            for key, size in sizes.items()
            if key.partition(".")[0] == name and "." in key
        }
        if name in sizes:
            value = sizes[name]
            if isinstance(value, PreTrainedConfig):
                arguments[name] = _shrink(type(value), nested)
        elif isinstance(value, PreTrainedConfig):
            arguments[name] = _shrink(type(value), nested)
        elif (size := _small(name, value)) is not None:
            arguments[name] = size
    if "window_size" in arguments and "image_size" in values:
        arguments["window_size"] = 2
    if values.get("num_key_value_heads") == values.get("num_attention_heads") is not None:
        arguments["num_key_value_heads"] = 4
    arguments |= _rotary_sections(values)
    for name in ("layer_types", "mlp_layer_types"):
        if name in values and "num_hidden_layers" in arguments:
            arguments[name] = None  # the constructor computes it from the number of layers
    arguments |= {name: size for name, size in sizes.items() if "." not in name}
    for name in [name for name, size in arguments.items() if size is tiny_sizes.DEFAULT]:
        del arguments[name]
    try:
        return config_class(**arguments)
    except Exception:
        if not {"layer_types", "mlp_layer_types"} & arguments.keys() - sizes.keys():
            raise
        for name in {"layer_types", "mlp_layer_types"} - sizes.keys():
            arguments.pop(name, None)
        return config_class(**arguments)


def _small(name: str, value: Any) -> Any:
    """Returns the small size of an attribute, or `None` to keep its default."""
    if isinstance(value, bool):
        return None
    if isinstance(value, int):
        if re.search(r"(_token_id|_token_index)$", name) and value > 90:
            return 60 + sum(map(ord, name)) % 37
        if _TOKEN.search(name) or value <= 0:
            return None
        size = next((size for rule, size in RULES if rule.search(name)), None)  # type: ignore[attr-defined]
        return None if size is None else min(size, value)
    if not isinstance(value, list | tuple) or not value:
        return None
    if not all(isinstance(entry, int) and not isinstance(entry, bool) for entry in value):
        return None
    if re.search(r"depths|^num_blocks|layers_per", name):
        return [1] * len(value)
    if "heads" in name:
        return [2] * len(value)
    if re.search(r"^(image_size|img_size)$", name):
        return [32] * len(value)
    if "conv_dim" in name:
        return [16] * len(value)
    pattern = r"hidden_sizes|embed_dims?|channels|^dims?$|widths|out_features_dim"
    if re.search(pattern, name) and max(value) > 16:
        largest = max(value)
        # Numbers up to 4 are channels of images, which stay the same.
        return [v if v <= 4 else max(8, v * 16 // largest) // 8 * 8 for v in value]
    return None


def _rotary_sections(values: Mapping[str, Any]) -> dict[str, Any]:
    """Returns arguments that divide 8 features per head among the three axes of image positions."""
    field = "rope_parameters" if values.get("rope_parameters") else "rope_scaling"
    rope = values.get(field)
    if not isinstance(rope, dict) or "mrope_section" not in rope:
        return {}
    arguments: dict[str, Any] = {field: {**rope, "mrope_section": [1, 1, 2]}}
    if "head_dim" in values:
        arguments["head_dim"] = 8
    return arguments


def model_class(config: PreTrainedConfig) -> type[transformers.PreTrainedModel]:
    """Returns the PyTorch class that the coverage table compares for a model type.

    It is the class of the model without a head, unless `tiny_sizes` names another class.
    """
    name = tiny_sizes.CLASSES.get(config.model_type)
    if name is not None:
        return getattr(transformers, name)
    entry = MODEL_MAPPING[type(config)]
    return typing.cast(Any, entry[0] if isinstance(entry, tuple) else entry)


def tiny_model(model_type: str) -> transformers.PreTrainedModel:
    """Returns a small PyTorch model with random weights, in evaluation mode.

    Raises:
        UsageError: The model has more than `MAX_PARAMETERS` parameters.
    """
    config = tiny_config(model_type)
    return random_model(model_class(config), config, tiny_sizes.SEEDS.get(model_type, 0))


def random_model(
    torch_class: Any, config: PreTrainedConfig, seed: int = 0
) -> transformers.PreTrainedModel:
    """Returns a PyTorch model with random weights, in evaluation mode.

    Noise is added to all parameters. Parameters that are initialized with 0 or 1 then affect the
    outputs, so a comparison of outputs detects errors in them.

    Args:
        torch_class: The class of the model.
        config: The configuration of the model.
        seed: Determines the weights.

    Raises:
        UsageError: The model has more than `MAX_PARAMETERS` parameters.
    """
    with torch.device("meta"):
        copied = copy.deepcopy(config)
        count = sum(p.numel() for p in torch_class._from_config(copied).parameters())
    if count > MAX_PARAMETERS:
        raise UsageError(
            f"the tiny {config.model_type} has {count} parameters, but at most {MAX_PARAMETERS} "
            "are allowed: add smaller sizes to hfseq_plugins.bridge.tiny_sizes"
        )
    torch.manual_seed(seed)
    model = torch_class._from_config(config).eval()
    generator = torch.Generator().manual_seed(seed)
    with torch.no_grad():
        for parameter in model.parameters():
            if parameter.is_floating_point():
                noise = torch.randn(parameter.shape, generator=generator)
                parameter.add_((noise * 0.02).to(parameter.dtype))
    return model


def tiny_inputs(
    model: transformers.PreTrainedModel, rows: int = 2, length: int = 16
) -> dict[str, Any]:
    """Returns random inputs for a tiny model by name.

    The inputs are NumPy arrays of float32, int32 and bool. The second row of texts is padded.

    Args:
        model: The model.
        rows: Batch size.
        length: Length of texts in tokens.
    """
    config = model.config
    random = np.random.default_rng(0)
    make = tiny_sizes.INPUTS.get(config.model_type)
    inputs = _automatic_inputs(model, config, random, rows, length)
    if make is not None:
        inputs = {**inputs, **make(config, random)}
    return {name: value for name, value in inputs.items() if value is not None}


def static_inputs(model_type: str) -> tuple[str, ...]:
    """Returns the names of inputs whose values the Python code of the model reads."""
    return tiny_sizes.STATIC.get(model_type, ()) + tiny_sizes.STATIC_NAMES


def _automatic_inputs(
    model: transformers.PreTrainedModel,
    config: PreTrainedConfig,
    random: np.random.Generator,
    rows: int,
    length: int,
) -> dict[str, Any]:
    names = inspect.signature(model.forward).parameters
    main = model.main_input_name
    inputs: dict[str, Any] = {}
    if "input_ids" in names and main == "input_ids":
        vocab = min(60, getattr(config.get_text_config(), "vocab_size", 60) or 60)
        ids = random.integers(min(4, vocab - 1), vocab, (rows, length)).astype(np.int32)
        inputs["input_ids"] = ids
        if "attention_mask" in names:
            inputs["attention_mask"] = np.ones((rows, length), np.int32)
            inputs["attention_mask"][1, 10:] = 0
        if "decoder_input_ids" in names and getattr(config, "is_encoder_decoder", False):
            inputs["decoder_input_ids"] = ids[:, :8]
    vision = getattr(config, "vision_config", config)
    two_towers = r"^(CLIP|Siglip|Align|Blip|Group|Flava|AltCLIP|ChineseCLIP|MetaClip|Aimv2)"
    if "pixel_values" in names and (
        main == "pixel_values"
        or (hasattr(config, "vision_config") and re.match(two_towers, type(model).__name__))
    ):
        size = getattr(vision, "image_size", 32)
        height, width = (
            (size, size) if isinstance(size, int) else (tuple(size or ()) or (32, 32))[:2]
        )
        channels = getattr(vision, "num_channels", 3)
        inputs["pixel_values"] = normal(random, rows, channels, height, width)
    if main == "input_values":
        inputs[main] = normal(random, rows, 2000)
    if "grid_thw" in names and "input_ids" not in inputs:
        inputs = _patches(config, random, next(iter(names)), rows=1)
    if main == "input_features":
        bins = getattr(config, "num_mel_bins", getattr(config, "feature_size", 16))
        frames = 2 * getattr(config, "max_source_positions", 32)
        shape = (bins, frames) if "whisper" in config.model_type else (64, bins)
        inputs[main] = normal(random, rows, *shape)
        if getattr(config, "is_encoder_decoder", False):
            inputs["decoder_input_ids"] = random.integers(4, 60, (rows, 8)).astype(np.int32)
    return inputs


def _patches(
    config: PreTrainedConfig, random: np.random.Generator, name: str, rows: int
) -> dict[str, Any]:
    """Returns inputs for images of 4 x 4 patches. The patches of all images are one sequence."""
    size = config.patch_size if isinstance(config.patch_size, int) else config.patch_size[-1]
    channels = getattr(config, "in_channels", getattr(config, "num_channels", 3))
    features = channels * getattr(config, "temporal_patch_size", 1) * size**2
    return {
        name: normal(random, rows * 16, features),
        "grid_thw": np.array([[1, 4, 4]] * rows, np.int32),
    }


def normal(random: np.random.Generator, *shape: int) -> np.ndarray:
    """Draws float32 numbers with mean 0 and standard deviation 1."""
    return random.normal(size=shape).astype(np.float32)
