"""The interface of encoder-decoders: encode, decode, caches, beams, packed rows."""

from __future__ import annotations

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from hfseq.errors import UsageError
from hfseq.modeling import FlaxSeq2SeqPreTrainedModel, shift_tokens_right
from hfseq.nn import kv_cache, trees
from hfseq.testing.case import jit
from hfseq_plugins.bart.modeling import FlaxBartForConditionalGeneration, FlaxBartModel
from tests.support.models import bart_config, close, ids

SHALLOW = {"encoder_layers": 1, "decoder_layers": 1, "init_std": 0.3}
SOURCE, TARGET = ids(2, 9), ids(2, 7, seed=1)
MASK = np.array([[1] * 9, [1] * 6 + [0] * 3])


class Runner:
    """A model with compiled methods."""

    def __init__(self, **options):
        self.model = FlaxBartForConditionalGeneration(bart_config(**SHALLOW), **options)
        self.encode = jit(lambda x, m: self.model.encode(x, m))
        self.whole = jit(lambda x, m, y: self.model(x, m, y).logits)
        self.decode = jit(lambda y, encoded, inputs: self.model.decode(y, encoded, **inputs))

    def cache(self, rows, length, encoded, params=None):
        return jit(lambda e: self.model.init_cache(rows, length, e, params=params))(encoded)


@pytest.fixture(scope="module")
def run():
    return Runner()


@pytest.fixture(scope="module")
def encoded(run):
    return run.encode(SOURCE, MASK)


@pytest.fixture(scope="module")
def expected(run):
    return run.whole(SOURCE, MASK, TARGET)


def places(rows, *numbers):
    return np.broadcast_to(np.array(numbers, np.int32), (rows, len(numbers)))


def test_shift_tokens_right_starts_and_pads():
    labels = np.array([[5, 6, -100, -100], [7, 8, 9, 2]])
    shifted = shift_tokens_right(labels, 1, 3)
    assert isinstance(shifted, jax.Array) and shifted.dtype == jnp.int32
    assert shifted.tolist() == [[3, 5, 6, 1], [3, 7, 8, 9]]
    assert shift_tokens_right(jnp.asarray(labels), 1, 3).tolist() == shifted.tolist()


def test_shift_is_an_attribute_of_the_models_module():
    import sys

    assert sys.modules[FlaxBartModel.__module__].shift_tokens_right is shift_tokens_right


def test_encode_then_decode_matches_the_model(run, encoded, expected):
    output = run.decode(TARGET, encoded, {"encoder_attention_mask": MASK})
    assert close(output.logits, expected)
    assert output.past_key_values is None
    alone = run.decode(TARGET, (encoded[0],), {"encoder_attention_mask": MASK})
    assert close(alone.logits, expected)


@pytest.mark.slow
@pytest.mark.parametrize("has_encoder_cache", [True, False], ids=["filled", "as in v4"])
@pytest.mark.parametrize("chunks", [(4, 3), (1, 1, 5)])
def test_chunked_decoding_matches_the_model(run, encoded, expected, has_encoder_cache, chunks):
    cache = run.cache(2, 7, encoded, run.model.params if has_encoder_cache else None)
    attentions = {path[-2] for path in trees.flatten(cache)}
    assert attentions == ({"self_attn", "encoder_attn"} if has_encoder_cache else {"self_attn"})
    parts, start = [], 0
    for size in chunks:
        columns = np.arange(start, start + size)
        inputs = {
            "encoder_attention_mask": MASK,
            "past_key_values": cache,
            "decoder_position_ids": places(2, *columns),
        }
        output = run.decode(TARGET[:, columns], encoded, inputs)
        cache, start = output.past_key_values, start + size
        parts.append(output.logits)
    assert close(np.concatenate(parts, 1), expected)


def test_filled_cache_contains_the_encoder_keys(run, encoded):
    cache = run.cache(6, 7, encoded, run.model.params)["model"]["decoder"]["layers"]["0"]
    assert cache["encoder_attn"].keys() == {"cached_key", "cached_value"}
    assert cache["encoder_attn"]["cached_key"].shape == (2, 9, 4, 8)
    layer = run.model.params["model"]["decoder"]["layers"]["0"]["encoder_attn"]["k_proj"]
    key = encoded[0] @ layer["kernel"] + layer["bias"]
    assert close(cache["encoder_attn"]["cached_key"].reshape(2, 9, 32), key)
    assert cache["self_attn"]["cached_key"].shape == (6, 7, 4, 8)
    assert not any(np.any(leaf) for leaf in cache["self_attn"].values())


