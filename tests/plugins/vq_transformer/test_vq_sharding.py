"""The VQ Transformer on meshes of eight devices gives the results of one device."""

from __future__ import annotations

import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from hfseq.errors import UsageError
from hfseq.nn import trees
from hfseq.nn.sharding import Layout, batch_sharding, make_mesh
from hfseq_plugins.vq_transformer.sharding import RULES
from tests.plugins.vq_transformer import vq_cases
from tests.support.tiers import first

TOKENS = 32
MESHES = [
    "data=8",
    "data=2,tensor=4",
    "tensor=8",
    "data=2,fsdp=4",
    "data=2,sequence=4",
    "data=2,tensor=2,sequence=2",
]
# Sizes that are multiples of eight.
CHANGES = {"mhga": {"value_dim": 8}}


@functools.cache
def case(head: str):
    # Other vocabulary sizes are padded by the training loop, not here.
    model = vq_cases.model(head, vocab_size=24, **CHANGES.get(head, {}))
    return model, *vq_cases.variables(model)


def batch(rows: int = 8) -> dict[str, np.ndarray]:
    """Returns packed documents, one of them longer than a piece, with padding in some rows."""
    segment = np.ones((rows, TOKENS), np.int32)
    segment[:, 5:], segment[1:, 21:], segment[2:, 30:] = 2, 3, 0
    return {"input_ids": vq_cases.ids(rows, TOKENS), "segment_ids": segment}


def gradient(model, params, extra, batch):
    """Returns loss, gradients and updated collections of a training call."""

    def loss(params, batch):
        output, changed = model(**batch, params=params, extra=extra, train=True)
        logs = jax.nn.log_softmax(output.logits[:, :-1])
        labels = batch["input_ids"][:, 1:, None]
        label_scores = jnp.take_along_axis(logs, labels, axis=2)[..., 0]
        real = batch["segment_ids"][:, 1:] == batch["segment_ids"][:, :-1]
        return output.auxiliary_loss - jnp.where(real, label_scores, 0.0).sum(), changed

    return jax.jit(jax.value_and_grad(loss, has_aux=True))(params, batch)


@functools.cache
def on_one_device(head: str, rows: int = 8):
    model, params, extra = case(head)
    model.use_mesh(None)
    return gradient(model, params, extra, batch(rows))


def on_mesh(head: str, layout: str, rows: int = 8):
    model, params, extra = case(head)
    mesh = make_mesh(layout)
    shapes = {path: leaf.shape for path, leaf in trees.flatten(params).items()}
    shardings = trees.unflatten(Layout(mesh, RULES).shardings(shapes))
    placed = jax.device_put(batch(rows), batch_sharding(mesh, 2, lead=0))
    model.use_mesh(mesh)
    try:
        return gradient(model, jax.device_put(params, shardings), extra, placed)
    finally:
        model.use_mesh(None)


def assert_same(ours, theirs):
    for (path, a), (_, b) in zip(
        jax.tree.flatten_with_path(ours)[0], jax.tree.flatten_with_path(theirs)[0], strict=True
    ):
        name = jax.tree_util.keystr(path)
        np.testing.assert_allclose(a, b, rtol=2e-5, atol=2e-5 * (1 + np.abs(b).max()), err_msg=name)


QUICK = {("shga", "data=2,tensor=2,sequence=2")}


@pytest.mark.parametrize(
    ("head", "layout"),
    first([(head, layout) for head in vq_cases.HEADS for layout in MESHES], *QUICK),
)
def test_losses_gradients_and_statistics_are_those_of_one_device(head, layout):
    assert_same(on_mesh(head, layout), on_one_device(head))


@pytest.mark.slow
@pytest.mark.parametrize("layout", ["tensor=8", "sequence=8", "tensor=2,sequence=4"])
def test_one_row_can_be_spread_over_all_devices(layout):
    assert_same(on_mesh("shga", layout, rows=1), on_one_device("shga", rows=1))


def test_sizes_that_do_not_divide_are_named():
    model = vq_cases.model("mhga")
    shapes = {p: leaf.shape for p, leaf in trees.flatten(model.params_shape_tree).items()}
    with pytest.raises(UsageError, match=r"v_proj/kernel: dimension 1 of size 12 .* tensor=8"):
        Layout(make_mesh("tensor=8"), RULES, 19).specs(shapes)


@pytest.mark.parametrize("head", vq_cases.HEADS)
def test_every_parameter_has_a_rule_and_none_is_left_whole_by_fsdp_that_is_large(head):
    model = vq_cases.model(head, **CHANGES.get(head, {}), num_hidden_layers=2)
    shapes = {p: leaf.shape for p, leaf in trees.flatten(model.params_shape_tree).items()}
    specs = Layout(make_mesh("fsdp=2,tensor=4"), RULES, 19).specs(shapes)
    for path, spec in specs.items():
        assert path[-1] not in ("kernel", "embedding") or any(spec), path
