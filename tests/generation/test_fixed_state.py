"""Generation with a fixed-size state, with a toy model whose memory is a decaying sum."""

from __future__ import annotations

import itertools

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from hfseq.generation import generate
from hfseq.generation.request import make_request
from hfseq.generation.search import Search
from tests.support import recurrent

OPTIONS = {"max_new_tokens": 7, "eos_token_id": None, "pad_token_id": 0}


@pytest.fixture(scope="module")
def model():
    return recurrent.model()


@pytest.fixture(
    scope="module", params=[False, pytest.param(True, marks=pytest.mark.slow)], ids=["loop", "scan"]
)
def either(request):
    return recurrent.model(scan_layers=request.param)


def prompts(rows=3, length=5, seed=0):
    return np.random.default_rng(seed).integers(2, 17, (rows, length)).astype(np.int32)


def greedily(model, prompt, steps=7):
    """Continues one prompt by full forward passes."""
    ids = [int(token) for token in prompt]
    for _ in range(steps):
        ids.append(int(model(np.array([ids])).logits[0, -1].argmax()))
    return ids


@pytest.mark.slow
@pytest.mark.parametrize("length", [1, 2, 16, 17])
def test_greedy_search_matches_argmax_of_full_forward_passes(either, length):
    ids = prompts(2, length)
    result = either.generate(ids, **OPTIONS | {"max_new_tokens": 3}).sequences
    assert result.tolist() == [greedily(either, row, 3) for row in ids]


@pytest.mark.slow
@pytest.mark.parametrize("side", ["left", "right"])
def test_padded_prompts_match_single_prompts(model, side):
    ids, lengths = prompts(), [5, 2, 1]
    mask = np.zeros_like(ids)
    for row, length in enumerate(lengths):
        mask[row, slice(length) if side == "right" else slice(5 - length, None)] = 1
    result = model.generate(ids, attention_mask=mask, **OPTIONS).sequences
    for row, real in enumerate(mask == 1):
        assert result[row, 5:].tolist() == greedily(model, ids[row][real])[-7:]


def test_a_row_stops_at_its_end_and_others_go_on(model):
    ids = prompts(6)
    free = np.asarray(model.generate(ids, **OPTIONS).sequences)
    end = int(free[0, 7])
    result = np.asarray(model.generate(ids, **OPTIONS | {"eos_token_id": end}).sequences)
    for row, free_row in zip(result, free, strict=True):
        stop = next((i + 1 for i in range(5, 12) if free_row[i] == end), 12)
        assert row[:stop].tolist() == free_row[:stop].tolist() and not row[stop:].any()


def scores(model, ids, count):
    """Returns the log-probabilities of all continuations of ``count`` tokens, and these."""
    ends = np.array(list(itertools.product(range(17), repeat=count)), np.int32)
    rows = np.concatenate([np.broadcast_to(ids, (len(ends), len(ids))), ends], axis=1)
    logs = jax.nn.log_softmax(model(rows).logits, axis=-1)[:, len(ids) - 1 : -1]
    return np.take_along_axis(np.asarray(logs), ends[..., None], 2).sum((1, 2)), ends


def test_wide_beam_search_finds_the_best_of_all_continuations(model):
    for ids in prompts(2):
        result = model.generate(
            ids[None],
            **OPTIONS | {"max_new_tokens": 2},
            num_beams=17,
            length_penalty=0.0,
            num_return_sequences=3,
        )
        total, ends = scores(model, ids, 2)
        best = np.argsort(-total)[:3]
        assert result.sequences[:, 5:].tolist() == ends[best].tolist()
        np.testing.assert_allclose(result.scores, total[best], rtol=1e-4)


@pytest.mark.slow
def test_one_beam_more_than_rows_keeps_states_with_their_beams(either):
    ids, options = prompts(4), OPTIONS | {"num_beams": 3, "num_return_sequences": 3}
    together = either.generate(ids, **options).sequences.reshape(4, 3, -1)
    for row, ours in zip(ids, together, strict=True):
        assert either.generate(row[None], **options).sequences.tolist() == ours.tolist()


