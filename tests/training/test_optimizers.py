"""Optimizers and schedules: weight decay, freezing, and learning rates."""

from __future__ import annotations

import contextlib
import dataclasses

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest

from hfseq import plugins
from hfseq.errors import UsageError
from hfseq.nn import trees
from hfseq.plugins.builtin import OPTIMIZERS
from hfseq.training.arguments import TrainingArguments
from hfseq.training.optimizers import NO_DECAY, make_optimizer, make_schedule, muon, path_mask
from hfseq.training.state import TrainState
from tests.support import parallel
from tests.support.tiers import first

PARAMS = {
    "bert": {
        "encoder": {"layer": {"0": {"dense": {"kernel": jnp.ones((4, 6)), "bias": jnp.ones(6)}}}},
        "embeddings": {
            "word_embeddings": {"embedding": jnp.ones((5, 4))},
            "LayerNorm": {"scale": jnp.ones(4), "bias": jnp.ones(4)},
        },
    }
}


def arguments(**changes):
    return dataclasses.replace(TrainingArguments(output_dir="x", learning_rate=0.1), **changes)


def updates(**changes):
    options = arguments(**changes)
    factory = plugins.load().optimizers.get(options.optim)
    optimizer = make_optimizer(factory, options, make_schedule(options, 10))
    grads = jax.tree.map(lambda x: jnp.full_like(x, 0.5), PARAMS)
    return optimizer.update(grads, optimizer.init(PARAMS), PARAMS)[0]["bert"]


@pytest.mark.parametrize(
    ("path", "decayed"),
    [
        (("encoder", "layer", "0", "dense", "kernel"), True),
        (("encoder", "layer", "0", "dense", "bias"), False),
        (("embeddings", "word_embeddings", "embedding"), True),
        (("embeddings", "LayerNorm", "scale"), False),
        (("h", "0", "ln_1", "scale"), False),
        (("block", "0", "layer_norm", "weight"), False),
        (("lm_head", "layer_norm", "bias"), False),
        (("final_logits_bias",), False),
        (("decoder", "final_layer_norm", "scale"), False),
        (("model", "norm", "scale"), False),
        (("normal_form",), True),
    ],
)
def test_biases_and_norms_are_not_decayed(path, decayed):
    tree: dict = {}
    node = tree
    for key in path[:-1]:
        node = node.setdefault(key, {})
    node[path[-1]] = 1.0
    leaf = jax.tree.leaves(path_mask(NO_DECAY, matching=False)(tree))[0]
    assert leaf is decayed


@pytest.mark.parametrize("optim", first(OPTIMIZERS, "adamw", "adafactor", "lion", "sgd", "muon"))
def test_every_registered_optimizer_descends_and_applies_decay(optim):
    # Schedule-free optimizers refuse a schedule that decays.
    options = {"lr_scheduler_type": "constant"} if optim.startswith("schedule_free") else {}
    plain, decayed = (updates(optim=optim, weight_decay=decay, **options) for decay in (0.0, 0.5))
    kernel = plain["encoder"]["layer"]["0"]["dense"]["kernel"]
    assert (kernel < 0).all() and jnp.isfinite(kernel).all()
    if optim not in ("lamb", "lars"):  # see test_trust_ratio_includes_weight_decay
        assert (decayed["encoder"]["layer"]["0"]["dense"]["kernel"] < kernel - 1e-3).all()
    for name in ("scale", "bias"):
        np.testing.assert_array_equal(
            decayed["embeddings"]["LayerNorm"][name], plain["embeddings"]["LayerNorm"][name]
        )


def test_adamw_is_the_formula_of_the_paper():
    rate, beta1, beta2, epsilon, decay, g = 0.1, 0.9, 0.98, 1e-6, 0.01, 0.5
    got = updates(adam_beta1=beta1, adam_beta2=beta2, adam_epsilon=epsilon, weight_decay=decay)
    mean, square = (1 - beta1) * g / (1 - beta1), (1 - beta2) * g * g / (1 - beta2)
    expected = -rate * (mean / (np.sqrt(square) + epsilon) + decay * 1.0)
    np.testing.assert_allclose(
        got["embeddings"]["word_embeddings"]["embedding"], expected, rtol=1e-6
    )


