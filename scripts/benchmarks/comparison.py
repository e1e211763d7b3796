"""Train with hfseq and with PyTorch on the same batches, and say how far their losses part.

PyTorch starts from hfseq's initial weights of the seed, sees hfseq's batches (same rows, same
masks), and runs the same AdamW and schedule without dropout. With the run's own seed the two should
agree step by step; with further seeds, which change weights and order, PyTorch shows how far a
final loss depends on chance.
"""

from __future__ import annotations

import dataclasses
import tempfile
import time
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

import comparison_plot
import numpy as np
from harness import machine_facts, write_json

from hfseq import plugins
from hfseq.data.batches import Batches, RowRandom
from hfseq.errors import UsageError
from hfseq.training import optimizers, setup
from hfseq.training.arguments import Arguments
from hfseq.training.run import Loop

FINAL_SHARE = 0.1
Batch = dict[str, np.ndarray]


@dataclasses.dataclass
class Trained:
    """What a training came to: the loss of each step, and of the validation split at the end.

    ``step_seconds`` is the median of the steps after the first tenth, which compiles and warms up.
    """

    seed: int
    losses: list[float]
    eval_loss: float | None
    step_seconds: float = 0.0

    @property
    def final(self) -> float:
        """The validation loss or, without one, the mean of the last tenth of the steps."""
        last = max(1, round(len(self.losses) * FINAL_SHARE))
        return float(np.mean(self.losses[-last:])) if self.eval_loss is None else self.eval_loss

    def as_dict(self) -> dict[str, Any]:
        """Return all of it for JSON."""
        return dataclasses.asdict(self) | {"final_loss": self.final}


def compare(
    arguments: Arguments,
    objective: str,
    seeds: Sequence[int],
    parity_steps: int,
    devices: Sequence[Any] | None = None,
) -> dict[str, Any]:
    """Train both and write ``pytorch_comparison.json`` and ``.png`` into the output directory.

    The first of ``seeds`` is the run's own; ``devices`` are hfseq's, all by default. Raises
    UsageError for what PyTorch's side has not.
    """
    check(arguments)
    switch_dropout_off(arguments, objective)
    loop, ours = train_hfseq(arguments, objective, devices)
    theirs = [train_torch(loop, seed) for seed in seeds]
    with tempfile.TemporaryDirectory() as again:  # machines get faster and slower: time both ends
        elsewhere = dataclasses.replace(arguments.training, output_dir=again)
        repeated = dataclasses.replace(arguments, training=elsewhere)
        times = [ours.step_seconds, train_hfseq(repeated, objective, devices)[1].step_seconds]
    folder = Path(loop.folder)
    result = {
        "benchmark": "compare_pytorch_training", "objective": objective,
        "command": arguments.command, "config": loop.model.config.to_dict(),
        "model": type(loop.model).__name__, "steps": len(ours.losses),
        "batch_size": loop.batch_size, "machine": machine_facts(),
        "final_loss_is": "eval_loss" if ours.eval_loss is not None else "train_loss",
        **verdict(ours, theirs, parity_steps), **speed(loop, times, theirs),
        "hfseq": ours.as_dict(), "pytorch": [other.as_dict() for other in theirs],
    }  # fmt: skip
    write_json(folder / "pytorch_comparison.json", result)
    comparison_plot.draw(result, folder / "pytorch_comparison.png")
    return result


def verdict(ours: Trained, theirs: Sequence[Trained], parity_steps: int) -> dict[str, Any]:
    """Return the largest difference of the first losses, and where the final one lies.

    The first of ``theirs`` has hfseq's own seed, so hfseq's loss lies in the range of all of them
    or a rounding error outside of it; what the others span by themselves is said beside it.
    """
    steps = min(parity_steps, len(ours.losses))
    pairs = zip(ours.losses[:steps], theirs[0].losses[:steps], strict=True)
    differences = [abs(a - b) for a, b in pairs]
    finals = [other.final for other in theirs]
    low, high, others = min(finals), max(finals), finals[1:]
    outside = max(low - ours.final, ours.final - high, 0.0)
    return {
        "parity_steps": steps, "differences": differences, "max_difference": max(differences),
        "final_loss": ours.final, "pytorch_final_losses": finals, "range": [low, high],
        "within_range": outside == 0.0, "distance_to_range": outside,
        "own_seed_difference": ours.final - finals[0],
        "range_of_other_seeds": [min(others), max(others)] if others else None,
    }  # fmt: skip


