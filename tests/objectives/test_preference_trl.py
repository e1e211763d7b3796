"""Losses, metrics and gradients compared with those of TRL on the same batch and model."""

from __future__ import annotations

from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import hfseq
from hfseq.data.arguments import OBJECTIVES, PreferenceArguments
from hfseq.nn import trees
from hfseq.objectives.base import Auxiliary
from hfseq.objectives.divergences import divergence
from hfseq.plugins import load
from tests.support import preferences
from tests.support.chats import write_lines

# The warnings are those of TRL about arguments of Transformers.
pytestmark = [pytest.mark.slow, pytest.mark.filterwarnings("ignore::FutureWarning")]
ROWS = 6
IGNORED = -100


@pytest.fixture(scope="module")
def trl(tmp_path_factory):
    """TRL, and a folder with a tiny model and preferences."""
    pytest.importorskip("trl", reason="TRL is not installed")
    pytest.importorskip("trl.experimental.orpo")
    folder = preferences.write(tmp_path_factory.mktemp("trl"))
    preferences.save_model(folder)
    pairs = preferences.pairs(ROWS, 2)
    for number, item in enumerate(pairs):
        item["margin"] = 0.1 * number
    write_lines(folder / "margin.jsonl", pairs)
    return folder


def moved(model):
    """Adds noise to a PyTorch model, so that it differs from the reference."""
    import torch

    generator = torch.Generator().manual_seed(0)
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.add_(0.02 * torch.randn(parameter.shape, generator=generator))
    return model


def trainer_of(name: str, folder: Any, data: str, **options: Any) -> Any:
    import importlib

    from datasets import load_dataset
    from transformers import (
        AutoModelForCausalLM,
        AutoModelForSequenceClassification,
        AutoTokenizer,
    )

    module = "trl" if name in ("DPO", "KTO", "Reward") else f"trl.experimental.{name.lower()}"
    library = importlib.import_module(module)
    arguments = getattr(library, f"{name}Config")(
        output_dir=str(folder / "out"),
        use_cpu=True,
        bf16=False,
        gradient_checkpointing=False,
        report_to=[],
        per_device_train_batch_size=ROWS,
        max_length=64,
        **options,
    )
    head = AutoModelForSequenceClassification if name == "Reward" else AutoModelForCausalLM
    extra = {"num_labels": 1} if name == "Reward" else {}
    return getattr(library, f"{name}Trainer")(
        model=head.from_pretrained(folder / "model", **extra),
        args=arguments,
        train_dataset=load_dataset(
            "json", data_files=str(folder / data), split="train", cache_dir=str(folder / "cache")
        ).select(range(ROWS)),
        processing_class=AutoTokenizer.from_pretrained(folder / "model"),
    )


def theirs(trainer: Any) -> tuple[dict, float, dict, dict]:
    """Returns TRL's batch, loss, metrics and gradients."""
    import torch

    torch.manual_seed(0)
    model = moved(trainer.model).train()
    loader = torch.utils.data.DataLoader(
        trainer.train_dataset, batch_size=ROWS, collate_fn=trainer.data_collator
    )
    batch = next(iter(loader))
    if hasattr(trainer, "get_batch_loss_metrics"):
        loss, metrics = trainer.get_batch_loss_metrics(model, batch, train_eval="train")
        metrics = {key: float(value) for key, value in metrics.items()}
    else:
        loss = trainer.compute_loss(model, dict(batch))
        metrics = {key: values[-1] for key, values in trainer._metrics["train"].items()}
    loss.backward()
    gradients = {name: p.grad.numpy() for name, p in model.named_parameters()}
    arrays = {name: value.numpy() for name, value in batch.items() if hasattr(value, "numpy")}
    return arrays, float(loss.detach()), metrics, gradients


def sides(ids: np.ndarray, mask: np.ndarray, answers: np.ndarray) -> dict[str, np.ndarray]:
    """Returns a batch of hfseq from arrays `(rows, answers, width)` of token IDs and masks."""
    following = np.roll(mask, -1, axis=-1)
    following[..., -1] = 0
    targets = np.where((mask > 0) & (following > 0), np.roll(ids, -1, axis=-1), IGNORED)
    learned = np.roll(answers, -1, axis=-1)
    learned[..., -1] = 0
    arrays = {"answer_ids": ids, "segments": mask, "targets": targets, "learned": learned}
    return {name: np.asarray(array, np.int32) for name, array in arrays.items()}


