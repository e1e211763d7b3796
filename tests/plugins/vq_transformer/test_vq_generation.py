"""Text generation with the VQ Transformer: prefill in blocks, then one token at a time."""

from __future__ import annotations

import functools
import itertools

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from hfseq.errors import UsageError
from hfseq.generation.request import make_request
from hfseq.generation.search import Search
from tests.plugins.vq_transformer import vq_cases
from tests.support.tiers import first

SIZE = 19
OPTIONS = {"max_new_tokens": 6, "eos_token_id": None, "pad_token_id": 0}


@functools.cache
def model(head: str = "shga", **changes):
    """Returns a model with random parameters and codebooks."""
    flax_model = vq_cases.model(head, **changes)
    params, extra = vq_cases.variables(flax_model)
    flax_model._is_initialized, flax_model.params = True, jax.tree.map(jnp.asarray, params)
    flax_model.extra = extra
    return flax_model


@functools.cache
def forward(flax_model):
    """Returns a full forward pass, compiled for one width, so that prefixes share a program."""
    return jax.jit(
        lambda ids, mask: jax.nn.log_softmax(flax_model(ids, mask, params=flax_model.params).logits)
    )


def next_log_probs(flax_model, rows: np.ndarray) -> np.ndarray:
    """Returns the next token's log-probabilities, from a full forward pass."""
    width = 40
    ids = np.pad(rows, ((0, 0), (0, width - rows.shape[1])))
    mask = np.broadcast_to(np.arange(width) < rows.shape[1], ids.shape).astype(np.int32)
    return np.asarray(forward(flax_model)(ids, mask))[:, rows.shape[1] - 1]


def greedy_search(flax_model, prompt: np.ndarray, steps: int = 6) -> list[int]:
    ids = np.asarray(prompt)[None]
    for _ in range(steps):
        best = next_log_probs(flax_model, ids).argmax(-1)
        ids = np.concatenate([ids, best[:, None]], axis=1)
    return ids[0].tolist()


@pytest.mark.parametrize("length", first([1, 3, 4, 9, 21], 4, 9))
def test_greedy_search_matches_argmax_of_full_forward_passes(length):
    # Shorter than the window of 4, as long as it, longer, and longer than several blocks.
    ids = vq_cases.ids(2, length)
    actual = model().generate(ids, **OPTIONS).sequences
    assert actual.tolist() == [greedy_search(model(), row) for row in ids]
    assert np.array_equal(model().generate(ids, **OPTIONS).sequences, actual)


@pytest.mark.slow
@pytest.mark.parametrize("head", vq_cases.HEADS)
@pytest.mark.parametrize(
    "changes",
    [
        {"window_size": 3, "block_size": 5},
        {"window_size": 0},
        {"window_size": 9, "reduction": "serial"},
        {"use_compressive_cache": False},
        {"num_hidden_layers": 2, "block_size": 8},
    ],
    ids=lambda changes: "-".join(changes),
)
def test_every_kind_of_head_continues_its_own_whole_pass(head, changes):
    flax_model, ids = model(head, **changes), vq_cases.ids(2, 11)
    actual = flax_model.generate(ids, **OPTIONS).sequences
    assert actual.tolist() == [greedy_search(flax_model, row) for row in ids]


@pytest.mark.parametrize("side", ["left", "right"])
def test_padded_prompts_match_single_prompts(side):
    ids, lengths = vq_cases.ids(4, 10), [10, 1, 5, 4]
    mask = np.zeros_like(ids)
    for row, length in enumerate(lengths):
        mask[row, slice(length) if side == "right" else slice(10 - length, None)] = 1
    actual = np.asarray(model().generate(ids, attention_mask=mask, **OPTIONS).sequences)
    for row, real in enumerate(mask == 1):
        assert actual[row, 10:].tolist() == greedy_search(model(), ids[row][real])[-6:]


@pytest.mark.slow
def test_a_row_stops_at_its_end_and_others_go_on():
    ids = vq_cases.ids(5, 6)
    free = np.asarray(model().generate(ids, **OPTIONS).sequences)
    end = int(free[0, 8])
    actual = np.asarray(model().generate(ids, **OPTIONS | {"eos_token_id": end}).sequences)
    for row, full in zip(actual, free, strict=True):
        stop = next((i + 1 for i in range(6, 12) if full[i] == end), 12)
        assert row[:stop].tolist() == full[:stop].tolist() and not row[stop:].any()


