"""Loss masks of conversations, prompts with completions and texts, and packing of examples."""

from __future__ import annotations

import json
import logging
import random
import warnings
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
from transformers import AutoTokenizer

from hfseq.data.arguments import ChatArguments
from hfseq.data.chat import (
    ChatEncoder,
    InvalidExample,
    PackedChatRows,
    best_fit_decreasing,
    configure_tokenizer,
    encode_examples,
)
from hfseq.data.records import load_records
from hfseq.errors import DataError, UsageError
from tests.support import chats
from tests.support.chats import END_TOKEN, OPEN_TEMPLATE, PLAIN_TEMPLATE, TEMPLATE, turn

TALK = [turn("user", "what is not hot"), turn("assistant", "cold")]


@pytest.fixture(scope="module")
def folder(tmp_path_factory) -> Path:
    return chats.write_tokenizer(tmp_path_factory.mktemp("chat"))


@pytest.fixture
def encoder(folder, tmp_path):
    """Returns a function from examples and flags to an encoder and the examples."""

    def make(examples: list[dict[str, Any]], template: str | None = TEMPLATE, **flags: Any):
        tokenizer = AutoTokenizer.from_pretrained(folder)
        tokenizer.chat_template = template
        file = chats.write_lines(tmp_path / "train.jsonl", examples)
        options = {"train_file": [str(file)], "validation_split_percentage": 0} | flags
        arguments = ChatArguments(**options)
        configure_tokenizer(tokenizer, arguments)
        records = load_records(arguments)["train"]
        return ChatEncoder(tokenizer, arguments, records), records

    return make


def learned(encoder, examples, template=TEMPLATE, **flags) -> list[str]:
    """Returns the text of the loss mask of each example."""
    encode, records = encoder(examples, template, **flags)
    created = (encode(records[row]) for row in range(len(records)))
    return [encode.tokenizer.decode(item.ids[item.loss_mask].tolist()) for item in created]


def test_only_answers_and_their_end_tokens_are_labels(encoder):
    two = [*TALK, turn("user", "what is not up"), turn("assistant", "down")]
    inputs = [{"messages": TALK}, {"messages": two}]
    assert learned(encoder, inputs, assistant_only_loss=True) == [
        f"cold{END_TOKEN}",
        f"cold{END_TOKEN}down{END_TOKEN}",
    ]
    assert learned(encoder, inputs)[0].startswith("<|im_start|>user\nwhat is not hot"), "as in TRL"


def test_alternative_role_and_content_names_are_accepted(encoder):
    inputs = [
        {
            "conversations": [
                {"from": "human", "value": "what is not hot"},
                {"from": "gpt", "value": "cold"},
            ]
        }
    ]
    assert learned(encoder, inputs, assistant_only_loss=True) == [f"cold{END_TOKEN}"]


def test_completions_are_learned_and_prompts_are_not(encoder):
    texts = [{"prompt": "not hot is ?", "completion": " cold"}]
    assert learned(encoder, texts) == [" cold<|endoftext|>"]
    assert learned(encoder, texts, eos_token=END_TOKEN) == [f" cold{END_TOKEN}"]
    assert learned(encoder, texts, completion_only_loss=False)[0].startswith("not hot is ?")
    lists = [{"prompt": TALK[:1], "completion": TALK[1:]}]
    assert learned(encoder, lists, PLAIN_TEMPLATE) == [f"cold{END_TOKEN}\n"]
    assert learned(encoder, lists, assistant_only_loss=True) == [f"cold{END_TOKEN}"], (
        "both masks hold"
    )
    assert learned(encoder, [{"text": "cold"}]) == ["cold<|endoftext|>"]
    assert learned(encoder, [{"body": "cold"}], dataset_text_field="body") == ["cold<|endoftext|>"]


def test_end_of_text_occurs_once(encoder):
    inputs = [{"prompt": "not hot is ?", "completion": " cold<|endoftext|>"}]
    assert learned(encoder, inputs) == [" cold<|endoftext|>"]