def test_frozen_parameters_get_no_update_and_do_not_count_in_the_clipping_norm():
    got = updates(freeze=["word_embeddings"], optim="sgd", max_grad_norm=1.0, weight_decay=0.1)
    assert (got["embeddings"]["word_embeddings"]["embedding"] == 0).all()
    trained = [
        x
        for x in jax.tree.leaves(
            updates(freeze=["word_embeddings"], optim="sgd", max_grad_norm=1.0)
        )
        if x.any()
    ]
    assert optax.tree.norm(trained) == pytest.approx(0.1, rel=1e-5)


def test_further_parameters_can_be_exempt_from_decay():
    exempt = updates(weight_decay=0.5, no_decay=["word_embeddings"])
    other = updates()
    np.testing.assert_array_equal(
        *(u["embeddings"]["word_embeddings"]["embedding"] for u in (exempt, other))
    )


@pytest.mark.parametrize(
    ("name", "points"),
    [
        ("linear", {0: 0.0, 5: 0.05, 10: 0.1, 55: 0.05, 100: 0.0}),
        ("cosine", {5: 0.05, 10: 0.1, 55: 0.05, 100: 0.0}),
        ("constant", {0: 0.0, 10: 0.1, 100: 0.1}),
        ("constant_with_warmup", {5: 0.05, 60: 0.1}),
        ("inverse_sqrt", {5: 0.05, 10: 0.1, 40: 0.05, 90: 0.1 / 3}),
    ],
)
def test_schedules_warm_up_and_then_move_as_named(name, points):
    schedule = make_schedule(arguments(lr_scheduler_type=name, warmup_steps=10), 100)
    for step, rate in points.items():
        assert float(schedule(step)) == pytest.approx(rate, abs=1e-7), step


@pytest.mark.parametrize(
    ("form", "half"), [("linear", 0.5), ("cosine", 0.5), ("1-sqrt", 1 - 0.5**0.5)]
)
def test_a_stable_schedule_decays_at_the_end_of_the_run(form, half):
    flags = {
        "lr_scheduler_type": "warmup_stable_decay",
        "lr_decay_steps": 20,
        "lr_decay_type": form,
        "lr_end_ratio": 0.2,
        "warmup_steps": 10,
    }
    short, long = (make_schedule(arguments(**flags), steps) for steps in (100, 300))
    for step, rate in {5: 0.05, 10: 0.1, 80: 0.1, 90: 0.1 * (0.2 + 0.8 * half), 100: 0.02}.items():
        assert float(short(step)) == pytest.approx(rate, rel=1e-5), step
    # A run that is resumed with another length has had the same learning rates.
    assert all(float(short(step)) == float(long(step)) for step in range(0, 80, 7))
    with pytest.raises(UsageError, match="--lr_decay_steps 20 exceeds the 5 steps"):
        make_schedule(arguments(**flags), 15)