@pytest.mark.slow
def test_filled_cache_is_reused(run, encoded):
    cache = run.cache(2, 7, encoded, run.model.params)
    inputs = {"past_key_values": cache, "decoder_position_ids": places(2, 0)}
    first = run.decode(TARGET[:, :1], encoded, inputs).logits
    without_encoder = run.decode(TARGET[:, :1], (jnp.zeros_like(encoded[0]),), inputs).logits
    assert close(first, without_encoder, 0)


@pytest.mark.slow
@pytest.mark.parametrize("options", [{"scan_layers": True}, {"gradient_checkpointing": True}])
def test_stacked_and_recomputed_layers_decode_alike(options):
    other = Runner(**options)
    encoded = other.encode(SOURCE, MASK)
    cache = other.cache(2, 7, encoded, other.model.params)
    parts = []
    for columns in (np.arange(4), np.arange(4, 7)):
        inputs = {
            "encoder_attention_mask": MASK,
            "past_key_values": cache,
            "decoder_position_ids": places(2, *columns),
        }
        output = other.decode(TARGET[:, columns], encoded, inputs)
        cache = kv_cache.reorder(output.past_key_values, jnp.arange(2))
        parts.append(output.logits)
    assert close(np.concatenate(parts, 1), other.whole(SOURCE, MASK, TARGET))


@pytest.mark.slow
def test_beams_share_the_row_of_their_source(run, encoded):
    tokens = ids(6, 4, seed=2)
    inputs = {
        "past_key_values": run.cache(6, 4, encoded, run.model.params),
        "encoder_attention_mask": MASK,
        "decoder_position_ids": places(6, *range(4)),
    }
    folded = run.decode(tokens, encoded, inputs)
    apart = run.whole(SOURCE.repeat(3, 0), MASK.repeat(3, 0), tokens)
    assert close(folded.logits, apart)
    without = {**inputs, "past_key_values": run.cache(6, 4, encoded)}
    assert close(run.decode(tokens, encoded, without).logits, apart)


def test_beams_have_separate_cross_attentions(run, encoded):
    tokens = ids(6, 4, seed=2)
    model = run.model
    decode = jit(lambda y, e, m: model.decode(y, e, m, output_attentions=True).cross_attentions)
    wide = (jnp.repeat(encoded[0], 3, 0),)
    folded, apart = decode(tokens, encoded, MASK), decode(tokens, wide, MASK.repeat(3, 0))
    assert folded[0].shape == (6, 4, 4, 9) and close(folded[0], apart[0])


@pytest.mark.slow
def test_reordered_beams_continue_correctly(run, encoded):
    tokens, rows = ids(4, 4, seed=3), np.array([1, 1, 3, 2])
    prompt = {
        "past_key_values": run.cache(4, 4, encoded, run.model.params),
        "encoder_attention_mask": MASK,
        "decoder_position_ids": places(4, *range(3)),
    }
    cache = run.decode(tokens[:, :3], encoded, prompt).past_key_values
    following = {
        **prompt,
        "past_key_values": kv_cache.reorder(cache, rows),
        "decoder_position_ids": places(4, 3),
    }
    step = run.decode(tokens[:, 3:], encoded, following).logits
    history = np.concatenate([tokens[rows, :3], tokens[:, 3:]], 1)
    full = run.whole(SOURCE.repeat(2, 0), MASK.repeat(2, 0), history)
    assert close(step[:, 0], full[:, 3])


@pytest.mark.slow
def test_rewound_cache_drops_later_tokens(run, encoded):
    inputs = {
        "past_key_values": run.cache(2, 4, encoded, run.model.params),
        "encoder_attention_mask": MASK,
        "decoder_position_ids": places(2, *range(4)),
    }
    cache = run.decode(TARGET[:, :4], encoded, inputs).past_key_values
    back = {
        **inputs,
        "past_key_values": kv_cache.rewind(cache, 2),
        "decoder_position_ids": places(2, 2, 3),
    }
    other = ids(2, 2, seed=5)
    again = run.decode(other, encoded, back).logits
    full = run.whole(SOURCE, MASK, np.concatenate([TARGET[:, :2], other], 1))
    assert close(again, full[:, 2:])


@pytest.mark.slow
def test_tuples_carry_the_cache_at_index_one(run, encoded):
    model = run.model
    cache = model.init_cache(2, 7, encoded)
    decode = jit(
        lambda y, e, c, p: model.decode(
            y, e, past_key_values=c, decoder_position_ids=p, return_dict=False
        )
    )
    output = decode(TARGET, encoded, cache, places(2, *range(7)))
    assert type(output) is tuple and len(output) == 2
    assert jax.tree.structure(output[1]) == jax.tree.structure(cache)
    states = model.encode(SOURCE, return_dict=False)
    assert type(states) is tuple and states[0].shape == (2, 9, 32)


def test_empty_cache_is_not_a_cache(run, encoded):
    output = run.decode(TARGET, encoded, {"past_key_values": {}})
    assert output.past_key_values is None


