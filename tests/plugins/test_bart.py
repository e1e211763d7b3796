"""BART: the battery for every head, its variants, call signatures and errors."""

from __future__ import annotations

import copy
import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from hfseq.errors import UsageError
from hfseq.nn import trees
from hfseq.testing import case, check_architecture
from hfseq_plugins.bart.modeling import (
    FlaxBartForCausalLM,
    FlaxBartForConditionalGeneration,
    FlaxBartForQuestionAnswering,
    FlaxBartForSequenceClassification,
    FlaxBartModel,
)
from tests.support.models import bart_config, close, ids
from tests.support.tiers import battery

SHALLOW = {"encoder_layers": 1, "decoder_layers": 1}
PARITY = ("gradients", "torch_loads_it", "torch_tree", "torch_parity")


@pytest.fixture(scope="module")
def model():
    return FlaxBartForConditionalGeneration(bart_config(**SHALLOW))


@pytest.fixture(scope="module")
def classifier():
    return FlaxBartForSequenceClassification(bart_config(**SHALLOW, num_labels=2))


# -- the battery -----------------------------------------------------------------------------------


@pytest.mark.parametrize(("head", "checks"), battery("bart", "ForSeq2SeqLM"))
def test_battery(head, checks):
    # Two layers for one head, to scan them. Encoder and decoder differ in all cases.
    sizes = {} if head == "ForSeq2SeqLM" and not checks else SHALLOW
    unlike = {"decoder_attention_heads": 2, "decoder_ffn_dim": 40}
    check_architecture(
        "bart", bart_config(**sizes, **unlike, num_labels=3), heads=[head], checks=checks
    )


VARIANTS = {
    "untied": ("ForSeq2SeqLM", {"tie_word_embeddings": False}),
    "untied decoder": ("ForCausalLM", {"tie_word_embeddings": False}),
    "scaled embeddings": ("ForSeq2SeqLM", {"scale_embedding": True}),
    "another activation": ("Model", {"activation_function": "relu", "dropout": 0.0}),
}


@pytest.mark.slow
@pytest.mark.parametrize(
    "name",
    VARIANTS,
)
def test_variants_equal_pytorch(name):
    from hfseq.testing import checks as testing_checks

    head, changes = VARIANTS[name]
    checks = testing_checks.CHECKS
    report = check_architecture(
        "bart",
        bart_config(**{**SHALLOW, **changes}),
        heads=[head],
        skip={c.__name__: "a variant" for c in checks if c.__name__ not in PARITY},
        zero_gradients=(*case.ZERO_GRADIENTS, r"shared/embedding$"),
    )
    assert len(report.passed) == 4 or "PyTorch is not installed" in report.not_run.values()


def test_decoder_without_encoder_matches_pytorch(tmp_path):
    torch = pytest.importorskip("torch")
    from transformers import BartForCausalLM

    ours = FlaxBartForCausalLM(bart_config(**SHALLOW))
    ours.save_pretrained(tmp_path)
    expected = BartForCausalLM.from_pretrained(tmp_path)(torch.tensor(ids()).long())
    assert close(jax.jit(ours)(ids()).logits, expected.logits.detach().numpy())


def test_init_weights_keeps_given_parameters():
    model = FlaxBartForCausalLM(bart_config(**SHALLOW), _do_init=False)
    partial_params = {"model": {"decoder": {"embed_tokens": {"embedding": jnp.ones((64, 32))}}}}
    params = model.init_weights(jax.random.key(0), (1, 1), params=partial_params)
    assert trees.flatten(params).keys() == model.required_params
    assert bool((params["model"]["decoder"]["embed_tokens"]["embedding"] == 1).all())


def test_decoder_model_does_not_change_the_config():
    config = bart_config(**SHALLOW)
    config_before = copy.deepcopy(config.to_dict())
    model = FlaxBartForCausalLM(config, _do_init=False)
    assert config.to_dict() == config_before
    assert model.config.is_decoder and not model.config.is_encoder_decoder
    with pytest.raises(ValueError, match="config"):
        FlaxBartForCausalLM(None)


# -- the call --------------------------------------------------------------------------------------


def test_decoder_inputs_default_to_shifted_source(model):
    tokens = ids()
    explicit = np.concatenate([np.full((2, 1), 2), tokens[:, :-1]], 1)
    assert close(model(tokens).logits, model(tokens, decoder_input_ids=explicit).logits, 0)


@pytest.mark.parametrize("name", ["pad_token_id", "decoder_start_token_id"])
def test_missing_shift_tokens_are_named(name):
    config = bart_config(**SHALLOW)
    setattr(config, name, None)
    with pytest.raises(UsageError, match=f"decoder_input_ids.*without .*{name}"):
        FlaxBartModel(config, _do_init=False)(ids(), params={})


def test_long_targets_are_refused_too():
    blank = FlaxBartModel(bart_config(**SHALLOW), _do_init=False)
    with pytest.raises(UsageError, match="decoder_input_ids .*41 tokens"):
        blank(ids(1, 5), decoder_input_ids=ids(1, 41), params={})


def test_positions_begin_at_the_third_row_of_the_table(model):
    params = copy.deepcopy(model.params)
    table = params["model"]["encoder"]["embed_positions"]["embedding"]
    params["model"]["encoder"]["embed_positions"]["embedding"] = table.at[:2].set(jnp.nan)
    assert np.isfinite(model(ids(), params=params).logits).all()
    shifted = model(ids(), position_ids=np.arange(12)[None] + 1).logits
    assert not close(shifted, model(ids()).logits, 1e-6)


