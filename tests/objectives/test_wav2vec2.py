"""wav2vec 2.0: masked spans and negatives, and loss and gradients compared with PyTorch."""

from __future__ import annotations

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from hfseq.data.batches import RowRandom
from hfseq.objectives.audio import draw_time_mask
from hfseq.objectives.wav2vec2 import Wav2Vec2, contrastive_loss, draw_negatives
from hfseq_plugins.wav2vec2 import modeling
from hfseq_plugins.wav2vec2.modeling import FlaxWav2Vec2ForPreTraining
from tests.support import models

STILL = dict.fromkeys(
    (
        "hidden_dropout",
        "activation_dropout",
        "attention_dropout",
        "feat_proj_dropout",
        "feat_quantizer_dropout",
        "final_dropout",
        "layerdrop",
    ),
    0.0,
)
STABLE = {"feat_extract_norm": "layer", "do_stable_layer_norm": True, "conv_bias": True}


def generators(rows=4, step=0):
    return RowRandom(3, step, np.arange(rows)).generators()


def test_mask_probability_and_negatives():
    frames = np.array([200, 60, 12, 3, 0])
    shares = []
    for step in range(40):
        hidden = draw_time_mask(frames, 200, 0.4, 4, generators(5, step))
        assert not hidden[:, 60:][1:].any() and not hidden[2, 12:].any() and not hidden[3:].any()
        lengths = np.diff(np.flatnonzero(np.diff(np.r_[0, hidden[0], 0])))[::2]
        assert lengths.min() >= 4 and hidden[2].any()
        shares.append(hidden[0].mean())
        negatives = draw_negatives(hidden, 7, generators(5, step))
        assert negatives.shape == (5, 200, 7) and not negatives[~hidden].any()
        for row in range(3):
            for frame in np.flatnonzero(hidden[row]):
                assert hidden[row, negatives[row, frame]].all()
                assert frame not in negatives[row, frame]
    assert 0.3 < np.mean(shares) < 0.37  # less than 0.4, since spans overlap: at most 1 - exp(-0.4)
    again = draw_time_mask(frames[1:2], 90, 0.4, 4, generators(5, step)[1:2])
    assert np.array_equal(again, hidden[1:2, :90])  # independent of other rows and of the width


def test_another_frame_with_the_same_code_is_not_a_wrong_answer():
    random = np.random.default_rng(0)
    states = jnp.asarray(random.normal(size=(1, 4, 8)), jnp.float32)
    # the prediction for frame 0 is correct, and frame 1 has the same code
    codes = states.at[0, 1].set(states[0, 0])
    hidden = jnp.asarray([[True, True, True, False]])
    negatives = jnp.asarray([[[1], [2], [0], [0]]])
    loss = jax.jit(
        lambda states, codes, hidden: contrastive_loss(states, codes, negatives, hidden, 0.1)
    )
    total, right = loss(states, codes, hidden)
    # Frame 0 has no negatives, so it has no loss and does not count as correct.
    _, remainder = loss(states, codes, hidden.at[0, 0].set(False))
    assert right == remainder
    only = loss(states, codes, jnp.asarray([[True, False, False, False]]))
    assert float(only[0]) == 0 and int(only[1]) == 0 and total > 0
    empty = jax.jit(jax.grad(lambda x: loss(x, 0 * codes, hidden)[0]))(0 * states)
    assert np.isfinite(empty).all()


@pytest.mark.slow
@pytest.mark.parametrize("variant", [STABLE, {}])
@pytest.mark.parametrize("train", [True, False])
def test_loss_and_gradients_are_those_of_pytorch(variant, train, tmp_path, monkeypatch):
    torch = pytest.importorskip("torch")
    from transformers import Wav2Vec2ForPreTraining

    config = models.wav2vec2_config(**STILL, **variant, num_negatives=5, mask_time_length=2)
    model = FlaxWav2Vec2ForPreTraining(config)
    model.save_pretrained(tmp_path)
    theirs = Wav2Vec2ForPreTraining.from_pretrained(tmp_path).train(train)
    random = np.random.default_rng(0)
    samples = np.array([90, 61, 80])
    values = random.normal(size=(3, 90)).astype(np.float32)
    attend = (np.arange(90) < samples[:, None]).astype(np.int32)
    values *= attend
    frames = np.asarray(model._get_feat_extract_output_lengths(samples))
    width = int(model._get_feat_extract_output_lengths(90))
    hidden = draw_time_mask(frames, width, 0.5, 2, generators(3))
    negatives = draw_negatives(hidden, 5, generators(3, 1))
    noise = random.gumbel(size=(3, width, 2, 6)).astype(np.float32)

    def soft(logits, tau, hard):
        soft = torch.softmax((logits + torch.tensor(noise).reshape(logits.shape)) / tau, -1)
        item = torch.nn.functional.one_hot(soft.argmax(-1), soft.shape[-1]).float()
        return item - soft.detach() + soft

    monkeypatch.setattr(torch.nn.functional, "gumbel_softmax", soft)
    monkeypatch.setattr(modeling, "_gumbel", lambda keys, shape: jnp.asarray(noise))
    theirs.set_gumbel_temperature(1.7)
    full = negatives + width * np.arange(3)[:, None, None]
    actual = theirs(
        torch.tensor(values),
        attention_mask=torch.tensor(attend).long() if variant else None,
        mask_time_indices=torch.tensor(hidden),
        sampled_negative_indices=torch.tensor(full),
    )
    (actual.loss / int(hidden.sum())).backward()  # as PyTorch's script scales its gradients

    objective = object.__new__(Wav2Vec2)
    objective.config = config
    objective.arguments = Wav2Vec2.data_arguments()
    batch = {
        "input_values": values,
        "hidden": hidden,
        "negatives": negatives,
        "frames": frames,
        "temperature": np.full(3, 1.7, np.float32),
    }
    if variant:
        batch["attention_mask"] = attend
    batch = {name: jnp.asarray(array) for name, array in batch.items()}

    def mean(params):
        rngs = jax.random.key(0) if train else None
        total, count, extra = objective.loss(model, params, batch, rngs, train)
        return total / count, (total, extra["totals"])

    gradients, (total, totals) = jax.jit(jax.grad(mean, has_aux=True))(model.params)
    assert float(total) == pytest.approx(float(actual.loss.detach()), rel=1e-5)
    assert float(totals["contrastive"]) == pytest.approx(
        float(actual.contrastive_loss.detach()), rel=1e-5
    )
    perplexity = float(totals["codes"] / hidden.sum())
    assert perplexity == pytest.approx(float(actual.codevector_perplexity.detach()), rel=1e-5)
    model.save_pretrained(tmp_path / "gradients", params=gradients)
    from safetensors.numpy import load_file

    ours = load_file(tmp_path / "gradients" / "model.safetensors")
    for name, parameter in theirs.named_parameters():
        expected = np.zeros(parameter.shape) if parameter.grad is None else parameter.grad.numpy()
        error = np.abs(ours[name] - expected).max()
        assert error <= 2e-5 * max(np.abs(expected).max(), 1e-2), (name, error)
