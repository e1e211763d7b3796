"""Training runs on preferences: DPO, KTO, ORPO, CPO and reward models."""

from __future__ import annotations

import json
import math

import jax
import pytest

import hfseq
from hfseq.errors import UsageError
from tests.support import preferences
from tests.training.conftest import assert_same, losses, make_runner

#: The flags of each objective that differ from DPO.
OBJECTIVES = {
    "dpo": {},
    "kto": {"train_file": "train-kto.jsonl", "validation_file": "valid-kto.jsonl"},
    "orpo": {},
    "cpo": {"loss_type": "simpo", "beta": 2, "cpo_alpha": 0.5},
    "reward": {"pad_token": "<|endoftext|>", "center_rewards_coefficient": 0.01},
}


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    """A folder with a tokenizer, a tiny model and preferences."""
    folder = preferences.write(tmp_path_factory.mktemp("preferences"))
    from transformers import AutoTokenizer, LlamaConfig

    values = dict(part.split("=") for part in preferences.TINY.split(","))
    sizes = {name: float(v) if "." in v else int(v) for name, v in values.items()}
    tokenizer = AutoTokenizer.from_pretrained(folder / "tokenizer")
    tokenizer.eos_token = "<|im_end|>"
    config = LlamaConfig(vocab_size=len(tokenizer), eos_token_id=tokenizer.eos_token_id, **sizes)
    hfseq.FlaxLlamaForCausalLM(config, seed=1).save_pretrained(folder / "model")
    tokenizer.save_pretrained(folder / "model")
    return folder


@pytest.fixture
def tune(folder, tmp_path):
    def run(output="run", objective="dpo", **changes):
        files = {"train_file": "train.jsonl", "validation_file": "valid.jsonl"}
        flags = files | OBJECTIVES[objective] | changes
        flags |= {name: folder / flags[name] for name in files}
        runner = make_runner(
            objective,
            tmp_path,
            model_name_or_path=folder / "model",
            global_batch_size=8,
            learning_rate=3e-3,
            max_steps=3,
            card_samples=0,
        )
        return runner(output, **flags)

    return run


def first_metrics(folder) -> dict[str, float]:
    records = map(json.loads, (folder / "metrics.jsonl").read_text().splitlines())
    return next(record for record in records if "train_loss" in record)


def test_a_new_adapter_is_compared_with_its_base(tune, folder):
    """The reference shares the base: the compiled step has no second copy of it as an argument."""
    adapter = {"use_peft": True, "lora_target_modules": "all-linear", "lora_dropout": 0.0}
    shared = tune("shared", **adapter)
    assert first_metrics(shared.folder)["train_loss"] == pytest.approx(math.log(2), rel=1e-6)
    separate = tune("separate", **adapter, ref_model_name_or_path=folder / "model")
    assert_same(losses(shared.folder), losses(separate.folder), 1e-6)
    assert shared.metrics["eval_loss"] == pytest.approx(separate.metrics["eval_loss"], rel=1e-6)
    base_size = sum(
        leaf.size
        for leaf in jax.tree.leaves(
            hfseq.FlaxLlamaForCausalLM.from_pretrained(folder / "model").params
        )
    )

    def argument_bytes(loop):
        run = loop.run
        batch = next(iter(run_batches(run)))
        step = run.step_function().lower(run.abstract_state(), run.frozen, batch).compile()
        return step.memory_analysis().argument_size_in_bytes

    difference = argument_bytes(separate) - argument_bytes(shared)
    assert difference == pytest.approx(4 * base_size, rel=0.01)


def run_batches(run):
    from hfseq.training.loader import Loader

    loader = Loader(run.data.train, run.objective, run.mesh, run.batch.micro_batches, 0)
    for item in loader.batches(0, 1):
        yield item.batch


def test_stored_log_probabilities_replace_the_reference(tune, folder, tmp_path):
    live = tune("live", max_steps=2)
    stored = tune("stored", max_steps=2, precompute_ref_log_probs=True)
    assert_same(losses(live.folder), losses(stored.folder), 1e-5)
    assert not stored.run.frozen
    # A resumed run reads them, and refuses those of other data.
    path = stored.folder / "reference_logps" / "train.npy"
    written = path.stat().st_mtime_ns
    tune("stored", max_steps=3, precompute_ref_log_probs=True)
    assert path.stat().st_mtime_ns == written
    with pytest.raises(UsageError, match="for other examples"):
        tune(
            "stored",
            max_steps=4,
            precompute_ref_log_probs=True,
            train_file=folder / "train-strings.jsonl",
        )


@pytest.mark.parametrize("objective", ["kto", "orpo", "cpo", "reward"])
def test_gradient_accumulation_is_exact(tune, objective):
    whole, parts = (
        tune(f"micro-{count}", objective, max_steps=2, gradient_accumulation_steps=count)
        for count in (1, 4)
    )
    assert_same(losses(whole.folder), losses(parts.folder))
    assert all(math.isfinite(value) for value in whole.metrics.values())
