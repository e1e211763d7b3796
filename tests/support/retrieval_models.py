"""Tiny retrieval models with random weights, saved by sentence-transformers or by hfseq."""

from __future__ import annotations

import json
import shutil
from pathlib import Path

import numpy as np

import hfseq
from tests.support import models
from tests.support.task_models import TEXTS, make

PAIRS = [(TEXTS[0], TEXTS[1]), (TEXTS[3], TEXTS[4]), (TEXTS[2], TEXTS[0])]


def make_masked(root: Path) -> Path:
    """Saves a BERT with a masked language modeling head, and its tokenizer."""
    folder = root / "masked-bert"
    shutil.copytree(make(root / "base", "features"), folder)
    config = hfseq.FlaxAutoModel.from_pretrained(folder).config
    config.initializer_range = 0.5
    hfseq.FlaxBertForMaskedLM(config, seed=2).save_pretrained(folder)
    return folder


def make_reranker(root: Path) -> Path:
    """Saves a causal language model with a chat template for pairs, and its tokenizer."""
    from hfseq.data.tokenizers import train_tokenizer

    folder = root / "causal"
    texts = [f"{text} yes no" for text in TEXTS for _ in range(4)]
    tokenizer = train_tokenizer([texts], "gpt2", None, 330, folder)
    tokenizer.add_tokens(["yes", "no"])
    template = (
        "{% for message in messages %}<{{ message.role }}> {{ message.content }} {% endfor %}answer"
    )
    tokenizer.chat_template = template
    tokenizer.pad_token = tokenizer.eos_token
    tokenizer.save_pretrained(folder)
    config = models.qwen3_config(vocab_size=len(tokenizer), initializer_range=0.5)
    config.tie_word_embeddings = True
    hfseq.FlaxQwen3ForCausalLM(config, seed=1).save_pretrained(folder)
    return folder


def make_stanford(root: Path, base: Path) -> Path:
    """Saves the BERT in ``base`` in the format of Stanford's ColBERT."""
    from safetensors.numpy import load_file, save_file

    folder = root / "stanford"
    shutil.copytree(base, folder)
    tensors = {
        f"bert.{name.removeprefix('bert.')}": value
        for name, value in load_file(base / "model.safetensors").items()
    }
    size = tensors["bert.embeddings.word_embeddings.weight"].shape[1]
    projection = np.random.default_rng(0).normal(size=(8, size))
    tensors["linear.weight"] = projection.astype(np.float32)
    save_file(tensors, folder / "model.safetensors", {"format": "pt"})
    change_json(folder / "config.json", architectures=["HF_ColBERT"])
    tokenizer = json.loads((folder / "tokenizer.json").read_text())
    vocabulary = tokenizer["model"]["vocab"]
    replaced = [token for token in vocabulary if token.startswith("##")][:2]
    for number, token in enumerate(replaced):
        vocabulary[f"[unused{number}]"] = vocabulary.pop(token)
    (folder / "tokenizer.json").write_text(json.dumps(tokenizer))
    metadata = {
        "query_token_id": "[unused0]",
        "doc_token_id": "[unused1]",
        "query_maxlen": 18,
        "doc_maxlen": 30,
        "mask_punctuation": True,
        "attend_to_mask_tokens": False,
    }
    (folder / "artifact.metadata").write_text(json.dumps(metadata))
    return folder


def make_pylate(root: Path, base: Path) -> Path:
    """Saves the BERT in ``base`` in the format of PyLate."""
    from safetensors.numpy import save_file

    folder = root / "pylate"
    shutil.copytree(base, folder)
    (folder / "1_Dense").mkdir()
    projection = np.random.default_rng(0).normal(size=(8, 32)).astype(np.float32)
    save_file({"linear.weight": projection}, folder / "1_Dense/model.safetensors", {"format": "pt"})
    files = {
        "1_Dense/config.json": {
            "in_features": 32,
            "out_features": 8,
            "bias": False,
            "activation_function": "torch.nn.modules.linear.Identity",
        },
        "modules.json": [
            {"idx": 0, "name": "0", "path": "", "type": "sentence_transformers.models.Transformer"},
            {"idx": 1, "name": "1", "path": "1_Dense", "type": "pylate.models.Dense.Dense"},
        ],
        "sentence_bert_config.json": {"max_seq_length": 60, "do_lower_case": False},
        "config_sentence_transformers.json": {
            "__version__": {"sentence_transformers": "4.0.0"},
            "prompts": {},
            "default_prompt_name": None,
            "similarity_fn_name": "MaxSim",
            "model_type": "ColBERT",
            "query_prefix": "of ",
            "document_prefix": "the ",
            "query_length": 16,
            "document_length": 20,
            "attend_to_expansion_tokens": False,
            "skiplist_words": [",", "."],
        },
    }
    for name, content in files.items():
        (folder / name).write_text(json.dumps(content))
    return folder


def change_json(file: Path, **values: object) -> None:
    """Changes entries of a JSON object in a file. The value `None` removes an entry."""
    content = json.loads(file.read_text()) | values
    kept = {name: value for name, value in content.items() if value is not None}
    file.write_text(json.dumps(kept))