def test_prompt_that_merges_with_the_answer_causes_a_warning(encoder, caplog):
    encode, records = encoder([{"prompt": "s", "completion": "mall"}])
    with caplog.at_level(logging.WARNING):
        encode_examples(encode, records, "train", 64)
    assert "last tokens of 1 train prompts change" in caplog.text


@pytest.mark.parametrize("trim", [False, True])
@pytest.mark.parametrize("answer", ["cold ", " cold", "cold\n", "kälte 🥶"])
def test_tokens_after_an_answer_are_not_labels(encoder, trim, answer):
    """The mask of Transformers continues to the end if the last character is in no token."""
    from tokenizers.processors import ByteLevel

    bare = OPEN_TEMPLATE.replace("{{ '<|im_end|>' }}", "")
    inputs = [turn("user", "not hot is ?"), turn("assistant", answer), turn("user", "really ?")]
    encode, records = encoder([{"messages": inputs}], bare, assistant_only_loss=True)
    encode.tokenizer.backend_tokenizer.post_processor = ByteLevel(trim_offsets=trim)
    tokens = encode(records[0])
    text = encode.tokenizer.decode(tokens.ids[tokens.loss_mask].tolist())
    assert text.strip() == answer.strip() and "really" not in text


def test_tools_and_options_of_the_template_are_passed_on(encoder):
    template = "{{ tools[0].name if tools else '' }}{{ mood }}" + TEMPLATE
    inputs = [
        {
            "messages": TALK,
            "tools": json.dumps([{"name": "clock"}]),
            "chat_template_kwargs": {"mood": "glad"},
        }
    ]
    assert learned(encoder, inputs, template)[0].startswith("clockglad<|im_start|>")


#: Two conversations whose calls have different arguments and whose tools have different schemas.
TOOL_EXAMPLES: list[dict[str, Any]] = [
    {"messages": chats.TOOL_CHAT, "tools": [chats.WEATHER]},
    {
        "messages": [
            turn("user", "not dark is ?"),
            {"role": "assistant", "content": "", "tool_calls": [chats.call("clock", zone="up")]},
            {"role": "tool", "content": "12"},
            turn("assistant", "light"),
        ],
        "tools": [
            {
                "type": "function",
                "function": {
                    "name": "clock",
                    "description": "Returns the time.",
                    "parameters": {
                        "type": "object",
                        "properties": {"zone": {"type": "string"}},
                        "required": ["zone"],
                    },
                },
            }
        ],
    },
]


@pytest.mark.parametrize("name", chats.DECODER_TEMPLATES)
def test_templates_of_decoders_render_reasoning_and_tools(encoder, name):
    """Some templates iterate over arguments and schemas, so no key of another row may be left."""
    encode, records = encoder(TOOL_EXAMPLES, chats.DECODER_TEMPLATES[name])
    for example, record in zip(TOOL_EXAMPLES, records, strict=True):
        expected = encode.tokenizer.apply_chat_template(
            example["messages"], tools=example["tools"], tokenize=False
        )
        assert encode.tokenizer.decode(encode(record).ids.tolist()) == expected
        assert "None" not in expected and "null" not in expected


@pytest.mark.parametrize("thinks", [True, False])
def test_conversations_with_tools_equal_those_of_apply_chat_template(encoder, thinks):
    """Rows of a table have the same keys, so calls and schemas contain `None` for other keys."""
    examples = [
        *TOOL_EXAMPLES,
        {
            "prompt": chats.TOOL_CHAT[:4],
            "completion": chats.TOOL_CHAT[4:],
            "chat_template_kwargs": {"enable_thinking": True, "mood": "glad"},
        },
    ]
    template = "{{ mood }}" + chats.TOOL_TEMPLATE
    for example in examples:
        same_columns = [other for other in examples if ("tools" in other) == ("tools" in example)]
        encode, records = encoder(
            same_columns,
            template,
            chat_template_kwargs=json.dumps({"enable_thinking": thinks, "mood": "calm"}),
        )
        tokens = encode(records[same_columns.index(example)])
        variables = {"enable_thinking": thinks, "mood": "calm"}
        variables |= example.get("chat_template_kwargs", {})
        messages = example.get("messages") or [*example["prompt"], *example["completion"]]
        expected = encode.tokenizer.apply_chat_template(
            messages, tools=example.get("tools"), tokenize=False, **variables
        )
        assert encode.tokenizer.decode(tokens.ids.tolist()) == expected
        assert "None" not in expected and "null" not in expected
        loss = encode.tokenizer.decode(tokens.ids[tokens.loss_mask].tolist())
        if "completion" in example:
            assert loss == "<think>\n30 is hot\n</think>\nhot<|im_end|>\n"
        else:
            assert loss == expected


