"""Text embedders that are modules of a larger NNX model, in the style of jflux."""

import sys
from pathlib import Path

import jax.numpy as jnp
import numpy as np
from flax import nnx
from transformers import AutoTokenizer, CLIPTokenizer, FlaxCLIPTextModel, FlaxT5EncoderModel


class Embedder(nnx.Module):
    def __init__(self, version, max_length, **hf_kwargs):
        self.is_clip = Path(version).name == "clip"
        self.max_length = max_length
        self.output_key = "pooler_output" if self.is_clip else "last_hidden_state"
        if self.is_clip:
            self.tokenizer = CLIPTokenizer.from_pretrained(f"{version}/../tokenizer")
            self.hf_module = FlaxCLIPTextModel.from_pretrained(version, **hf_kwargs)
        else:
            self.tokenizer = AutoTokenizer.from_pretrained(f"{version}/../tokenizer_2")
            self.hf_module = FlaxT5EncoderModel.from_pretrained(version, from_pt=True, **hf_kwargs)

    def __call__(self, text):
        encoding = self.tokenizer(
            text,
            truncation=True,
            max_length=self.max_length,
            return_length=False,
            return_overflowing_tokens=False,
            padding="max_length",
            return_tensors="jax",
        )
        outputs = self.hf_module(
            input_ids=encoding["input_ids"], attention_mask=None, output_hidden_states=False
        )
        return encoding["input_ids"], outputs[self.output_key]


class Flow(nnx.Module):
    def __init__(self, folder, rngs):
        self.clip = Embedder(f"{folder}/clip", 16, dtype=jnp.float32)
        self.t5 = Embedder(f"{folder}/t5", 16, dtype=jnp.float32)
        self.project = nnx.Linear(32, 4, rngs=rngs)

    def __call__(self, text):
        clip_ids, vector = self.clip(text)
        t5_ids, states = self.t5(text)
        return clip_ids, t5_ids, vector, states, self.project(states)


def main(folder, output):
    flow = Flow(folder, nnx.Rngs(0))
    clip_ids, t5_ids, vector, states, projected = flow(["a photo of the small dog", "a big book"])
    assert projected.shape == (2, 16, 4)
    np.savez(output, clip_ids=clip_ids, t5_ids=t5_ids, pooled=vector, prompt=states)


if __name__ == "__main__":
    main(*sys.argv[1:])
