"""Meshes and sharding rules, and errors with solutions."""

from __future__ import annotations

import jax
import pytest
from jax.sharding import PartitionSpec as P

from hfseq.errors import UsageError
from hfseq.nn.sharding import Layout, data_shards, make_mesh

RULES = [
    (r"embedding$", "embedding"),
    (r"up/kernel$", "column"),
    (r"down/kernel$", "row"),
    (r"bias$", "vector"),
]


def layout(mesh: str, vocab_size: int = 10, stacked=()) -> Layout:
    shapes = {("embedding",): (10, 4), ("decoder", "embedding"): (12, 4)}
    return Layout(make_mesh(mesh), RULES, vocab_size, stacked, shapes)


def test_without_a_layout_all_devices_share_the_data():
    mesh = make_mesh(None)
    assert dict(mesh.shape) == {
        "data": 8,
        "fsdp": 1,
        "expert": 1,
        "tensor": 1,
        "sequence": 1,
    }
    assert data_shards(make_mesh("data=2,fsdp=2,tensor=2")) == 4


def test_one_axis_may_be_inferred():
    assert make_mesh("data=-1,tensor=2").shape["data"] == 4


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("data=3", "describes 3 devices, but there are 8"),
        ("date=8", "did you mean 'data'"),
        ("data=2,data=4", "given twice"),
        ("data=0", "positive number or -1"),
        ("data=x", "positive number or -1"),
        ("data=-1,fsdp=-1", "only one axis"),
        ("data=-1,tensor=3", "describes 6 devices"),
    ],
)
def test_an_impossible_mesh_is_explained(text, message):
    with pytest.raises(UsageError, match=message):
        make_mesh(text)


def test_the_first_matching_rule_decides():
    specs = layout("fsdp=4,tensor=2").specs(
        {("up", "kernel"): (8, 8), ("down", "kernel"): (8, 8), ("bias",): (8,)}
    )
    assert specs == {
        ("up", "kernel"): P("fsdp", "tensor"),
        ("down", "kernel"): P("tensor", "fsdp"),
        ("bias",): P("fsdp"),
    }


def test_stacked_layers_are_not_split_along_layers():
    rules = layout("fsdp=4,tensor=2", stacked=[("layer",)])
    assert rules.specs({("layer", "up", "kernel"): (3, 8, 8)}) == {
        ("layer", "up", "kernel"): P(None, "fsdp", "tensor")
    }


def test_all_sharding_problems_are_listed_in_one_error():
    with pytest.raises(UsageError) as raised:
        layout("fsdp=4,tensor=2").specs(
            {("up", "kernel"): (6, 8), ("odd", "scale"): (4,), ("down", "kernel"): (9, 8)}
        )
    text = str(raised.value)
    assert "up/kernel: dimension 0 of size 6 is not divisible by fsdp=4 (possible: 1, 2, 3)" in text
    assert (
        "odd/scale: no sharding rule matches" in text
        and "down/kernel: dimension 0 of size 9" in text
    )


def test_a_vocabulary_that_does_not_divide_is_padded_and_cut_again():
    rules, path = layout("data=2,tensor=4"), ("embedding",)
    table = jax.numpy.ones((10, 4))
    padded = rules.pad(path, table)
    assert padded.shape == (12, 4) and (padded[10:] == 0).all()
    assert rules.specs({path: (10, 4)}) == {path: P("tensor", "fsdp")}
    assert (rules.cut(path, padded) == table).all()
    other = jax.numpy.ones((12, 4))  # the decoder's own vocabulary
    assert rules.cut(("decoder", "embedding"), other).shape == (12, 4)


def test_an_architecture_without_rules_runs_on_data_and_fsdp_only():
    assert Layout(make_mesh("data=8"), None).specs({("a", "kernel"): (4, 8)}) == {
        ("a", "kernel"): P(None, "fsdp")
    }
    with pytest.raises(UsageError, match="declares no sharding rules"):
        Layout(make_mesh("data=4,tensor=2"), None)


def test_an_unknown_tactic_is_named():
    with pytest.raises(UsageError, match="colum"):
        Layout(make_mesh("data=8"), [(".*", "colum")])
