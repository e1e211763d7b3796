"""Runs a tiny model of every architecture with eight heads on meshes of eight devices.

The loss and the gradients on a mesh can be compared with those on a single device.
"""

from __future__ import annotations

import functools
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from hfseq import plugins
from hfseq.nn import trees
from hfseq.nn.sharding import batch_sharding, make_mesh
from hfseq.objectives.cross_entropy import cross_entropy
from hfseq.training import setup
from tests.support import models

_ENCODER = {"num_attention_heads": 8, "num_hidden_layers": 1}
_SIDES = {
    f"{side}_{name}": size
    for side in ("encoder", "decoder")
    for name, size in (("layers", 1), ("attention_heads", 8))
}
#: Changes to the tiny configuration of each family, for eight heads and one layer.
SIZES: dict[str, dict[str, Any]] = {
    "bert": _ENCODER,
    "roberta": _ENCODER,
    "fp8_encoder": _ENCODER,
    "megatron-bert": _ENCODER,
    "roberta-prelayernorm": _ENCODER,
    "xlm-roberta": _ENCODER,
    "gpt2": {"n_head": 8, "n_layer": 1},
    "opt": _ENCODER,
    "bloom": {"n_head": 8, "n_layer": 1},
    "gpt_neo": {"num_heads": 8, "num_layers": 1, "attention_types": [[["local"], 1]]},
    "distilbert": {"n_heads": 8, "n_layers": 1},
    "electra": _ENCODER,
    "albert": {**_ENCODER, "num_hidden_layers": 2},
    "roformer": _ENCODER,
    "big_bird": {**_ENCODER, "attention_type": "block_sparse", "block_size": 1},
    "longt5": {"num_heads": 8, "d_kv": 4, "num_layers": 1},
    "gptj": {"n_head": 8, "n_layer": 1, "rotary_dim": 2},
    "llama": {**_ENCODER, "num_key_value_heads": 8},
    "mistral": {
        "num_attention_heads": 16,
        "num_key_value_heads": 8,
        "head_dim": 2,
        "num_hidden_layers": 1,
    },
    "gemma": {**_ENCODER, "num_key_value_heads": 8},
    **dict.fromkeys(
        (
            "olmo",
            "olmo2",
            "phi",
            "granite",
            "glm",
            "glm4",
            "cohere",
            "starcoder2",
            "ernie4_5",
            "seed_oss",
        ),
        {**_ENCODER, "num_key_value_heads": 8},
    ),
    # The rotated part of a head must have an even number of features.
    **dict.fromkeys(
        ("phi3", "stablelm", "gpt_neox"),
        {
            **_ENCODER,
            "num_key_value_heads": 8,
            "rope_parameters": {"rope_type": "default", "partial_rotary_factor": 0.5},
        },
    ),
    "falcon": {**_ENCODER, "num_kv_heads": 8},
    **dict.fromkeys(
        ("mixtral", "granitemoe", "gpt_oss"),
        {**_ENCODER, "num_key_value_heads": 8, "num_local_experts": 8},
    ),
    **dict.fromkeys(
        ("qwen3_moe", "olmoe"),
        {**_ENCODER, "num_key_value_heads": 8, "num_experts": 8, "decoder_sparse_step": 1},
    ),
    "qwen2_moe": {
        "num_attention_heads": 8,
        "num_key_value_heads": 8,
        "num_hidden_layers": 2,
        "max_window_layers": 1,
        "num_experts": 8,
        "shared_expert_intermediate_size": 24,
    },
    "helium": {**_ENCODER, "num_key_value_heads": 8, "head_dim": 4},
    **dict.fromkeys(
        (
            "qwen2",
            "qwen3",
            "smollm3",
            "gemma2",
            "gemma3_text",
            "olmo3",
            "cohere2",
            "ministral",
            "exaone4",
        ),
        {
            "num_attention_heads": 8,
            "num_key_value_heads": 8,
            "num_hidden_layers": 2,
            "layer_types": ["sliding_attention", "full_attention"],
        },
    ),
    "modernbert": {
        "num_attention_heads": 8,
        "num_hidden_layers": 2,
        "layer_types": ["full_attention", "sliding_attention"],
    },
    "modernbert-decoder": {
        "num_attention_heads": 8,
        "num_hidden_layers": 2,
        "layer_types": ["full_attention", "sliding_attention"],
    },
    "esm": _ENCODER,
    "eurobert": {**_ENCODER, "num_key_value_heads": 8},
    **dict.fromkeys(
        ("camembert", "data2vec-text", "deberta-v2", "ernie", "gte", "jina_embeddings_v3"), _ENCODER
    ),
    **dict.fromkeys(("mobilebert", "mpnet", "new", "nomic_bert", "xlm-roberta-xl"), _ENCODER),
    "umt5": {"num_heads": 8, "d_kv": 4, "num_layers": 1},
    "t5": {"num_heads": 8, "d_kv": 4, "num_layers": 1},
    "mt5": {"num_heads": 8, "d_kv": 4, "num_layers": 1},
    "bart": _SIDES,
    "marian": _SIDES,
    "pegasus": _SIDES,
    "mbart": _SIDES,
    "blenderbot": _SIDES,
    "blenderbot-small": _SIDES,
    "m2m_100": _SIDES,
    "mamba2": {"num_hidden_layers": 1},
    "falcon_mamba": {"num_hidden_layers": 1},
    "dinov3_vit": _ENCODER,
    **dict.fromkeys(
        (
            "siglip",
            "siglip_text_model",
            "siglip_vision_model",
            "siglip2",
            "siglip2_text_model",
            "siglip2_vision_model",
            "hubert",
            "wavlm",
        ),
        _ENCODER,
    ),
    "xglm": {"attention_heads": 8, "num_layers": 1},
    "wmt_transformer": _SIDES,
    "vq_transformer": {"num_hidden_layers": 1},
    "clip": _ENCODER,
    "clip_text_model": _ENCODER,
    "clip_vision_model": _ENCODER,
    "vision-text-dual-encoder": _ENCODER,
    "vit": _ENCODER,
    "whisper": {
        "encoder_attention_heads": 8,
        "decoder_attention_heads": 8,
        "d_model": 32,
        "encoder_layers": 1,
        "decoder_layers": 1,
    },
    "beit": _ENCODER,
    "dinov2": {"num_attention_heads": 8, "num_hidden_layers": 1},
    "wav2vec2": _ENCODER,
    "encoder-decoder": _ENCODER,
    "vision-encoder-decoder": _ENCODER,
    "speech-encoder-decoder": _ENCODER,
    "resnet": {},
    "regnet": {},
}
#: Inputs whose second axis is not split over the `sequence` mesh axis.
UNSPLIT = (
    *("pixel_values", "pixel_attention_mask", "spatial_shapes", "input_values", "input_features"),
    "inputs",
)
LANGUAGE = ("ForMaskedLM", "ForCausalLM", "ForSeq2SeqLM")
ROWS, LENGTH, VOCABULARY = 8, 16, 72