@pytest.mark.slow
def test_wide_beam_search_finds_the_best_of_all_continuations():
    (ids,) = vq_cases.ids(1, 7)
    options = OPTIONS | {"max_new_tokens": 2, "num_beams": SIZE, "num_return_sequences": 3}
    actual = model().generate(ids[None], **options, length_penalty=0.0)
    ends = np.array(list(itertools.product(range(SIZE), repeat=2)))
    first = next_log_probs(model(), ids[None])[0]
    rows = np.concatenate([np.tile(ids, (SIZE, 1)), np.arange(SIZE)[:, None]], axis=1)
    total = first[ends[:, 0]] + next_log_probs(model(), rows)[ends[:, 0], ends[:, 1]]
    best = np.argsort(-total)[:3]
    assert actual.sequences[:, 7:].tolist() == ends[best].tolist()
    np.testing.assert_allclose(actual.scores, total[best], rtol=1e-4)


@pytest.mark.slow
def test_beams_of_a_row_do_not_depend_on_other_rows():
    ids, options = vq_cases.ids(3, 6), OPTIONS | {"num_beams": 3}
    together = np.asarray(model().generate(ids, **options).sequences)
    for row, ours in zip(ids, together, strict=True):
        assert model().generate(row[None], **options).sequences[0].tolist() == ours.tolist()


SAMPLING = [
    {"temperature": 0.7},
    {"top_k": 4},
    {"top_p": 0.6},
    {"min_p": 0.1},
    {"typical_p": 0.7},
    {"repetition_penalty": 1.5, "no_repeat_ngram_size": 2},
    {"num_return_sequences": 3},
    {"num_beams": 2},
]


@pytest.mark.slow
@pytest.mark.parametrize("options", SAMPLING, ids=lambda options: next(iter(options)))
def test_sampling_is_reproducible_and_follows_the_key(options):
    ids, call_options = vq_cases.ids(3, 6), {**OPTIONS, "do_sample": True, "top_k": 0, **options}
    first, two, other = (
        np.asarray(model().generate(ids, prng_key=key, **call_options).sequences)
        for key in (0, 0, 1)
    )
    assert np.array_equal(first, two) and not np.array_equal(first, other)


@pytest.mark.slow
def test_the_nucleus_is_all_that_is_ever_drawn():
    ids = np.tile(vq_cases.ids(1, 6), (64, 1))
    options = {**OPTIONS, "max_new_tokens": 1, "do_sample": True, "top_k": 0, "top_p": 0.5}
    sampled = np.asarray(model().generate(ids, **options).sequences)[:, 6]
    share = np.exp(next_log_probs(model(), ids[:1])[0])
    order = np.argsort(-share)
    nucleus = order[: int((np.cumsum(share[order]) < 0.5).sum()) + 1]
    assert set(sampled) <= set(nucleus) and len(set(sampled)) > 1


@pytest.mark.slow
def test_nothing_but_the_text_itself_grows_with_the_length():
    shapes = []
    for new in (10, 3000):
        call_options = {**OPTIONS, "max_new_tokens": new}
        request = make_request(model(), vq_cases.ids(2, 9), kwargs=call_options)
        session = Search(model(), request.plan, request.operands)
        inputs = jax.eval_shape(session.first_inputs)
        tokens = jax.ShapeDtypeStruct((2,), jnp.int32)
        following = jax.eval_shape(session.next_logits, tokens, inputs)[1]
        shapes.append([jax.tree.map(jnp.shape, tree) for tree in (inputs, following)])
    assert shapes[0] == shapes[1] and shapes[0][0] == shapes[0][1]
    state_shapes = shapes[0][0]["past_key_values"]["model"]["layers"]["0"]["attention"]
    assert state_shapes["window_key"] == (2, 1, 4, 8) and state_shapes["cache_mean"] == (
        2,
        1,
        5,
        32,
    )
    assert shapes[0][0]["attention_mask"] == (2, 1) and len(shapes[0][0]) == 2


@pytest.mark.slow
def test_scanned_layers_write_the_same(tmp_path):
    two, ids = model("mqa", num_hidden_layers=2), vq_cases.ids(2, 7)
    two.save_pretrained(tmp_path)
    scanned = type(two).from_pretrained(tmp_path, scan_layers=True)
    expected = two.generate(ids, **OPTIONS, num_beams=2).sequences
    assert np.array_equal(scanned.generate(ids, **OPTIONS, num_beams=2).sequences, expected)


@pytest.mark.slow
def test_the_quadratic_baseline_says_that_it_cannot():
    with pytest.raises(UsageError, match="attention_type=full"):
        model(attention_type="full").generate(vq_cases.ids(1, 4), **OPTIONS)


@pytest.mark.slow
def test_streamed_tokens_match_generate():
    ids = vq_cases.ids(2, 5)
    full = np.asarray(model().generate(ids, **OPTIONS).sequences)[:, 5:]
    assert np.array_equal(np.stack(list(model().stream_generate(ids, **OPTIONS)), 1), full)
