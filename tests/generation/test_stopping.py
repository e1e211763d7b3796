"""Rows stop at tokens, at token sequences, at strings and by functions."""

from __future__ import annotations

import jax
import numpy as np
import pytest

from hfseq.generation.request import StopStrings
from tests.generation import families

IDS = families.prompts(2, 5)
FREE = {"max_length": 16, "eos_token_id": None, "pad_token_id": 0}


def tokens(**changes):
    return np.asarray(families.model("llama").generate(IDS, **{**FREE, **changes}).sequences)


def stopped(free: np.ndarray, ends: np.ndarray) -> np.ndarray:
    """Returns ``free`` with padding after the first position per row where ``ends`` is true."""
    ended_before = np.cumsum(ends[:, 5:], 1) - ends[:, 5:]
    keep = np.concatenate([np.ones((len(free), 5), bool), ended_before == 0], 1)
    return np.where(keep, free, 0)


@pytest.mark.slow
def test_stop_token_sequences():
    free = tokens()
    pair = free[0, 7:9].tolist()
    ends = np.zeros(free.shape, bool)
    ends[:, 1:] = (free[:, :-1] == pair[0]) & (free[:, 1:] == pair[1])
    assert (tokens(stop_token_sequences=[pair, [99]]) == stopped(free, ends)).all()


def test_custom_stopping_function():
    free = tokens()

    def at_eight(input_ids, cur_len):
        return (cur_len >= 8) & (input_ids[:, 0] == IDS[0, 0])

    result = tokens(stopping_criteria=[at_eight])
    assert (result[0, :8] == free[0, :8]).all() and (result[0, 8:] == 0).all()
    assert (result[1] == free[1]).all()
    beams = families.model("llama").generate(
        IDS, num_beams=2, stopping_criteria=lambda ids, cur_len: cur_len >= 8, **FREE
    )
    assert (np.asarray(beams.sequences)[:, 8:] == 0).all()


class Letters:
    """A tokenizer whose tokens are letters and pairs of letters."""

    all_special_ids = [0]
    texts = ["<s>", *(chr(ord("a") + i) for i in range(26)), "ab", "bc", "abc", "c d", "dd"]

    def __len__(self):
        return len(self.texts)

    def encode(self, text, add_special_tokens=True):
        return [self.texts.index(letter) for letter in text]

    def decode(self, ids, **_):
        return "".join(self.texts[i] for i in ids)


@pytest.mark.parametrize(
    ("strings", "text", "ends"),
    [
        (["ab"], ["z", "a", "b"], True),
        (["ab"], ["z", "ab"], True),
        (["ab"], ["ab", "z"], False),  # it ended before
        (["bcb"], ["ab", "c", "bc"], True),  # starts and ends inside of tokens
        (["aab"], ["a", "a", "a", "b"], True),  # after a false start
        (["abab"], ["a", "b", "a", "b", "a", "b"], True),
        (["abab"], ["a", "b", "a", "b", "a"], False),
        (["c dd"], ["c d", "<s>", "dd"], True),  # special tokens have no text
        (["xx", "bc"], ["ab", "c"], True),
        (["zz"], ["z"], False),
    ],
)
def test_stop_strings_match_across_tokens(strings, text, ends):
    tokenizer = Letters()
    texts = ["" if i == 0 else t for i, t in enumerate(tokenizer.texts)]
    ids = np.array([[tokenizer.texts.index(t) for t in text] + [5, 5, 5]])
    result = StopStrings(texts, strings)(ids, len(text))
    assert bool(result[0]) is ends


def test_long_stop_strings_compile_and_match():
    """Compile time must not grow with the length of a string: unrolled lookups never ended."""
    tokenizer, string = Letters(), "abcdefghijkl"
    texts = ["" if i == 0 else t for i, t in enumerate(tokenizer.texts)]
    criterion = jax.jit(StopStrings(texts, (string, "zyx")))
    row = [0, 3, 4, "ab", *string[2:], "d", 5]
    ids = np.array([[texts.index(t) if isinstance(t, str) else t for t in row]])
    end = len(row) - 2
    ended = [bool(criterion(ids, length)[0]) for length in range(1, len(row) + 1)]
    assert ended == [length == end for length in range(1, len(row) + 1)]


def test_stop_strings_end_rows_and_are_compiled_once():
    free, tokenizer = tokens(), Letters()
    letters = ["" if i in (0,) or i > 31 else tokenizer.texts[i] for i in range(families.VOCAB)]
    visible = [token for token in free[0, 6:] if letters[token]]
    stop_string = letters[visible[1]]
    result = tokens(stop_strings=stop_string, tokenizer=tokenizer)
    ends = np.array([[stop_string in letters[token] for token in row] for row in free])
    assert (result == stopped(free, ends)).all()
    model = families.model("llama")
    num_programs = len(model._generation_programs)
    tokens(stop_strings=stop_string, tokenizer=tokenizer)
    assert len(model._generation_programs) == num_programs


def test_strings_equal_pytorchs_on_text(shared):
    """Random tokens of a real tokenizer, and stop strings from their text."""
    torch = pytest.importorskip("torch")
    from transformers import AutoTokenizer
    from transformers.generation.stopping_criteria import StopStringCriteria

    from hfseq.generation.request import stop_strings_criterion

    folder = shared / "checkpoints-tiny" / "caikit-BloomForCausalLM"
    tokenizer = AutoTokenizer.from_pretrained(folder)
    generator = np.random.default_rng(0)
    rows = generator.integers(3, len(tokenizer), (60, 8))
    texts = tokenizer.batch_decode(rows)
    strings = [text[-4 - i % 3 :][: 2 + i % 3] for i, text in enumerate(texts[:12])]
    strings = [string for string in strings if string.strip() and "�" not in string]
    theirs = StopStringCriteria(tokenizer, strings)(torch.tensor(rows), None).numpy()
    ours = np.asarray(stop_strings_criterion(tokenizer, tuple(strings))(rows, rows.shape[1]))
    assert (ours == theirs).all() and theirs.any()