def main_head(name: str) -> str:
    """Returns the task of the head to train, the first in a fixed order that the family has."""
    heads = plugins.load().architectures.get(name).heads
    order = ("ForSeq2SeqLM", "ForMaskedLM", "ForCausalLM", "ForImageClassification")
    order = (*order, "ForSpeechSeq2Seq", "ForVision2Seq", "Model")
    return next(task for task in order if task in heads)


def make_model(name: str, task: str, **options: Any) -> Any:
    """Creates a model without parameters."""
    # No other dimension has the size of the vocabulary, so it can be identified in shapes.
    changes = {"vocab_size": VOCABULARY, **SIZES[name], **options.pop("config", {})}
    config = getattr(models, f"{name.replace('-', '_')}_config")(**changes)
    if task == "ForCausalLM" and hasattr(config, "is_decoder"):
        config.is_decoder = True
    spec = plugins.load().architectures.get(name)
    return spec.load_head(task)(config, _do_init=False, **options)


@functools.cache
def variables(name: str, task: str) -> tuple[Any, Any]:
    """Returns randomly perturbed parameters, and the non-parameter collections of the model."""
    model, random = make_model(name, task), np.random.default_rng(0)

    def shake(leaf: jax.Array) -> np.ndarray:
        return np.asarray(leaf) + random.normal(size=leaf.shape).astype(np.float32) * 0.05

    params, _ = model.split_collections(model.init_weights(jax.random.key(0)))
    return (
        jax.tree.map(shake, params),
        jax.device_get(model.init_extra(jax.random.key(1))),
    )


