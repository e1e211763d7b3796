"""Preference data: formats, truncation, and invalid examples."""

from __future__ import annotations

import logging

import numpy as np
import pytest
from transformers import AutoTokenizer

from hfseq.data.arguments import (
    CPOArguments,
    DPOArguments,
    KTOArguments,
    PreferenceArguments,
    ReferenceArguments,
)
from hfseq.data.batches import Batches
from hfseq.data.preferences import (
    AnswerRows,
    PackedAnswerRows,
    PreferenceEncoder,
    check_labels,
    encode_preferences,
    unpair,
)
from hfseq.data.records import load_records
from hfseq.errors import DataError, UsageError
from tests.support import chats, preferences
from tests.support.chats import turn

PROMPT, GOOD, BAD = [turn("user", "what is not hot")], [turn("assistant", "cold")], [
    turn("assistant", "big big")
]  # fmt: skip


@pytest.fixture(scope="module")
def tokenizer(tmp_path_factory):
    folder = chats.write_tokenizer(tmp_path_factory.mktemp("tokenizer"))
    loaded = AutoTokenizer.from_pretrained(folder)
    loaded.eos_token = chats.END_TOKEN
    return loaded


@pytest.fixture
def encode(tokenizer, tmp_path):
    def run(examples, length=64, paired=True, encoder_decoder=False, **flags):
        file = chats.write_lines(tmp_path / "data.jsonl", examples)
        arguments = PreferenceArguments(
            train_file=[str(file)], validation_split_percentage=0, **flags
        )
        records = load_records(arguments)["train"]
        encoder = PreferenceEncoder(tokenizer, arguments, records, paired, encoder_decoder)
        return encode_preferences(encoder, records, "train", length)

    return run


def texts(tokenizer, item):
    """Returns the prompt and the answers of an example as texts."""
    parts = [
        (ids[:length], ids[length:])
        for ids, length in zip(item.answers, item.prompt_lengths, strict=True)
    ]
    return [tuple(tokenizer.decode(part.tolist()) for part in pair) for pair in parts]


FORMATS = {
    "explicit": {"prompt": PROMPT, "chosen": GOOD, "rejected": BAD},
    "implicit": {"chosen": PROMPT + GOOD, "rejected": PROMPT + BAD},
    "mixed": {"prompt": "what is not hot", "chosen": PROMPT + GOOD, "rejected": PROMPT + BAD},
    "answers as strings": {"prompt": PROMPT, "chosen": "cold", "rejected": "big big"},
}


@pytest.mark.parametrize("name", FORMATS)
def test_conversational_formats_have_the_same_tokens(name, encode, tokenizer):
    (item,) = encode([FORMATS[name]]).examples
    start = "<|im_start|>user\nwhat is not hot<|im_end|>\n<|im_start|>assistant\n"
    assert texts(tokenizer, item) == [
        (start, "cold<|im_end|>\n"),
        (start, "big big<|im_end|>\n"),
    ]


def test_strings_end_with_eos_and_share_a_prompt(encode, tokenizer):
    explicit = {"prompt": "hot :", "chosen": " cold", "rejected": " big"}
    implicit = {"chosen": "hot : cold", "rejected": "hot : big<|im_end|>"}
    for example in (explicit, implicit):
        (item,) = encode([example]).examples
        assert texts(tokenizer, item) == [
            ("hot :", " cold<|im_end|>"),
            ("hot :", " big<|im_end|>"),
        ]
    # If one answer is the beginning of the other, the model still predicts its end.
    (item,) = encode([{"chosen": "hot : cold", "rejected": "hot : cold cold"}]).examples
    assert [text for _, text in texts(tokenizer, item)] == ["<|im_end|>", " cold<|im_end|>"]


@pytest.mark.parametrize("mode", ["keep_start", "keep_end"])
def test_truncation_keeps_the_start_or_the_end(mode, encode):
    example = {"prompt": "hot : hot : hot :", "chosen": " cold cold", "rejected": " big"}
    (whole,) = encode([example]).examples
    length = len(whole.prompt) + 1
    encoded = encode([example], length, truncation_mode=mode)
    (item,) = encoded.examples
    assert encoded.num_truncated == 1 and encoded.num_invalid == 0
    for ids, full, prompt in zip(item.answers, whole.answers, item.prompt_lengths, strict=True):
        assert ids.tolist() == (full[:length] if mode == "keep_start" else full[-length:]).tolist()
        assert len(ids) - prompt >= 1


