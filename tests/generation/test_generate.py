"""``generate`` as programs for Transformers 4 use it."""

from __future__ import annotations

import copy
import pickle

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from flax import jax_utils

from hfseq import generation as g
from tests.generation import families

IDS = families.prompts(2, 5)
OPTIONS = {
    "greedy": {},
    "sample": {"do_sample": True, "top_k": 8, "top_p": 0.9, "temperature": 0.8},
    "beam": {"num_beams": 3, "num_return_sequences": 2, "length_penalty": 1.5},
}
OUTPUTS = {
    "greedy": g.FlaxGreedySearchOutput,
    "sample": g.FlaxSampleOutput,
    "beam": g.FlaxBeamSearchOutput,
}


def tokens(model, ids=IDS, **options):
    return np.asarray(model.generate(ids, **{"max_length": 11, **options}).sequences)


@pytest.mark.slow
@pytest.mark.parametrize(
    ("family", "name"),
    [
        ("llama", "sample"),
        ("t5", "beam"),
        *(("llama", name) for name in ("greedy", "beam")),
        *(("t5", name) for name in ("greedy", "sample")),
    ],
)
def test_jit_matches_internal_compilation(family, name):
    model = families.model(family)
    mask = np.ones_like(IDS)
    output = model.generate(IDS, attention_mask=mask, max_length=11, **OPTIONS[name])
    assert type(output) is OUTPUTS[name]
    assert output.sequences.shape == (4 if name == "beam" else 2, 11)
    jitted = jax.jit(
        lambda ids, mask: model.generate(ids, attention_mask=mask, max_length=11, **OPTIONS[name])
    )
    assert (np.asarray(jitted(IDS, mask).sequences) == np.asarray(output.sequences)).all()


@pytest.mark.slow
@pytest.mark.parametrize("name", OPTIONS)
def test_python_loop_gives_the_same(name):
    model, options = families.model("llama"), {"max_length": 7, **OPTIONS[name]}
    assert (tokens(model, trace=False, **options) == tokens(model, **options)).all()


@pytest.mark.slow
def test_python_loop_keeps_least_lengths():
    model = families.model("llama")
    for least in ({"min_length": 8}, {"min_new_tokens": 3}):
        options = {"max_length": 9, "eos_token_id": list(range(2, 40)), **least}
        assert (tokens(model, trace=False, **options) == tokens(model, **options)).all()


@pytest.mark.slow
def test_generate_itself_can_be_jitted():
    model = families.fresh_model()
    model.generation_config.max_length = 11
    jitted = jax.jit(model.generate)
    mask = jnp.asarray(families.mask(2, 5, "right"))
    expected = model.generate(IDS, attention_mask=mask).sequences
    assert (jitted(IDS, attention_mask=mask).sequences == expected).all()


@pytest.mark.slow
def test_only_the_key_or_the_weights_are_traced():
    model, mask = families.model("llama"), families.mask(2, 5, "right")
    options = {"attention_mask": mask, "max_length": 11, "do_sample": True}
    expected = model.generate(IDS, prng_key=4, **options).sequences
    by_key = jax.jit(lambda key: model.generate(IDS, prng_key=key, **options).sequences)
    assert (by_key(jax.random.PRNGKey(4)) == expected).all()
    per_key = jax.vmap(by_key)(jnp.stack([jax.random.PRNGKey(4), jax.random.PRNGKey(5)]))
    assert (per_key[0] == expected).all() and (per_key[1] != expected).any()
    by_weights = jax.jit(lambda p: model.generate(IDS, params=p, prng_key=4, **options).sequences)
    assert (by_weights(model.params) == expected).all()


def test_outputs_are_read_by_name_and_place():
    output = families.model("llama").generate(IDS, max_length=11)
    assert isinstance(output.sequences, np.ndarray)
    assert (output[0] == output["sequences"]).all() and list(output) == ["sequences"]
    beams = families.model("llama").generate(IDS, max_length=11, **OPTIONS["beam"])
    assert beams.scores.shape == (4,) and (beams.scores == beams.sequences_scores).all()
    assert (np.diff(np.asarray(beams.scores).reshape(2, 2)) <= 0).all()  # the best comes first


@pytest.mark.slow
def test_pmap():
    model = families.model("llama")
    ids = families.prompts(8, 5).reshape(8, 1, 5)

    def generate(params, ids):
        return model.generate(ids, params=params, max_length=11).sequences

    with jax.disable_jit(False):
        result = jax.pmap(generate)(jax_utils.replicate(model.params), ids)
    assert (np.asarray(result)[:, 0] == tokens(model, ids[:, 0])).all()


