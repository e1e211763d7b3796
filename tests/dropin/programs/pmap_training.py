"""A training loop over all devices, as in Trax and the Flax examples of Transformers 4."""

import sys
from collections.abc import Callable
from pathlib import Path

import jax
import jax.numpy as jnp
import numpy as np
import optax
from flax import jax_utils, struct, traverse_util
from flax.serialization import from_bytes, msgpack_restore, to_bytes
from flax.training import train_state
from flax.training.common_utils import get_metrics, onehot, shard, shard_prng_key
from transformers import FlaxAutoModelForMaskedLM, FlaxBertForMaskedLM


class TrainState(train_state.TrainState):
    loss_fn: Callable = struct.field(pytree_node=False)
    dropout_rng: jnp.ndarray

    def replicate(self):
        return jax_utils.replicate(self).replace(dropout_rng=shard_prng_key(self.dropout_rng))


def decay_mask(params):
    flat = traverse_util.flatten_dict(params)
    norms = {
        path[-2:]
        for name in ("layernorm", "layer_norm", "ln")
        for path in flat
        if name in "".join(path).lower()
    }
    return traverse_util.unflatten_dict(
        {path: path[-1] != "bias" and path[-2:] not in norms for path in flat}
    )


def masked_loss(logits, labels):
    weights = jnp.where(labels >= 0, 1.0, 0.0)
    losses = optax.softmax_cross_entropy(logits, onehot(labels, logits.shape[-1])) * weights
    return losses.sum(), weights.sum()


def train_step(state, batch):
    dropout_rng, new_rng = jax.random.split(state.dropout_rng)
    labels = batch.pop("labels")

    def loss_fn(params):
        logits = state.apply_fn(**batch, params=params, dropout_rng=dropout_rng, train=True)[0]
        return state.loss_fn(logits, labels)

    (loss, count), grads = jax.value_and_grad(loss_fn, has_aux=True)(state.params)
    loss, count, grads = jax.lax.psum((loss, count, grads), "batch")
    grads = jax.tree.map(lambda grad: grad / count, grads)
    return state.apply_gradients(grads=grads, dropout_rng=new_rng), {"loss": loss / count}


def main(folder, output):
    folder = Path(folder)
    model = FlaxAutoModelForMaskedLM.from_pretrained(folder / "bert", seed=0, dtype=jnp.float32)
    tx = optax.chain(
        optax.add_decayed_weights(0.1, mask=decay_mask), optax.sgd(optax.linear_schedule(0.1, 0, 4))
    )
    state = TrainState.create(
        apply_fn=model.__call__,
        params=model.params,
        tx=tx,
        dropout_rng=jax.random.PRNGKey(0),
        loss_fn=masked_loss,
    ).replicate()
    generator = np.random.default_rng(0)
    ids = generator.integers(3, 64, (jax.device_count(), 12))
    labels = np.where(generator.random(ids.shape) < 0.5, ids, -100)
    p_train_step = jax.pmap(train_step, "batch", donate_argnums=(0,))
    metrics = []
    for _ in range(4):
        batch = {"input_ids": ids, "attention_mask": np.ones_like(ids), "labels": labels}
        state, metric = p_train_step(state, shard(batch))
        metrics.append(metric)
    losses = get_metrics(metrics)["loss"]

    state = jax_utils.unreplicate(state)
    params = jax.device_get(state.params)
    model.save_pretrained(folder / "trained", params=params)
    model.save_pretrained(folder / "legacy", params=params, safe_serialization=False)
    stored = msgpack_restore((folder / "legacy" / "flax_model.msgpack").read_bytes())
    assert jax.tree.structure(stored) == jax.tree.structure(params)
    (folder / "opt_state.msgpack").write_bytes(to_bytes(state.opt_state))
    from_bytes(state.opt_state, (folder / "opt_state.msgpack").read_bytes())
    again = FlaxBertForMaskedLM.from_pretrained(folder / "legacy")
    np.savez(output, ids=ids, labels=labels, losses=losses, logits=again(ids, params=params).logits)


if __name__ == "__main__":
    main(*sys.argv[1:])