def test_schedule_free_adamw_averages_the_parameters_of_its_steps():
    """Compares with Defazio et al., 2024, algorithm 1, in float64."""
    options = arguments(
        optim="schedule_free_adamw",
        lr_scheduler_type="constant_with_warmup",
        warmup_steps=3,
        weight_decay=0.1,
    )
    factory, schedule = plugins.load().optimizers.get(options.optim), make_schedule(options, 10)
    optimizer = make_optimizer(factory, options, schedule)
    draw = np.random.default_rng(0)
    start = draw.normal(size=(3, 4))
    params = {"kernel": jnp.asarray(start, jnp.float32)}
    opt_state = optimizer.init(params)
    x, z, v, total = start.copy(), start.copy(), np.zeros_like(start), 0.0
    for step in range(8):
        y = 0.1 * z + 0.9 * x
        np.testing.assert_allclose(params["kernel"], y, rtol=2e-5, atol=1e-6)
        gradient = draw.normal(size=start.shape)
        rate = 0.1 * min(step / 3, 1)
        v = 0.999 * v + 0.001 * gradient**2
        scaled = gradient / (np.sqrt(v / (1 - 0.999 ** (step + 1))) + 1e-8)
        z = z - rate * (scaled + 0.1 * y)
        largest = 0.1 * min((step + 1) / 3, 1)  # optax weighs a step by the next learning rate
        total += largest**2
        share = largest**2 / total
        x = (1 - share) * x + share * z
        grads = {"kernel": jnp.asarray(gradient, jnp.float32)}
        change, opt_state = optimizer.update(grads, opt_state, params)
        params = {"kernel": params["kernel"] + change["kernel"]}
    zero = jnp.zeros(())
    trained = TrainState(params=params, opt_state=opt_state, extra={}, step=zero, window={})
    np.testing.assert_allclose(trained.inference_params["kernel"], x, rtol=2e-5, atol=1e-6)


def test_noam_is_the_papers_formula():
    """Vaswani et al., 2017, equation 3, with width 512 and 4000 warmup steps."""
    schedule = make_schedule(
        arguments(lr_scheduler_type="noam", warmup_steps=4000, learning_rate=2.0), 10_000, 512
    )
    for step in (1, 100, 4000, 4001, 9000):
        expected = 2.0 * 512**-0.5 * min(step**-0.5, step * 4000**-1.5)
        assert float(schedule(step - 1)) == pytest.approx(expected, rel=1e-5), step


@pytest.mark.parametrize("name", ["linear", "cosine", "constant_with_warmup", "inverse_sqrt"])
def test_a_schedule_takes_plain_numbers_from_the_first_step_on(name):
    """Returns the learning rate of a step, as the log reports it."""
    schedule = make_schedule(arguments(lr_scheduler_type=name, warmup_steps=1), 10)
    assert [float(schedule(step)) > 0 for step in (0, 1, 5)] == [False, True, True]


def test_noam_and_inverse_sqrt_have_one_shape():
    noam = make_schedule(arguments(lr_scheduler_type="noam", warmup_steps=10), 100, 64)
    other = make_schedule(arguments(lr_scheduler_type="inverse_sqrt", warmup_steps=10), 100)
    ratios = [float(noam(step - 1)) / float(other(step)) for step in (1, 5, 10, 50)]
    assert ratios == pytest.approx([ratios[0]] * 4, rel=1e-5)


@pytest.mark.parametrize(("width", "warmup"), [(64, 0), (None, 10)])
def test_noam_needs_a_warmup_and_a_width(width, warmup):
    with pytest.raises(UsageError, match="noam requires --warmup_steps"):
        make_schedule(arguments(lr_scheduler_type="noam", warmup_steps=warmup), 100, width)


def test_muon_optimizes_kernels_and_adam_the_rest():
    kernels = {
        "decoder": {"layers": {"0": {"fc1": {"kernel": jnp.ones((4, 8))}}}},
        "predictions": {"decoder": {"kernel": jnp.ones((4, 8))}},
        "lm_head": {"kernel": jnp.ones((4, 8))},
        "classifier": {"out_proj": {"kernel": jnp.ones((4, 8))}},
    }
    optimizer = muon(lambda step: 0.1, arguments(), lambda tree: jax.tree.map(jnp.ones_like, tree))
    grads = jax.tree.map(lambda leaf: jnp.arange(32.0).reshape(4, 8) + 1, kernels)
    kernel_updates, _ = optimizer.update(grads, optimizer.init(kernels), kernels)
    signs = {
        path[0]: bool(jnp.allclose(leaf, leaf[0, 0]))
        for path, leaf in trees.flatten(kernel_updates).items()
    }  # Adam's first step has one size everywhere
    assert signs == {"decoder": False, "predictions": True, "lm_head": True, "classifier": True}