@pytest.mark.parametrize(
    ("example", "problem"),
    [
        ({"prompt": PROMPT, "chosen": None, "rejected": BAD}, "chosen is missing"),
        ({"prompt": PROMPT, "chosen": GOOD, "rejected": None}, "rejected is missing"),
        ({"prompt": None, "chosen": GOOD, "rejected": BAD}, "prompt is missing"),
        ({"prompt": PROMPT, "chosen": GOOD, "rejected": GOOD}, "identical"),
        ({"prompt": "hot", "chosen": " cold", "rejected": " "}, "the rejected is empty"),
        ({"prompt": PROMPT, "chosen": GOOD, "rejected": [turn("assistant", "")]}, "is empty"),
        ({"prompt": PROMPT, "chosen": GOOD, "rejected": [turn("user", "no")]}, "no assistant turn"),
        (
            {"prompt": "other", "chosen": PROMPT + GOOD, "rejected": PROMPT + BAD},
            "do not begin with the prompt 'other'",
        ),
        ({"prompt": 3, "chosen": "a", "rejected": "b"}, "the prompt is not a string"),
        (
            {"prompt": "hot " * 40, "chosen": " cold", "rejected": " big"},
            "no token of the answer is among the first 24",
        ),
        (
            {"prompt": "hot", "chosen": " cold" * 30 + " a", "rejected": " cold" * 30 + " b"},
            "identical after truncation",
        ),
        (
            {"prompt": PROMPT, "chosen": PROMPT + GOOD, "rejected": PROMPT + BAD},
            "the answers repeat the prompt",
        ),
        (
            {"prompt": PROMPT, "chosen": GOOD, "rejected": BAD, "margin": float("inf")},
            "the margin must be a finite number",
        ),
    ],
)
def test_invalid_pairs_are_reported_by_row_and_counted(example, problem, encode, caplog):
    with caplog.at_level(logging.WARNING):
        encoded = encode([FORMATS["explicit"], example], 24)
    assert encoded.num_invalid == 1 and len(encoded.examples) == 1
    assert "1 of 2 train examples" in caplog.text and problem in caplog.text
    assert "line 2" in caplog.text
    with pytest.raises(DataError, match="line 2: .*--bad_examples skip"):
        encode([FORMATS["explicit"], example], 24, bad_examples="error")


def test_conversations_without_a_common_prompt_are_invalid(encode, caplog):
    other = {"chosen": PROMPT + GOOD, "rejected": [turn("user", "else"), *BAD]}
    assert encode([FORMATS["implicit"], other]).num_invalid == 1
    assert "do not begin with the same prompt" in caplog.text
    # The first tokens of both strings are the same, or none.
    strings = {"chosen": "hot : cold", "rejected": "hot : big"}
    caplog.clear()
    assert encode([strings, {"chosen": "hot", "rejected": "big"}]).num_invalid == 1
    assert "do not begin with the same prompt" in caplog.text


def test_a_template_that_changes_the_prompt_is_reported(encode, tokenizer, caplog, monkeypatch):
    changed = chats.TEMPLATE.replace(
        "assistant\\n' }}{% endif %}", "assistant\\n<think>' }}{% endif %}"
    )
    assert changed != chats.TEMPLATE
    monkeypatch.setattr(tokenizer, "chat_template", changed)
    (item,) = encode([FORMATS["explicit"]]).examples
    assert "the last tokens of 1 train prompts change" in caplog.text
    assert texts(tokenizer, item)[0][1].endswith("cold<|im_end|>\n")


@pytest.mark.parametrize(
    ("examples", "message"),
    [
        ([{"prompt": "a", "chosen": "b"}], "'chosen' and 'rejected'"),
        ([{"prompt": "a", "completion": "b", "label": True}], "objective kto"),
    ],
)
def test_missing_columns_are_usage_errors(examples, message, encode):
    with pytest.raises(UsageError, match=message):
        encode(examples)