def test_answers_of_a_conversation_with_tools_are_learned(encoder):
    examples = [{"messages": chats.TOOL_CHAT, "tools": json.dumps([chats.WEATHER])}]
    (loss,) = learned(encoder, examples, chats.TOOL_TEMPLATE, assistant_only_loss=True)
    calls = '<tool_call>{"name": "weather", "arguments": {"city": "far", "days": 2}}</tool_call>'
    assert loss == (
        f"<think>\nwhich city\n</think>\n{calls}<|im_end|>"
        "<think>\n30 is hot\n</think>\nhot<|im_end|>"
    )


@pytest.mark.parametrize("value", ["{", "[1]", "hot"])
def test_invalid_template_variables_are_refused(value):
    with pytest.raises(UsageError, match="--chat_template_kwargs .* is not a JSON object"):
        ChatArguments(chat_template_kwargs=value)


BAD = {
    "messages must be a list, not 'hello'": {"messages": "hello"},
    "messages must be a list, not None": {"messages": None},
    "message 1 must have a role and a content": {"messages": ["hello"]},
    "message 1 has no role": {"messages": [{"content": "hello"}]},
    "message 2 has no content": {"messages": [TALK[0], {"role": "assistant"}]},
    "message 1 has content 7": {"messages": [{"role": "user", "content": 7}]},
    "it has no assistant turn": {"messages": TALK[:1]},
    "an assistant turn is empty": {"messages": [TALK[0], turn("assistant", " ")]},
    "the completion is empty": {"prompt": "not hot is ?", "completion": " "},
    "the completion is not a string": {"prompt": "not hot is ?", "completion": None},
    "the prompt is not a string": {"prompt": 3, "completion": "cold"},
    "messages must be a list, not 'cold'": {"prompt": TALK[:1], "completion": "cold"},
    "the text is empty": {"text": ""},
    "unpaired surrogate": {"text": "cold \ud83e"},
    "the chat template raised an error: unsupported": {
        "messages": TALK,
        "chat_template_kwargs": "none",
    },
}


@pytest.mark.parametrize("problem", BAD)
def test_unusable_conversations_error_names_them(encoder, problem):
    encode, records = encoder([BAD[problem]])
    with pytest.raises(InvalidExample, match=problem):
        encode(records[0])


def test_bad_examples_are_counted_and_named_with_their_line_or_refused(encoder, caplog):
    long = [turn("user", "what is not hot " * 20), TALK[1]]
    refused = [turn("user", "no"), turn("user", "no"), TALK[1]]
    template = "{% if messages[1].role == 'user' %}{{ raise_exception('twice') }}{% endif %}"
    inputs = [{"messages": item} for item in (TALK, TALK[:1], long, refused, TALK)]
    options = {"assistant_only_loss": True}
    encode, records = encoder(inputs, template + TEMPLATE, **options)
    with caplog.at_level(logging.WARNING):
        created, cut = encode_examples(encode, records, "train", 24)
    assert len(created) == 2 and cut == 0
    assert "3 of 5 train examples are invalid" in caplog.text
    assert "train.jsonl, line 2: it has no assistant turn" in caplog.text
    assert "line 3: its first 24 of " in caplog.text
    assert "line 4: the chat template raised an error: twice" in caplog.text
    encode, records = encoder(inputs, template + TEMPLATE, bad_examples="error", **options)
    with pytest.raises(DataError, match="line 2: it has no assistant turn"):
        encode_examples(encode, records, "train", 24)
    encode, records = encoder([{"messages": TALK[:1]}])
    with pytest.raises(DataError, match="none of the 1 train examples is valid"):
        encode_examples(encode, records, "train", 24)


