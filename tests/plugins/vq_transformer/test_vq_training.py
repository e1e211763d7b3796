"""Training steps: the reference's six updates, scanned layers, dropout, checkpoints."""

from __future__ import annotations

import functools

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest

from hfseq.data.arguments import CausalArguments
from hfseq.nn import trees
from hfseq.nn.random import batch_keys
from hfseq.objectives.clm import CausalLM
from hfseq.training.optimizers import NO_DECAY, path_mask
from hfseq_plugins.vq_transformer.modeling import FlaxVQTransformerForCausalLM
from hfseq_plugins.vq_transformer.reference import convert_reference
from tests.plugins.vq_transformer.vq_cases import (
    assert_gradients_close,
    config,
    ids,
    max_difference,
    model,
    statistics,
    token_losses,
    variables,
)
from tests.support.tiers import first

WINDOW = 8


def golden_optimizer(options, multipliers):
    """Returns clipping, Adam with schedule, and weight decay that no rate scales."""
    decayed = optax.masked(
        optax.add_decayed_weights(-options["wd_lam"]),
        lambda tree: jax.tree.map(lambda leaf: leaf.ndim != 1, tree),
    )
    return optax.chain(
        optax.clip_by_global_norm(options["grad_clip"]),
        optax.scale_by_adam(options["b1"], options["b2"], options["eps"]),
        optax.scale(-options["lr_max"]),
        optax.scale_by_schedule(lambda step: jnp.asarray(multipliers)[step]),
        decayed,
    )


@functools.cache
def golden_run(golden):
    """Returns parameters after each update, all losses, and the loss of an evaluation."""
    options, plan = golden.options("main/gau_untied"), golden.options("train")
    start = convert_reference(golden.tree("train/params_init"), options)
    flax_model = FlaxVQTransformerForCausalLM(start.config, _do_init=False)
    optimizer = golden_optimizer(plan, golden["train/schedule_multiplier"])
    cost = start.config.commitment_cost

    def loss(params, extra, state, batch):
        output, extra = flax_model(
            batch["inputs"],
            params=params,
            past_key_values=state,
            train=True,
            extra=extra,
            code_mask=batch["loss_mask"],
        )
        size = batch["inputs"].size
        each = batch["loss_mask"] * token_losses(output.logits, batch["targets"])
        main_loss = each.mean()
        commitment = output.auxiliary_loss / size
        return main_loss + commitment, (main_loss, commitment / cost, extra, output.past_key_values)

    @jax.jit
    def update(params, memory, extra, state, batch):
        (_, actual), slopes = jax.value_and_grad(loss, has_aux=True)(params, extra, state, batch)
        main_loss, commitment, extra, state = actual
        changes, memory = optimizer.update(slopes, memory, params)
        params = optax.apply_updates(params, changes)
        norm = sum(jnp.square(leaf).sum() for leaf in jax.tree.leaves(slopes)) ** 0.5
        return (
            params,
            memory,
            flax_model.finalize_extra(extra),
            state,
            (main_loss, commitment, norm),
        )

    params = jax.tree.map(jnp.asarray, start.params)
    extra = jax.tree.map(jnp.asarray, start.extra)
    memory, updated, losses = optimizer.init(params), [], []
    for sequence in range(2):
        state = flax_model.init_cache(2)
        for begin in range(0, 24, WINDOW):
            batch = {
                name: golden[f"train/{name}"][sequence][:, begin : begin + WINDOW]
                for name in ("inputs", "targets", "loss_mask")
            }
            params, memory, extra, state, actual = update(params, memory, extra, state, batch)
            updated.append((params, extra))
            losses.append([float(value) for value in actual])
    inputs, targets, mask = (golden[f"train/{n}"][1] for n in ("inputs", "targets", "loss_mask"))
    output, _ = jax.jit(lambda p, e: flax_model(inputs, params=p, extra=e))(params, extra)
    return updated, np.array(losses), float((mask * token_losses(output.logits, targets)).mean())


