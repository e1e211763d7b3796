"""Text encoders of a diffusion pipeline, in the style of maxdiffusion.

The encoders are in the subfolders of a pipeline. Their parameters become TrainStates that are
placed on a mesh, and the prompts are encoded by functions that get the states as arguments.
"""

import functools
import sys
from pathlib import Path

import jax
import jax.numpy as jnp
import numpy as np
import optax
from flax.core.frozen_dict import freeze
from flax.training import train_state
from jax.sharding import Mesh, NamedSharding, PartitionSpec
from transformers import (
    AutoTokenizer,
    CLIPTokenizer,
    FlaxAutoModel,
    FlaxCLIPTextModel,
    FlaxCLIPTextModelWithProjection,
    FlaxPreTrainedModel,
    FlaxT5EncoderModel,
)
from transformers.models.clip.modeling_flax_clip import FlaxCLIPTextPreTrainedModel

PROMPTS = ["a photo of the small dog", "a big book"]


class InferenceState(train_state.TrainState):
    pass


def make_state(model, mesh, rng):
    init = functools.partial(model.init_weights, rng, input_shape=(1, 16))
    shapes = jax.eval_shape(init)
    assert jax.tree.structure(shapes) == jax.tree.structure(model.params)
    state = InferenceState.create(apply_fn=model.__call__, params=model.params, tx=optax.sgd(0.0))
    return jax.device_put(state, NamedSharding(mesh, PartitionSpec()))


def tokenize(tokenizer, prompts, length=16):
    return tokenizer(
        prompts, padding="max_length", max_length=length, truncation=True, return_tensors="np"
    ).input_ids


def encode_sdxl(ids, ids_2, encoder, encoder_2, state, state_2):
    hidden = encoder(ids, params=state["params"], output_hidden_states=True)
    out_2 = encoder_2(ids_2, params=state_2["params"], output_hidden_states=True)
    embeds = jnp.concatenate([hidden["hidden_states"][-2], out_2["hidden_states"][-2]], axis=-1)
    return embeds, out_2["text_embeds"]


def encode_flux(clip_ids, t5_ids, clip_state, t5_state):
    pooled = clip_state.apply_fn(clip_ids, params=clip_state.params, train=False)[1]
    prompt = t5_state.apply_fn(t5_ids, attention_mask=None, params=t5_state.params)[0]
    return pooled, prompt


def main(folder, output):
    folder = Path(folder)
    mesh = Mesh(np.array(jax.devices()).reshape(-1, 1), ("data", "tensor"))
    batches = NamedSharding(mesh, PartitionSpec("data"))
    rng = jax.random.PRNGKey(0)

    tokenizer = CLIPTokenizer.from_pretrained(folder, subfolder="tokenizer")
    tokenizer_t5 = AutoTokenizer.from_pretrained(folder / "tokenizer_2", use_fast=True)
    clip = FlaxCLIPTextModel.from_pretrained(folder, subfolder="clip", dtype=jnp.float32)
    projected = FlaxCLIPTextModelWithProjection.from_pretrained(
        folder, subfolder="projected", from_pt=True
    )
    t5 = FlaxT5EncoderModel.from_pretrained(folder / "t5", dtype=jnp.float32)
    assert isinstance(clip, FlaxCLIPTextPreTrainedModel) and isinstance(t5, FlaxPreTrainedModel)

    prompts = PROMPTS * (jax.device_count() // 2)
    clip_ids = jax.device_put(tokenize(tokenizer, prompts), batches)
    t5_ids = jax.device_put(tokenize(tokenizer_t5, prompts), batches)
    clip_state, t5_state = (make_state(model, mesh, rng) for model in (clip, t5))
    pooled, prompt = jax.jit(encode_flux)(clip_ids, t5_ids, clip_state, t5_state)

    states = ({"params": freeze(model.params)} for model in (clip, projected))
    encode = functools.partial(encode_sdxl, encoder=clip, encoder_2=projected)
    embeds, text_embeds = jax.jit(
        lambda ids, ids_2, state, state_2: encode(ids, ids_2, state=state, state_2=state_2)
    )(clip_ids, clip_ids, *states)

    gemma = FlaxAutoModel.from_pretrained(folder / "gemma3", dtype=jnp.bfloat16)
    gemma.params = gemma.to_bf16(gemma.params)
    gemma_ids = tokenize(tokenizer_t5, PROMPTS)
    mask = (gemma_ids != tokenizer_t5.pad_token_id).astype(np.int32)
    hidden = gemma(gemma_ids, attention_mask=mask, output_hidden_states=True).hidden_states
    np.savez(
        output,
        clip_ids=np.asarray(clip_ids)[:2],
        t5_ids=np.asarray(t5_ids)[:2],
        gemma_mask=mask,
        pooled=np.asarray(pooled)[:2],
        prompt=np.asarray(prompt)[:2],
        embeds=np.asarray(embeds)[:2],
        text_embeds=np.asarray(text_embeds)[:2],
        gemma=np.stack([np.asarray(layer, np.float32) for layer in hidden]),
    )


if __name__ == "__main__":
    main(*sys.argv[1:])
