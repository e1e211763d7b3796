"""Conversations about opposites, a tokenizer for them, and chat templates."""

from __future__ import annotations

import json
import random
from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import Any

OPPOSITES = {
    "hot": "cold",
    "big": "small",
    "up": "down",
    "wet": "dry",
    "old": "new",
    "far": "near",
    "dark": "light",
    "fast": "slow",
}
#: ChatML. The end token of an assistant turn is inside the generation tags, so it is trained too.
TEMPLATE = (
    "{% for message in messages %}{{ '<|im_start|>' + message.role + '\\n' }}"
    "{% if message.role == 'assistant' %}"
    "{% generation %}{{ message.content + '<|im_end|>' }}{% endgeneration %}"
    "{% else %}{{ message.content + '<|im_end|>' }}{% endif %}{{ '\\n' }}{% endfor %}"
    "{% if add_generation_prompt %}{{ '<|im_start|>assistant\\n' }}{% endif %}"
)
#: The template without generation tags.
PLAIN_TEMPLATE = TEMPLATE.replace("{% generation %}", "").replace("{% endgeneration %}", "")
#: The template with the end token of an assistant turn after the generation tags.
OPEN_TEMPLATE = TEMPLATE.replace(
    "{{ message.content + '<|im_end|>' }}{% endgeneration %}",
    "{{ message.content }}{% endgeneration %}{{ '<|im_end|>' }}",
)
END_TOKEN = "<|im_end|>"


def turn(role: str, content: str) -> dict[str, str]:
    return {"role": role, "content": content}


def conversations(count: int, seed: int = 0) -> list[list[dict[str, str]]]:
    """Returns conversations of one to three questions, a third of them with a system message."""
    draw, created = random.Random(seed), []
    for number in range(count):
        messages = [turn("system", "be short")] if number % 3 == 0 else []
        for word in draw.sample(sorted(OPPOSITES), draw.randint(1, 3)):
            requested = f"what is not {word}" if draw.random() < 0.5 else f"not {word} is ?"
            messages += [turn("user", requested), turn("assistant", OPPOSITES[word])]
        created.append(messages)
    return created


def pairs(count: int, seed: int = 0) -> list[dict[str, str]]:
    """Returns examples with the strings "prompt" and "completion"."""
    return [
        {"prompt": f"{chat[-2]['content']} :", "completion": f" {chat[-1]['content']}"}
        for chat in conversations(count, seed)
    ]


def write_tokenizer(folder: Path, template: str | None = TEMPLATE, family: str = "gpt2") -> Path:
    """Saves a tokenizer that is trained on conversations and has the special tokens of ChatML."""
    from hfseq.data.tokenizers import train_tokenizer

    texts = [f"{item['role']}\n{item['content']}" for chat in conversations(100) for item in chat]
    tokenizer = train_tokenizer(texts, family, vocab_size=300, min_frequency=1)
    tokenizer.add_tokens(["<|im_start|>", END_TOKEN], special_tokens=True)
    tokenizer.chat_template = template
    tokenizer.save_pretrained(folder)
    return folder


def write_lines(path: Path, examples: Iterable[Mapping[str, Any]]) -> Path:
    path.write_text("".join(f"{json.dumps(item)}\n" for item in examples))
    return path