def test_long_examples_keep_their_start(encoder):
    inputs = [{"messages": TALK * 5}]
    encode, records = encoder(inputs, assistant_only_loss=True)
    full = encode(records[0])
    (created,), cut = encode_examples(encode, records, "train", 20)
    assert cut == 1 and len(created.ids) == 20
    assert (created.ids == full.ids[:20]).all() and (created.loss_mask == full.loss_mask[:20]).all()


def test_the_token_that_ends_an_answer_is_looked_for(encoder):
    inputs = [{"messages": TALK}]
    assert encoder(inputs, assistant_only_loss=True)[0].end_of_turn() == (END_TOKEN, True)
    assert encoder(inputs, OPEN_TEMPLATE, assistant_only_loss=True)[0].end_of_turn() == (
        None,
        False,
    )
    assert encoder(inputs, PLAIN_TEMPLATE)[0].end_of_turn() == (END_TOKEN, True)
    assert encoder(inputs, "{{ raise_exception('no') }}")[0].end_of_turn() == (None, True)


def test_flags_columns_and_templates_that_do_not_go_together_are_refused(encoder, tmp_path):
    talk, texts = [{"messages": TALK}], [{"prompt": "not hot is ?", "completion": "cold"}]
    for match, inputs, template, flags in (
        ("--chat_template_path", talk, PLAIN_TEMPLATE, {"assistant_only_loss": True}),
        ("tokenizer has none: use --chat_template_path", talk, None, {}),
        ("--assistant_only_loss requires conversations", texts, TEMPLATE,
         {"assistant_only_loss": True}),
        ("requires the columns prompt and", talk, TEMPLATE, {"completion_only_loss": True}),
        ("has the columns prompt: expected", [{"prompt": "cold"}], TEMPLATE, {}),
        ("--eos_token <end>: the tokenizer does not", talk, TEMPLATE,
         {"eos_token": "<end>"}),
        ("--chat_template_path .*none.jinja", talk, TEMPLATE,
         {"chat_template_path": str(tmp_path / "none.jinja")}),
        ("neither a .jinja file nor a tokenizer", talk, TEMPLATE,
         {"chat_template_path": str(tmp_path)}),
        ("--max_length 5 and --max_seq_length 6 disagree", talk, TEMPLATE,
         {"max_length": 5, "max_seq_length": 6}),
    ):  # fmt: skip
        with pytest.raises(UsageError, match=match):
            encoder(inputs, template, **flags)
    with pytest.raises(UsageError, match="the chat template is not valid, line 1"):
        encoder(talk, "{% for %}")[0](talk[0])


def test_a_template_comes_from_a_file_or_another_tokenizer(encoder, folder, tmp_path):
    (tmp_path / "chat.jinja").write_text(TEMPLATE)
    flags = {"assistant_only_loss": True, "chat_template_path": str(tmp_path / "chat.jinja")}
    assert learned(encoder, [{"messages": TALK}], None, **flags) == [f"cold{END_TOKEN}"]
    flags["chat_template_path"] = str(folder)
    assert learned(encoder, [{"messages": TALK}], PLAIN_TEMPLATE, **flags) == [f"cold{END_TOKEN}"]


