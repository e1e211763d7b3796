"""Train with hfseq and PyTorch on the same batches and compare the losses.

PyTorch starts from hfseq's initial weights for the same seed, reads the same batches (rows and
masks), and uses AdamW with the same settings and learning rate schedule. Dropout is disabled. With
the seed of the hfseq run, the losses should agree at every step. PyTorch is also trained with other
seeds, which change the initial weights and the order of the data. These runs show how much the
final loss varies between seeds.

The command is scripts/compare_pytorch_training.py.
"""

from __future__ import annotations

import dataclasses
import functools
import math
import tempfile
import time
from collections.abc import Callable, Iterable, Iterator, Sequence
from pathlib import Path
from typing import Any

import harness
import numpy as np
import torch
from torch import nn

from hfseq import plugins
from hfseq.data.batches import Batches, RowRandom
from hfseq.errors import UsageError
from hfseq.nn import trees
from hfseq.reports import plots
from hfseq.training import optimizers
from hfseq.training.arguments import Arguments
from hfseq.training.callbacks import StepInfo
from hfseq.training.run import Result, main
from hfseq.training.setup import Run, load_config, load_tokenizer, make_params

IGNORED = -100
FINAL_SHARE = 0.1
Batch = dict[str, np.ndarray]


@dataclasses.dataclass
class TrainingRecord:
    """The losses and the step time of a training run.

    Attributes:
        seed: Seed of the initial weights and of the data order.
        losses: Training loss of each step.
        eval_loss: Final loss of the validation split, or ``None`` without one.
        step_seconds: Median time of a step, without the first tenth of the steps (compilation and
            warm-up).
    """

    seed: int
    losses: list[float]
    eval_loss: float | None
    step_seconds: float = 0.0

    @property
    def final(self) -> float:
        """The validation loss or, without one, the mean loss of the last tenth of the steps."""
        last = max(1, round(len(self.losses) * FINAL_SHARE))
        return float(np.mean(self.losses[-last:])) if self.eval_loss is None else self.eval_loss

    def as_dict(self) -> dict[str, Any]:
        """Returns the fields and ``final_loss``."""
        return dataclasses.asdict(self) | {"final_loss": self.final}


def compare(
    arguments: Arguments,
    objective: str,
    seeds: Sequence[int],
    parity_steps: int,
    devices: Sequence[Any] | None = None,
) -> dict[str, Any]:
    """Trains with both libraries and writes ``pytorch_comparison.json`` and ``.png``.

    Args:
        arguments: Arguments of the hfseq run. The files are written into its output directory.
        objective: Name of the training objective.
        seeds: Seeds of the PyTorch runs. The first one must be the seed of the hfseq run.
        parity_steps: Number of initial steps whose losses are compared.
        devices: Devices of the hfseq run. Default: all.

    Returns:
        The content of ``pytorch_comparison.json``.

    Raises:
        UsageError: The comparison does not support one of the arguments.
    """
    check(arguments)
    switch_dropout_off(arguments, objective)
    result, ours = train_hfseq(arguments, objective, devices)
    run = result.run
    theirs = [train_torch(run, seed) for seed in seeds]
    # The speed of the machine drifts, so hfseq is timed before and after PyTorch.
    with tempfile.TemporaryDirectory() as repeat_folder:
        repeat_training = dataclasses.replace(arguments.training, output_dir=repeat_folder)
        repeat_arguments = dataclasses.replace(arguments, training=repeat_training)
        times = [
            ours.step_seconds,
            train_hfseq(repeat_arguments, objective, devices)[1].step_seconds,
        ]
    comparison = {
        "benchmark": "compare_pytorch_training",
        "objective": objective,
        "command": arguments.command,
        "config": run.model.config.to_dict(),
        "model": type(run.model).__name__,
        "steps": len(ours.losses),
        "batch_size": run.batch.rows,
        "machine": harness.machine_info(),
        "final_loss_is": "eval_loss" if ours.eval_loss is not None else "train_loss",
        **verdict(ours, theirs, parity_steps),
        **speed(result, times, theirs),
        "hfseq": ours.as_dict(),
        "pytorch": [record.as_dict() for record in theirs],
    }
    harness.write_json(run.folder / "pytorch_comparison.json", comparison)
    draw(comparison, run.folder / "pytorch_comparison.png")
    return comparison


