"""Stopping at strings: the tokenizer's vocabulary turned into tables that a compiled loop reads."""

from __future__ import annotations

import functools
from collections.abc import Sequence
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from hfseq.errors import UsageError


def stop_criteria(stop_strings: Any, extras: dict[str, Any]) -> tuple[Any, ...]:
    """Return the criteria that end rows: the user's, and one for ``stop_strings``."""
    given = extras.get("stopping_criteria")
    given = [] if given is None else list(given) if isinstance(given, Sequence) else [given]
    for criterion in given:
        if not callable(criterion) or type(criterion).__module__.startswith("transformers."):
            raise UsageError(
                f"generate: stopping_criteria holds {criterion!r}; hfseq takes traceable functions "
                "(input_ids, cur_len) -> bool array (rows,)"
            )
    if stop_strings is None:
        return tuple(given)
    strings = (stop_strings,) if isinstance(stop_strings, str) else tuple(stop_strings)
    if not strings or not all(isinstance(string, str) and string for string in strings):
        raise UsageError(f"generate: stop_strings={stop_strings!r} has to be text, or a list of it")
    tokenizer = extras.get("tokenizer")
    if tokenizer is None:
        raise UsageError(
            f"generate: stop_strings={stop_strings!r} needs the tokenizer too: pass tokenizer=..., "
            "or the tokens themselves as stop_token_sequences=[[...]]"
        )
    return (*given, stop_strings_criterion(tokenizer, strings))


@functools.lru_cache(maxsize=16)
def stop_strings_criterion(tokenizer: Any, strings: tuple[str, ...]) -> StopStrings:
    """Return the criterion for ``strings``; the same object for the same arguments."""
    return StopStrings(vocabulary(tokenizer), strings)


@functools.lru_cache(maxsize=4)
def vocabulary(tokenizer: Any) -> tuple[str, ...]:
    """Return the text of every token as it reads inside of a text; empty for special tokens."""
    before = tokenizer.encode("a", add_special_tokens=False)
    special = set(tokenizer.all_special_ids)
    start = len(tokenizer.decode(before))
    options: dict[str, Any] = {"clean_up_tokenization_spaces": False}
    texts = (
        "" if i in special else tokenizer.decode([*before, i], **options)[start:]
        for i in range(len(tokenizer))
    )
    return tuple(texts)


class StopStrings:
    """True for rows whose text contains one of ``strings`` that ends within the last token.

    Knuth, Morris and Pratt's automaton reads the last tokens, with one table from (state, token) to
    the next state. It needs no memory of its own, so beams may be reordered freely.
    """

    def __init__(self, vocabulary: Sequence[str], strings: Sequence[str]):
        self.tables = [_tables(string, vocabulary) for string in strings]

    def __call__(self, input_ids: jax.Array, cur_len: Any) -> jax.Array:
        """Read the last tokens of the first ``cur_len`` columns of ``input_ids``."""
        found = jnp.zeros(input_ids.shape[0], bool)
        for following, hits in self.tables:
            found |= self._ends(input_ids, cur_len, jnp.asarray(following), jnp.asarray(hits))
        return found

    def _ends(self, ids: jax.Array, cur_len: Any, following: jax.Array, hits: jax.Array):
        # A match ends in the last token; every token but an empty one has a character of it.
        window = min(2 * len(following) + 1, ids.shape[1])
        state, hit = jnp.zeros(ids.shape[0], jnp.int32), jnp.zeros(ids.shape[0], bool)
        for back in range(window, 0, -1):
            column = jax.lax.dynamic_slice_in_dim(ids, jnp.maximum(cur_len - back, 0), 1, axis=1)
            token = jnp.clip(column[:, 0], 0, following.shape[1] - 1)
            inside = cur_len >= back
            hit = hits[state, token] & inside
            state = jnp.where(inside, following[state, token], 0)
        return hit


def _tables(string: str, vocabulary: Sequence[str]) -> tuple[np.ndarray, np.ndarray]:
    """Return (states, tokens) tables: the state after a token, and whether it completed a match."""
    letters = sorted(set(string))
    moves = _automaton(string, letters)
    longest = max(map(len, vocabulary), default=0)
    # Letter numbers of each token; len(letters): any other letter, -1: past the end.
    codes = np.full((len(vocabulary), longest), -1, np.int32)
    number = {letter: place for place, letter in enumerate(letters)}
    for row, text in enumerate(vocabulary):
        codes[row, : len(text)] = [number.get(letter, len(letters)) for letter in text]
    states = np.repeat(np.arange(len(string))[:, None], len(vocabulary), axis=1)
    hits = np.zeros(states.shape, bool)
    for place in range(longest):
        code = codes[None, :, place]
        arrived = np.where(code >= 0, moves[states, np.maximum(code, 0)], states)
        hits |= (arrived == len(string)) & (code >= 0)
        states = arrived
    following = np.where(states == len(string), _border(string), states)
    return following.astype(np.int32), hits


def _automaton(string: str, letters: Sequence[str]) -> np.ndarray:
    """Return (states + 1, letters + 1): how much of ``string`` ends the text after a letter."""
    table = np.zeros((len(string) + 1, len(letters) + 1), np.int32)
    for state in range(len(string) + 1):
        for place, letter in enumerate(letters):
            text = string[:state] + letter
            sizes = range(min(len(text), len(string)), 0, -1)
            table[state, place] = next((n for n in sizes if text.endswith(string[:n])), 0)
    return table


def _border(string: str) -> int:
    """Return the length of the longest proper prefix of ``string`` that also ends it."""
    return next((n for n in range(len(string) - 1, 0, -1) if string.endswith(string[:n])), 0)