def pair_batch(arrays: dict[str, np.ndarray]) -> dict[str, np.ndarray]:
    if "chosen_input_ids" in arrays:  # ORPO and CPO
        width = max(arrays[f"{side}_input_ids"].shape[1] for side in ("chosen", "rejected"))

        def both(name: str, fill: int) -> np.ndarray:
            parts = [arrays[f"{side}_{name}"] for side in ("chosen", "rejected")]
            pads = [((0, 0), (0, width - part.shape[1])) for part in parts]
            padded = [
                np.pad(part, pad, constant_values=fill)
                for part, pad in zip(parts, pads, strict=True)
            ]
            return np.stack(padded, 1)

        answers = (both("labels", IGNORED) != IGNORED).astype(int)
        batch = sides(both("input_ids", 0), both("attention_mask", 0), answers)
    else:
        mask = arrays.get("completion_mask", arrays["attention_mask"])
        batch = sides(
            *(
                array.reshape(2, ROWS, -1).swapaxes(0, 1)
                for array in (arrays["input_ids"], arrays["attention_mask"], mask)
            )
        )
    extra = {"margin": arrays["margin"]} if "margin" in arrays else {}
    return batch | {"pairs": np.ones((ROWS, 1), bool)} | extra


def completion_batch(arrays: dict[str, np.ndarray]) -> dict[str, np.ndarray]:
    batches = [
        sides(*(arrays[f"{prefix}{name}"][:, None] for name in
                ("input_ids", "attention_mask", "completion_mask")))
        for prefix in ("", "KL_")
    ]  # fmt: skip
    batch = batches[0] | {f"mismatched_{name}": array for name, array in batches[1].items()}
    return batch | {"pairs": np.ones((ROWS, 1), bool), "label": arrays["label"].astype(np.float32)}


def ours(
    name: str, folder: Any, trainer: Any, batch: dict, tmp_path: Any, **flags: Any
) -> tuple[float, dict, dict]:
    """Returns the loss, the metrics and the gradients of hfseq for the model of a trainer."""
    from transformers import AutoTokenizer

    trainer.model.save_pretrained(tmp_path / "moved")
    kind = load().objectives.get(name)
    head = "SequenceClassification" if name == "reward" else "CausalLM"
    auto = getattr(hfseq, f"FlaxAutoModelFor{head}")
    model = auto.from_pretrained(tmp_path / "moved")
    arguments: Any = OBJECTIVES[name](train_file=["x"], **flags)
    assert isinstance(arguments, PreferenceArguments)
    objective = kind(arguments, AutoTokenizer.from_pretrained(folder / "model"), model.config)
    objective.prepare(model)
    inputs: dict[str, Any] = {key: jnp.asarray(array) for key, array in batch.items()}
    if objective.auxiliary_models():
        reference = hfseq.FlaxAutoModelForCausalLM.from_pretrained(folder / "model")
        objective.auxiliary = {"reference": Auxiliary(reference)}
        inputs["auxiliary"] = {"reference": reference.params}

    def loss(params: Any) -> Any:
        values = dict(inputs)
        if objective.uses_step_totals:
            values["step_totals"] = objective.step_totals(model, params, values, {})
        total, count, outputs = objective.loss(model, params, values, None, True, extra={})
        return total / count, (count, total, outputs["totals"])

    (value, (count, total, totals)), grads = jax.value_and_grad(loss, has_aux=True)(model.params)
    sums = {"loss": float(total), "count": float(count)}
    metrics = objective.metrics(sums | {key: float(part) for key, part in totals.items()})
    gradients = model.weight_map.to_torch(trees.flatten(grads))
    return float(value), metrics, gradients


#: TRL's ORPO and CPO average the logits over prompts and padding, too.
LOGITS = ("logits/chosen", "logits/rejected")


def check(expected: tuple, found: tuple, without: tuple[str, ...] = ()) -> None:
    loss, metrics, gradients = expected
    assert found[0] == pytest.approx(loss, rel=5e-5)
    shared = metrics.keys() & found[1].keys() - {*without}
    assert len(shared) >= 3
    for name in shared:
        assert found[1][name] == pytest.approx(metrics[name], rel=5e-5, abs=2e-6), name
    largest = max(np.abs(array).max() for array in gradients.values())
    for name, array in gradients.items():
        if name in found[2]:
            own = np.array(found[2][name])
            if "embed_tokens" in name:  # PyTorch's embedding of the padding token has no gradient
                own[0] = array[0]
            np.testing.assert_allclose(own, array, atol=1e-5 * largest, rtol=0, err_msg=name)


