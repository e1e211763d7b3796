"""Chats with reasoning, tools and variables of the chat template."""

from __future__ import annotations

import json
from pathlib import Path
from types import SimpleNamespace

import numpy as np
import pytest

import hfseq
from hfseq import cli
from hfseq.errors import UsageError
from hfseq.pipelines.chat import Chat
from hfseq.pipelines.generation import TextGeneration
from tests.support import models
from tests.support.chats import (
    DECODER_TEMPLATES,
    PLAIN_TEMPLATE,
    RESPONSE_TEMPLATE,
    TEMPLATE,
    TOOL_CHAT,
    TOOL_TEMPLATE,
    WEATHER,
    call,
    turn,
    write_tokenizer,
)

ANSWER = (
    "<think>\nis far hot\n</think>\n"
    '<tool_call>{"name": "weather", "arguments": {"city": "far", "days": "2"}}</tool_call>'
)
PARSED = {
    "role": "assistant",
    "reasoning_content": "is far hot",
    "tool_calls": [call("weather", city="far", days=2)],
}


@pytest.fixture(scope="module")
def folder(tmp_path_factory) -> Path:
    texts = [TOOL_TEMPLATE, ANSWER, json.dumps([WEATHER, TOOL_CHAT])]
    folder = tmp_path_factory.mktemp("tools") / "gpt2"
    write_tokenizer(folder, TOOL_TEMPLATE, texts=texts)
    tokens = {"bos_token_id": 0, "eos_token_id": 0}  # the end-of-text token
    config = models.gpt2_config(vocab_size=310, n_layer=1, n_positions=1024, **tokens)
    return models.write_random_model(config, folder, "ForCausalLM")


@pytest.fixture
def generator(folder) -> TextGeneration:
    generator = hfseq.pipeline("text-generation", str(folder))
    end = generator.tokenizer.convert_tokens_to_ids("<|im_end|>")
    generator.model.generation_config.eos_token_id = end
    return generator


def answer_with(generator, monkeypatch, text):
    """Makes the model generate `text` and the end of the turn. Returns the prompts it receives."""
    tokenizer, prompts = generator.tokenizer, []
    end = generator.model.generation_config.eos_token_id
    ids = [*tokenizer(text)["input_ids"], end]

    def stream(input_ids, attention_mask, **options):
        row = np.asarray(input_ids)[0][np.asarray(attention_mask)[0] == 1]
        prompts.append(tokenizer.decode(row.tolist()))
        return iter([np.array([token]) for token in ids])

    def generate(input_ids, attention_mask, **options):
        stream(input_ids, attention_mask)
        return SimpleNamespace(sequences=np.concatenate([np.asarray(input_ids), [ids]], axis=1))

    monkeypatch.setattr(generator.model, "stream_generate", stream)
    monkeypatch.setattr(generator.model, "generate", generate)
    return prompts


QUIET = {"enable_thinking": False}
WITHOUT_THINKING = {"chat_template_kwargs": QUIET}


@pytest.mark.parametrize(
    ("template", "length", "options"),
    [
        (TOOL_TEMPLATE, 2, {"tools": [WEATHER]}),
        (TOOL_TEMPLATE, 4, {}),
        (TOOL_TEMPLATE, 4, WITHOUT_THINKING),
        (TOOL_TEMPLATE, 4, {"tools": [WEATHER], "tokenizer_encode_kwargs": QUIET}),
        (PLAIN_TEMPLATE, 4, {"tools": [WEATHER]}),
        (TEMPLATE, 2, WITHOUT_THINKING),
    ],
)
def test_prompts_are_those_of_apply_chat_template(
    generator, monkeypatch, template, length, options
):
    generator.tokenizer.chat_template = template
    chat = [message | {"content": message.get("content", "")} for message in TOOL_CHAT[:length]]
    variables = options.get("chat_template_kwargs") or options.get("tokenizer_encode_kwargs") or {}
    expected = generator.tokenizer.apply_chat_template(
        chat, add_generation_prompt=True, tools=options.get("tools"), tokenize=False, **variables
    )
    if template == TOOL_TEMPLATE:
        assert ("<think>\n\n</think>" in expected) == bool(variables)
        assert ("which city" in expected) == (length == 4)
    prompts = answer_with(generator, monkeypatch, "cold")
    (result,) = generator(chat, **options)
    with_options = {"messages": chat, **options}
    assert generator([with_options])[0][0] == result
    assert prompts == [expected] * 2
    assert result["generated_text"] == [*chat, turn("assistant", "cold")]