SAMPLING = [{"temperature": 0.7}, {"top_k": 4}, {"num_beams": 3}]
MORE = [
    {"top_p": 0.6},
    {"min_p": 0.1},
    {"typical_p": 0.7},
    {"epsilon_cutoff": 0.01},
    {"eta_cutoff": 0.01},
    {"repetition_penalty": 1.5, "no_repeat_ngram_size": 2},
    {"num_return_sequences": 4},
]


@pytest.mark.parametrize(
    "options",
    [*SAMPLING, *(pytest.param(options, marks=pytest.mark.slow) for options in MORE)],
    ids=lambda options: next(iter(options)),
)
def test_sampling_is_reproducible_and_follows_the_key(model, options):
    ids, all_options = prompts(), {**OPTIONS, "do_sample": True, "top_k": 0, **options}
    first, two, other = (
        np.asarray(model.generate(ids, prng_key=key, **all_options).sequences) for key in (0, 0, 1)
    )
    assert np.array_equal(first, two) and not np.array_equal(first, other)


def test_streamed_tokens_match_generate(model):
    ids = prompts()
    sequences = np.asarray(model.generate(ids, **OPTIONS).sequences)
    assert np.array_equal(
        np.stack(list(model.stream_generate(ids, **OPTIONS)), 1), sequences[:, 5:]
    )


@pytest.mark.parametrize("beams", [1, pytest.param(2, marks=pytest.mark.slow)])
def test_finished_rows_are_removed(either, beams, monkeypatch):
    monkeypatch.setattr(generate, "SMALLEST_BATCH", 2)
    options = {**OPTIONS, "eos_token_id": [3, 5, 7, 9, 11, 13], "max_new_tokens": 20}
    ids = prompts(12, seed=4)
    plain = either.generate(ids, num_beams=beams, **options)
    result = either.generate(ids, num_beams=beams, **options, compact_finished=True)
    assert np.array_equal(plain.sequences, result.sequences)


def test_no_input_of_the_model_grows_with_the_length(either):
    shapes = []
    for new in (10, 1000):
        request = make_request(either, prompts(), kwargs={**OPTIONS, "max_new_tokens": new})
        session = Search(either, request.plan, request.operands)
        inputs = jax.eval_shape(session.first_inputs)
        tokens = jax.ShapeDtypeStruct((3,), jnp.int32)
        following = jax.eval_shape(session.next_logits, tokens, inputs)[1]
        assert jax.tree.structure(inputs) == jax.tree.structure(following)
        shapes.append([jax.tree.map(jnp.shape, tree) for tree in (inputs, following)])
    assert shapes[0] == shapes[1] and shapes[0][0]["attention_mask"] == (3, 1)


def test_new_collections_are_seen_by_programs_that_are_compiled_already(model):
    ids, options = prompts(), {**OPTIONS, "output_logits": True}
    initial = model.generate(ids, **options).logits
    other = jax.tree.map(lambda leaf: leaf + 2, model.extra)
    changed = model.generate(ids, extra=other, **options).logits
    assert not np.allclose(initial, changed)
    assert np.array_equal(model.generate(ids, **options).logits, initial)


def test_a_state_of_other_rows_is_refused(model):
    from hfseq.errors import UsageError

    with pytest.raises(UsageError, match="past_key_values.* 4, .* 3"):
        model(prompts(), past_key_values=model.init_cache(4, 0))


def test_empty_state_matches_the_module(either):
    leaves = jax.tree.leaves(either.init_cache(4, 0))
    layers = (2,) if either.scan_layers else ()
    expected = {"float32": (*layers, 4, 8), "int32": (*layers, 4)}
    for leaf in leaves:
        assert leaf.shape == expected[leaf.dtype.name]
        assert (leaf == (recurrent.EMPTY if leaf.dtype == jnp.float32 else 0)).all()