@pytest.mark.parametrize("updates", first([1, 3, 6], 6))
def test_parameters_and_codebooks_after_updates(golden, updates):
    options = golden.options("main/gau_untied")
    expected = convert_reference(golden.tree(f"train/params_after_{updates}"), options)
    params, extra = golden_run(golden)[0][updates - 1]
    for ours, theirs in ((params, expected.params), (extra, expected.extra)):
        mine = trees.flatten(ours)
        for path, leaf in trees.flatten(theirs).items():
            assert max_difference(mine[path], leaf) <= 1e-5, trees.join(path)


def test_losses_of_updates_and_of_the_evaluation_after_them(golden):
    _, losses, evaluation = golden_run(golden)
    for begin, name in ((0, "updates_1_3"), (3, "updates_4_6")):
        main_loss, commitment, _ = losses[begin : begin + 3].mean(0)
        assert main_loss == pytest.approx(float(golden[f"train/mean_loss_lm_{name}"]), rel=1e-5)
        assert commitment == pytest.approx(float(golden[f"train/mean_commit_{name}"]), rel=1e-5)
    assert losses[0, 2] == pytest.approx(1.57864, rel=1e-5)
    assert evaluation == pytest.approx(float(golden["train/eval_after_6/loss_lm"]), rel=1e-5)
    mean = golden["train/loss_mask"][1].mean()
    assert mean == pytest.approx(float(golden["train/eval_after_6/mask_mean"]), rel=1e-6)


def stacked(tree):
    """Returns a tree with the layers stacked for scanning."""
    layers = tree["model"]["layers"]
    both = jax.tree.map(lambda *leaves: jnp.stack(leaves), *(layers[n] for n in sorted(layers)))
    return {**tree, "model": {**tree["model"], "layers": both}}


@pytest.mark.slow
def test_scanned_layers_train_as_the_loop_does():
    loop = model("mqa", num_hidden_layers=2, window_size=2)
    scan = FlaxVQTransformerForCausalLM(loop.config, _do_init=False, scan_layers=True)
    params, extra = variables(loop)
    tokens = ids(2, 6)
    optimizer = optax.adam(0.1)

    def step(flax_model, params, extra):
        def loss(params):
            output, updated = flax_model(
                tokens,
                params=params,
                extra=extra,
                train=True,
                past_key_values=flax_model.init_cache(2),
            )
            main_loss = token_losses(output.logits, tokens).mean() + output.auxiliary_loss
            return main_loss, (updated, output.past_key_values)

        (value, (updated, state)), slopes = jax.value_and_grad(loss, has_aux=True)(params)
        changes, _ = optimizer.update(slopes, optimizer.init(params), params)
        return (
            value,
            optax.apply_updates(params, changes),
            flax_model.finalize_extra(updated),
            state,
        )

    first = jax.jit(functools.partial(step, loop))(params, extra)
    two = jax.jit(functools.partial(step, scan))(
        stacked(params), {"codebook": stacked(extra["codebook"])}
    )
    assert float(first[0]) == pytest.approx(float(two[0]), rel=1e-6)
    pairs = (
        (stacked(first[1]), two[1]),
        (stacked(first[2]["codebook"]), two[2]["codebook"]),
        (stacked(first[3]), two[3]),
    )
    for ours, theirs in pairs:
        mine, expected = trees.flatten(ours), trees.flatten(theirs)
        assert mine.keys() == expected.keys()
        for path, leaf in expected.items():
            assert max_difference(mine[path], leaf) <= 1e-5, trees.join(path)


@pytest.mark.parametrize("scan", [False, True])
def test_u_and_v_are_not_decayed(scan):
    flax_model = FlaxVQTransformerForCausalLM(
        config("gqa", num_hidden_layers=2), _do_init=False, scan_layers=scan
    )
    mask = trees.flatten(path_mask(NO_DECAY, matching=False)(flax_model.params_shape_tree))
    undecayed = {path[-1] for path, decayed in mask.items() if not decayed}
    assert {"content_bias", "position_bias"} <= undecayed
    decayed = {path[-1] for path, decayed in mask.items() if decayed}
    assert decayed == {"kernel", "embedding", "position_scale"}