@pytest.mark.parametrize("name", DECODER_TEMPLATES)
def test_templates_of_decoders_show_reasoning_and_tools(generator, monkeypatch, name):
    """Prompts equal those of `apply_chat_template`, and contain what the template gets."""
    tokenizer = generator.tokenizer
    tokenizer.chat_template = DECODER_TEMPLATES[name]
    prompts, expected = answer_with(generator, monkeypatch, "cold"), []
    for length in (2, 4):
        for variables in ({}, {"enable_thinking": False}, {"enable_thinking": True}):
            options = {"tools": [WEATHER], "chat_template_kwargs": variables}
            generator(TOOL_CHAT[:length], **options)
            expected.append(
                tokenizer.apply_chat_template(
                    TOOL_CHAT[:length],
                    add_generation_prompt=True,
                    tools=[WEATHER],
                    tokenize=False,
                    **variables,
                )
            )
    assert prompts == expected
    assert all("weather" in prompt for prompt in prompts)
    assert all("far" in prompt and "degrees" in prompt for prompt in prompts[3:])
    # Llama 3 has no reasoning. Mistral and gpt-oss have no such variable.
    assert (prompts[1] == prompts[2]) == (name in ("llama3", "mistral", "gpt_oss"))
    assert ("which city" in prompts[3]) == (name not in ("llama3", "granite"))
    with pytest.raises(UsageError, match="chat template .* fails"):
        generator(TOOL_CHAT[:2], tools=[{"type": "function"}, "weather"])


def test_a_message_of_the_assistant_is_continued(generator, monkeypatch):
    prompts = answer_with(generator, monkeypatch, " cold")
    chat = [*TOOL_CHAT[:2], turn("assistant", "it is")]
    (result,) = generator(chat)
    expected = generator.tokenizer.apply_chat_template(
        chat, continue_final_message=True, tokenize=False
    )
    assert prompts == [expected] and expected.endswith("it is")
    assert result["generated_text"][-1] == turn("assistant", "it is cold")
    (result,) = generator(chat, continue_final_message=False)
    assert prompts[1].endswith("it is<|im_end|>\n<|im_start|>assistant\n")
    assert result["generated_text"][-2:] == [chat[-1], turn("assistant", " cold")]


def test_answers_are_parsed_with_the_response_template(generator, monkeypatch):
    generator.tokenizer.response_template = RESPONSE_TEMPLATE
    answer_with(generator, monkeypatch, ANSWER)
    (result,) = generator(TOOL_CHAT[:2], tools=[WEATHER])
    assert result["generated_text"] == [*TOOL_CHAT[:2], PARSED]
    (result,) = generator(
        TOOL_CHAT[:2], tools=[WEATHER], return_full_text=False, return_details=True
    )
    assert result["generated_text"] == ANSWER and result["message"] == PARSED
    answer_with(generator, monkeypatch, "<tool_call>{no json</tool_call>")
    (result,) = generator(TOOL_CHAT[:2])
    assert result["generated_text"][-1]["role"] == "assistant"


@pytest.mark.parametrize("parses", [False, True])
def test_a_conversation_with_a_tool(generator, monkeypatch, parses):
    tokenizer = generator.tokenizer
    if parses:
        tokenizer.response_template = RESPONSE_TEMPLATE
    chat = Chat(
        generator,
        system="be short",
        tools=[WEATHER],
        chat_template_kwargs={"enable_thinking": False},
    )
    options = {"tools": [WEATHER], "enable_thinking": False, "tokenize": False}
    options["add_generation_prompt"] = True
    prompts = answer_with(generator, monkeypatch, ANSWER)
    assert "".join(chat.reply("is it hot")) == ANSWER
    assert prompts == [tokenizer.apply_chat_template(TOOL_CHAT[:2], **options)]
    assert chat.messages[-1] == (PARSED if parses else turn("assistant", ANSWER))
    prompts = answer_with(generator, monkeypatch, "hot")
    messages = [*chat.messages, {"role": "tool", "content": "30"}]
    assert "".join(chat.reply(messages[-1])) == "hot"
    assert prompts == [tokenizer.apply_chat_template(messages, **options)]
    assert chat.messages == [*messages, turn("assistant", "hot")]


@pytest.mark.parametrize(
    ("chat", "options", "message"),
    [
        ([{"role": "user"}], {}, "must have a role and a content"),
        ([TOOL_CHAT[1], {"content": "hot"}], {}, "must have a role and a content"),
        (TOOL_CHAT[:3], {"continue_final_message": True}, "chat template .* fails"),
        (TOOL_CHAT[:2], {"tools": ["weather"]}, "chat template .* fails"),
    ],
)
def test_chats_that_cannot_be_formatted_are_refused(generator, chat, options, message):
    with pytest.raises(UsageError, match=message):
        generator(chat, **options)