def muon_kernels(name, head, scan_layers):
    """Returns the shapes of the parameters of a model that Muon optimizes, by path."""
    model = parallel.make_model(name, head, scan_layers=scan_layers)
    optimizer = make_optimizer(
        plugins.load().optimizers.get("muon"),
        arguments(optim="muon"),
        lambda step: 0.1,
        tuple(model.stacked_prefixes),
    )
    leaves = jax.tree_util.tree_leaves_with_path(
        jax.eval_shape(optimizer.init, model.abstract_params)
    )
    found = {}
    for key_path, leaf in leaves:
        names = [str(getattr(key, "key", getattr(key, "name", ""))) for key in key_path]
        if "muon" in names and "mu" in names:
            path = tuple(names[names.index("mu") + 1 :])
            found[path[path[0] == model.base_model_prefix :]] = leaf.shape
    return found


@pytest.mark.parametrize("scan_layers", [False, pytest.param(True, marks=pytest.mark.slow)])
@pytest.mark.parametrize("name", first(parallel.SIZES, "bert"))
def test_muon_gets_the_kernels_of_layers_and_none_of_a_head(name, scan_layers):
    heads = plugins.load().architectures.get(name).heads
    if "Model" not in heads:
        pytest.skip("the family has no model without a head")
    try:
        own = muon_kernels(name, "Model", scan_layers)
    except UsageError:
        pytest.skip("the layers of the small configuration cannot be scanned")
    assert all(path[-1] == "kernel" for path in own)
    assert own or name in ("vq_transformer",)
    for head in set(heads) - {"Model"}:
        with contextlib.suppress(UsageError):  # heads that need another configuration
            assert muon_kernels(name, head, scan_layers).keys() <= own.keys(), head


@pytest.mark.parametrize(("optim", "trust"), [("lamb", 1.0), ("lars", 0.001)])
def test_trust_ratio_includes_weight_decay(optim, trust):
    kernel = jnp.arange(24.0).reshape(4, 6) / 24
    steps = []
    for decay in (0.0, 0.1):
        options = arguments(optim=optim, weight_decay=decay)
        optimizer = make_optimizer(
            plugins.load().optimizers.get(optim), options, make_schedule(options, 10)
        )
        params = {"dense": {"kernel": kernel}}
        grads = {"dense": {"kernel": jnp.full_like(kernel, 0.5)}}
        steps.append(optimizer.update(grads, optimizer.init(params), params)[0]["dense"]["kernel"])
        ratio = float(jnp.linalg.norm(steps[-1]) / (0.1 * jnp.linalg.norm(kernel)))
        assert ratio == pytest.approx(trust, rel=1e-4)
    assert not np.allclose(*steps)


def test_warmup_ratio_applies_without_warmup_steps():
    schedule = make_schedule(arguments(warmup_ratio=0.2), 50)
    assert float(schedule(5)) == pytest.approx(0.05) and float(schedule(10)) == pytest.approx(0.1)


def test_a_warmup_longer_than_the_run_is_refused():
    with pytest.raises(UsageError, match="--warmup_steps .* exceeds the 3 steps"):
        make_schedule(arguments(warmup_steps=4), 3)