def test_completions_need_both_labels(encode, caplog):
    examples = preferences.completions(8)
    encoded = encode([*examples, {**examples[0], "label": "yes"}], paired=False)
    assert len(encoded.examples) == 8 and "the label must be true or false" in caplog.text
    good = [item for item in encoded.examples if item.values["label"]]
    check_labels(encoded.examples, "train")
    with pytest.raises(DataError, match="all 4 train examples have the label true"):
        check_labels(good, "train")
    divided = unpair(encode(preferences.pairs(3)).examples)
    assert [item.values["label"] for item in divided] == [1, 0] * 3


@pytest.mark.parametrize(
    ("kind", "flags", "message"),
    [
        (DPOArguments, {"loss_type": ["sigmod"]}, "unknown loss 'sigmod'"),
        (DPOArguments, {"loss_type": ["sigmoid,ipo"]}, "separate several losses by spaces"),
        (DPOArguments, {"loss_type": ["ipo", "ipo"]}, "name each loss only once"),
        (DPOArguments, {"loss_type": ["ipo", "sft"], "loss_weights": [1.0]}, "one weight per loss"),
        (DPOArguments, {"label_smoothing": 0.1}, "robust or cdpo"),
        (DPOArguments, {"loss_type": ["robust"], "label_smoothing": 0.5}, "0 to below 0.5"),
        (ReferenceArguments, {"beta": 0.0}, "--beta 0.0: use a positive number"),
        (KTOArguments, {"beta": -1.0}, "--beta -1.0"),
        (KTOArguments, {"loss_type": "sigmoid"}, "kto or apo_zero_unpaired"),
        (
            DPOArguments,
            {"reference_free": True, "ref_model_name_or_path": "x"},
            "--reference_free and --ref_model_name_or_path",
        ),
        (CPOArguments, {"loss_type": "simpo", "label_smoothing": 0.1}, "no effect"),
    ],
)
def test_contradictory_flags_are_refused(kind, flags, message):
    with pytest.raises(UsageError, match=message):
        kind(train_file=["x"], **flags)


def test_packed_rows_contain_whole_pairs(encode, tokenizer):
    examples = encode(preferences.pairs(17)).examples
    rows = PackedAnswerRows(examples, 0, 128)
    assert len(rows) < 9
    batch = rows.fetch(np.arange(len(rows)))
    found = []
    for row, numbers in enumerate(rows.pair_numbers):
        for pair, number in enumerate(numbers):
            if number < 0:
                assert not batch["pairs"][row, pair]
                continue
            found.append(number)
            for side, ids in enumerate(examples[number].answers):
                inside = batch["segment_ids"][row] == 2 * pair + side + 1
                assert batch["input_ids"][row][inside].tolist() == ids.tolist()
                mask = batch["learned"][row][inside]
                assert mask.sum() == len(ids) - examples[number].prompt_lengths[side]
    assert sorted(found) == list(range(17))


def test_prompts_are_paired_with_the_answer_of_the_next_row_of_the_step(encode):
    examples = encode(preferences.completions(10), paired=False).examples
    rows = AnswerRows(examples, 0, 64)
    rows.mismatched = True
    batches = Batches(rows, 4, seed=3)
    indices, _ = batches.indices(1)
    # A process that holds only a part of the rows uses the same pairs.
    whole, part = batches.fetch(1, np.arange(4)), batches.fetch(1, np.array([3, 0]))
    for name in ("mismatched_ids", "mismatched_segments", "mismatched_learned"):
        assert np.array_equal(whole[name][[3, 0]], part[name])
    for position in range(4):
        own, other = examples[indices[position]], examples[indices[(position + 1) % 4]]
        expected = [
            *own.answers[0][: own.prompt_lengths[0]],
            *other.answers[0][other.prompt_lengths[0] :],
        ][: whole["input_ids"].shape[-1]]
        real = whole["mismatched_segments"][position, 0] > 0
        assert whole["mismatched_ids"][position, 0][real].tolist() == expected
    with pytest.raises(UsageError, match="--global_batch_size 1"):
        Batches(rows, 1, seed=3)


def test_encoder_decoders_read_prompts_separately(encode, tokenizer):
    (item,) = encode(preferences.strings(1), encoder_decoder=True).examples
    assert tokenizer.decode(item.prompt.tolist()).endswith(" :")
    assert item.prompt_lengths == (0, 0)
    assert not any(ids[0] == item.prompt[0] for ids in item.answers)
