"""Pairs of right and wrong answers to questions about opposites."""

from __future__ import annotations

import random
from pathlib import Path
from typing import Any

from tests.support import chats
from tests.support.chats import OPPOSITES, turn

TINY = (
    "hidden_size=32,num_hidden_layers=1,num_attention_heads=4,num_key_value_heads=2,"
    "intermediate_size=64,max_position_embeddings=64,initializer_range=0.2"
)


def pairs(count: int, seed: int = 0) -> list[dict[str, Any]]:
    """Returns conversational examples with "prompt", "chosen" and "rejected"."""
    draw, created = random.Random(seed), []
    for number in range(count):
        word = draw.choice(sorted(OPPOSITES))
        right = OPPOSITES[word]
        wrong = draw.choice(sorted(set(OPPOSITES.values()) - {right}))
        created.append(
            {
                "prompt": [turn("user", f"what is not {word}")],
                "chosen": [turn("assistant", right)],
                "rejected": [turn("assistant", wrong + " big" * (number % 3))],
            }
        )
    return created


def strings(count: int, seed: int = 0) -> list[dict[str, str]]:
    """Returns examples whose prompts and answers are strings."""
    return [
        {
            "prompt": f"{item['prompt'][0]['content']} :",
            "chosen": f" {item['chosen'][0]['content']}",
            "rejected": f" {item['rejected'][0]['content']}",
        }
        for item in pairs(count, seed)
    ]


def completions(count: int, seed: int = 0) -> list[dict[str, Any]]:
    """Returns examples with "prompt", "completion" and "label"."""
    return [
        {"prompt": item["prompt"], "completion": item[name], "label": name == "chosen"}
        for number, item in enumerate(pairs(count // 2, seed))
        for name in (("chosen", "rejected") if number % 3 else ("rejected", "chosen"))
    ]


def write(folder: Path) -> Path:
    """Writes a tokenizer with a chat template, and training and validation files."""
    chats.write_tokenizer(folder / "tokenizer")
    for name, count, seed in (("train", 40, 0), ("valid", 11, 1)):
        chats.write_lines(folder / f"{name}.jsonl", pairs(count, seed))
        chats.write_lines(folder / f"{name}-kto.jsonl", completions(count, seed))
        chats.write_lines(folder / f"{name}-strings.jsonl", strings(count, seed))
    return folder


def save_model(
    folder: Path, name: str = "model", head: str = "ForCausalLM", seed: int = 1, **options: Any
) -> Path:
    """Saves a tiny Llama with random weights for the tokenizer of `write` in `folder`/`name`."""
    from transformers import AutoTokenizer, LlamaConfig

    import hfseq

    values = dict(part.split("=") for part in TINY.split(","))
    sizes: Any = {name: float(v) if "." in v else int(v) for name, v in values.items()}
    tokenizer = AutoTokenizer.from_pretrained(folder / "tokenizer")
    tokenizer.eos_token, tokenizer.pad_token = chats.END_TOKEN, "<|endoftext|>"
    tokens = {"eos_token_id": tokenizer.eos_token_id, "pad_token_id": tokenizer.pad_token_id}
    config = LlamaConfig(vocab_size=len(tokenizer), **(tokens | sizes | options))
    getattr(hfseq, f"FlaxLlama{head}")(config, seed=seed).save_pretrained(folder / name)
    tokenizer.save_pretrained(folder / name)
    return folder / name