@pytest.mark.slow
def test_hidden_rows_change_neither_loss_nor_gradients():
    """The loss is averaged over targets, so half a batch of padding does not halve it."""
    flax_model = model("mqa")
    params, extra = variables(flax_model)
    objective = CausalLM(CausalArguments(), None, flax_model.config)
    objective.prepare(flax_model)
    tokens, real = ids(4, 7), np.array([[1], [1], [0], [0]])
    segments = np.broadcast_to(real, tokens.shape).astype(np.int32)
    labels = np.where(segments > 0, ids(4, 7, 1), -100)
    batch = {"input_ids": tokens, "segment_ids": segments, "labels": labels}

    def loss(params, batch):
        total, count, metrics = objective.loss(flax_model, params, batch, None, True, extra)
        assert "divisor" not in metrics
        return total / count

    actual = [
        jax.jit(jax.value_and_grad(loss))(params, part)
        for part in (batch, {name: leaf[:2] for name, leaf in batch.items()})
    ]
    assert float(actual[0][0]) == pytest.approx(float(actual[1][0]), rel=1e-6)
    assert_gradients_close(actual[0][1], actual[1][1])


# -- dropout
# ---------------------------------------------------------------------------------------


def dropping(**rates):
    flax_model = model("mqa", window_size=3, num_hidden_layers=2, **rates)
    params, extra = variables(flax_model)

    def call(tokens, state=None, keys=None):
        output, _ = flax_model(
            tokens,
            params=params,
            extra=extra,
            past_key_values=state,
            train=True,
            dropout_rng=keys,
        )
        return output.logits, output.past_key_values

    return flax_model, jax.jit(call)


def keys_of(number, rows=2, steady=None):
    steady = None if steady is None else jax.random.key(steady)
    return batch_keys(jax.random.key(number), jnp.arange(rows), steady)


@pytest.mark.slow
def test_without_dropout_training_computes_what_evaluation_does():
    flax_model = model("mqa")
    params, extra = variables(flax_model)
    first, two = (
        flax_model(ids(2, 6), params=params, extra=extra, train=train)[0].logits
        for train in (True, False)
    )
    assert np.array_equal(first, two)


@pytest.mark.slow
def test_sinusoids_and_layers_are_dropped_for_whole_sequences():
    """Windows with different keys but the same per-sequence keys equal one call."""
    flax_model, call = dropping(sinusoid_dropout=0.4, layer_dropout=0.4)
    tokens = ids(2, 8)
    full, _ = call(tokens, flax_model.init_cache(2), keys_of(7))
    first, state = call(tokens[:, :5], flax_model.init_cache(2), keys_of(7))
    second, _ = call(tokens[:, 5:], state, keys_of(8, steady=7))
    assert max_difference(np.concatenate([first, second], 1), full) <= 1e-5
    other, _ = call(tokens, flax_model.init_cache(2), keys_of(9))
    assert max_difference(other, full) > 1e-3


@pytest.mark.slow
def test_residuals_and_embeddings_are_dropped_afresh():
    for rates in ({"residual_dropout": 0.4}, {"embedding_dropout": 0.4}):
        flax_model, call = dropping(**rates)
        actual = [
            call(ids(2, 6), flax_model.init_cache(2), keys_of(number, steady=7))[0]
            for number in (7, 8)
        ]
        assert max_difference(*actual) > 1e-3


@pytest.mark.slow
def test_masks_belong_to_rows_and_not_to_batches():
    rates = ("sinusoid_dropout", "layer_dropout", "residual_dropout", "embedding_dropout")
    _, call = dropping(**dict.fromkeys(rates, 0.3))
    tokens, keys = ids(4, 6), keys_of(3, 4)
    full, _ = call(tokens, None, keys)
    part = jax.tree.map(lambda leaf: leaf[2:] if leaf.ndim else leaf, keys)
    assert max_difference(call(tokens[2:], None, part)[0], full[2:]) <= 1e-5