@pytest.mark.slow
def test_absolute_decay_does_not_depend_on_learning_rate():
    """With a learning rate of zero, only the decay changes parameters."""
    tree = {
        "model": {
            "embed_tokens": {"embedding": jnp.full((3, 2), 2.0)},
            "position_scale": jnp.float32(2.0),
            "layers": {
                "0": {
                    "attention": {
                        "input_norm": {"scale": jnp.full(2, 2.0), "bias": jnp.full(2, 2.0)},
                        "q_proj": {"kernel": jnp.full((2, 2), 2.0)},
                        "content_bias": jnp.full(2, 2.0),
                        "position_bias": jnp.full(2, 2.0),
                    }
                }
            },
            "norm": {"scale": jnp.full(2, 2.0)},
        },
        "lm_head_bias": jnp.full(3, 2.0),
    }
    options = arguments(learning_rate=0.0, weight_decay=0.25, weight_decay_mode="absolute")
    for name in ("adamw", "lion", "adafactor"):
        options = dataclasses.replace(options, optim=name)
        factory = plugins.load().optimizers.get(name)
        optimizer = make_optimizer(factory, options, make_schedule(options, 10))
        updates, _ = optimizer.update(tree, optimizer.init(tree), tree)
        moved = trees.flatten(optax.apply_updates(tree, updates))
        decayed = {trees.join(p) for p, leaf in moved.items() if jnp.allclose(leaf, 1.5)}
        assert decayed == {
            "model/embed_tokens/embedding",
            "model/position_scale",
            "model/layers/0/attention/q_proj/kernel",
        }
        assert all((leaf == 2.0).all() for p, leaf in moved.items() if trees.join(p) not in decayed)


def test_cosine_ends_at_the_end_ratio():
    options = arguments(
        lr_scheduler_type="cosine", warmup_steps=10, lr_end_ratio=0.1, lr_constant_steps=20
    )
    schedule = make_schedule(options, 100)
    rates = [float(schedule(step)) for step in range(100)]
    assert rates[0] == 0.0 and rates[10] == pytest.approx(0.1)
    halfway = 0.1 * (0.1 + 0.9 * 0.5)
    assert rates[45] == pytest.approx(halfway)
    assert rates[80:] == pytest.approx([0.01] * 20)


def test_linear_and_inverse_sqrt_schedules():
    linear = make_schedule(arguments(lr_end_ratio=0.5), 10)
    assert float(linear(10)) == pytest.approx(0.05)
    options = arguments(lr_scheduler_type="inverse_sqrt", warmup_steps=10, lr_constant_steps=30)
    with_constant_end = make_schedule(options, 80)
    assert (
        float(with_constant_end(50))
        == float(with_constant_end(79))
        == pytest.approx(0.1 * (10 / 50) ** 0.5)
    )


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"lr_end_ratio": 1.5}, "--lr_end_ratio 1.5: .*0 to 1"),
        (
            {"lr_end_ratio": 0.1, "lr_scheduler_type": "constant"},
            "--lr_end_ratio 0.1 .*linear and cosine",
        ),
        ({"lr_constant_steps": 5, "lr_scheduler_type": "noam"}, "noam .*inverse_sqrt"),
        ({"lr_scheduler_type": "warmup_stable_decay"}, "requires --lr_decay_steps"),
        ({"lr_decay_steps": 5}, "--lr_decay_steps 5 requires .*warmup_stable_decay"),
        ({"optim": "schedule_free_adamw"}, "schedule_free_adamw .*constant_with_warmup"),
        ({"optim": "adamw_8bit"}, "adamw_8bit: optax has no .*8-bit"),
        ({"weight_decay_mode": "relative"}, "decoupled, absolute"),
        ({"state_reset": "never"}, "--state_reset never .*--update_length"),
        ({"weight_decay": -0.1}, "--weight_decay -0.1: .*0 or more"),
        (
            {"weight_decay": 1.0, "weight_decay_mode": "absolute"},
            "--weight_decay 1.0 .*less than 1",
        ),
        ({"max_grad_norm": -1.0}, "--max_grad_norm -1.0: .*0 .no clipping"),
    ],
)
def test_flags_of_schedule_and_decay_that_make_no_sense_are_refused(changes, message):
    with pytest.raises(UsageError, match=message):
        arguments(**changes)


def test_constant_steps_precede_the_decay():
    with pytest.raises(UsageError, match="--lr_constant_steps 8 .* 10 steps"):
        make_schedule(arguments(lr_constant_steps=8, warmup_steps=2), 10)
