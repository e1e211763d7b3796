"""Tiny models of every family, ours and PyTorch's with the same weights."""

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
    """The example plugin, from its file."""
    if "hfseq_llama" not in sys.modules:
        path = ROOT / "docs" / "examples" / "hfseq-llama" / "hfseq_llama.py"
        spec = importlib.util.spec_from_file_location("hfseq_llama", path)
        module = importlib.util.module_from_spec(spec)
        sys.modules["hfseq_llama"] = module
        spec.loader.exec_module(module)
    return sys.modules["hfseq_llama"]


def generative_class(kind: Any) -> Any:
    """The class with the parts of generation that it lacks; the class itself if it has all."""
    lacks = () if hasattr(kind, "update_inputs_for_generation") else (CausalGeneration,)
    lacks += () if issubclass(kind, FlaxGenerationMixin) else (FlaxGenerationMixin,)
    return type(kind.__name__, (*lacks, kind), {"__module__": __name__}) if lacks else kind


def class_without_head(kind: Any) -> Any:
    """The class itself, which has ``generate`` only to refuse."""
    if issubclass(kind, FlaxGenerationMixin):
        return kind
    return type(kind.__name__, (FlaxGenerationMixin, kind), {"__module__": __name__})


def bert_like(config: Any, **changes: Any) -> Any:
    return config(
        vocab_size=VOCAB,
        hidden_size=32,
        num_hidden_layers=2,
        num_attention_heads=4,
        intermediate_size=40,
        max_position_embeddings=66,
        is_decoder=True,
        initializer_range=0.3,
        **TOKENS,
        **changes,
    )


def config(family: str) -> Any:
    import transformers as t

    if family == "llama":
        return t.LlamaConfig(
            vocab_size=VOCAB,
            hidden_size=32,
            intermediate_size=40,
            num_hidden_layers=2,
            num_attention_heads=4,
            num_key_value_heads=2,
            head_dim=8,
            max_position_embeddings=64,
            initializer_range=0.3,
            **TOKENS,
        )
    if family == "gpt2":
        return t.GPT2Config(
            vocab_size=VOCAB,
            n_embd=32,
            n_layer=2,
            n_head=4,
            n_positions=64,
            initializer_range=0.3,
            **TOKENS,
        )
    if family == "t5":
        return t.T5Config(
            vocab_size=VOCAB,
            d_model=32,
            d_kv=8,
            d_ff=40,
            num_layers=2,
            num_heads=4,
            initializer_factor=3.0,
            decoder_start_token_id=PAD,
            pad_token_id=PAD,
            eos_token_id=EOS,
        )
    if family == "bart":
        return t.BartConfig(
            vocab_size=VOCAB,
            d_model=32,
            encoder_layers=2,
            decoder_layers=2,
            init_std=0.3,
            encoder_attention_heads=4,
            decoder_attention_heads=4,
            encoder_ffn_dim=40,
            decoder_ffn_dim=40,
            max_position_embeddings=64,
            decoder_start_token_id=EOS,
            forced_eos_token_id=EOS,
            **TOKENS,
        )
    return bert_like(t.BertConfig if family == "bert" else t.RobertaConfig)


def flax_class(family: str) -> Any:
    import hfseq

    names = {
        "gpt2": "FlaxGPT2LMHeadModel",
        "bert": "FlaxBertForCausalLM",
        "roberta": "FlaxRobertaForCausalLM",
        "t5": "FlaxT5ForConditionalGeneration",
        "bart": "FlaxBartForConditionalGeneration",
    }
    if family == "llama":
        return generative_class(llama_module().FlaxLlamaForCausalLM)
    return generative_class(getattr(hfseq, names[family]))


def torch_class(family: str) -> Any:
    import transformers as t

    return {
        "llama": t.LlamaForCausalLM,
        "gpt2": t.GPT2LMHeadModel,
        "bert": t.BertLMHeadModel,
        "roberta": t.RobertaForCausalLM,
        "t5": t.T5ForConditionalGeneration,
        "bart": t.BartForConditionalGeneration,
    }[family]


@functools.cache
def model_pair(family: str) -> tuple[Any, Any]:
    """Our model and PyTorch's, with the same weights."""
    import torch

    torch.manual_seed(7)
    theirs = torch_class(family)(config(family)).eval()
    with tempfile.TemporaryDirectory() as folder:
        theirs.save_pretrained(folder)
        ours = flax_class(family).from_pretrained(folder)
    return ours, theirs


@functools.cache
def model(family: str) -> Any:
    """Our model alone, with random weights; tests leave it as it is."""
    return flax_class(family)(config(family))


def fresh_model(family: str = "llama") -> Any:
    """A model of one's own, to change; it shares the weights of :func:`model`."""
    made = flax_class(family)(config(family), _do_init=False)
    made._is_initialized, made._params = True, model(family).params
    return made


def prompts(rows: int, length: int, seed: int = 0) -> np.ndarray:
    """Random tokens, none of them special."""
    return np.random.default_rng(seed).integers(3, VOCAB, (rows, length)).astype(np.int32)


def mask(rows: int, length: int, side: str, seed: int = 0) -> np.ndarray:
    """A mask of rows of different lengths, padded on ``side``."""
    lengths = np.random.default_rng(seed).integers(1, length + 1, rows)
    lengths[0] = length
    left = np.arange(length)[None] >= length - lengths[:, None]
    return (left if side == "left" else left[:, ::-1]).astype(np.int32)
