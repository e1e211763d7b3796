"""`generate` of the PyTorch version: the state gives the same text as recomputing all tokens."""

from __future__ import annotations

import copy

import pytest

torch = pytest.importorskip("torch")

from hfseq_plugins.vq_transformer.torch_files import modeling_vq_transformer as modeling
from tests.plugins.vq_transformer import vq_cases
from tests.plugins.vq_transformer.torch_twins import ids, leaves, run_in_steps, tiny_model
from tests.support.tiers import first

MODES = {
    "greedy": {},
    "sampling": {"do_sample": True, "top_k": 5, "temperature": 0.8},
    "beams": {"num_beams": 3, "num_return_sequences": 2, "length_penalty": 0.7},
    "beam sampling": {"num_beams": 2, "do_sample": True},
}


def generate(model, tokens, **options):
    torch.manual_seed(0)
    options = {"max_new_tokens": 12, "eos_token_id": None, "pad_token_id": 0, **options}
    return model.generate(tokens, **options)


@pytest.mark.parametrize("mode", MODES)
@pytest.mark.parametrize("head", first(vq_cases.HEADS, "gqa"))
def test_state_matches_the_full_forward_pass(head, mode):
    model, tokens = tiny_model(head, window_size=3, block_size=2), ids(2, 5)
    options = MODES[mode]
    with_state = generate(model, tokens, **options)
    assert torch.equal(with_state, generate(model, tokens, use_cache=False, **options))
    assert with_state.shape == (2 * options.get("num_return_sequences", 1), 17)


@pytest.mark.parametrize("variant", ["vq_quadratic", "full"])
def test_quadratic_types_generate(variant):
    model, tokens = tiny_model("mha", attention_type=variant), ids(2, 5)
    for mode in ("greedy", "beams"):
        expected = generate(model, tokens, use_cache=False, **MODES[mode])
        assert torch.equal(generate(model, tokens, **MODES[mode]), expected)


@pytest.mark.parametrize("side", ["left", "right"])
@pytest.mark.parametrize("mode", ["greedy", "beams"])
def test_padded_prompts_match_single_prompts(mode, side):
    model, options = tiny_model("gqa", window_size=3, block_size=2), MODES[mode]
    rows, mask = torch.zeros(3, 9, dtype=torch.long), torch.zeros(3, 9, dtype=torch.long)
    lengths = (2, 9, 5)
    for row, length in enumerate(lengths):
        position = slice(9 - length, 9) if side == "left" else slice(0, length)
        rows[row, position], mask[row, position] = ids(1, length, seed=row)[0], 1
    actual = generate(model, rows, attention_mask=mask, **options)[:, 9:]
    number = options.get("num_return_sequences", 1)
    for row, length in enumerate(lengths):
        alone = generate(model, ids(1, length, seed=row), **options)[:, length:]
        assert torch.equal(actual[number * row : number * (row + 1)], alone)


def test_end_of_text_stops_a_row():
    model, tokens = tiny_model("shga"), ids(2, 5)
    free = generate(model, tokens)
    end = free[0, 8].item()
    stopped = generate(model, tokens, eos_token_id=end)
    first = free[0].tolist().index(end, 5)
    assert stopped[0, : first + 1].tolist() == free[0, : first + 1].tolist()
    assert (stopped[0, first + 1 :] == 0).all()


def test_state_has_constant_size_and_continues_generation():
    model, tokens = tiny_model("shga"), ids(2, 5)
    full = generate(model, tokens, max_new_tokens=40)
    sizes = []
    for length in (5, 30):
        output = generate(model, full[:, :length], max_new_tokens=5, return_dict_in_generate=True)
        sizes.append([leaf.shape for leaf in leaves(output.past_key_values)])
        assert output.past_key_values.get_seq_length() == length + 4
    assert sizes[0] == sizes[1]
    state = {modeling.CACHE: output.past_key_values}
    again = generate(model, output.sequences, max_new_tokens=5, **state)
    assert torch.equal(again, full[:, :40])


def test_prompts_can_be_read_in_chunks():
    model, tokens = tiny_model("mqa"), ids(2, 11)
    assert torch.equal(generate(model, tokens, prefill_chunk_size=4), generate(model, tokens))


def test_embeddings_can_be_the_prompt():
    model, tokens = tiny_model("mqa"), ids(2, 11)
    embedded = model.get_input_embeddings()(tokens)
    actual = generate(model, None, inputs_embeds=embedded)
    assert torch.equal(actual, generate(model, tokens)[:, 11:])


def test_prompt_lookup_is_refused_since_a_state_cannot_go_back():
    with pytest.raises(ValueError, match="not supported with stateful models"):
        generate(tiny_model("shga"), ids(1, 5), prompt_lookup_num_tokens=2)


def test_state_rows_can_be_selected_and_copied():
    model, tokens = tiny_model("mhga"), ids(3, 9)
    _, state = run_in_steps(model, tokens, 9)
    for change, rows in (
        (lambda s: s.reorder_cache(torch.tensor([2, 0, 0])), [2, 0, 0]),
        (lambda s: s.batch_select_indices(torch.tensor([1])), [1]),
        (lambda s: s.batch_repeat_interleave(2), [0, 0, 1, 1, 2, 2]),
    ):
        selected = copy.deepcopy(state)
        change(selected)
        assert selected.batch_size == len(rows)
        for ours, theirs in zip(leaves(selected), leaves(state), strict=True):
            assert torch.equal(ours, theirs[rows])
    state.reset()
    assert state.get_seq_length() == 0 and not state.is_initialized


def test_an_empty_state_is_the_same_as_none():
    model, tokens = tiny_model("mha"), ids(2, 9)
    with torch.no_grad():
        expected = model(tokens).logits
        for state in (model.init_cache(2), type(model.init_cache(2))()):
            assert torch.equal(model(tokens, past_key_values=state).logits, expected)


@pytest.mark.slow
def test_long_texts_decode_in_constant_memory():
    model = tiny_model("shga", num_codes=16, window_size=8)
    with torch.no_grad():
        state, token = model.init_cache(1), ids(1, 1)
        for _ in range(800):
            output = model(token, past_key_values=state)
            token = output.logits[:, -1:].argmax(-1)
    cached_tokens = [attention.cache_count.sum().item() for attention in state.attentions]
    assert cached_tokens == [800 - 8] * len(cached_tokens) and torch.isfinite(output.logits).all()