def test_documents_share_rows_best_fit_first_and_none_is_lost():
    assert best_fit_decreasing([3, 6, 4, 5, 2], 10) == [[1, 2], [3, 0, 4]]
    assert best_fit_decreasing([7, 6, 3, 4], 10) == [[0, 2], [1, 3]], "the fullest row with room"
    draw = random.Random(0)
    lengths = [draw.randint(1, 64) for _ in range(500)]
    rows = best_fit_decreasing(lengths, 64)
    assert sorted(number for row in rows for number in row) == list(range(500))
    sums = [sum(lengths[number] for number in row) for row in rows]
    assert max(sums) <= 64 and sum(sums) / (64 * len(rows)) > 0.98


def test_packed_rows_have_each_example_as_it_is(encoder):
    inputs = [{"messages": chat} for chat in chats.conversations(50)]
    encode, records = encoder(inputs, assistant_only_loss=True)
    created, _ = encode_examples(encode, records, "train", 64)
    rows = PackedChatRows(created, 0, 64)
    assert len(rows) < 50 and rows.total_tokens == sum(len(item.ids) for item in created)
    fetched = rows.fetch(np.arange(len(rows)))
    actual = []
    for ids, marks, segments, positions in zip(
        *(fetched[name] for name in ("input_ids", "learned", "segment_ids", "position_ids")),
        strict=True,
    ):
        for segment in range(1, segments.max() + 1):
            custom = segments == segment
            assert positions[custom].tolist() == list(range(custom.sum()))
            actual.append((ids[custom].tolist(), marks[custom].tolist()))
        assert not marks[segments == 0].any()
        assert segments.max() < rows.max_runs
    expected = [(item.ids.tolist(), item.loss_mask.astype(int).tolist()) for item in created]
    assert sorted(actual) == sorted(expected)


def prepared_by_trl(tokenizer, examples: list[dict], packing: bool, **flags: Any) -> Any:
    """Returns the rows that TRL's trainer creates from examples."""
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        trl = pytest.importorskip("trl")
        from datasets import Dataset
        from trl import SFTTrainer

    assert trl
    args = SimpleNamespace(
        dataset_num_proc=None,
        dataset_text_field="text",
        truncation_mode="keep_start",
        shuffle_dataset=False,
        packing_strategy="bfd",
        seed=0,
        assistant_only_loss=flags.get("assistant_only_loss", False),
        max_length=flags["max_length"],
    )
    only = flags.get("completion_only_loss", "prompt" in examples[0])
    trainer = SimpleNamespace(_tokenizer=tokenizer, chat_template=None, completion_only_loss=only)
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        return SFTTrainer._prepare_dataset(
            trainer, Dataset.from_list(examples), tokenizer, args, packing, None, "train"
        )


@pytest.mark.slow
@pytest.mark.parametrize("length", [256, 30])
@pytest.mark.parametrize(
    ("case", "flags"),
    [
        ("messages", {"assistant_only_loss": True}),
        ("messages", {}),
        ("pairs", {}),
        ("pairs", {"completion_only_loss": False}),
        ("chat pairs", {}),
        ("chat pairs", {"assistant_only_loss": True}),
        ("text", {}),
    ],
)
def test_masks_are_those_of_trl(encoder, case, flags, length):
    talk = chats.conversations(200)
    inputs: list[dict] = {
        "messages": [{"messages": item} for item in talk],
        "pairs": chats.pairs(200),
        "chat pairs": [{"prompt": item[:-1], "completion": item[-1:]} for item in talk],
        "text": [{"text": " ".join(item["content"] for item in chat)} for chat in talk],
    }[case]
    encode, records = encoder(inputs, max_length=length, **flags)
    created, _ = encode_examples(encode, records, "train", length)
    ours = [
        (item.ids.tolist(), np.where(item.loss_mask, item.ids, -100).tolist()) for item in created
    ]
    options = {"max_length": length, **flags}
    theirs = prepared_by_trl(encode.tokenizer, inputs, False, **options)
    assert ours == [(row["input_ids"], row["labels"]) for row in theirs]
    packed = prepared_by_trl(encode.tokenizer, inputs, True, **options)
    rows = PackedChatRows(created, 0, length)
    if length == 256:  # TRL also packs examples without labels
        assert len(rows) == len(packed)