def verdict(
    ours: TrainingRecord, theirs: Sequence[TrainingRecord], parity_steps: int
) -> dict[str, Any]:
    """Compares the losses of hfseq (``ours``) with those of the PyTorch runs (``theirs``).

    The first losses are compared step by step with the first PyTorch run, which has the same seed
    as hfseq. The final loss of hfseq is compared with the range of the final losses of all PyTorch
    runs. Since one of these runs has the same seed as hfseq, the final loss of hfseq should be in
    this range, or outside of it by no more than a rounding error. The range of the other seeds is
    reported separately.
    """
    steps = min(parity_steps, len(ours.losses))
    pairs = zip(ours.losses[:steps], theirs[0].losses[:steps], strict=True)
    differences = [abs(a - b) for a, b in pairs]
    finals = [record.final for record in theirs]
    low, high, other_finals = min(finals), max(finals), finals[1:]
    distance = max(low - ours.final, ours.final - high, 0.0)
    return {
        "parity_steps": steps,
        "differences": differences,
        "max_difference": max(differences),
        "final_loss": ours.final,
        "pytorch_final_losses": finals,
        "range": [low, high],
        "within_range": distance == 0.0,
        "distance_to_range": distance,
        "own_seed_difference": ours.final - finals[0],
        "range_of_other_seeds": [min(other_finals), max(other_finals)] if other_finals else None,
    }


def speed(
    result: Result, times: Sequence[float], theirs: Sequence[TrainingRecord]
) -> dict[str, Any]:
    """Returns the tokens per second of hfseq and PyTorch, without padding, and their ratio.

    ``times`` contains the median step times of hfseq before and after the PyTorch runs.
    """
    tokens = result.progress.tokens_seen / max(result.progress.step, 1)
    pytorch_seconds = float(np.median([record.step_seconds for record in theirs]))
    hfseq_seconds = float(np.mean(times))
    if not (pytorch_seconds and hfseq_seconds):  # too few steps to time
        return {}
    return {
        "step_seconds": times,
        "tokens_per_second": tokens / hfseq_seconds,
        "pytorch_tokens_per_second": tokens / pytorch_seconds,
        "speed_ratio": pytorch_seconds / hfseq_seconds,
    }


