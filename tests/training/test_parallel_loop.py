"""Sequence parallelism, --inspect_sharding and invalid meshes, in short training runs."""

from __future__ import annotations

import jax
import pytest

from hfseq import plugins
from hfseq.errors import UsageError
from tests.training.conftest import TINY, losses

ONE = {"max_steps": 1, "warmup_steps": 0, "do_train": True}


@pytest.mark.slow
def test_sequence_parallelism_changes_no_loss(train):
    plain = losses(train("one", devices=1, max_steps=2).folder)
    loop = train("many", mesh="data=2,tensor=4", sequence_parallel=True, max_steps=2)
    assert loop.run.model.sequence_parallel
    assert losses(loop.folder) == pytest.approx(plain, rel=1e-5)


@pytest.mark.slow
def test_sharding_inspection_lists_placement_and_collectives(train, capsys):
    train("run", mesh="data=2,fsdp=2,tensor=2", inspect_sharding=True, **ONE)
    text = capsys.readouterr().out
    assert "data=2, fsdp=2, expert=1, tensor=2, sequence=1 (8 devices)" in text
    lines = {line.split()[0]: line.split() for line in text.splitlines() if line.startswith("  ")}
    query = lines["roberta/encoder/layer/0/attention/self/query/kernel"]
    assert query[1:] == ["32x32", "column", "fsdp,", "tensor", "1,024"]
    assert lines["input_ids"][2:] == ["-,", "data+fsdp,", "-"]
    assert "Optimizer state:" in text and "4.00 ways)" not in text.split("Optimizer")[0]
    assert any(line.split()[:2] == ["all-gather", "fsdp"] for line in text.splitlines())
    assert "Unexpected all-gathers: none" in text


@pytest.mark.slow
def test_a_rule_that_splits_a_product_the_wrong_way_is_reported(train, monkeypatch, capsys):
    spec = plugins.load().architectures.get("roberta")
    right = spec.load_sharding()
    # The second product of a pair, split by its output: it requires the whole result of the first.
    wrong = [(r"output/dense/kernel$", "column"), *right]
    monkeypatch.setattr(type(spec), "load_sharding", lambda self: wrong)
    loop = train("run", mesh="data=4,tensor=2", inspect_sharding=True, **ONE)
    text = capsys.readouterr().out.split("Unexpected all-gathers: ")[1]
    assert int(text.split()[0]) > 0 and " over tensor, " in text
    assert loop.progress.step == 1, "it is only a report, and training continues"


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"mesh": "tensor=8"}, "tensor=8 does not divide the 4 attention heads .*one of 1, 2, 4"),
        (
            {"mesh": "data=4,tensor=2", "sequence_parallel": True, "max_seq_length": 31},
            "sequence=1,tensor=2 with --sequence_parallel does not divide the 31 tokens",
        ),
        ({"mesh": "data=8", "global_batch_size": 4}, "4 rows of a step .* 8 data shards"),
    ],
)
def test_impossible_layouts_are_explained(train, changes, message):
    with pytest.raises(UsageError, match=message):
        train(**changes)


@pytest.mark.slow
def test_a_vocabulary_that_the_tensor_axis_does_not_divide_is_padded(train):
    changes = {"config_overrides": f"{TINY},vocab_size=301", "mesh": "data=2,tensor=4"}
    loop = train("run", **ONE, **changes)
    table = loop.state.params["roberta"]["embeddings"]["word_embeddings"]["embedding"]
    assert table.shape[0] == 304 and table.sharding.shard_shape(table.shape)[0] == 76
    assert isinstance(table, jax.Array)
