"""Training steps on preferences and with a teacher, compiled for real chips."""

from __future__ import annotations

import math
import re

import pytest
from transformers import AutoTokenizer, LlamaConfig

import hfseq
from hfseq.cli.plan import run as planned
from hfseq.nn.logits import CHUNK_LOGITS
from hfseq.training import aot
from hfseq.training.arguments import parse
from hfseq.training.checkpointer import Progress
from hfseq.training.setup import build_run
from tests.support import chats

pytestmark = pytest.mark.slow
LENGTH, VOCABULARY, ROWS = 640, 32_768, 8


@pytest.mark.parametrize(
    ("objective", "teacher"),
    [("dpo", False), ("kto", False), ("orpo", False), ("clm", True), ("dpo", True), ("kto", True)],
)
@pytest.mark.parametrize("target", ["h200", "v5e"])
def test_a_step_holds_neither_all_scores_nor_all_logits(objective, teacher, target, tmp_path):
    name = aot.parse(target)[0].name
    if reason := aot.unavailable_reason(name):
        pytest.skip(reason)
    devices = aot.describe(name, 1)
    folder = chats.write_tokenizer(tmp_path / "tokenizer")
    config = LlamaConfig(
        vocab_size=VOCABULARY,
        hidden_size=256,
        num_hidden_layers=2,
        num_attention_heads=2,
        num_key_value_heads=1,
        intermediate_size=512,
        max_position_embeddings=LENGTH,
    )
    flags = {"output_dir": tmp_path / "out", "max_steps": 1, "do_train": True}
    flags |= {"precision": "bfloat16", "per_device_train_batch_size": ROWS}
    flags |= {"block_size" if objective == "clm" else "max_length": LENGTH}
    if teacher:
        hfseq.FlaxLlamaForCausalLM(config).save_pretrained(tmp_path / "teacher")
        AutoTokenizer.from_pretrained(folder).save_pretrained(tmp_path / "teacher")
        flags["teacher"] = tmp_path / "teacher"
    arguments = parse([f"--{key}={value}" for key, value in flags.items()], objective=objective)
    run = build_run(
        arguments,
        objective,
        tmp_path / "out",
        Progress(),
        devices,
        tokenizer=AutoTokenizer.from_pretrained(folder),
        config=config,
        with_data=False,
    )
    program = aot.compile_for(
        devices[0],
        run.step_function(),
        run.abstract_state(),
        run.abstract_frozen(),
        planned.abstract_batch(run, ROWS),
        fast_compile=True,
    )
    shapes = {
        tuple(map(int, match.split(",")))
        for match in re.findall(r"\w+\[([\d,]+)\]", program.as_text() or "")
    }
    assert not [shape for shape in shapes if shape.count(LENGTH) > 1]
    logits = [math.prod(shape) for shape in shapes if VOCABULARY in shape]
    assert max(logits) <= max(CHUNK_LOGITS, 256 * VOCABULARY)