def median_step(moments: Sequence[float]) -> float:
    """Returns the median time between ``moments``, without the first tenth of them."""
    return float(np.median(np.diff(moments[len(moments) // 10 :]))) if len(moments) > 2 else 0.0


def report(result: dict[str, Any]) -> str:
    """Returns the text that summarizes a comparison."""
    finals = ", ".join(
        f"{record['final_loss']:.4f} (seed {record['seed']})" for record in result["pytorch"]
    )
    position = "within" if result["within_range"] else f"{result['distance_to_range']:.1e} outside"
    rates = ""
    if "speed_ratio" in result:
        rates = (
            f"\ntokens per second: hfseq {result['tokens_per_second']:.0f}, PyTorch "
            f"{result['pytorch_tokens_per_second']:.0f} (ratio {result['speed_ratio']:.2f})"
        )
    return (
        f"{result['model']}, {result['objective']}, {result['steps']} steps of "
        f"{result['batch_size']} rows\n"
        f"largest |loss difference| in the first {result['parity_steps']} steps: "
        f"{result['max_difference']:.2e}\n"
        f"final {result['final_loss_is'].replace('_', ' ')}: hfseq {result['final_loss']:.4f}, "
        f"{position} PyTorch's range: {finals}\n"
        f"with the same seed the final losses differ by {result['own_seed_difference']:+.1e}"
        + rates
    )


# -- checks of the arguments


def check(arguments: Arguments) -> None:
    """Raises UsageError for arguments that the comparison does not support."""
    training, model = arguments.training, arguments.model
    problems = [
        message
        for unsupported, message in (
            (training.optim != "adamw", f"--optim {training.optim} is unsupported, use adamw"),
            (
                model.recipe != "float32",
                f"--precision {model.recipe} is unsupported, use float32",
            ),
            (model.param_dtype != "float32", "--param_dtype must be float32"),
            (training.freeze, "--freeze is not supported"),
            (arguments.data.streaming, "--streaming is not supported, omit it"),
            (not training.do_train, "--do_train is required"),
        )
        if unsupported
    ]
    if problems:
        raise UsageError("; ".join(problems))


def switch_dropout_off(arguments: Arguments, objective: str) -> None:
    """Sets all dropout rates of the configuration to 0 through ``--config_overrides``."""
    plugins.load(extra=arguments.training.plugin)
    objective_spec = plugins.load().objectives.get(objective)
    folder = Path(arguments.training.output_dir)
    config = load_config(
        arguments, load_tokenizer(arguments, objective_spec, folder), objective_spec
    )
    rates = (
        f"{name}=0.0"
        for name, value in config.to_dict().items()
        if "drop" in name and isinstance(value, float) and value
    )
    changes = [arguments.model.config_overrides, *rates]
    arguments.model.config_overrides = ",".join(filter(None, changes)) or None


# -- the two trainings


def train_hfseq(
    arguments: Arguments, objective: str, devices: Sequence[Any] | None = None
) -> tuple[Result, TrainingRecord]:
    """Trains with hfseq and records the loss and the time of every step."""
    losses: list[float] = []
    moments: list[float] = []

    def record_step(info: StepInfo) -> None:
        losses.append(float(info.step_metrics["loss"]))
        moments.append(time.perf_counter())

    result = main(arguments, objective, callbacks=[record_step], devices=devices)
    if len(losses) != result.run.total_steps:
        raise UsageError(
            f"--output_dir {arguments.training.output_dir} contains an earlier run whose "
            "first losses are missing: use an empty directory or add --overwrite_output_dir"
        )
    eval_loss = result.metrics.get("eval_loss")
    return result, TrainingRecord(arguments.training.seed, losses, eval_loss, median_step(moments))


def train_torch(run: Run, seed: int) -> TrainingRecord:
    """Trains the PyTorch class for the same number of steps, from hfseq's weights of ``seed``."""
    with tempfile.TemporaryDirectory() as folder:
        model = torch_model(run, seed, folder)
    smoothing = getattr(run.arguments.data, "label_smoothing_factor", 0.0)
    trainer = TorchTrainer(model, decay_rule(run), run.schedule, run.arguments.training, smoothing)
    losses = trainer.train(training_batches(run, seed))
    evaluation = run.data.evaluation
    eval_loss = None if evaluation is None else trainer.evaluate(evaluation_batches(run))
    return TrainingRecord(seed, losses, eval_loss, median_step(trainer.moments))


def torch_model(run: Run, seed: int, folder: str) -> Any:
    """Saves hfseq's initial weights of ``seed`` and loads them with PyTorch."""
    import transformers

    training = dataclasses.replace(run.arguments.training, seed=seed)
    arguments = dataclasses.replace(run.arguments, training=training)
    params, _ = make_params(arguments, run.model, run.layout)
    cut = {path: run.layout.cut(path, leaf) for path, leaf in trees.flatten(params).items()}
    run.model.save_pretrained(folder, params=trees.unflatten(cut))
    name = run.model.torch_class_name()
    model, info = getattr(transformers, name).from_pretrained(folder, output_loading_info=True)
    problems = {key: sorted(map(str, value)) for key, value in info.items() if value}
    if problems:
        raise UsageError(f"{name} cannot load the weights that hfseq saved: {problems}")
    # hfseq computes these weights, for example sinusoidal positions, and does not train them.
    for derived in run.model.derived_weights():
        model.get_parameter(derived).requires_grad_(False)
    return model


def decay_rule(run: Run) -> Any:
    """Returns a function that returns whether hfseq applies weight decay to a parameter.

    The argument of the function is the name of the parameter in PyTorch.
    """
    names = run.model.weight_map
    patterns = (*optimizers.NO_DECAY, *run.arguments.training.no_decay)
    mask = trees.flatten(
        optimizers.path_mask(patterns, matching=False)(run.model.params_shape_tree)
    )
    decayed = {slot.name: bool(mask[slot.path]) for slot in names.slots}
    return lambda name: decayed[names.aliases.get(name, name)]


def training_batches(run: Run, seed: int) -> Iterator[Batch]:
    """Yields the training batches of an hfseq run with ``seed``."""
    source = Batches(run.data.train.rows, run.batch.rows, seed)
    for step in range(run.total_steps):
        rows = source[step]
        random = RowRandom(seed, step, np.arange(len(rows["input_ids"]), dtype=np.int32))
        yield run.objective.collate(rows, random, 1)


def evaluation_batches(run: Run) -> Iterator[Batch]:
    """Yields the validation batches with the masks that hfseq's evaluation draws."""
    data = run.data.evaluation
    for step in range(len(data)):
        random = RowRandom(run.arguments.training.seed, 0, data.indices(step)[0])
        yield run.objective.collate(data[step], random, 1)


# -- training with PyTorch: same weights, batches, masks, AdamW and schedule as hfseq.
# hfseq separates the documents of a packed row with segment IDs. PyTorch receives the equivalent
# attention masks, (batch, 1, queries, keys), and position IDs that restart in every document.


def positions(segments: np.ndarray) -> np.ndarray:
    """Returns position IDs that restart in every document of ``segments``, ``(rows, length)``."""
    indices = np.broadcast_to(np.arange(segments.shape[1]), segments.shape)
    begins = np.ones(segments.shape, bool)
    begins[:, 1:] = segments[:, 1:] != segments[:, :-1]
    return indices - np.maximum.accumulate(np.where(begins, indices, 0), axis=1)


def additive_mask(queries: np.ndarray, keys: np.ndarray, causal: bool = False) -> torch.Tensor:
    """Returns an additive attention mask, ``(rows, 1, queries, keys)``.

    It is 0 where a query may attend to a key, and the smallest float32 value elsewhere. ``queries``
    and ``keys`` are segment IDs, ``(rows, length)``. Padding attends to padding, so that every
    query can attend to at least one key.
    """
    visible = queries[:, :, None] == keys[:, None, :]
    if causal:
        visible = visible & np.tril(np.ones(visible.shape[1:], bool))
    lowest = np.finfo(np.float32).min
    return torch.from_numpy(np.where(visible, np.float32(0), lowest)[:, None])


def ids(array: np.ndarray) -> torch.Tensor:
    """Returns an integer array as an int64 tensor."""
    return torch.from_numpy(np.ascontiguousarray(array)).long()


def smoothed_entropy(smoothing: float, size: int) -> float:
    """Returns the entropy of smoothed labels, which hfseq subtracts from the loss."""
    if not smoothing:
        return 0.0
    other_probability = smoothing / (size - 1)
    return -(1 - smoothing) * math.log(1 - smoothing) - smoothing * math.log(other_probability)


class TorchTrainer:
    """Trains a PyTorch model on hfseq's batches.

    Args:
        model: The PyTorch model.
        decayed: Function that returns whether weight decay applies to a parameter, given the
            PyTorch name of the parameter.
        schedule: Function that returns the learning rate of a step.
        training: Training arguments with the AdamW settings and ``max_grad_norm``.
        smoothing: Label smoothing in training: the probability that is distributed over the labels
            other than the correct one.
    """

    def __init__(
        self,
        model: nn.Module,
        decayed: Callable[[str], bool],
        schedule: Callable[[int], Any],
        training: Any,
        smoothing: float = 0.0,
    ):
        self.model, self.schedule, self.training = model, schedule, training
        self.smoothing, self.moments = smoothing, list[float]()
        named_parameters = [(n, p) for n, p in model.named_parameters() if p.requires_grad]
        groups = [
            {
                "params": [p for n, p in named_parameters if decayed(n)],
                "weight_decay": training.weight_decay,
            },
            {"params": [p for n, p in named_parameters if not decayed(n)], "weight_decay": 0.0},
        ]
        betas = (training.adam_beta1, training.adam_beta2)
        self.optimizer = torch.optim.AdamW(groups, lr=0.0, betas=betas, eps=training.adam_epsilon)
        self._positions: dict[str, torch.Tensor] = {}
        for name, module in model.named_modules():
            if isinstance(module, nn.Embedding) and "position" not in name:
                # The padding token also starts the decoder input. hfseq trains its embedding.
                module.padding_idx = None
            # BART-like models do not accept position IDs, so the output of their position
            # embeddings is replaced.
            if name.endswith("embed_positions"):
                side = "decoder" if "decoder" in name.split(".") else "encoder"
                module.register_forward_hook(functools.partial(self._replace, side))

    def _replace(self, side: str, module: Any, args: Any, output: torch.Tensor) -> torch.Tensor:
        if side not in self._positions:
            return output
        return nn.functional.embedding(
            self._positions[side] + getattr(module, "offset", 0), module.weight
        )

    def train(self, batches: Iterable[Batch]) -> list[float]:
        """Trains one step per batch and returns the losses."""
        self.model.train()
        losses = []
        for number, batch in enumerate(batches):
            for group in self.optimizer.param_groups:
                group["lr"] = float(self.schedule(number))
            total, count = self.loss(batch)
            loss = total / max(count, 1)
            self.optimizer.zero_grad()
            loss.backward()
            self._clip(self.training.max_grad_norm)
            self.optimizer.step()
            losses.append(loss.item())
            self.moments.append(time.perf_counter())
        return losses

    def _clip(self, max_norm: float) -> None:
        """Clips the gradient norm as optax does. PyTorch's own function adds 1e-6 to the norm."""
        if max_norm <= 0:
            return
        grads = [p.grad for p in self.model.parameters() if p.grad is not None]
        norm = torch.linalg.vector_norm(torch.stack([torch.linalg.vector_norm(g) for g in grads]))
        if norm > max_norm:
            for grad in grads:
                grad.mul_(max_norm / norm)

    @torch.no_grad()
    def evaluate(self, batches: Iterable[Batch]) -> float:
        """Returns the mean loss over all targets of the batches."""
        self.model.eval()
        total = count = 0.0
        for batch in batches:
            part, targets = self.loss(batch)
            total, count = total + part.item(), count + targets
        return total / max(count, 1)

    def loss(self, batch: Batch) -> tuple[torch.Tensor, int]:
        """Returns the summed loss of a batch and the number of its targets."""
        logits, labels = self._logits(batch), ids(batch["labels"])
        if "masked_positions" in batch:
            masked = ids(batch["masked_positions"])
            flat = logits.reshape(len(masked), -1, logits.shape[-1])
            logits = flat[torch.arange(len(masked))[:, None], masked]
        smoothing = self.smoothing if self.model.training else 0.0
        size, count = logits.shape[-1], int((labels != IGNORED).sum())
        # PyTorch's label smoothing also gives probability to the correct label. Adapt the rate
        # accordingly.
        total = nn.functional.cross_entropy(
            logits.reshape(-1, size).float(),
            labels.reshape(-1),
            ignore_index=IGNORED,
            reduction="sum",
            label_smoothing=smoothing * size / (size - 1),
        )
        return total - count * smoothed_entropy(smoothing, size), count

    # -- the forward pass of each kind of batch

    def _logits(self, batch: Batch) -> torch.Tensor:
        if "decoder_segment_ids" in batch:
            return self._packed_pairs(batch)
        if "decoder_input_ids" in batch:
            return self._pairs(batch)
        segments = batch["segment_ids"]
        causal = "masked_positions" not in batch
        kwargs = {"use_cache": False} if causal else {}
        return self.model(
            input_ids=ids(batch["input_ids"]),
            attention_mask=additive_mask(segments, segments, causal),
            position_ids=ids(positions(segments) + self._first_position),
            **kwargs,
        ).logits

    @functools.cached_property
    def _first_position(self) -> int:
        """The first position ID. RoBERTa's positions start after its padding ID."""
        for name, module in self.model.named_modules():
            if name.endswith("position_embeddings"):
                padding = getattr(module, "padding_idx", None)
                return 0 if padding is None else padding + 1
        return 0

    def _pairs(self, batch: Batch) -> torch.Tensor:
        """Returns the logits of rows with one pair of source and target. Only padding is masked."""
        return self.model(
            input_ids=ids(batch["input_ids"]),
            attention_mask=ids(batch["segment_ids"] > 0),
            decoder_input_ids=ids(batch["decoder_input_ids"]),
            use_cache=False,
        ).logits

    def _packed_pairs(self, batch: Batch) -> torch.Tensor:
        """Returns the logits of rows with several packed pairs of source and target.

        The encoder runs separately because its mask differs from the cross-attention mask.
        """
        source, target = batch["segment_ids"], batch["decoder_segment_ids"]
        self._positions = {"encoder": ids(positions(source)), "decoder": ids(positions(target))}
        encoded = self.model.get_encoder()(
            input_ids=ids(batch["input_ids"]), attention_mask=additive_mask(source, source)
        )
        logits = self.model(
            encoder_outputs=encoded,
            attention_mask=additive_mask(target, source),
            decoder_input_ids=ids(batch["decoder_input_ids"]),
            decoder_attention_mask=additive_mask(target, target, causal=True),
            use_cache=False,
        ).logits
        self._positions = {}
        return logits


# -- the plot


def draw(result: dict[str, Any], path: Path) -> Path:
    """Plots the losses of all runs and the differences of the first steps."""
    losses: dict[str, Any] = {}

    def curve(label: str, values: list[float], **style: Any) -> None:
        smooth, array = len(values) >= plots.SMOOTH_FROM, np.asarray(values)
        array = plots.smooth(array, len(array) // 25 | 1) if smooth else array
        losses[label] = np.arange(1, len(array) + 1), array, style

    for number, record in enumerate(result["pytorch"]):
        dashes = plots.DASHES[number % len(plots.DASHES)]
        label = f"PyTorch, seed {record['seed']}: {record['final_loss']:.3f}"
        curve(label, record["losses"], color="#b08a3e", dashes=dashes, linewidth=1.1)
    label = f"hfseq: {result['final_loss']:.3f}"
    curve(label, result["hfseq"]["losses"], color=plots.TRAIN_COLOR, linewidth=1.6, alpha=0.85)
    values = np.asarray(result["differences"])
    values = np.where(values > 0, values, np.nan)  # zero is not defined on a logarithmic axis
    style = {"color": plots.TRAIN_COLOR, "linewidth": 1.2, "marker": "."}
    parts = [
        {"x": "step", "y": "training loss (nats)", "lines": losses, "log": False},
        {
            "x": f"step (largest: {result['max_difference']:.1e})",
            "y": "|loss difference|",
            "lines": {"_": (np.arange(1, len(values) + 1), values, style)},
            "log": False,
        },
    ]
    title = f"{result['model']} ({result['objective']}), hfseq and PyTorch"
    figure, panels = harness.curves(title, parts, (8, 6), (2, 1), height_ratios=[3, 2])
    panels[1].axhline(1e-3, color="#777777", linewidth=1.1, dashes=plots.DASHES[0])
    panels[1].set_yscale("log")
    return plots.save_figure(figure, path)
