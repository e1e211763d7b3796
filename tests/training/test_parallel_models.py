"""Every architecture on eight devices: the results of one device, no unnecessary collectives."""

from __future__ import annotations

import jax
import numpy as np
import pytest

from hfseq import plugins
from hfseq.training.collectives import find_collectives, unexpected_all_gathers
from tests.support import parallel
from tests.support.tiers import first

NAMES = sorted(plugins.load().architectures)
ALL_AXES = "data=2,fsdp=2,tensor=2"
MESHES = ("data=8", "data=4,tensor=2", ALL_AXES, "tensor=8", "data=2,sequence=4")
TEXT = [name for name in NAMES if parallel.main_head(name) in parallel.LANGUAGE]
# One layout for each kind of model. Families with the same code and other layouts are slow tests.
DEFAULT = {
    *((name, ALL_AXES, False) for name in ("bert", "fp8_encoder", "gpt2", "t5")),
    *((name, "data=4,tensor=2", True) for name in ("bart", "vq_transformer")),
}
SPLIT_LENGTH = ("data=4,tensor=2", "data=2,tensor=2,sequence=2", "tensor=8")


#: All-gathers that the architecture requires, by shape.
TOGETHER = {
    # Blocks of two tokens are few queries, for which CPUs use a separate implementation.
    "big_bird": ("2, 8, 4)", "1, 8, 4)", "6, 32)", "6, 8)"),
    "cohere": ("((8, 4),)",),  # the gradient of the norms of heads, computed by head
    "clip": ("(24, 8)",),  # every text of the batch is compared with every image
    "deberta-v2": ("(13, 32)", "(13, 16)"),  # relative positions, which all rows share
    "dinov2": ("(1, 10, 32)",),  # the gradient of the places, where the length was split
    # The recurrence reads all tokens in order. XLA gathers the chunks of several arrays where the
    # length is split: suboptimal.
    "falcon_mamba": ("18, 64)",),
    "mamba2": ("18, 96)", "5, 2, 4)", "5, 2, 8)", "5, 2, 4, 8)"),
    # The blocks of queries and of neighboring keys, whose heads XLA gathers: suboptimal, and as
    # large as a few activations of one layer.
    "longt5": ("4, 8, 4)", "12, 4, 8)"),
    "olmoe": ("((32,),)",),  # the gradient of the norms over all heads, computed by head
    # Pooling by attention with one query, whose projections are not split over tensor.
    "siglip_vision_model": ("((32, 32),)", "(4, 1, 32)"),
    "siglip2_vision_model": ("((32, 32),)", "(4, 1, 32)"),
    "vision-text-dual-encoder": ("(24, 8)", "(1, 10, 32)"),  # likewise
    "vision-encoder-decoder": ("(1, 10, 32)",),  # likewise
    "vit": ("(1, 10, 32)",),  # likewise
    # The gates of the position bias read the hidden states of each head, which are gathered in each
    # layer: suboptimal, and as large as a few activations.
    "wavlm": ("8, 32)", "(16, 32)", "(32,)", "8, 8, 4)", "8, 8)", "(1, 8, 1, 1)"),
}


LAYOUTS = [*((mesh, False) for mesh in MESHES), *((mesh, True) for mesh in SPLIT_LENGTH)]
#: Layouts of every family, which together split all axes. Other layouts take turns.
EVERY_FAMILY = [(ALL_AXES, False), ("data=2,tensor=2,sequence=2", True)]
IN_TURN = [layout for layout in LAYOUTS if layout not in EVERY_FAMILY]


def cases():
    for number, name in enumerate(NAMES):
        for layout in LAYOUTS:
            quick = (name, *layout) in DEFAULT
            if quick or layout in (*EVERY_FAMILY, IN_TURN[number % len(IN_TURN)]):
                label = f"{name}-{layout[0]}{'-sequence_parallel' if layout[1] else ''}"
                marks = () if quick else pytest.mark.slow
                yield pytest.param(name, *layout, marks=marks, id=label)


def assert_same(ours, theirs):
    loss, gradients = jax.tree.leaves(ours[0])[0], jax.tree.flatten_with_path(ours[1])[0]
    assert abs(loss - theirs[0]) <= 1e-5 * max(1, abs(theirs[0]))
    for (path, a), b in zip(gradients, jax.tree.leaves(theirs[1]), strict=True):
        error = np.abs(a - b).max()
        assert error <= 1e-5 * max(1, np.abs(b).max()), (jax.tree_util.keystr(path), error)


def test_every_architecture_has_test_sizes():
    assert set(NAMES) <= set(parallel.SIZES), "add the new family to tests/support/parallel.py"


@pytest.mark.slow
@pytest.mark.parametrize(("name", "mesh", "split_length"), list(cases()))
def test_losses_and_gradients_are_those_of_one_device(name, mesh, split_length):
    task = parallel.main_head(name)
    assert_same(parallel.run(name, task, mesh, split_length), parallel.run(name, task, None))


@pytest.mark.parametrize(("name", "mesh", "split_length"), list(cases()))
def test_only_rules_cause_gathers(name, mesh, split_length):
    model, layout, step = parallel.compile_step(name, parallel.main_head(name), mesh, split_length)
    collectives = find_collectives(step.as_text(), layout.mesh)
    unasked = [
        f"{collective.shapes} {collective.axes} {collective.source}"
        for collective in collectives
        if collective.op == "all-gather"
        and collective in unexpected_all_gathers(collectives, layout, model)
    ]
    assert [
        collective
        for collective in unasked
        if not any(shape in collective for shape in TOGETHER.get(name, ()))
    ] == []


@pytest.mark.parametrize(
    "name",
    first(TEXT, *(name for name in NAMES if (name, "data=4,tensor=2", True) in DEFAULT)),
)
def test_logits_and_embeddings_are_never_gathered(name):
    """The vocabulary is sharded in the embedding, the head and the loss."""
    task = parallel.main_head(name)
    model, layout, step = parallel.compile_step(name, task, "data=4,tensor=2", True)
    vocabulary = getattr(model.config, "decoder", model.config).vocab_size
    shapes = [
        shape
        for collective in find_collectives(step.as_text(), layout.mesh)
        for shape in collective.shapes
    ]
    assert shapes and not [shape for shape in shapes if vocabulary in shape]


OTHER_HEADS = [
    (name, task, *((ALL_AXES, False) if number % 2 else ("data=4,tensor=2", True)))
    for name in NAMES
    for number, task in enumerate(plugins.load().architectures.get(name).heads)
    if task != parallel.main_head(name)
]


@pytest.mark.slow
@pytest.mark.parametrize(("name", "task", "mesh", "split_length"), OTHER_HEADS)
def test_other_heads_give_the_numbers_of_one_device(name, task, mesh, split_length):
    assert_same(parallel.run(name, task, mesh, split_length), parallel.run(name, task, None))