def test_rows_on_several_devices_stay_there():
    from jax.sharding import AxisType, NamedSharding, PartitionSpec

    mesh = jax.make_mesh((8,), ("data",), axis_types=(AxisType.Auto,))
    model, ids = families.model("llama"), families.prompts(8, 5)
    spread = jax.device_put(ids, NamedSharding(mesh, PartitionSpec("data")))
    params = jax.device_put(model.params, NamedSharding(mesh, PartitionSpec()))
    result = model.generate(spread, params=params, max_length=11).sequences
    assert (np.asarray(result) == tokens(model, ids)).all()


@pytest.mark.slow
def test_explicit_params_are_used():
    model = families.fresh_model()
    without = families.flax_class("llama")(families.config("llama"), _do_init=False)
    expected = tokens(model)
    assert (tokens(without, params=model.params) == expected).all()
    other = jax.tree.map(lambda leaf: leaf[::-1], model.params)
    assert (tokens(model, params=other) != expected).any()
    assert (tokens(model) == expected).all()  # no program contains the other parameters


@pytest.mark.slow
def test_new_parameters_are_seen():
    model = families.fresh_model()
    expected = tokens(model, params=jax.tree.map(lambda leaf: leaf[::-1], model.params))
    tokens(model)
    model.params = jax.tree.map(lambda leaf: leaf[::-1], model.params)
    assert (tokens(model) == expected).all()


def test_copies_and_pickles_drop_compiled_programs():
    model = families.fresh_model()
    expected = tokens(model)
    assert (tokens(copy.deepcopy(model)) == expected).all()
    assert pickle.loads(pickle.dumps(model._generation_programs)) == {}


def test_bool_and_list_inputs_equal_arrays():
    model, mask = families.model("llama"), families.mask(2, 5, "left")
    expected = tokens(model, attention_mask=mask)
    for other in (mask.astype(bool), mask.tolist(), jnp.asarray(mask), mask.astype(np.float32)):
        assert (tokens(model, attention_mask=other) == expected).all()
    assert (tokens(model, IDS.tolist()) == tokens(model)).all()


def test_lengths():
    model = families.fresh_model()
    assert tokens(model, max_length=None).shape == (2, 20)  # the default, including the prompt
    assert tokens(model, max_length=20).shape == (2, 20)
    assert tokens(model, max_length=9).shape == (2, 9)
    # Equal lengths share a compiled program. The prompt has five tokens.
    assert tokens(model, max_length=None, max_new_tokens=15).shape == (2, 20)
    assert tokens(model, max_new_tokens=4).shape == (2, 9)  # takes precedence over max_length
    model.generation_config.max_new_tokens = 4
    assert tokens(model, max_length=None).shape == (2, 9)
    assert tokens(families.model("t5"), max_new_tokens=9).shape == (2, 10)


@pytest.mark.slow
def test_generation_config_precedence():
    from transformers import GenerationConfig

    model = families.fresh_model()
    model.generation_config.max_new_tokens = 3
    model.generation_config.num_beams = 2
    assert tokens(model, max_length=None).shape == (2, 8)
    passed_config = GenerationConfig(max_new_tokens=4, num_beams=1)
    output = model.generate(IDS, generation_config=passed_config)
    assert type(output) is g.FlaxGreedySearchOutput and output.sequences.shape == (2, 9)
    assert model.generate(IDS, passed_config, max_new_tokens=5).sequences.shape == (2, 10)


@pytest.mark.slow
def test_options_on_the_model_config_before_creation():
    config = families.config("llama")
    config.max_length, config.num_beams, config.num_return_sequences = 9, 2, 2
    model = families.flax_class("llama")(config)
    assert model.generate(IDS).sequences.shape == (4, 9)
    assert jax.jit(model.generate)(IDS).sequences.shape == (4, 9)


def test_edits_of_the_model_configuration_count_with_a_warning(caplog):
    model = families.fresh_model()
    model.config.max_length = 9
    model.config.num_beams = 2
    output = model.generate(IDS)
    assert type(output) is g.FlaxBeamSearchOutput and output.sequences.shape == (2, 9)
    assert "modified the pretrained model configuration" in caplog.text
    caplog.clear()
    model.generation_config.num_beams = 1  # now the generation configuration is the user's
    model.config.max_length = 13
    assert model.generate(IDS).sequences.shape == (2, 9)


def test_end_and_padding():
    model = families.model("llama")
    free = tokens(model, eos_token_id=None)
    end = int(free[0, 7])
    result = tokens(model, eos_token_id=end, pad_token_id=5)
    first = int(np.flatnonzero(free[0, 5:] == end)[0]) + 5
    assert (result[0, : first + 1] == free[0, : first + 1]).all()
    assert (result[0, first + 1 :] == 5).all()
    # the first end token is the padding
    padded = tokens(model, eos_token_id=[end, 3], pad_token_id=None)
    assert set(padded[0, first + 1 :]) <= {end}


