"""The PyTorch version against the JAX model: logits, states, gradients, generated tokens."""

from __future__ import annotations

import jax
import numpy as np
import pytest

torch = pytest.importorskip("torch")

from hfseq.testing.case import jit
from hfseq_plugins.vq_transformer import modeling as ours_modeling
from tests.plugins.vq_transformer import torch_twins, vq_cases
from tests.plugins.vq_transformer.torch_twins import ids, max_difference, model_pair, to_state_dict
from tests.support.tiers import first

HEADS = list(vq_cases.HEADS)
OPTIONS = {
    "window over block": {"window_size": 7, "block_size": 3},
    "no cache": {"use_compressive_cache": False, "final_norm": False},
    "bias after scale": {"head_bias": True, "scale_head_bias": False, "logit_scale": 0.3},
    "bare": {"norm_affine": False, "absolute_positions": False, "value_dim": 5},
    "window 0": {"window_size": 0},
    "full": {"attention_type": "full"},
    "quadratic": {"attention_type": "vq_quadratic", "reduction": "matmul"},
}
CASES = [(head, {}) for head in HEADS]
CASES += [(head, changes) for head in ("shga", "gqa") for changes in OPTIONS.values()]
NAMES = [*HEADS, *(f"{head} {name}" for head in ("shga", "gqa") for name in OPTIONS)]
QUICK = ("shga", "mqa", "gqa full", "gqa no cache")
BEAMS = {"num_beams": 3, "num_return_sequences": 3}
MASK = np.array([[1] * 21, [0] * 6 + [1] * 15, [1, 0, 1] * 7, [1] * 9 + [0] * 12], np.int32)


@pytest.mark.parametrize(
    ("head", "changes"),
    [
        pytest.param(*case, id=name, marks=() if name in QUICK else pytest.mark.slow)
        for case, name in zip(CASES, NAMES, strict=True)
    ],
)
def test_logits_and_hidden_states_are_those_of_jax(head, changes):
    ours, params, extra, model = model_pair(head, num_hidden_layers=2, **changes)
    tokens, mask = ids(4, 21), torch.from_numpy(MASK)
    theirs = model(tokens, attention_mask=mask, output_hidden_states=True)
    output_mask = MASK[..., None]

    def run(params):
        return ours(
            tokens.int().numpy(), MASK, params=params, extra=extra, output_hidden_states=True
        )

    output, _ = jit(run)(params)
    assert (
        max_difference(theirs.logits.detach().numpy() * output_mask, output.logits * output_mask)
        <= 1e-5
    )
    for a, b in zip(theirs.hidden_states, output.hidden_states, strict=True):
        assert max_difference(a.detach().numpy() * output_mask, b * output_mask) <= 1e-5


@pytest.mark.slow
@pytest.mark.parametrize("head", HEADS)
def test_gradients_commitment_and_statistics_are_those_of_jax(head):
    ours, params, extra, model = model_pair(head, sinusoid_base=100.0)
    tokens, counted = ids(4, 21), torch.from_numpy(MASK[::-1].copy())
    output_mask = MASK[..., None]

    def loss(params):
        output, updated = ours(
            tokens.int().numpy(),
            MASK,
            params=params,
            train=True,
            extra=extra,
            code_mask=(MASK * MASK[::-1]),
        )
        return (output.logits * output_mask).std() + output.auxiliary_loss, updated

    (value, updated), gradient = jit(jax.value_and_grad(loss, has_aux=True))(params)
    output = model.train()(tokens, attention_mask=torch.from_numpy(MASK), code_mask=counted)
    actual = (output.logits * torch.from_numpy(output_mask)).std(
        correction=0
    ) + output.auxiliary_loss
    assert actual.item() == pytest.approx(float(value), rel=1e-5)
    actual.backward()
    theirs = torch_twins.gradients(model)
    for name, leaf in to_state_dict(gradient).items():
        assert max_difference(theirs[name], leaf) <= 2e-5 * float(leaf.abs().max()) + 1e-8, name
    model.update_codebooks()
    for name, leaf in to_state_dict({}, ours.finalize_extra(updated)).items():
        assert max_difference(model.state_dict()[name], leaf) <= 1e-5, name


@pytest.mark.parametrize("head", first(HEADS, "shga"))
def test_states_are_those_of_jax(head):
    ours, params, extra, model = model_pair(head, window_size=3)
    tokens, mask = ids(4, 21), torch.from_numpy(MASK)
    output, _ = jit(
        lambda params: ours(
            tokens.int().numpy(),
            MASK,
            params=params,
            extra=extra,
            past_key_values=ours.init_cache(4, 0),
        )
    )(params)
    state = model(tokens, attention_mask=mask, use_cache=True).past_key_values
    assert state.position.tolist() == MASK.sum(1).tolist()
    for theirs, leaves in zip(
        state.attentions, vq_cases.attentions(output.past_key_values), strict=True
    ):
        for name, leaf in theirs._asdict().items():
            assert max_difference(leaf, leaves[name]) <= 1e-5, name


@pytest.mark.parametrize(
    ("head", "options"),
    [
        ("gqa", {}),
        *(pytest.param(head, {}, marks=pytest.mark.slow) for head in HEADS if head != "gqa"),
        *(pytest.param(head, BEAMS, marks=pytest.mark.slow) for head in HEADS),
    ],
)
def test_generated_tokens_are_those_of_jax(head, options):
    ours, params, extra, model = model_pair(head, window_size=3)
    tokens, mask = ids(3, 7), np.array([[1] * 7, [0] * 4 + [1] * 3, [0] * 2 + [1] * 5], np.int32)
    options = {"max_new_tokens": 14, "eos_token_id": 4, "pad_token_id": 2, **options}
    actual = model.generate(tokens, attention_mask=torch.from_numpy(mask), **options)
    ours.extra = extra
    expected = ours.generate(
        tokens.int().numpy(), attention_mask=mask, params=params, **options
    ).sequences
    width = actual.shape[1]
    assert actual.tolist() == np.asarray(expected)[:, :width].tolist()
    assert (np.asarray(expected)[:, width:] == 2).all()


@pytest.mark.slow
def test_classification_is_that_of_jax():
    config = vq_cases.config("gqa", num_labels=3)
    ours = ours_modeling.FlaxVQTransformerForSequenceClassification(config, _do_init=False)
    params, extra = vq_cases.variables(ours)
    model = torch_twins.make_torch_model(config, params, extra, "ForSequenceClassification")
    tokens, mask = ids(4, 21), torch.from_numpy(MASK)
    output, _ = ours(tokens.int().numpy(), MASK, params=params, extra=extra)
    theirs = model(tokens, attention_mask=mask, labels=torch.tensor([0, 2, 1, 1]))
    assert max_difference(theirs.logits, output.logits) <= 1e-5
    assert theirs.loss.item() > 0
    tokens[:, 18:] = config.pad_token_id  # located without a mask
    output, _ = ours(tokens.int().numpy(), params=params, extra=extra)
    assert max_difference(model(tokens).logits, output.logits) <= 1e-5
