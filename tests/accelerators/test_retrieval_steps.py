"""The training steps of retrieval models compile for accelerators, with memory linear in rows."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from transformers import BertConfig

from hfseq.cli.plan import run as planned
from hfseq.data.batches import RowRandom
from hfseq.training import aot
from hfseq.training.arguments import parse
from hfseq.training.checkpointer import Progress
from hfseq.training.setup import build_run

LENGTH = 128
SIZES = {
    "hidden_size": 256,
    "num_hidden_layers": 1,
    "num_attention_heads": 4,
    "intermediate_size": 512,
    "vocab_size": 1024,
    "max_position_embeddings": 514,
    "num_labels": 1,
}
FLAGS: dict[str, dict[str, Any]] = {
    "embedding": {"mini_batch_size": 8},
    "cross_encoder": {"loss": "multiple_negatives_ranking"},
    "sparse_encoder": {"mini_batch_size": 8},
    "multi_vector": {"query_expansion": False},
}


def temporary_bytes(objective: str, target: str, rows: int, folder: Path) -> int:
    """Returns the temporary memory of a training step that is compiled for a described device."""
    folder.mkdir()
    name = aot.parse(target)[0].name
    if reason := aot.unavailable_reason(name):
        pytest.skip(reason)
    lines = [json.dumps({"anchor": f"w{n}", "positive": f"w{n} w7"}) for n in range(rows)]
    (folder / "train.jsonl").write_text("\n".join(lines) + "\n")
    flags = {
        "output_dir": folder / "out",
        "model_type": "bert",
        "train_file": folder / "train.jsonl",
        "validation_split_percentage": 0,
        "max_seq_length": LENGTH,
        "pad_to_max_length": True,
        "per_device_train_batch_size": rows,
        "max_steps": 1,
        "precision": "bfloat16",
        "do_train": True,
        **FLAGS[objective],
    }
    config = BertConfig(**SIZES)
    tokenizer = planned.make_tokenizer(config, sentinels=False)
    arguments = parse([f"--{key}={value}" for key, value in flags.items()], objective=objective)
    devices = aot.describe(name, 1)
    run = build_run(
        arguments,
        objective,
        folder / "out",
        Progress(),
        devices,
        config=config,
        tokenizer=tokenizer,
    )
    assert run.data is not None and run.data.train is not None
    numbers = np.arange(rows)
    batch = run.objective.collate(run.data.train[0], RowRandom(0, 0, numbers), 1)
    placed = planned.abstract_placed_batch(run, batch | {"row": numbers.astype(np.int32)})
    program = aot.compile_for(
        devices[0],
        run.step_function(),
        run.abstract_state(),
        run.frozen,
        placed,
        fast_compile=True,
    )
    return program.memory_analysis().temp_size_in_bytes


@pytest.mark.slow
@pytest.mark.parametrize("target", ["h200", "v5e"])
@pytest.mark.parametrize("objective", FLAGS)
def test_memory_is_linear_in_rows(objective, target, tmp_path):
    small, large = (
        temporary_bytes(objective, target, rows, tmp_path / str(rows)) for rows in (16, 64)
    )
    # Four times the rows. The rest is independent of the batch, such as a second set of gradients.
    assert large < 4.4 * small
