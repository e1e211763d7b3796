"""Tiny models of several families, in hfseq and in PyTorch, with the same weights."""

from __future__ import annotations

import functools
import importlib.util
import sys
import tempfile
from pathlib import Path
from typing import Any

import numpy as np

from hfseq.generation import CausalGeneration, FlaxGenerationMixin

ROOT = Path(__file__).resolve().parents[2]
VOCAB, PAD, BOS, EOS = 48, 0, 1, 2
TOKENS = {"pad_token_id": PAD, "bos_token_id": BOS, "eos_token_id": EOS}
DECODERS = ("llama", "gpt2", "bert", "roberta")
PAIRS = ("t5", "bart")


def llama_module() -> Any:
    """Returns the example plugin, imported from its file."""
    if "hfseq_llama" not in sys.modules:
        path = ROOT / "docs" / "examples" / "hfseq-llama" / "hfseq_llama.py"
        spec = importlib.util.spec_from_file_location("hfseq_llama", path)
        module = importlib.util.module_from_spec(spec)
        sys.modules["hfseq_llama"] = module
        spec.loader.exec_module(module)
    return sys.modules["hfseq_llama"]


def generative_class(base_class: Any) -> Any:
    """Returns the class with the generation mixins that it lacks."""
    lacks = () if hasattr(base_class, "update_inputs_for_generation") else (CausalGeneration,)
    lacks += () if issubclass(base_class, FlaxGenerationMixin) else (FlaxGenerationMixin,)
    return (
        type(base_class.__name__, (*lacks, base_class), {"__module__": __name__})
        if lacks
        else base_class
    )


def class_without_head(base_class: Any) -> Any:
    """Returns the class with a ``generate`` method that raises an error."""
    if issubclass(base_class, FlaxGenerationMixin):
        return base_class
    return type(base_class.__name__, (FlaxGenerationMixin, base_class), {"__module__": __name__})


_SIZES = {
    "vocab_size": VOCAB,
    "hidden_size": 32,
    "num_hidden_layers": 1,
    "num_attention_heads": 4,
    "intermediate_size": 40,
    "initializer_range": 0.3,
    **TOKENS,
}
_BERT = {**_SIZES, "max_position_embeddings": 66, "is_decoder": True}
#: The configuration of each family with its options, and PyTorch's class. Models have one layer,
#: except those that are compared with PyTorch, which have two.
CONFIGS: dict[str, tuple[str, dict[str, Any], str]] = {
    "llama": (
        "LlamaConfig",
        {**_SIZES, "num_key_value_heads": 2, "head_dim": 8, "max_position_embeddings": 64},
        "LlamaForCausalLM",
    ),
    "gpt2": (
        "GPT2Config",
        {"vocab_size": VOCAB, "n_embd": 32, "n_layer": 1, "n_head": 4, "n_positions": 64}
        | {"initializer_range": 0.3, **TOKENS},
        "GPT2LMHeadModel",
    ),
    "bert": ("BertConfig", _BERT, "BertLMHeadModel"),
    "roberta": ("RobertaConfig", _BERT, "RobertaForCausalLM"),
    "t5": (
        "T5Config",
        {"vocab_size": VOCAB, "d_model": 32, "d_kv": 8, "d_ff": 40, "num_layers": 1, "num_heads": 4}
        | {"initializer_factor": 3.0, "decoder_start_token_id": PAD}
        | {"pad_token_id": PAD, "eos_token_id": EOS},
        "T5ForConditionalGeneration",
    ),
    "bart": (
        "BartConfig",
        {"vocab_size": VOCAB, "d_model": 32, "init_std": 0.3, "max_position_embeddings": 64}
        | {f"{side}_layers": 1 for side in ("encoder", "decoder")}
        | {f"{side}_attention_heads": 4 for side in ("encoder", "decoder")}
        | {f"{side}_ffn_dim": 40 for side in ("encoder", "decoder")}
        | {"decoder_start_token_id": EOS, "forced_eos_token_id": EOS, **TOKENS},
        "BartForConditionalGeneration",
    ),
}


def config(family: str, layers: int = 1) -> Any:
    import transformers

    name, options, _ = CONFIGS[family]
    counts = {key: layers for key in options if key.endswith(("layer", "layers"))}
    return getattr(transformers, name)(**options | counts)


def flax_class(family: str) -> Any:
    import hfseq

    if family == "llama":
        return generative_class(llama_module().FlaxLlamaForCausalLM)
    name = "BertForCausalLM" if family == "bert" else CONFIGS[family][2]
    return generative_class(getattr(hfseq, f"Flax{name}"))


def torch_class(family: str) -> Any:
    import transformers

    return getattr(transformers, CONFIGS[family][2])


@functools.cache
def model_pair(family: str) -> tuple[Any, Any]:
    """Returns hfseq's model and PyTorch's with the same weights."""
    import torch

    torch.manual_seed(7)
    theirs = torch_class(family)(config(family, layers=2)).eval()
    with tempfile.TemporaryDirectory() as folder:
        theirs.save_pretrained(folder)
        ours = flax_class(family).from_pretrained(folder)
    return ours, theirs


@functools.cache
def model(family: str) -> Any:
    """Returns hfseq's model with random weights. Tests must not modify it."""
    return flax_class(family)(config(family))


def fresh_model(family: str = "llama") -> Any:
    """Returns a model that tests can modify. It shares the weights of :func:`model`."""
    new_model = flax_class(family)(config(family), _do_init=False)
    new_model._is_initialized, new_model._params = True, model(family).params
    return new_model


def prompts(rows: int, length: int, seed: int = 0) -> np.ndarray:
    """Returns random tokens without special tokens."""
    return np.random.default_rng(seed).integers(3, VOCAB, (rows, length)).astype(np.int32)


def mask(rows: int, length: int, side: str, seed: int = 0) -> np.ndarray:
    """Returns a mask of rows of different lengths, padded on ``side``."""
    lengths = np.random.default_rng(seed).integers(1, length + 1, rows)
    lengths[0] = length
    left = np.arange(length)[None] >= length - lengths[:, None]
    return (left if side == "left" else left[:, ::-1]).astype(np.int32)
