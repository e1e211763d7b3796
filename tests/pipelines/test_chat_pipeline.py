"""Conversations: answers, dropped turns, and the number of compilations."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest

import hfseq
from hfseq.errors import CheckpointError, UsageError
from hfseq.pipelines.chat import Chat
from tests.support.tiny_chat import save_tiny_chat


@pytest.fixture(scope="module")
def folder(tmp_path_factory) -> Path:
    folder = tmp_path_factory.mktemp("chats") / "gpt2"
    save_tiny_chat(folder)
    return folder


@pytest.fixture(scope="module")
def loaded(folder) -> Chat:
    return Chat.from_pretrained(str(folder), max_new_tokens=10)


@pytest.fixture
def chat(loaded) -> Chat:
    return Chat(loaded.generator, max_new_tokens=10)


def ask(chat: Chat, text: str) -> str:
    return "".join(chat.reply(text))


def test_answers_match_generate_on_the_conversation(chat):
    model, tokenizer = chat.generator.model, chat.generator.tokenizer
    chat = Chat(chat.generator, max_new_tokens=10, system="read the law")
    texts = "system: read the law<|endoftext|>"
    for question in ("who are all?", "blåbær"):
        texts += f"user: {question}<|endoftext|>assistant:"
        ids = tokenizer(texts, return_tensors="np")["input_ids"]
        generated = np.asarray(model.generate(ids, max_new_tokens=10).sequences)[0, ids.shape[1] :]
        expected = tokenizer.decode(generated, skip_special_tokens=True)
        pieces = list(chat.reply(question))
        assert "".join(pieces) == expected and len(pieces) > 1
        texts += f" {expected}<|endoftext|>"
    assert [item["role"] for item in chat.messages] == ["system", *["user", "assistant"] * 2]
    assert chat.dropped_turns == 0


def test_turns_share_compiled_programs(folder):
    chat = Chat.from_pretrained(str(folder), max_new_tokens=4)
    for number in range(7):
        ask(chat, f"{number}")
    programs = vars(chat.generator.model)["_generation_programs"]
    # Prompts of up to 64 tokens: buckets of 16, 24, 32, 48, 64 and 96 at most.
    compiled = [item._cache_size() for _, pair in programs.items() for item in pair]
    assert len(chat._ids(chat.messages)) > 48
    assert sum(compiled[::2]) <= 6 and sum(compiled[1::2]) <= 6


def test_oldest_turns_are_dropped_at_the_maximum_length(loaded):
    chat = Chat(loaded.generator, max_new_tokens=10, system="the law")
    for number in range(12):
        ask(chat, f"read {number}")
        assert chat.messages[0]["role"] == "system"
        assert [item["role"] for item in chat.messages[1:3]] == ["user", "assistant"]
    assert chat.dropped_turns and len(chat.messages) == 1 + 2 * (12 - chat.dropped_turns)
    assert chat.messages[-2]["content"] == "read 11"


def test_too_long_message_is_not_added(chat):
    ask(chat, "who?")
    previous = list(chat.messages)
    with pytest.raises(UsageError, match="supports 128 including the answer"):
        ask(chat, "the law of every land " * 40)
    assert chat.messages == previous and not chat.dropped_turns
    long = "law " * 112  # leaves less space than a full answer
    assert 118 < len(chat._ids([{"role": "user", "content": long}])) < 128
    assert ask(chat, long) and chat.dropped_turns == 1 and len(chat.messages) == 2


def test_interrupted_answer_contains_the_streamed_text(chat):
    pieces = chat.reply("who?")
    first = next(pieces)
    pieces.close()
    assert chat.messages[-1] == {"role": "assistant", "content": first}
    chat.clear()
    assert chat.messages == []


def test_seed_determines_the_samples(loaded):
    def said(seed: int) -> list[str]:
        options = {"do_sample": True, "temperature": 2.0, "top_k": 0}
        chat = Chat(loaded.generator, max_new_tokens=10, seed=seed, **options)
        return [ask(chat, "who?"), ask(chat, "who?")]

    assert said(1) == said(1) != said(2)


def test_template_errors_are_reported(chat):
    with pytest.raises(UsageError, match="the chat template of .* fails: not that"):
        ask(chat, "refuse")
    assert chat.messages == []


def test_a_model_without_a_template_gets_one(chat, monkeypatch):
    monkeypatch.setattr(chat.generator.tokenizer, "chat_template", None)
    with pytest.raises(UsageError, match="has no chat template.*--chat_template FILE"):
        Chat(chat.generator)
    other = Chat(chat.generator, chat_template="{{ messages[-1].content }}", max_new_tokens=2)
    assert ask(other, "who?")


def test_an_adapter_answers_with_its_base_and_its_tokenizer(folder, tmp_path):
    import jax

    from hfseq.modeling.lora import LoraConfig

    config = LoraConfig(2, target_modules=("c_attn",), base_model_name_or_path=str(folder))
    adapted = hfseq.FlaxGPT2LMHeadModel.from_pretrained(folder, peft_config=config)
    adapted.params = jax.tree.map(lambda leaf: leaf + 0.1, adapted.params)
    adapted.save_pretrained(tmp_path)
    ours = Chat.from_pretrained(str(tmp_path), max_new_tokens=10)
    theirs = Chat.from_pretrained(str(folder), max_new_tokens=10)
    assert ask(ours, "who?") != ask(theirs, "who?")
    (tmp_path / "tokenizer_config.json").write_text("broken")
    with pytest.raises(CheckpointError):  # its own comes before that of the base
        Chat.from_pretrained(str(tmp_path))
