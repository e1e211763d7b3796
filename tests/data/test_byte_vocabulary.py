"""Byte vocabulary: the ids of the reference, and lossless decoding of any text."""

from __future__ import annotations

import random
import subprocess
import sys
import time

import numpy as np
import pytest

from hfseq.data.tokenize import DocumentEncoder
from hfseq.data.tokenizers import byte_characters, byte_ids, train_tokenizer
from hfseq.errors import UsageError

TEXTS = [
    "plain",
    "</s> <pad><unk>  names of special tokens are text \r\n\t",
    "øæå e\u0301 \U0001f600 \u2028\ufeff\x00",
    " ,. n't 's  two  spaces ",
]


@pytest.fixture(scope="module")
def saved(tmp_path_factory):
    folder = tmp_path_factory.mktemp("bytes")
    return train_tokenizer([], "vq_transformer", "bytes", output_dir=folder), folder


def random_text():
    draw = random.Random(0)
    blocks = ((1, 0x250), (0x4E00, 0x5000), (0x1F300, 0x1F600))
    return "".join(chr(draw.randrange(*draw.choice(blocks))) for _ in range(2000))


def test_ids_are_those_of_the_reference(saved):
    tokenizer, _ = saved
    assert len(tokenizer) == 259 and tokenizer.bos_token_id is None
    assert (tokenizer.pad_token_id, tokenizer.eos_token_id, tokenizer.unk_token_id) == (0, 1, 2)
    assert byte_ids(tokenizer).tolist() == list(range(3, 259))


@pytest.mark.parametrize("text", [*TEXTS, random_text()])
def test_any_text_comes_back_exactly(saved, text):
    tokenizer, _ = saved
    ids = tokenizer(text)["input_ids"]
    assert ids == [byte + 3 for byte in text.encode()]
    assert tokenizer.decode(ids) == text == tokenizer.decode(ids, skip_special_tokens=True)


@pytest.mark.slow
def test_loads_in_plain_transformers(saved):
    _, folder = saved
    code = (
        "import sys; from transformers import AutoTokenizer;"
        f"t = AutoTokenizer.from_pretrained({str(folder)!r});"
        f"texts = {TEXTS!r};"
        "assert [t.decode(t(x)['input_ids']) for x in texts] == texts;"
        "assert t('</s>')['input_ids'] == [b + 3 for b in b'</s>'] and len(t) == 259;"
        "assert 'hfseq' not in sys.modules"
    )
    process = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, cwd="/")
    assert process.returncode == 0, process.stderr


def test_the_characters_are_those_of_byte_level_vocabularies():
    from tokenizers import pre_tokenizers

    assert sorted(byte_characters()) == sorted(pre_tokenizers.ByteLevel.alphabet())


def test_documents_are_encoded_by_a_table_with_the_tokenizers_result(saved):
    tokenizer, _ = saved
    ids, lengths = DocumentEncoder(tokenizer, append_eos=True)([*TEXTS, "x"])
    parts = np.split(ids, np.cumsum(lengths)[:-1])
    for text, part in zip([*TEXTS, "x"], parts, strict=True):
        assert part.tolist() == [*tokenizer(text)["input_ids"], 1]
    cut, lengths = DocumentEncoder(tokenizer, 3, append_eos=True)(["abcdef"])
    assert cut.tolist() == [100, 101, 1] and lengths.tolist() == [3]


def test_an_end_of_text_is_appended_with_other_vocabularies_too(tokenizer):
    plain, _ = DocumentEncoder(tokenizer)(["one two"])
    ended, lengths = DocumentEncoder(tokenizer, append_eos=True)(["one two"])
    assert ended.tolist() == [*plain.tolist(), tokenizer.eos_token_id] and lengths.sum() == len(
        ended
    )


def test_a_megabyte_takes_seconds(saved):
    tokenizer, _ = saved
    text = random_text()[:1000] * 400
    started = time.perf_counter()
    ids = tokenizer(text)["input_ids"]
    assert len(ids) == len(text.encode()) > 1_000_000
    assert time.perf_counter() - started < 30  # quadratic work would take minutes


def test_families_with_boundary_tokens_have_no_byte_vocabulary():
    with pytest.raises(UsageError, match="use --model_type vq_transformer"):
        train_tokenizer([], "t5", "bytes")
    with pytest.raises(UsageError, match="byte vocabulary does not change texts"):
        train_tokenizer([], "vq_transformer", "bytes", lowercase=True)


def test_a_bpe_of_the_family_knows_every_text_and_has_the_same_special_ids(texts):
    tokenizer = train_tokenizer(texts, "vq_transformer", vocab_size=400)
    assert (tokenizer.pad_token_id, tokenizer.eos_token_id, tokenizer.unk_token_id) == (0, 1, 2)
    assert byte_ids(tokenizer) is None
    for text in (texts[0], "øæå \U0001f600 日本"):
        ids = tokenizer(text)["input_ids"]
        assert tokenizer.decode(ids) == text and min(ids) > 2