@pytest.mark.slow
def test_some_layers_are_left_out_of_some_rows():
    """With nearly all layers dropped most rows equal their embeddings, without scaling."""
    flax_model = model("mqa", layer_dropout=0.9, absolute_positions=False)
    params, extra = variables(flax_model)
    output, _ = flax_model(
        ids(64, 3),
        params=params,
        extra=extra,
        train=True,
        output_hidden_states=True,
        dropout_rng=keys_of(1, 64),
    )
    embeddings = output.hidden_states[0]
    unnormed = FlaxVQTransformerForCausalLM(
        config("mqa", layer_dropout=0.9, absolute_positions=False, final_norm=False),
        _do_init=False,
    )
    params = {**params, "model": {k: v for k, v in params["model"].items() if k != "norm"}}
    output, _ = unnormed(
        ids(64, 3),
        params=params,
        extra=extra,
        train=True,
        output_hidden_states=True,
        dropout_rng=keys_of(1, 64),
    )
    unchanged = np.abs(np.asarray(output.hidden_states[-1] - embeddings)).max((1, 2)) == 0
    assert 0.6 < unchanged.mean() < 0.97


# -- files
# ---------------------------------------------------------------------------------------


@pytest.mark.slow
def test_saved_models_are_the_same_models(tmp_path):
    flax_model = FlaxVQTransformerForCausalLM(config("gqa"), seed=3)
    params, extra = variables(flax_model)
    flax_model.params = params
    flax_model.save_pretrained(tmp_path, params=params, extra=extra)
    again = FlaxVQTransformerForCausalLM.from_pretrained(tmp_path)
    for ours, theirs in ((again.params, params), (again.extra, extra)):
        mine = trees.flatten(ours)
        for path, leaf in trees.flatten(theirs).items():
            assert np.array_equal(mine[path], leaf), trees.join(path)
    first, two = (
        m(ids(2, 6), params=m.params, extra=e)[0].logits
        for m, e in ((flax_model, extra), (again, again.extra))
    )
    assert np.array_equal(first, two)


@pytest.mark.slow
def test_files_hold_the_statistics_and_not_the_sums_of_a_step(tmp_path):
    from safetensors.numpy import load_file

    flax_model = FlaxVQTransformerForCausalLM(config("shga"), seed=3)
    flax_model.save_pretrained(tmp_path)
    stored = load_file(tmp_path / "model.safetensors")
    actual = {name for name in stored if "codebook" in name}
    assert actual == {
        f"model.layers.0.{part}.codebook.{name}"
        for part in ("attention", "attention_2")
        for name in ("sums", "counts")
    }
    name = "model.layers.0.attention_2.codebook.sums"
    assert np.array_equal(stored[name], statistics(flax_model.extra, "sums")[1])


@pytest.mark.slow
def test_gradients_with_rematerialised_layers_are_the_same():
    plain = model("mqa", num_hidden_layers=2)
    params, extra = variables(plain)
    again = FlaxVQTransformerForCausalLM(plain.config, _do_init=False)
    again.enable_gradient_checkpointing()
    actual = []
    for flax_model in (plain, again):

        def loss(params, flax_model=flax_model):
            output, updated = flax_model(ids(2, 6), params=params, extra=extra, train=True)
            return jnp.square(output.logits).mean() + output.auxiliary_loss, updated

        actual.append(jax.jit(jax.value_and_grad(loss, has_aux=True))(params))
    assert_gradients_close(actual[1][1], actual[0][1], 1e-6)
    for name in ("new_sums", "new_counts"):
        ours, theirs = (statistics(updated, name) for (_, updated), _ in actual)
        assert max_difference(np.stack(ours), np.stack(theirs)) <= 1e-6