# -- commands


@pytest.fixture
def echo(monkeypatch):
    """Makes pipelines answer with their prompt."""

    def stream_text(self, prompt, **options):
        yield self.tokenizer.decode(prompt) + ANSWER

    def generate(self, inputs, options):
        ids = np.asarray(inputs["input_ids"])
        return {"sequences": np.concatenate([ids, ids], axis=1)[:, None]}

    monkeypatch.setattr(TextGeneration, "stream_text", stream_text)
    monkeypatch.setattr(TextGeneration, "generate", generate)


def test_chat_command(folder, tmp_path, capsys, echo):
    (tmp_path / "tools.json").write_text(json.dumps(WEATHER))
    lines = ["is it hot", {"role": "tool", "content": "30"}]
    path = tmp_path / "turns.jsonl"
    path.write_text("".join(f"{json.dumps(line)}\n" for line in lines))
    flags = ["--system", "be short", "--tools", str(tmp_path / "tools.json")]
    flags += ["--chat_template_kwargs", '{"enable_thinking": false}']
    assert cli.main(["chat", str(folder), "--input_file", str(path), "--json", *flags]) == 0
    first, second = map(json.loads, capsys.readouterr().out.splitlines())
    tokenizer = hfseq.pipeline("text-generation", str(folder)).tokenizer
    messages = [*TOOL_CHAT[:2], first, lines[1]]
    for length, answer in ((2, first), (4, second)):
        expected = tokenizer.apply_chat_template(
            messages[:length],
            add_generation_prompt=True,
            tools=[WEATHER],
            enable_thinking=False,
            tokenize=False,
        )
        assert answer == turn("assistant", expected + ANSWER)


def test_generate_command(folder, tmp_path, capsys, echo):
    chats = [TOOL_CHAT[1:2], {"messages": TOOL_CHAT[1:4], "tools": [WEATHER]}]
    path = tmp_path / "chats.jsonl"
    path.write_text("".join(f"{json.dumps(chat)}\n" for chat in chats))
    flags = ["--chat", "--system", "be short", "--max_new_tokens", "2", "--json"]
    command = ["generate", str(folder), "--input_file", str(path), *flags]
    assert cli.main(command) == 0
    rows = [json.loads(line) for line in capsys.readouterr().out.splitlines()]
    tokenizer = hfseq.pipeline("text-generation", str(folder)).tokenizer
    for row, length, tools in zip(rows, (2, 4), (None, [WEATHER]), strict=True):
        ids = tokenizer.apply_chat_template(
            TOOL_CHAT[:length], add_generation_prompt=True, tools=tools, return_dict=False
        )
        expected = tokenizer.decode(ids, skip_special_tokens=True)
        assert row["prompt"] == TOOL_CHAT[:length]
        assert row["sequences"][0]["message"] == turn("assistant", expected)
    assert cli.main(["generate", str(folder), "is it hot", *flags[:-1]]) == 0
    assert capsys.readouterr().out.strip() == rows[0]["sequences"][0]["text"].strip()


@pytest.mark.parametrize("command", ["chat", "generate"])
@pytest.mark.parametrize(
    ("flags", "message"),
    [
        (["--chat_template_kwargs", "{"], "--chat_template_kwargs { is not valid JSON"),
        (["--chat_template_kwargs", "[1]"], "--chat_template_kwargs [1] is not a JSON object"),
        (["--tools", "/no/where"], "--tools /no/where: "),
        (["--tools", "{folder}/vocab.txt"], "is not valid JSON"),
        (["--tools", "{folder}/list.json"], "must contain a JSON list of function schemas"),
    ],
)
def test_invalid_template_flags(tmp_path, capsys, command, flags, message):
    (tmp_path / "vocab.txt").write_text("weather")
    (tmp_path / "list.json").write_text('["weather"]')
    arguments = [flag.replace("{folder}", str(tmp_path)) for flag in flags]
    model = ["no-model", "hello", "--chat"] if command == "generate" else ["no-model"]
    assert cli.main([command, *model, *arguments]) == 2
    assert message in capsys.readouterr().err


def test_template_flags_of_generate_require_chat(tmp_path, capsys):
    assert cli.main(["generate", "no-model", "hello", "--system", "be short"]) == 2
    assert "--system requires --chat" in capsys.readouterr().err
