import numpy as np
import pytest

from hfseq.data.tokenizers import train_tokenizer
from hfseq.objectives.collators import FlaxDataCollatorForLanguageModeling
from tests.data.samples import make_texts


@pytest.fixture
def examples(tokenizer):
    texts = make_texts(64, seed=9)
    return [tokenizer(text, return_special_tokens_mask=True) for text in texts]


def test_rows_are_padded_to_a_multiple(tokenizer, examples):
    batch = FlaxDataCollatorForLanguageModeling(tokenizer, seed=0)(examples, pad_to_multiple_of=16)
    longest = max(len(example["input_ids"]) for example in examples)
    assert batch["input_ids"].shape == batch["labels"].shape == (64, -(-longest // 16) * 16)
    assert "special_tokens_mask" not in batch


def test_masks_follow_the_recipe(tokenizer, examples):
    collator = FlaxDataCollatorForLanguageModeling(tokenizer, mlm_probability=0.5, seed=0)
    plain = tokenizer.pad(examples, pad_to_multiple_of=16, return_tensors="np")
    selected, masked, total = 0, 0, 0
    for _ in range(20):
        batch = collator(examples)
        targets = batch["labels"] != -100
        np.testing.assert_array_equal(batch["labels"][targets], plain["input_ids"][targets])
        np.testing.assert_array_equal(batch["input_ids"][~targets], plain["input_ids"][~targets])
        assert not (targets & (plain["special_tokens_mask"] == 1)).any()
        selected += targets.sum()
        masked += (batch["input_ids"][targets] == tokenizer.mask_token_id).sum()
        total += (plain["special_tokens_mask"] == 0).sum()
    assert abs(selected / total - 0.5) < 5 * (0.25 / total) ** 0.5
    assert abs(masked / selected - 0.8) < 5 * (0.16 / selected) ** 0.5 + 1 / len(tokenizer)


def test_special_tokens_are_detected_without_a_mask(tokenizer):
    collator = FlaxDataCollatorForLanguageModeling(tokenizer, mlm_probability=1.0, seed=0)
    batch = collator([tokenizer("en lov om alle")], pad_to_multiple_of=32)
    assert batch["labels"][0, 0] == -100 and batch["labels"][0, -1] == -100
    assert (batch["labels"] != -100).any()


def test_without_masking_the_labels_are_the_inputs(tokenizer):
    collator = FlaxDataCollatorForLanguageModeling(tokenizer, mlm=False)
    batch = collator([tokenizer("en"), tokenizer("en lov om alle")])
    real = batch["attention_mask"] == 1
    np.testing.assert_array_equal(batch["labels"][real], batch["input_ids"][real])
    assert (batch["labels"][~real] == -100).all() and (~real).any()


def test_a_tokenizer_without_a_mask_is_refused():
    tokenizer = train_tokenizer(make_texts(50), "gpt2", vocab_size=300)
    with pytest.raises(ValueError, match="does not have a mask token"):
        FlaxDataCollatorForLanguageModeling(tokenizer)