@pytest.mark.parametrize(
    ("losses", "options"),
    [
        (["sigmoid"], {}),
        (["hinge"], {}),
        (["ipo"], {}),
        (["robust"], {"label_smoothing": 0.2}),
        (["apo_zero"], {}),
        (["apo_down"], {}),
        (["sigmoid_norm"], {}),
        (["bco_pair"], {}),
        (["nca_pair"], {}),
        (["sigmoid", "bco_pair", "sft"], {"loss_weights": [0.8, 0.2, 1.0]}),
    ],
)
def test_dpo_equals_trl(trl, tmp_path, losses, options):
    trainer = trainer_of("DPO", trl, "train.jsonl", loss_type=losses, **options)
    arrays, *expected = theirs(trainer)
    batch = pair_batch(arrays)
    check(expected, ours("dpo", trl, trainer, batch, tmp_path, loss_type=losses, **options))


@pytest.mark.parametrize("loss", ["kto", "apo_zero_unpaired"])
def test_kto_equals_trl(trl, tmp_path, loss):
    weights = {"desirable_weight": 1.3, "undesirable_weight": 0.8}
    trainer = trainer_of("KTO", trl, "train-kto.jsonl", loss_type=loss, **weights)
    arrays, *expected = theirs(trainer)
    if loss != "kto":
        arrays |= {f"KL_{name}": array for name, array in arrays.items()}
    batch = completion_batch(arrays)
    check(expected, ours("kto", trl, trainer, batch, tmp_path, loss_type=loss, **weights))


def test_orpo_equals_trl(trl, tmp_path):
    trainer = trainer_of("ORPO", trl, "train-strings.jsonl", beta=0.3)
    arrays, *expected = theirs(trainer)
    check(expected, ours("orpo", trl, trainer, pair_batch(arrays), tmp_path, beta=0.3), LOGITS)


@pytest.mark.parametrize(
    ("loss", "options"),
    [
        ("sigmoid", {"label_smoothing": 0.1}),
        ("hinge", {}),
        ("ipo", {}),
        ("simpo", {"beta": 2.0, "simpo_gamma": 0.8}),
        ("alphapo", {"beta": 2.0, "simpo_gamma": 0.8, "alpha": 0.3, "cpo_alpha": 0.0}),
    ],
)
def test_cpo_equals_trl(trl, tmp_path, loss, options):
    options = {"cpo_alpha": 0.6, **options}
    trainer = trainer_of("CPO", trl, "train-strings.jsonl", loss_type=loss, **options)
    arrays, *expected = theirs(trainer)
    batch = pair_batch(arrays)
    found = ours("cpo", trl, trainer, batch, tmp_path, loss_type=loss, **options)
    # TRL does not compute the cross-entropy if its weight is 0.
    check(expected, found, LOGITS if options["cpo_alpha"] else (*LOGITS, "nll_loss"))


def test_reward_models_equal_those_of_trl(trl, tmp_path):
    options = {"center_rewards_coefficient": 0.05}
    trainer = trainer_of("Reward", trl, "margin.jsonl", **options)
    arrays, *expected = theirs(trainer)
    batch = pair_batch(arrays)
    assert batch["margin"].max() > 0.4
    check(expected, ours("reward", trl, trainer, batch, tmp_path, **options))


@pytest.mark.parametrize(("name", "beta"), [("forward_kl", 0.0), ("jsd", 0.3), ("reverse_kl", 1.0)])
def test_divergences_equal_trl(trl, name, beta):
    """On fixed logits. TRL does not multiply by the square of the temperature."""
    import torch
    from trl.experimental.gkd import GKDTrainer

    student, teacher = np.random.default_rng(0).normal(size=(2, 4, 7, 50)).astype(np.float32) * 3
    inputs = torch.tensor(student, requires_grad=True)
    expected = GKDTrainer.generalized_jsd_loss(
        inputs, torch.tensor(teacher), beta=beta, temperature=2.0, reduction="sum"
    )
    expected.backward()

    def loss(logits: Any) -> Any:
        return divergence(name, logits, jnp.asarray(teacher), 2.0, beta).sum() / 4

    result, gradient = jax.value_and_grad(loss)(jnp.asarray(student))
    assert float(result) == pytest.approx(float(expected.detach()), rel=1e-6)
    largest = float(inputs.grad.abs().max())
    np.testing.assert_allclose(gradient, inputs.grad.numpy(), atol=1e-5 * largest)