def speed(loop: Loop, times: Sequence[float], theirs: Sequence[Trained]) -> dict[str, Any]:
    """Return tokens a second, real ones, from the median step of each, and their ratio.

    ``times`` are those of hfseq before and after PyTorch's.
    """
    tokens = loop.progress.tokens_seen / max(loop.progress.step, 1)
    other = float(np.median([trained.step_seconds for trained in theirs]))
    own = float(np.mean(times))
    if not (other and own):  # too few steps to time
        return {}
    return {
        "step_seconds": times, "tokens_per_second": tokens / own,
        "pytorch_tokens_per_second": tokens / other, "speed_ratio": other / own,
    }  # fmt: skip


def median_step(moments: Sequence[float]) -> float:
    """Return the median time between ``moments``, the first tenth of them left out."""
    return float(np.median(np.diff(moments[len(moments) // 10 :]))) if len(moments) > 2 else 0.0


def report(result: dict[str, Any]) -> str:
    """Return what the command prints."""
    finals = ", ".join(
        f"{other['final_loss']:.4f} (seed {other['seed']})" for other in result["pytorch"]
    )
    where = "within" if result["within_range"] else f"{result['distance_to_range']:.1e} outside of"
    rates = ""
    if "speed_ratio" in result:
        rates = (
            f"\ntokens a second: hfseq {result['tokens_per_second']:.0f}, PyTorch "
            f"{result['pytorch_tokens_per_second']:.0f} (ratio {result['speed_ratio']:.2f})"
        )
    return (
        f"{result['model']}, {result['objective']}, {result['steps']} steps of "
        f"{result['batch_size']} rows\n"
        f"largest |loss difference| of the first {result['parity_steps']} steps: "
        f"{result['max_difference']:.2e}\n"
        f"final {result['final_loss_is'].replace('_', ' ')}: hfseq {result['final_loss']:.4f}, "
        f"{where} PyTorch's range: {finals}\n"
        f"with the same seed the final losses differ by {result['own_seed_difference']:+.1e}"
        + rates
    )


# -- what is asked for


def check(arguments: Arguments) -> None:
    """Refuse what the two sides do not have in common."""
    training, model = arguments.training, arguments.model
    problems = [
        text
        for wrong, text in (
            (training.optim != "adamw", f"--optim {training.optim}: only adamw is compared"),
            (model.recipe != "float32", f"--precision {model.recipe}: only float32 is compared"),
            (model.param_dtype != "float32", "--param_dtype: only float32 is compared"),
            (training.freeze, "--freeze is not compared"),
            (arguments.data.streaming, "--streaming is not compared: give the files without it"),
            (not training.do_train, "--do_train is needed"),
        )
        if wrong
    ]
    if problems:
        raise UsageError("; ".join(problems))


def switch_dropout_off(arguments: Arguments, objective: str) -> None:
    """Set every rate of the configuration to 0, as ``--config_overrides`` would."""
    plugins.load(extra=arguments.training.plugin)
    kind = plugins.load().objectives.get(objective)
    folder = Path(arguments.training.output_dir)
    config = setup.load_config(arguments, setup.load_tokenizer(arguments, kind, folder), kind)
    rates = [
        name
        for name, value in config.to_dict().items()
        if "drop" in name and isinstance(value, float) and value
    ]
    changes = [arguments.model.config_overrides, *(f"{name}=0.0" for name in rates)]
    arguments.model.config_overrides = ",".join(filter(None, changes)) or None


# -- the two trainings


def train_hfseq(
    arguments: Arguments, objective: str, devices: Sequence[Any] | None = None
) -> tuple[Loop, Trained]:
    """Run the training loop itself, and note the loss of every step."""
    losses: list[float] = []
    moments: list[float] = []
    loop = Loop(arguments, objective, devices)

    def note(loop: Loop) -> None:
        losses.append(float(loop.last_step["loss"]))
        moments.append(time.perf_counter())

    loop.add_callback(note)
    metrics = loop.run()
    if len(losses) != loop.total_steps:
        raise UsageError(
            f"--output_dir {arguments.training.output_dir} holds a run that was begun before, and "
            "its first losses are gone: give an empty one, or --overwrite_output_dir"
        )
    evaluated = metrics.get("eval_loss")
    return loop, Trained(arguments.training.seed, losses, evaluated, median_step(moments))


def train_torch(loop: Loop, seed: int) -> Trained:
    """Train PyTorch's class as many steps, from hfseq's initial weights of ``seed``."""
    from torch_twin import Twin

    with tempfile.TemporaryDirectory() as folder:
        model = torch_model(loop, seed, folder)
    smoothing = getattr(loop.arguments.data, "label_smoothing_factor", 0.0)
    twin = Twin(model, decay_rule(loop), loop.schedule, loop.training, smoothing)
    losses = twin.train(training_batches(loop, seed))
    evaluation = loop.data.evaluation
    found = None if evaluation is None else twin.evaluate(evaluation_batches(loop))
    return Trained(seed, losses, found, median_step(twin.moments))


def torch_model(loop: Loop, seed: int, folder: str) -> Any:
    """Save hfseq's initial weights of ``seed`` and load them with PyTorch."""
    import transformers

    training = dataclasses.replace(loop.training, seed=seed)
    arguments = dataclasses.replace(loop.arguments, training=training)
    params, _ = setup.make_params(arguments, loop.model, loop.layout)
    loop.model.save_pretrained(folder, params=setup.to_host(params, loop.layout))
    name = loop.model.torch_class_name()
    model, info = getattr(transformers, name).from_pretrained(folder, output_loading_info=True)
    wrong = {key: sorted(map(str, value)) for key, value in info.items() if value}
    if wrong:
        raise UsageError(f"{name} does not load what hfseq saved: {wrong}")
    for derived in loop.model.derived_weights():  # places, say: hfseq computes, trains them not
        model.get_parameter(derived).requires_grad_(False)
    return model


def decay_rule(loop: Loop) -> Any:
    """Return a function from PyTorch names to whether hfseq's optimizer decays the parameter."""
    from hfseq.nn import trees

    names = loop.model.weight_map
    patterns = (*optimizers.NO_DECAY, *loop.training.no_decay)
    mask = trees.flatten(
        optimizers.path_mask(patterns, matching=False)(loop.model.params_shape_tree)
    )
    decayed = {slot.name: bool(mask[slot.path]) for slot in names.slots}
    return lambda name: decayed[names.aliases.get(name, name)]


def training_batches(loop: Loop, seed: int) -> Iterator[Batch]:
    """Yield the batches of a run with ``seed``, as hfseq's feed makes them."""
    source = Batches(loop.data.train.rows, loop.batch_size, seed)
    for step in range(loop.total_steps):
        rows = source[step]
        random = RowRandom(seed, step, np.arange(len(rows["input_ids"]), dtype=np.int32))
        yield loop.objective.collate(rows, random, 1)


def evaluation_batches(loop: Loop) -> Iterator[Batch]:
    """Yield the validation split with the masks that hfseq's evaluation draws."""
    data = loop.data.evaluation
    for step in range(len(data)):
        random = RowRandom(loop.training.seed, 0, data.indices(step)[0])
        yield loop.objective.collate(data[step], random, 1)