@pytest.mark.slow
def test_bias_of_the_logits_is_added_and_not_trained(model):
    params = copy.deepcopy(model.params)
    params["final_logits_bias"] = jnp.arange(64.0)[None]
    assert close(model(ids(), params=params).logits - jnp.arange(64.0), model(ids()).logits)

    def loss(params):
        return model(ids(), params=params).logits.sum()

    assert not case.jit(jax.grad(loss))(params)["final_logits_bias"].any()


def test_hidden_states_and_attentions_of_both_sides(model):
    flags = {"output_attentions": True, "output_hidden_states": True}
    run = case.jit(lambda x, y: model(x, decoder_input_ids=y, **flags))
    output = run(ids(2, 9), ids(2, 7))
    assert output.keys() == (
        *("logits", "decoder_hidden_states", "decoder_attentions", "cross_attentions"),
        *("encoder_last_hidden_state", "encoder_hidden_states", "encoder_attentions"),
    )
    assert [x.shape for x in output.encoder_hidden_states] == [(2, 9, 32)] * 2
    assert [x.shape for x in output.decoder_hidden_states] == [(2, 7, 32)] * 2
    assert output.encoder_attentions[0].shape == (2, 4, 9, 9)
    assert output.decoder_attentions[0].shape == (2, 4, 7, 7)
    assert output.cross_attentions[0].shape == (2, 4, 7, 9)
    assert np.allclose(np.sum(output.cross_attentions[0], -1), 1, atol=1e-5)
    assert np.array_equal(output.encoder_hidden_states[-1], output.encoder_last_hidden_state)


def test_heads_must_divide_the_width():
    with pytest.raises(UsageError, match="d_model=32 is not a multiple of the 5 attention heads"):
        FlaxBartModel(bart_config(decoder_attention_heads=5), _do_init=False)


def test_layerdrop_skips_layers_row_by_row_in_training_only():
    still = {"dropout": 0.0, "attention_dropout": 0.0, "activation_dropout": 0.0}
    config = bart_config(**SHALLOW, **still, encoder_layerdrop=0.5)
    model = FlaxBartModel(config)
    rows = np.repeat(ids(1), 16, 0)
    with pytest.raises(UsageError, match="dropout_rng"):
        model.encode(rows, train=True)
    options = {"train": True, "output_hidden_states": True}
    output = jax.jit(functools.partial(model.encode, **options))(
        rows, dropout_rng=jax.random.key(0)
    )
    skipped, plain = np.asarray(output.hidden_states[0]), np.asarray(jax.jit(model.encode)(rows)[0])
    matches = [
        [close(row, expected[number], 1e-6) for expected in (skipped, plain)]
        for number, row in enumerate(np.asarray(output.last_hidden_state))
    ]
    assert sorted(map(tuple, matches))[0] == (False, True)
    assert sorted(map(tuple, matches))[-1] == (True, False)
    assert all(sum(pair) == 1 for pair in matches)


# -- sequence classification -----------------------------------------------------------------------


def ended(*eos_positions):
    tokens = ids(len(eos_positions), 8)
    for row, columns in enumerate(eos_positions):
        tokens[row, list(columns)] = 2
    return tokens


def test_rows_must_have_equally_many_ends(classifier):
    with pytest.raises(ValueError, match="same number of <eos> tokens.*1, 2"):
        classifier(ended((7,), (3, 7)))


def test_rows_must_have_an_end(classifier):
    with pytest.raises(ValueError, match="missing <eos> tokens in input_ids"):
        classifier(ended((), ()))


def test_label_is_read_at_the_last_end_traced_or_not(classifier):
    tokens = ended((2, 5), (3, 7))
    logits = classifier(tokens).logits
    assert close(jax.jit(lambda x: classifier(x).logits)(tokens), logits, 1e-6)
    states = classifier.decode(
        np.concatenate([np.full((2, 1), 2), tokens[:, :-1]], 1), classifier.encode(tokens)
    ).last_hidden_state
    head = classifier.params["classification_head"]
    pooled = states[np.arange(2), [5, 7]]
    inner = np.tanh(pooled @ head["dense"]["kernel"] + head["dense"]["bias"])
    assert close(inner @ head["out_proj"]["kernel"] + head["out_proj"]["bias"], logits)


def test_source_and_target_of_a_classifier_have_one_length(classifier):
    with pytest.raises(UsageError, match="decoder_input_ids .*5 tokens.*8"):
        classifier(ended((7,), (7,)), decoder_input_ids=ids(2, 5))


def test_classifier_needs_to_know_the_end():
    config = bart_config(**SHALLOW)
    config.eos_token_id = None
    with pytest.raises(UsageError, match="eos_token_id"):
        FlaxBartForSequenceClassification(config, _do_init=False)


def test_question_answering_head_has_two_outputs():
    model = FlaxBartForQuestionAnswering(bart_config(**SHALLOW, num_labels=7), _do_init=False)
    assert model.params_shape_tree["qa_outputs"]["kernel"].shape == (32, 2)


# -- stand-alone decoder --------------------------------------------------------------------------


@pytest.mark.slow
def test_decoder_model_accepts_left_padding():
    model = FlaxBartForCausalLM(bart_config(**SHALLOW))
    tokens, mask = ids(1, 6), np.array([[0, 0, 1, 1, 1, 1]])
    first = model.prepare_inputs_for_generation(tokens, 8, mask)
    assert first["position_ids"].tolist() == [[0, 0, 0, 1, 2, 3]]
    output = model(tokens, **first)
    assert close(output.logits[:, 2:], model(tokens[:, 2:]).logits)
    later = model.update_inputs_for_generation(output, first)
    again = model(tokens[:, :1], **{k: v for k, v in later.items()})
    expected = model(np.concatenate([tokens[:, 2:], tokens[:, :1]], 1)).logits
    assert close(again.logits[:, 0], expected[:, -1])
