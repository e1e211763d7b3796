"""Programs as users wrote them for Transformers 4, with only the import changed.

Each test is the skeleton of an old example: a pmap loop, a TrainState over `model.__call__`, and
parameters that are replicated and saved from the first device.
"""

from __future__ import annotations

from functools import partial

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from flax import jax_utils, traverse_util
from flax.training import train_state
from flax.training.common_utils import onehot, shard, shard_prng_key

import hfseq
from tests.support.models import bart_config, bert_config, close, gpt2_config, ids, t5_config
from tests.support.tiers import first

DEVICES = 8


class TrainState(train_state.TrainState):
    dropout_rng: jnp.ndarray

    def replicate(self):
        return jax_utils.replicate(self).replace(dropout_rng=shard_prng_key(self.dropout_rng))


def decay_mask_fn(params):
    flat = traverse_util.flatten_dict(params)
    mask = {path: path[-1] not in ("bias", "scale", "weight") for path in flat}
    return traverse_util.unflatten_dict(mask)


def train(model, batch, loss_fn, steps=4):
    """The old training loop. Returns the losses and the trained parameters."""
    state = TrainState.create(
        apply_fn=model.__call__,
        params=model.params,
        tx=optax.adamw(3e-3, weight_decay=0.01, mask=decay_mask_fn),
        dropout_rng=jax.random.split(jax.random.PRNGKey(0))[0],
    )

    def train_step(state, batch):
        dropout_rng, new_dropout_rng = jax.random.split(state.dropout_rng)

        def compute_loss(params):
            inputs = dict(batch)
            labels = inputs.pop("labels")
            logits = state.apply_fn(**inputs, params=params, dropout_rng=dropout_rng, train=True)[0]
            return loss_fn(logits, labels)

        loss, grad = jax.value_and_grad(compute_loss)(state.params)
        grad = jax.lax.pmean(grad, "batch")
        new_state = state.apply_gradients(grads=grad, dropout_rng=new_dropout_rng)
        return new_state, jax.lax.pmean({"loss": loss}, axis_name="batch")

    p_train_step = jax.pmap(train_step, "batch", donate_argnums=(0,))
    state = state.replicate()
    losses = []
    for _ in range(steps):
        state, metrics = p_train_step(state, shard(batch))
        losses.append(float(jax_utils.unreplicate(metrics)["loss"]))
    return losses, jax.device_get(jax.tree_util.tree_map(lambda x: x[0], state.params))


def cross_entropy(logits, labels):
    return optax.softmax_cross_entropy(logits, onehot(labels, logits.shape[-1])).mean()


def next_token(logits, labels):
    return cross_entropy(logits[..., :-1, :], labels[..., 1:])


@pytest.mark.parametrize(
    ("auto", "config", "loss_fn"),
    first(
        [
            (hfseq.FlaxAutoModelForMaskedLM, bert_config, cross_entropy),
            (hfseq.FlaxAutoModelForCausalLM, gpt2_config, next_token),
        ],
        (hfseq.FlaxAutoModelForCausalLM, gpt2_config, next_token),
    ),
)
def test_language_modelling_script(auto, config, loss_fn, tmp_path):
    model = auto.from_config(config(), seed=42, dtype=jnp.float32)
    tokens = ids(DEVICES)
    batch = {"input_ids": tokens, "attention_mask": np.ones_like(tokens), "labels": tokens}
    losses, params = train(model, batch, loss_fn)
    assert np.isfinite(losses).all() and losses[-1] < losses[0]
    model.save_pretrained(tmp_path, params=params)
    again = auto.from_pretrained(tmp_path)
    assert close(jax.jit(again)(tokens)[0], jax.jit(model)(tokens, params=params)[0], 1e-6)


@pytest.mark.slow
@pytest.mark.parametrize("config", [t5_config, bart_config])
def test_summarization_script(config, tmp_path):
    model = hfseq.FlaxAutoModelForSeq2SeqLM.from_config(config(), seed=42)
    module = __import__(model.__module__, fromlist=["shift_tokens_right"])
    shift = module.shift_tokens_right
    labels = ids(DEVICES, 6, seed=1)
    settings = model.config
    decoder_input_ids = shift(labels, settings.pad_token_id, settings.decoder_start_token_id)
    tokens = ids(DEVICES)
    batch = {
        "input_ids": tokens,
        "attention_mask": np.ones_like(tokens),
        "labels": labels,
        "decoder_input_ids": np.asarray(decoder_input_ids),
        "decoder_attention_mask": np.ones_like(labels),
    }
    losses, params = train(model, batch, cross_entropy)
    assert np.isfinite(losses).all() and losses[-1] < losses[0]

    def generate_step(params, batch):
        model.params = params
        options = {"max_length": 8, "num_beams": 2}
        return model.generate(
            batch["input_ids"], attention_mask=batch["attention_mask"], **options
        ).sequences

    replicated = jax_utils.replicate(params)
    p_generate_step = jax.pmap(generate_step, "batch")
    parts = {name: shard(batch[name]) for name in ("input_ids", "attention_mask")}
    generated = p_generate_step(replicated, parts)
    assert generated.reshape(-1, generated.shape[-1]).shape == (DEVICES, 8)
    model.params = jax.tree.map(jnp.asarray, params)
    alone = model.generate(tokens, max_length=8, num_beams=2).sequences
    assert np.array_equal(generated.reshape(DEVICES, 8), alone)


@pytest.mark.slow
def test_pad_shard_unpad_evaluation():
    model = hfseq.FlaxBertForMaskedLM(bert_config())

    def eval_step(params, batch):
        return model(**batch, params=params, train=False)[0]

    p_eval_step = jax.pmap(eval_step, axis_name="batch")
    evaluate = partial(jax_utils.pad_shard_unpad(p_eval_step))
    tokens = ids(5)
    logits = evaluate(jax_utils.replicate(model.params), {"input_ids": tokens}, min_device_batch=1)
    assert logits.shape[0] == 5 and close(logits, model(tokens)[0], 1e-5)
