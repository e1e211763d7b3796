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
#: ChatML with tools and reasoning, in the style of Qwen3. Reasoning of earlier turns is omitted.
TOOL_TEMPLATE = """
{%- if tools %}{{ '<|im_start|>system\n' }}
  {%- if messages[0].role == 'system' %}{{ messages[0].content + '\n' }}{% endif %}
  {{- 'tools:' }}{% for tool in tools %}{{ '\n' + tool | tojson }}{% endfor %}
    {{- '<|im_end|>\n' }}
{%- elif messages[0].role == 'system' %}{{ '<|im_start|>system\n' + messages[0].content
    + '<|im_end|>\n' }}{% endif %}
{%- set ns = namespace(last=-1) %}
{%- for m in messages %}{% if m.role == 'user' %}{% set ns.last = loop.index0 %}{% endif %}
{%- endfor %}
{%- for m in messages %}
  {%- if m.role == 'user' %}{{ '<|im_start|>user\n' + m.content + '<|im_end|>\n' }}
  {%- elif m.role == 'tool' %}{{ '<|im_start|>user\n<tool_response>' + m.content
      + '</tool_response><|im_end|>\n' }}
  {%- elif m.role == 'assistant' %}{{ '<|im_start|>assistant\n' }}{% generation %}
    {%- if m.reasoning_content and loop.index0 > ns.last %}{{ '<think>\n' + m.reasoning_content
        + '\n</think>\n' }}{% endif %}
    {{- m.content or '' }}
    {%- for call in m.tool_calls or [] %}{% set call = call.function or call %}
      {{- '<tool_call>{"name": "' + call.name + '", "arguments": ' }}
      {{- call.arguments if call.arguments is string else call.arguments | tojson }}
      {{- '}</tool_call>' }}{% endfor %}
    {{- '<|im_end|>' }}{% endgeneration %}{{ '\n' }}
  {%- endif %}
{%- endfor %}
{%- if add_generation_prompt %}{{ '<|im_start|>assistant\n' }}
  {%- if enable_thinking is defined and enable_thinking is false %}{{ '<think>\n\n</think>\n' }}
  {%- endif %}
{%- endif %}"""
#: Parses answers in the format of `TOOL_TEMPLATE`, as in tokenizer_config.json of Transformers 5.
RESPONSE_TEMPLATE = {
    "defaults": {"role": "assistant"},
    "start_anchor": "<|im_start|>assistant\n",
    "fields": {
        "reasoning_content": {"open": "<think>", "close": "</think>"},
        "tool_calls": {
            "open": "<tool_call>",
            "close": "</tool_call>",
            "repeats": True,
            "content": "json",
            "transform": {"type": "function", "function": "{content}"},
        },
        "content": {"close": "<|im_end|>"},
    },
}
WEATHER = {
    "type": "function",
    "function": {
        "name": "weather",
        "description": "Returns the weather of a city.",
        "parameters": {
            "type": "object",
            "properties": {"city": {"type": "string"}, "days": {"type": "integer"}},
            "required": ["city"],
        },
    },
}
END_TOKEN = "<|im_end|>"


def turn(role: str, content: str) -> dict[str, str]:
    return {"role": role, "content": content}


def call(name: str, **arguments: Any) -> dict[str, Any]:
    """Returns a tool call, as in a message of the assistant."""
    return {"type": "function", "function": {"name": name, "arguments": arguments}}


#: A conversation with reasoning, a tool call and its result.
TOOL_CHAT: list[dict[str, Any]] = [
    turn("system", "be short"),
    turn("user", "is it hot"),
    {
        "role": "assistant",
        "reasoning_content": "which city",
        "tool_calls": [call("weather", city="far", days=2)],
    },
    {"role": "tool", "name": "weather", "content": '{"degrees": 30}'},
    {"role": "assistant", "reasoning_content": "30 is hot", "content": "hot"},
]


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


def write_tokenizer(
    folder: Path, template: str | None = TEMPLATE, family: str = "gpt2", texts: Iterable[str] = ()
) -> Path:
    """Saves a tokenizer that is trained on conversations and has the special tokens of ChatML.

    Args:
        folder: The directory.
        template: The chat template.
        family: The kind of the tokenizer.
        texts: Further texts to train on.
    """
    from hfseq.data.tokenizers import train_tokenizer

    turns = [f"{item['role']}\n{item['content']}" for chat in conversations(100) for item in chat]
    tokenizer = train_tokenizer([*turns, *texts], family, vocab_size=300, min_frequency=1)
    tokenizer.add_tokens(["<|im_start|>", END_TOKEN], special_tokens=True)
    tokenizer.chat_template = template
    tokenizer.save_pretrained(folder)
    return folder


def write_lines(path: Path, examples: Iterable[Mapping[str, Any]]) -> Path:
    path.write_text("".join(f"{json.dumps(item)}\n" for item in examples))
    return path
