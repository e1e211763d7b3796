"""Training steps of bridged models, compiled for real chips: attention is fused as in hfseq."""

from __future__ import annotations

import dataclasses
import re
from typing import Any

import numpy as np
import pytest

pytest.importorskip("torch")

from transformers import AutoConfig  # noqa: E402

from hfseq.cli.plan import run as planned  # noqa: E402
from hfseq.data.batches import RowRandom  # noqa: E402
from hfseq.training import aot  # noqa: E402
from hfseq.training.arguments import parse  # noqa: E402
from hfseq.training.checkpointer import Progress  # noqa: E402
from hfseq.training.setup import build_run  # noqa: E402
from tests.support.images import draw_digits  # noqa: E402

pytestmark = pytest.mark.slow
#: No other size of these models is the same.
LENGTH, PATCHES = 384, 18 * 18 + 2  # of an image of 288 x 288, and two tokens
SIZES = {
    "hidden_size": 256,
    "num_hidden_layers": 1,
    "num_attention_heads": 4,
    "intermediate_size": 512,
}
TEXT = SIZES | {"vocab_size": 1024, "max_position_embeddings": 512}
NO_DROPOUT = {"hidden_dropout_prob": 0.0, "attention_probs_dropout_prob": 0.0}
DECODER = TEXT | {"num_key_value_heads": 2, "pad_token_id": 1, "attention_dropout": 0.0}


@dataclasses.dataclass(frozen=True)
class Family:
    """A bridged model that is compiled for accelerators.

    Attributes:
        objective: Objective of the training step.
        sizes: Values of its configuration.
        flags: Further flags of the training command.
        attentions: Number of attention calls.
        length: Number of tokens in each attention call.
        splash: Whether attention is fused on a TPU.
    """

    objective: str
    sizes: dict[str, Any]
    flags: dict[str, Any] = dataclasses.field(default_factory=dict)
    attentions: int = 1
    length: int = LENGTH
    splash: bool = True


FAMILIES = {
    "roc_bert": Family("mlm", TEXT | NO_DROPOUT, {"max_seq_length": LENGTH, "line_by_line": True}),
    "apertus": Family("clm", DECODER, {"block_size": LENGTH}),
    "mixtral": Family("clm", DECODER | {"num_local_experts": 4}, {"block_size": LENGTH}),
    "plbart": Family(
        "translation",
        {
            "vocab_size": 1024,
            "max_position_embeddings": 512,
            "d_model": 256,
            "dropout": 0.0,
            "decoder_start_token_id": 2,
            **{f"{side}_layers": 1 for side in ("encoder", "decoder")},
            **{f"{side}_attention_heads": 4 for side in ("encoder", "decoder")},
            **{f"{side}_ffn_dim": 512 for side in ("encoder", "decoder")},
        },
        {"max_source_length": LENGTH, "max_target_length": LENGTH},
        attentions=3,
        splash=False,
    ),
    "deit": Family(
        "image_classification",
        SIZES | NO_DROPOUT | {"image_size": 288, "patch_size": 16},
        {"image_size": 288, "decode_workers": 0},
        length=PATCHES,
    ),
}
FAMILIES["vit_msn"] = dataclasses.replace(FAMILIES["deit"], length=PATCHES - 1)


def step_text(name: str, devices: Any, folder: Any) -> str:
    """Compiles the training step of a bridged model and returns the text of the program."""
    family = FAMILIES[name]
    config = AutoConfig.for_model(name, **family.sizes)
    flags = {"output_dir": folder / "out", "max_steps": 1, "do_train": True, "bridge": True}
    flags |= {"precision": "bfloat16", "per_device_train_batch_size": 2} | family.flags
    values: dict[str, Any] = {"config": config}
    if family.objective == "image_classification":
        draw_digits(folder / "digits", 1, size=288)
        overrides = ",".join(f"{size}={value}" for size, value in family.sizes.items())
        flags |= {"train_dir": folder / "digits", "model_type": name, "config_overrides": overrides}
        values = {}  # the number of classes comes from the folder
    else:
        values |= {"tokenizer": planned.make_tokenizer(config, sentinels=False), "with_data": False}
    arguments = parse([f"--{key}={x}" for key, x in flags.items()], objective=family.objective)
    run = build_run(arguments, family.objective, folder / "out", Progress(), devices, **values)
    if run.data is None:
        batch = planned.abstract_batch(run, 2)
    else:
        rows = run.objective.collate(run.data.train[0], RowRandom(0, 0, np.arange(2)), 1)
        rows |= {"row": np.arange(2, dtype=np.int32)}
        batch = planned.abstract_placed_batch(run, rows)
    program = aot.compile_for(
        devices[0], run.step_function(), run.abstract_state(), run.frozen, batch, fast_compile=True
    )
    return program.as_text() or ""


@pytest.mark.parametrize("target", ["h200", "v5e"])
@pytest.mark.parametrize("name", FAMILIES)
def test_step_of_a_bridged_model_has_fused_attention(name, target, tmp_path):
    chip = aot.parse(target)[0].name
    if reason := aot.unavailable_reason(chip):
        pytest.skip(reason)
    text, family = step_text(name, aot.describe(chip, 1), tmp_path), FAMILIES[name]
    assert "callback" not in text
    shapes = {tuple(map(int, s.split(","))) for s in re.findall(r"\w+\[([\d,]+)\]", text)}
    is_fused = target == "h200" or family.splash
    squares = [shape for shape in shapes if shape.count(family.length) > 1]
    assert bool(squares) != is_fused
    if target == "h200":
        kernels = r'custom_call_target="__cudnn\$fmha\w*Softmax"', r'name = "flash_forward_kernel"'
        assert sum(len(re.findall(kernel, text)) for kernel in kernels) == family.attentions
    else:
        for phase in ("fwd", "dq", "dkv"):
            pattern = rf"{phase}_(segmented_)?(no_)?residuals"
            assert re.search(pattern, text) or not is_fused