def inputs(model: Any, task: str) -> dict[str, np.ndarray]:
    """Returns the inputs of a batch with eight rows, two of which are padded.

    In encoder-decoder models, the targets have the same length as the sources.
    """
    ids = models.ids(ROWS, LENGTH)
    mask = np.ones_like(ids)
    mask[1, 11:] = mask[5, 9:] = 0
    model_inputs = (
        {"input_ids": ids, "attention_mask": mask} if model.has_input("input_ids") else {}
    )
    if model.has_input("spatial_shapes"):
        model_inputs |= models.patches(ROWS)
    elif model.has_input("pixel_values"):
        model_inputs["pixel_values"] = models.images(ROWS)
    if model.has_input("input_values"):
        model_inputs["input_values"] = models.waveforms(ROWS)
    if model.has_input("inputs"):
        model_inputs["inputs"] = models.waveforms(ROWS)
    if model.has_input("input_features"):
        model_inputs["input_features"] = models.spectrograms(ROWS)
    if task == "ForMultipleChoice":
        return {key: np.stack([value, value], 1) for key, value in model_inputs.items()}
    if model.has_input("decoder_input_ids") and task != "ForCausalLM":
        model_inputs |= {"decoder_input_ids": ids[:, ::-1].copy()}
    return model_inputs


@functools.cache
def compile_step(name: str, task: str, mesh: str | None, sequence_parallel: bool = False) -> Any:
    """Returns the model, its layout, and a compiled function.

    The function is ``(parameters, batch) -> (loss, gradients)``. Without a mesh, the layout is
    `None`.
    """
    model, layout = make_model(name, task), None
    options = {}
    params, extra = variables(name, task)
    if mesh is not None:
        grid = make_mesh(mesh)
        layout = setup.shard_model(model, grid, sequence_parallel)
        shardings = trees.unflatten(
            layout.shardings({p: leaf.shape for p, leaf in trees.flatten(params).items()})
        )
        batch = {
            key: batch_sharding(grid, value.ndim, 0, split_length=key not in UNSPLIT)
            for key, value in inputs(model, task).items()
        }
        everywhere = jax.NamedSharding(grid, jax.P())
        options = {"in_shardings": (shardings, batch), "out_shardings": (everywhere, shardings)}

    def loss(params: Any, batch: Any) -> jax.Array:
        # Training mode, to check that batch normalization uses the batch of all devices.
        train = {"train": True} if "batch_stats" in extra else {}
        output, _ = model(**batch, params=params, extra=extra, **train)
        if task in LANGUAGE:
            total, count, _ = cross_entropy(output.logits, batch["input_ids"], VOCABULARY)
            return total / count
        leaves = [x for x in jax.tree.leaves(output.to_tuple()) if x.dtype == jnp.float32]
        # A scalar is a sum over all tokens, such as `auxiliary_loss`.
        return sum(jnp.sin(3 * x).mean() if x.ndim else x / (ROWS * LENGTH) for x in leaves)

    step = jax.jit(jax.value_and_grad(loss), **options)
    return model, layout, step.lower(params, inputs(model, task)).compile()


def run(name: str, task: str, mesh: str | None, sequence_parallel: bool = False) -> Any:
    """Returns the loss and the gradients as arrays on the host."""
    model, _, step = compile_step(name, task, mesh, sequence_parallel)
    step_inputs = (variables(name, task)[0], inputs(model, task))
    if mesh is not None:
        step_inputs = jax.device_put(step_inputs, step.input_shardings[0])
    return jax.device_get(step(*step_inputs))