def test_scores_of_the_steps_are_pytorchs():
    torch = pytest.importorskip("torch")
    ours, theirs = families.model_pair("llama")
    options = {
        "max_new_tokens": 5,
        "output_scores": True,
        "output_logits": True,
        "repetition_penalty": 1.5,
        "return_dict_in_generate": True,
    }
    result = ours.generate(IDS, **options)
    expected = theirs.generate(torch.tensor(IDS).long(), **options)
    for name in ("scores", "logits"):
        stacked = torch.stack(getattr(expected, name)).numpy()
        np.testing.assert_allclose(result[name][: len(stacked)], stacked, atol=2e-4)
    beams = ours.generate(IDS, num_beams=3, **options)
    expected = theirs.generate(torch.tensor(IDS).long(), num_beams=3, **options)
    steps = len(expected.scores)
    np.testing.assert_allclose(beams.scores, expected.sequences_scores.numpy(), atol=1e-4)
    np.testing.assert_allclose(beams.step_scores[:steps], torch.stack(expected.scores), atol=2e-4)
    np.testing.assert_allclose(beams.logits[:steps], torch.stack(expected.logits), atol=2e-4)
    expected_beams = expected.beam_indices.numpy()
    assert (np.asarray(beams.beam_indices)[:, : expected_beams.shape[1]] == expected_beams).all()
    assert (np.asarray(beams.beam_indices)[:, expected_beams.shape[1] :] == -1).all()


@pytest.mark.slow
def test_overridden_steps_and_adapted_logits_are_used():
    model_class = families.flax_class("llama")

    class Mine(model_class):
        updates = 0

        def prepare_inputs_for_generation(self, input_ids, max_length, attention_mask=None):
            prepared = super().prepare_inputs_for_generation(input_ids, max_length, attention_mask)
            return {**prepared, "position_ids": prepared["position_ids"] + 1}

        def update_inputs_for_generation(self, model_outputs, model_kwargs):
            self.updates += 1
            return super().update_inputs_for_generation(model_outputs, model_kwargs)

        def _adapt_logits_for_beam_search(self, logits):
            return logits.at[:, 7].set(-jnp.inf)

    model = Mine(families.config("llama"), seed=3)
    assert tokens(model).shape == (2, 11) and model.updates > 0
    assert 7 not in tokens(model, num_beams=2)[:, 5:]


@pytest.mark.slow
def test_forced_decoder_tokens_and_decoder_prompt():
    model = families.model("t5")
    forced = tokens(model, forced_decoder_ids=[[1, 9], [3, 11]])
    assert (forced[:, 1] == 9).all() and (forced[:, 3] == 11).all()
    begun = tokens(model, decoder_input_ids=np.array([[0, 5, 6]] * 2))
    assert (begun[:, :3] == [0, 5, 6]).all()
    without = tokens(model, begin_suppress_tokens=[int(forced[0, 1])], forced_bos_token_id=12)
    assert (without[:, 1] == 12).all() and (without[:, 2] != forced[0, 1]).all()


@pytest.mark.slow
def test_encoder_outputs_of_the_caller():
    model = families.model("bart")
    mask = families.mask(2, 5, "right")
    outputs = model.encode(IDS, attention_mask=mask)
    for options in ({}, {"num_beams": 2}):
        expected = tokens(model, attention_mask=mask, **options)
        inputs = {"encoder_outputs": outputs, "attention_mask": mask}
        assert (tokens(model, **inputs, **options) == expected).all()
        assert (tokens(model, None, **inputs, **options) == expected).all()


@pytest.mark.slow
def test_user_processors_come_after_those_of_the_options():
    def never_seven(input_ids, scores, cur_len):
        return scores.at[:, 7].set(-jnp.inf)

    class Only(g.FlaxLogitsProcessor):
        def __init__(self, token):
            self.token = token

        def __call__(self, input_ids, scores, cur_len):
            return jnp.where(jnp.arange(scores.shape[-1]) == self.token, 0.0, -jnp.inf)

    model = families.model("llama")
    assert 7 not in tokens(model, logits_processor=[never_seven], suppress_tokens=[9])[:, 5:]
    for token in (5, 6):
        parts = g.FlaxLogitsProcessorList([Only(token)])
        assert (tokens(model, logits_processor=parts, min_length=9)[:, 5:] == token).all()


@pytest.mark.slow
def test_model_in_bfloat16_and_with_scanned_layers():
    model_class = families.flax_class("llama")
    scanned = model_class(families.config("llama"), scan_layers=True)
    for options in OPTIONS.values():
        assert (tokens(scanned, **options) == tokens(families.model("llama"), **options)).all()
    half = model_class(families.config("llama"), dtype=jnp.bfloat16)
    assert tokens(half, num_beams=2).shape == (2, 11)