def test_cache_needs_the_positions(run, encoded):
    cache = run.model.init_cache(2, 7, encoded)
    with pytest.raises(ValueError, match="past_key_values requires decoder_position_ids"):
        run.model.decode(TARGET, encoded, past_key_values=cache)


def test_families_without_shift_require_decoder_inputs():
    class Strict(FlaxBartModel):
        default_decoder_input_ids = FlaxSeq2SeqPreTrainedModel.default_decoder_input_ids

    with pytest.raises(UsageError, match="Strict requires decoder_input_ids.*shift_tokens_right"):
        Strict(bart_config(**SHALLOW), _do_init=False)(SOURCE, params={})


def test_unknown_inputs_are_refused():
    blank = FlaxBartModel(bart_config(**SHALLOW), _do_init=False)
    with pytest.raises(TypeError, match="FlaxBartModel does not accept.* token_type_ids"):
        blank(SOURCE, token_type_ids=SOURCE, params={})
    with pytest.raises(TypeError, match="FlaxBartModel does not accept.* decoder_input_ids"):
        blank.encode(SOURCE, decoder_input_ids=SOURCE, params={})


def test_ids_of_another_vocabulary_are_refused_on_both_sides():
    blank = FlaxBartModel(bart_config(**SHALLOW), _do_init=False)
    for name in ("input_ids", "decoder_input_ids"):
        inputs = {"input_ids": SOURCE, "decoder_input_ids": TARGET, name: np.array([[64]])}
        with pytest.raises(UsageError, match=f"^{name} contains 64.*vocabulary of 64"):
            blank(**inputs, params={})


@pytest.mark.slow
def test_packed_pairs_match_single_pairs(run):
    sources, targets = (4, 5), (3, 4)
    model = run.model
    packed = jit(
        lambda x, y, s, t: (
            model(x, decoder_input_ids=y, segment_ids=s, decoder_segment_ids=t).logits
        )
    )
    numbers = (np.repeat([[1, 2]], 2, 0).repeat(lengths, 1) for lengths in (sources, targets))
    logits = packed(SOURCE, TARGET, *numbers)
    ones = np.ones((2, 9), np.int32)
    first = run.whole(SOURCE[:, :4], ones[:, :4], TARGET[:, :3])
    second = run.whole(SOURCE[:, 4:], ones[:, 4:], TARGET[:, 3:])
    assert close(logits, np.concatenate([first, second], 1))


@pytest.mark.slow
def test_left_padded_prompts_go_on_as_if_not_padded(run, encoded):
    prompt, mask = TARGET[:, :4].copy(), np.array([[1, 1, 1, 1], [0, 0, 1, 1]])
    model = run.model
    first = model.prepare_inputs_for_generation(prompt, 6, MASK, mask, encoded, params=model.params)
    assert first["decoder_position_ids"].tolist() == [[0, 1, 2, 3], [0, 0, 0, 1]]
    encoder_outputs = first.pop("encoder_outputs")
    output = run.decode(prompt, encoder_outputs, first)
    following = model.update_inputs_for_generation(output, first)
    step = run.decode(TARGET[:, 4:5], encoder_outputs, following)
    logits = [output.logits[:, -1], step.logits[:, 0]]
    short = np.concatenate([prompt[1:, 2:], TARGET[1:, 4:5]], 1)
    full = run.whole(SOURCE, MASK, TARGET[:, :5])
    alone = run.whole(SOURCE[1:], MASK[1:], short)
    assert all(close(ours[0], full[0, 3 + i]) for i, ours in enumerate(logits))
    assert all(close(ours[1], alone[0, 1 + i]) for i, ours in enumerate(logits))


@pytest.mark.slow
def test_cache_has_the_compute_dtype():
    model = FlaxBartForConditionalGeneration(bart_config(**SHALLOW), dtype=jnp.bfloat16)
    states = (jnp.zeros((2, 9, 32), jnp.bfloat16),)
    cache = jit(lambda p: model.init_cache(2, 7, states, params=p))(model.params)
    kinds = {(path[-1], leaf.dtype.name) for path, leaf in trees.flatten(cache).items()}
    keys = {("cached_key", "bfloat16"), ("cached_value", "bfloat16")}
    assert kinds == keys | {("cache_index", "int32")}


@pytest.mark.slow
def test_both_sides_are_trained(run):
    def loss(params, rng):
        output = run.model(
            SOURCE, decoder_input_ids=TARGET, params=params, dropout_rng=rng, train=True
        )
        return jnp.square(output.logits).mean()

    gradient = jit(jax.grad(loss))(run.model.params, jax.random.key(0))
    flat = trees.flatten(gradient)
    zero = {"/".join(path[-2:]) for path, leaf in flat.items() if not np.any(leaf)}
    assert zero <= {"k_proj/bias", "final_logits_bias"}
