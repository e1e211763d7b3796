"""Model loaders with one interface, in the style of tt-forge-models.

Each loader returns a model, possibly in another dtype, and sample inputs from a tokenizer or an
image processor. The harness compiles `model.__call__` with `params` as an argument.
"""

import inspect
import sys
from dataclasses import dataclass
from pathlib import Path

import jax
import jax.numpy as jnp
import numpy as np
from transformers import (
    AutoImageProcessor,
    AutoTokenizer,
    CLIPConfig,
    FlaxAlbertForMaskedLM,
    FlaxBartForCausalLM,
    FlaxBertForMaskedLM,
    FlaxBloomForCausalLM,
    FlaxCLIPModel,
    FlaxDinov2ForImageClassification,
    FlaxDistilBertForMaskedLM,
    FlaxElectraForMaskedLM,
    FlaxGPT2LMHeadModel,
    FlaxGPTNeoForCausalLM,
    FlaxMistralForCausalLM,
    FlaxOPTForCausalLM,
    FlaxPreTrainedModel,
    FlaxResNetForImageClassification,
    FlaxRobertaForSequenceClassification,
    FlaxT5ForConditionalGeneration,
    FlaxViTForImageClassification,
    FlaxXGLMForCausalLM,
)


def cast_model(model: FlaxPreTrainedModel, dtype) -> FlaxPreTrainedModel:
    cast = {jnp.bfloat16: model.to_bf16, jnp.float16: model.to_fp16, jnp.float32: model.to_fp32}
    model.params = cast[dtype](model.params)
    return model


@dataclass
class Variant:
    pretrained_model_name: str
    from_pt: bool = False


class TextLoader:
    sample_text = "the small dog reads a big book"
    model_class = FlaxBertForMaskedLM

    def __init__(self, variant: Variant):
        self._variant = variant
        self._tokenizer = None

    def _load_tokenizer(self, dtype_override=None):
        options = {} if dtype_override is None else {"dtype": dtype_override}
        name = self._variant.pretrained_model_name
        self._tokenizer = AutoTokenizer.from_pretrained(name, **options)
        return self._tokenizer

    def load_model(self, *, dtype_override=None, **kwargs):
        if dtype_override is not None:
            kwargs["dtype"] = dtype_override
        name = self._variant.pretrained_model_name
        model = self.model_class.from_pretrained(name, from_pt=self._variant.from_pt, **kwargs)
        return model if dtype_override is None else cast_model(model, dtype_override)

    def load_inputs(self, dtype_override=None):
        if self._tokenizer is None:
            self._load_tokenizer(dtype_override)
        return dict(
            self._tokenizer(
                self.sample_text,
                return_tensors="jax",
                max_length=12,
                padding="max_length",
                truncation=True,
            )
        )


class Seq2SeqLoader(TextLoader):
    model_class = FlaxT5ForConditionalGeneration

    def load_inputs(self, dtype_override=None):
        inputs = super().load_inputs(dtype_override)
        start = inputs["input_ids"][:, :4]
        return {**inputs, "decoder_input_ids": start}


class ImageLoader(TextLoader):
    model_class = FlaxViTForImageClassification

    def load_inputs(self, dtype_override=None):
        processor = AutoImageProcessor.from_pretrained(self._variant.pretrained_model_name)
        image = np.random.default_rng(0).integers(0, 255, (12, 12, 3), dtype=np.uint8)
        pixels = processor(images=image, return_tensors="jax")["pixel_values"]
        return {"pixel_values": pixels.astype(dtype_override or jnp.float32)}


class CLIPLoader(ImageLoader):
    model_class = FlaxCLIPModel

    def load_inputs(self, dtype_override=None):
        config = CLIPConfig.from_pretrained(self._variant.pretrained_model_name)
        ids = jax.random.randint(jax.random.PRNGKey(0), (2, 8), 3, config.text_config.vocab_size)
        ids = ids.at[:, -1].set(config.text_config.eos_token_id)
        return {**super().load_inputs(dtype_override), "input_ids": ids}


def loader_class(base, flax_class):
    return type("ModelLoader", (base,), {"model_class": flax_class})


LOADERS = {
    "albert": loader_class(TextLoader, FlaxAlbertForMaskedLM),
    "bart": loader_class(TextLoader, FlaxBartForCausalLM),
    "bert": TextLoader,
    "bloom": loader_class(TextLoader, FlaxBloomForCausalLM),
    "clip": CLIPLoader,
    "dinov2": loader_class(ImageLoader, FlaxDinov2ForImageClassification),
    "distilbert": loader_class(TextLoader, FlaxDistilBertForMaskedLM),
    "electra": loader_class(TextLoader, FlaxElectraForMaskedLM),
    "gpt2": loader_class(TextLoader, FlaxGPT2LMHeadModel),
    "gpt_neo": loader_class(TextLoader, FlaxGPTNeoForCausalLM),
    "mistral": loader_class(TextLoader, FlaxMistralForCausalLM),
    "opt": loader_class(TextLoader, FlaxOPTForCausalLM),
    "resnet": loader_class(ImageLoader, FlaxResNetForImageClassification),
    "roberta": loader_class(TextLoader, FlaxRobertaForSequenceClassification),
    "t5": Seq2SeqLoader,
    "vit": ImageLoader,
    "xglm": loader_class(TextLoader, FlaxXGLMForCausalLM),
}


def forward(loader, dtype_override=None):
    model = loader.load_model(dtype_override=dtype_override)
    inputs = loader.load_inputs(dtype_override)
    accepted = inspect.signature(model.__call__).parameters
    inputs = {name: value for name, value in inputs.items() if name in accepted}
    assert all(isinstance(value, jax.Array) for value in inputs.values())
    compiled = jax.jit(model.__call__, static_argnames=["train", "return_dict"])
    outputs = compiled(**inputs, params=model.params, train=False)
    key = "logits_per_image" if "logits_per_image" in outputs else "logits"
    return inputs, outputs[key]


def main(folder, output):
    arrays = {}
    for name, loader_type in LOADERS.items():
        loader = loader_type(Variant(str(Path(folder) / name), from_pt=name in ("bert", "vit")))
        inputs, logits = forward(loader)
        arrays |= {f"{name}/{key}": np.asarray(value) for key, value in inputs.items()}
        arrays[f"{name}/result"] = np.asarray(logits)
        if name in ("bert", "clip", "vit", "t5"):
            _, halves = forward(loader_type(loader._variant), jnp.bfloat16)
            assert halves.dtype == jnp.bfloat16
            arrays[f"{name}/bfloat16"] = np.asarray(halves, np.float32)
    np.savez(output, **arrays)


if __name__ == "__main__":
    main(*sys.argv[1:])
