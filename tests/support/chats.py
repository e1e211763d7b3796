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
#: Templates in the styles of today's decoders, with reasoning and tools. They differ in where the
#: tools and the reasoning are, how calls and their arguments are written, and which roles exist.
DECODER_TEMPLATES = {
    "mistral": """{{- bos_token }}
{%- set ns = namespace(last=-1) %}
{%- for m in messages if m.role == 'user' %}{% set ns.last = messages.index(m) %}{% endfor %}
{%- for m in messages %}
  {%- if m.role == 'system' %}{{ '[SYSTEM_PROMPT]' + m.content + '[/SYSTEM_PROMPT]' }}
  {%- elif m.role == 'user' %}
    {%- if tools and loop.index0 == ns.last %}
      {{- '[AVAILABLE_TOOLS]' + tools | tojson + '[/AVAILABLE_TOOLS]' }}{% endif %}
    {{- '[INST]' + m.content + '[/INST]' }}
  {%- elif m.role == 'tool' %}{{ '[TOOL_RESULTS]' + m.content + '[/TOOL_RESULTS]' }}
  {%- elif m.role == 'assistant' %}
    {%- if m.reasoning_content %}{{ '[THINK]' + m.reasoning_content + '[/THINK]' }}{% endif %}
    {{- m.content or '' }}
    {%- for call in m.tool_calls or [] %}{% set call = call.function %}
      {{- '[TOOL_CALLS]' + call.name + '[ARGS]' + call.arguments | tojson }}{% endfor %}
    {{- eos_token }}
  {%- else %}{{ raise_exception('unknown role ' + m.role) }}{% endif %}
{%- endfor %}""",
    "llama3": """{{- bos_token }}
{%- macro turn(role) %}{{ '<|start_header_id|>' + role + '<|end_header_id|>\n\n' }}{% endmacro %}
{%- set system = '' %}{% set rest = messages %}
{%- if messages[0].role == 'system' %}
  {%- set system = messages[0].content | trim %}{% set rest = messages[1:] %}{% endif %}
{{- turn('system') }}{% if tools %}{{ 'Environment: ipython\n' }}{% endif %}
{{- system + '<|eot_id|>' }}
{%- for m in rest %}
  {%- if m.tool_calls %}
    {%- if m.tool_calls | length != 1 %}{{ raise_exception('one call per turn') }}{% endif %}
    {%- set call = m.tool_calls[0].function %}
    {{- turn('assistant') + '<|python_tag|>{"name": "' + call.name + '", "parameters": ' }}
    {{- call.arguments | tojson + '}<|eom_id|>' }}
  {%- else %}{{ turn('ipython' if m.role == 'tool' else m.role) }}
    {%- if loop.first and tools %}
      {%- for tool in tools %}{{ tool | tojson(indent=4) + '\n\n' }}{% endfor %}{% endif %}
    {{- m.content | trim + '<|eot_id|>' }}
  {%- endif %}
{%- endfor %}
{%- if add_generation_prompt %}{{ turn('assistant') }}{% endif %}""",
    "gpt_oss": """
{%- macro function(tool) %}{% set p = tool.parameters %}
  {{- '// ' + tool.description + '\ntype ' + tool.name + ' = (_: {\n' }}
  {%- for name, value in p.properties.items() %}
    {{- name + ('' if name in p.required else '?') + ': ' }}
    {{- 'number' if value.type == 'integer' else value.type }}{{ ',\n' }}{% endfor %}
  {{- '}) => any;\n' }}{% endmacro %}
{{- '<|start|>system<|message|>Reasoning: ' + (reasoning_effort or 'medium') + '<|end|>' }}
{%- set rest = messages %}{% set system = '' %}
{%- if messages[0].role in ('system', 'developer') %}
  {%- set system = messages[0].content %}{% set rest = messages[1:] %}{% endif %}
{{- '<|start|>developer<|message|># Instructions\n' + system }}
{%- if tools %}{{ '\nnamespace functions {\n' }}
  {%- for tool in tools %}{{ function(tool.function) }}{% endfor %}{{ '}' }}{% endif %}
{{- '<|end|>' }}
{%- set ns = namespace(name=none) %}
{%- for m in rest %}
  {%- if m.role == 'assistant' %}
    {%- set thinking = m.thinking or m.reasoning_content %}
    {%- if thinking and (m.tool_calls or loop.last) %}
      {{- '<|start|>assistant<|channel|>analysis<|message|>' + thinking + '<|end|>' }}{% endif %}
    {%- for call in m.tool_calls or [] %}{% set ns.name = call.function.name %}
      {{- '<|start|>assistant to=functions.' + ns.name + '<|channel|>commentary json<|message|>' }}
      {{- call.function.arguments | tojson + '<|call|>' }}
    {%- else %}{{ '<|start|>assistant<|channel|>final<|message|>' + m.content }}
      {{- '<|return|>' if loop.last and not add_generation_prompt else '<|end|>' }}{% endfor %}
  {%- elif m.role == 'tool' %}
    {%- if ns.name is none %}{{ raise_exception('a result without a call') }}{% endif %}
    {{- '<|start|>functions.' + ns.name + ' to=assistant<|message|>' + m.content | tojson }}
    {{- '<|end|>' }}
  {%- else %}{{ '<|start|>' + m.role + '<|message|>' + m.content + '<|end|>' }}{% endif %}
{%- endfor %}
{%- if add_generation_prompt %}{{ '<|start|>assistant' }}{% endif %}""",
    "glm4": """[gMASK]<sop>
{%- if tools %}{{ '<|system|>\n<tools>' }}
  {%- for tool in tools %}{{ '\n' + tool | tojson(ensure_ascii=False) }}{% endfor %}
  {{- '\n</tools>' }}{% endif %}
{%- for m in messages %}
  {%- if m.role == 'tool' %}
    {%- if loop.previtem.role != 'tool' %}{{ '<|observation|>' }}{% endif %}
    {{- '\n<tool_response>\n' + m.content + '\n</tool_response>' }}
  {%- else %}{{ '<|' + m.role + '|>\n' }}
    {%- if m.role == 'assistant' %}
      {{- '<think>' + (m.reasoning_content or '') + '</think>' }}{% endif %}
    {{- m.content or '' }}
    {%- for call in m.tool_calls or [] %}
      {{- '\n<tool_call>' + call.function.name }}
      {%- for key, value in call.function.arguments.items() %}
        {{- '\n<arg_key>' + key + '</arg_key>\n<arg_value>' }}
        {{- value if value is string else value | tojson }}{{ '</arg_value>' }}{% endfor %}
      {{- '\n</tool_call>' }}{% endfor %}
  {%- endif %}
{%- endfor %}
{%- if add_generation_prompt %}{{ '<|assistant|>\n' }}
  {{- '<think></think>\n' if enable_thinking is defined and not enable_thinking else '' }}
{%- endif %}""",
    "cohere2": """{{- bos_token }}
{%- set ns = namespace(calls=0) %}
{%- macro begin(role) %}{{ '<|START_OF_TURN_TOKEN|><|' + role + '_TOKEN|>' }}{% endmacro %}
{{- begin('SYSTEM') + '# Tools\n' + (tools or []) | map(attribute='function.name') | join(', ') }}
{%- for document in documents or [] %}{{ '\n' + document.text }}{% endfor %}
{{- '<|END_OF_TURN_TOKEN|>' }}
{%- for m in messages %}
  {%- if m.role == 'tool' %}{{ begin('SYSTEM') + '<|START_TOOL_RESULT|>' }}
    {{- [{'tool_call_id': ns.calls - 1, 'results': m.content}] | tojson }}
    {{- '<|END_TOOL_RESULT|>' }}
  {%- elif m.role == 'assistant' %}{{ begin('CHATBOT') }}
    {%- if m.reasoning_content %}
      {{- '<|START_THINKING|>' + m.reasoning_content + '<|END_THINKING|>' }}{% endif %}
    {%- if m.tool_calls %}{{ '<|START_ACTION|>[' }}
      {%- for call in m.tool_calls %}
        {{- {'tool_call_id': ns.calls, 'tool_name': call.function.name,
            'parameters': call.function.arguments} | tojson }}
        {%- set ns.calls = ns.calls + 1 %}{{ ', ' if not loop.last else '' }}{% endfor %}
      {{- ']<|END_ACTION|>' }}
    {%- else %}{{ '<|START_RESPONSE|>' + m.content + '<|END_RESPONSE|>' }}{% endif %}
  {%- else %}{{ begin(m.role | upper) + m.content }}{% endif %}
  {{- '<|END_OF_TURN_TOKEN|>' }}
{%- endfor %}
{%- if add_generation_prompt %}{{ begin('CHATBOT') }}
  {{- '<|START_THINKING|>' if enable_thinking | default(true) else '<|START_RESPONSE|>' }}
{%- endif %}""",
    "seed_oss": """
{%- for tool in tools or [] %}{% if loop.first %}{{ bos_token + 'system\n' }}{% endif %}
  {%- set f = tool.function %}{{ 'Function:\ndef ' + f.name + '(' }}
  {%- for name, value in f.parameters.properties | dictsort %}
    {{- name + ': ' + {'string': 'str', 'integer': 'int'}[value.type] }}
    {{- ', ' if not loop.last else '' }}{% endfor %}
  {{- '):\n' }}{% if loop.last %}{{ eos_token }}{% endif %}{% endfor %}
{%- if thinking_budget is defined %}
  {{- bos_token + 'system\nbudget ' + thinking_budget | string + eos_token }}{% endif %}
{%- for m in messages %}{{ bos_token + m.role + '\n' }}
  {%- if m.reasoning_content is string and m.reasoning_content | trim | length > 0 %}
    {{- '<seed:think>' + m.reasoning_content | trim + '</seed:think>\n' }}{% endif %}
  {{- m.content or '' }}
  {%- for call in m.tool_calls or [] %}
    {{- '\n<seed:tool_call>\n<function=' + call.function.name + '>' }}
    {%- for name, value in call.function.arguments | items %}
      {{- '\n<parameter=' + name + '>' + value | string + '</parameter>' }}{% endfor %}
    {{- '\n</function>\n</seed:tool_call>' }}{% endfor %}
  {{- eos_token }}
{%- endfor %}
{%- if add_generation_prompt %}{{ bos_token + 'assistant\n' }}
  {{- '<seed:think>' if enable_thinking | default(true) else '' }}{% endif %}""",
    "granite": """
{%- set thinks = thinking or enable_thinking %}
{{- '<|start_of_role|>system<|end_of_role|>' }}
{%- if messages[0].role == 'system' %}{{ messages[0].content }}{% endif %}
{{- '\nThink first.' if thinks else '' }}{{ '<|end_of_text|>\n' }}
{%- if tools %}{{ '<|start_of_role|>available_tools<|end_of_role|>' + tools | tojson(indent=4) }}
  {{- '<|end_of_text|>\n' }}{% endif %}
{%- for m in messages %}
  {%- if loop.first and m.role == 'system' %}{% continue %}{% endif %}
  {{- '<|start_of_role|>' + ('tool_response' if m.role == 'tool' else m.role) }}
  {{- '<|end_of_role|>' }}
  {%- if m.role == 'assistant' and m.reasoning_content and loop.last %}
    {{- '<think>' + m.reasoning_content + '</think>' }}{% endif %}
  {{- m.content or '' }}
  {%- if m.tool_calls %}{{ '<|tool_call|>' }}
    {{- m.tool_calls | map(attribute='function') | list | tojson }}{% endif %}
  {{- '<|end_of_text|>\n' }}
{%- endfor %}
{%- if add_generation_prompt %}{{ '<|start_of_role|>assistant<|end_of_role|>' }}{% endif %}""",
    "exaone4": """
{%- for tool in tools or [] %}{{ '[|tool|]' + tool | tojson + '[|endofturn|]\n' }}{% endfor %}
{%- set ns = namespace(last=messages | length) %}
{%- for m in messages[::-1] %}
  {%- if m.role == 'user' %}{% set ns.last = messages | length - loop.index %}{% break %}{% endif %}
{%- endfor %}
{%- for m in messages %}{{ '[|' + m.role + '|]\n' }}
  {%- if m.role == 'tool' %}{{ '<tool_result>' + m.content + '</tool_result>' }}
  {%- elif m.role == 'assistant' %}{% set text = m.content or '' %}
    {%- if '</think>' in text %}{% set text = text.split('</think>')[-1].lstrip('\n') %}{% endif %}
    {%- if loop.index0 > ns.last and m.reasoning_content %}
      {{- '<think>\n' + m.reasoning_content + '\n</think>\n\n' }}{% endif %}
    {{- text }}
    {%- for call in m.tool_calls or [] %}
      {{- '<tool_call>{"name": "' + call.function.name + '", "arguments": ' }}
      {{- call.function.arguments | tojson(ensure_ascii=False) + '}</tool_call>' }}{% endfor %}
  {%- else %}{{ m.content }}{% endif %}
  {{- '[|endofturn|]\n' }}
{%- endfor %}
{%- if add_generation_prompt %}{{ '[|assistant|]\n' }}
  {{- '<think>\n' if enable_thinking else '<think>\n\n</think>\n\n' }}{% endif %}""",
}
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
