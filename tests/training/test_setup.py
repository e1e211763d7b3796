"""The model of a run, built from its flags."""

from __future__ import annotations

import jax
import jax.numpy as jnp
import pytest
from transformers import RobertaConfig

from hfseq import FlaxAutoModel
from hfseq.training.arguments import parse
from hfseq.training.setup import build_model

TINY = {"vocab_size": 50, "hidden_size": 16, "num_attention_heads": 2, "intermediate_size": 64}
CONFIG = RobertaConfig(**TINY, num_hidden_layers=2, max_position_embeddings=40)
RECOMPUTED = "--gradient_checkpointing saves little memory"


@pytest.mark.parametrize(
    "flags, warned",
    [
        (["--gradient_checkpointing"], True),
        (["--gradient_checkpointing", "--scan_layers"], False),
        ([], False),
    ],
    ids=["unrolled", "scanned", "kept"],
)
def test_recomputing_on_a_cpu_without_scanning_is_warned_of(tmp_path, caplog, flags, warned):
    argument_list = [
        "--output_dir",
        str(tmp_path),
        "--model_type",
        "roberta",
        "--train_file",
        "x",
        *flags,
    ]
    build_model(parse(argument_list, objective="mlm"), CONFIG, "ForMaskedLM")
    assert (RECOMPUTED in caplog.text) == warned


@pytest.mark.slow
def test_scanned_and_recomputed_layers_take_less_memory():
    def temporary(**options: bool) -> int:
        config = RobertaConfig(**TINY, num_hidden_layers=12, max_position_embeddings=40)
        model = FlaxAutoModel.from_config(config, _do_init=False, **options)
        ids = jnp.ones((16, 32), jnp.int32)
        params = jax.eval_shape(lambda: model.init_weights(jax.random.key(0), (1, 1)))
        step = jax.grad(lambda params: model(ids, params=params, train=False)[0].sum())
        program = jax.jit(step).lower(params).compile()
        return program.memory_analysis().temp_size_in_bytes

    recomputed = temporary(scan_layers=True, gradient_checkpointing=True)
    assert recomputed < 0.5 * temporary(scan_layers=True)
