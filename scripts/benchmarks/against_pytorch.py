"""Train with hfseq and with PyTorch on the same batches, and say how far their losses part.

PyTorch starts from hfseq's initial weights of the seed, sees hfseq's batches (same rows, same
masks), and runs the same AdamW and schedule without dropout. With the run's own seed the two should
agree step by step; with further seeds, which change weights and order, PyTorch shows how far a
final loss depends on chance. scripts/compare_pytorch_training.py is the command.
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
from hfseq.training.state import to_host

IGNORED = -100
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
    result, ours = train_hfseq(arguments, objective, devices)
    run = result.run
    theirs = [train_torch(run, seed) for seed in seeds]
    with tempfile.TemporaryDirectory() as again:  # machines get faster and slower: time both ends
        elsewhere = dataclasses.replace(arguments.training, output_dir=again)
        repeated = dataclasses.replace(arguments, training=elsewhere)
        times = [ours.step_seconds, train_hfseq(repeated, objective, devices)[1].step_seconds]
    comparison = {
        "benchmark": "compare_pytorch_training",
        "objective": objective,
        "command": arguments.command,
        "config": run.model.config.to_dict(),
        "model": type(run.model).__name__,
        "steps": len(ours.losses),
        "batch_size": run.batch.rows,
        "machine": harness.machine_facts(),
        "final_loss_is": "eval_loss" if ours.eval_loss is not None else "train_loss",
        **verdict(ours, theirs, parity_steps),
        **speed(result, times, theirs),
        "hfseq": ours.as_dict(),
        "pytorch": [other.as_dict() for other in theirs],
    }
    harness.write_json(run.folder / "pytorch_comparison.json", comparison)
    draw(comparison, run.folder / "pytorch_comparison.png")
    return comparison


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
        "parity_steps": steps,
        "differences": differences,
        "max_difference": max(differences),
        "final_loss": ours.final,
        "pytorch_final_losses": finals,
        "range": [low, high],
        "within_range": outside == 0.0,
        "distance_to_range": outside,
        "own_seed_difference": ours.final - finals[0],
        "range_of_other_seeds": [min(others), max(others)] if others else None,
    }


def speed(result: Result, times: Sequence[float], theirs: Sequence[Trained]) -> dict[str, Any]:
    """Return tokens a second, real ones, from the median step of each, and their ratio.

    ``times`` are those of hfseq before and after PyTorch's.
    """
    tokens = result.progress.tokens_seen / max(result.progress.step, 1)
    other = float(np.median([trained.step_seconds for trained in theirs]))
    own = float(np.mean(times))
    if not (other and own):  # too few steps to time
        return {}
    return {
        "step_seconds": times,
        "tokens_per_second": tokens / own,
        "pytorch_tokens_per_second": tokens / other,
        "speed_ratio": other / own,
    }


def median_step(moments: Sequence[float]) -> float:
    """Return the median time between ``moments``, the first tenth of them left out."""
    return float(np.median(np.diff(moments[len(moments) // 10 :]))) if len(moments) > 2 else 0.0


def report(result: dict[str, Any]) -> str:
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
    plugins.load(extra=arguments.training.plugin)
    kind = plugins.load().objectives.get(objective)
    folder = Path(arguments.training.output_dir)
    config = load_config(arguments, load_tokenizer(arguments, kind, folder), kind)
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
) -> tuple[Result, Trained]:
    losses: list[float] = []
    moments: list[float] = []

    def note(info: StepInfo) -> None:
        losses.append(float(info.step_metrics["loss"]))
        moments.append(time.perf_counter())

    result = main(arguments, objective, callbacks=[note], devices=devices)
    if len(losses) != result.run.total_steps:
        raise UsageError(
            f"--output_dir {arguments.training.output_dir} holds a run that was begun before, and "
            "its first losses are gone: give an empty one, or --overwrite_output_dir"
        )
    evaluated = result.metrics.get("eval_loss")
    return result, Trained(arguments.training.seed, losses, evaluated, median_step(moments))


def train_torch(run: Run, seed: int) -> Trained:
    """Train PyTorch's class as many steps, from hfseq's initial weights of ``seed``."""
    with tempfile.TemporaryDirectory() as folder:
        model = torch_model(run, seed, folder)
    smoothing = getattr(run.arguments.data, "label_smoothing_factor", 0.0)
    twin = Twin(model, decay_rule(run), run.schedule, run.arguments.training, smoothing)
    losses = twin.train(training_batches(run, seed))
    evaluation = run.data.evaluation
    found = None if evaluation is None else twin.evaluate(evaluation_batches(run))
    return Trained(seed, losses, found, median_step(twin.moments))


def torch_model(run: Run, seed: int, folder: str) -> Any:
    """Save hfseq's initial weights of ``seed`` and load them with PyTorch."""
    import transformers

    training = dataclasses.replace(run.arguments.training, seed=seed)
    arguments = dataclasses.replace(run.arguments, training=training)
    params, _ = make_params(arguments, run.model, run.layout)
    run.model.save_pretrained(folder, params=to_host(params, run.layout))
    name = run.model.torch_class_name()
    model, info = getattr(transformers, name).from_pretrained(folder, output_loading_info=True)
    wrong = {key: sorted(map(str, value)) for key, value in info.items() if value}
    if wrong:
        raise UsageError(f"{name} does not load what hfseq saved: {wrong}")
    for derived in run.model.derived_weights():  # places, say: hfseq computes, trains them not
        model.get_parameter(derived).requires_grad_(False)
    return model


def decay_rule(run: Run) -> Any:
    """Return a function from PyTorch names to whether hfseq's optimizer decays the parameter."""
    names = run.model.weight_map
    patterns = (*optimizers.NO_DECAY, *run.arguments.training.no_decay)
    mask = trees.flatten(
        optimizers.path_mask(patterns, matching=False)(run.model.params_shape_tree)
    )
    decayed = {slot.name: bool(mask[slot.path]) for slot in names.slots}
    return lambda name: decayed[names.aliases.get(name, name)]


def training_batches(run: Run, seed: int) -> Iterator[Batch]:
    """Yield the batches of a run with ``seed``, as hfseq's feed makes them."""
    source = Batches(run.data.train.rows, run.batch.rows, seed)
    for step in range(run.total_steps):
        rows = source[step]
        random = RowRandom(seed, step, np.arange(len(rows["input_ids"]), dtype=np.int32))
        yield run.objective.collate(rows, random, 1)


def evaluation_batches(run: Run) -> Iterator[Batch]:
    """Yield the validation split with the masks that hfseq's evaluation draws."""
    data = run.data.evaluation
    for step in range(len(data)):
        random = RowRandom(run.arguments.training.seed, 0, data.indices(step)[0])
        yield run.objective.collate(data[step], random, 1)


# -- PyTorch's class trained as hfseq trains: same weights, batches, masks, AdamW and schedule.
# What hfseq says with segment ids PyTorch is told with masks of four dimensions (batch, 1, queries,
# keys) and with positions that begin again in every document, so packed rows stay packed.


def positions(segments: np.ndarray) -> np.ndarray:
    """Return 0, 1, 2 … in every document of ``segments`` (rows, length)."""
    places = np.broadcast_to(np.arange(segments.shape[1]), segments.shape)
    begins = np.ones(segments.shape, bool)
    begins[:, 1:] = segments[:, 1:] != segments[:, :-1]
    return places - np.maximum.accumulate(np.where(begins, places, 0), axis=1)


def additive_mask(queries: np.ndarray, keys: np.ndarray, causal: bool = False) -> torch.Tensor:
    """Return 0 where a query may see a key, else the least number: (rows, 1, queries, keys).

    Both are segment ids (rows, length). Padding sees padding, so no row of weights is empty.
    """
    same = queries[:, :, None] == keys[:, None, :]
    if causal:
        same = same & np.tril(np.ones(same.shape[1:], bool))
    lowest = np.finfo(np.float32).min
    return torch.from_numpy(np.where(same, np.float32(0), lowest)[:, None])


def ids(array: np.ndarray) -> torch.Tensor:
    return torch.from_numpy(np.ascontiguousarray(array)).long()


def smoothed_entropy(smoothing: float, size: int) -> float:
    """Return the loss of a perfect prediction of smoothed labels, which hfseq subtracts."""
    if not smoothing:
        return 0.0
    rest = smoothing / (size - 1)
    return -(1 - smoothing) * math.log(1 - smoothing) - smoothing * math.log(rest)


class Twin:
    """A PyTorch model that trains on hfseq's batches.

    ``decayed`` tells by PyTorch name which parameters decay; ``schedule`` gives the learning rate
    of a step; ``training`` holds AdamW's flags and ``max_grad_norm``. ``smoothing`` is the
    probability that training spreads over all labels but the right one.
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
        named = [(n, p) for n, p in model.named_parameters() if p.requires_grad]
        groups = [
            {"params": [p for n, p in named if decayed(n)], "weight_decay": training.weight_decay},
            {"params": [p for n, p in named if not decayed(n)], "weight_decay": 0.0},
        ]
        betas = (training.adam_beta1, training.adam_beta2)
        self.optimizer = torch.optim.AdamW(groups, lr=0.0, betas=betas, eps=training.adam_epsilon)
        self._places: dict[str, torch.Tensor] = {}
        for name, module in model.named_modules():
            if isinstance(module, nn.Embedding) and "position" not in name:
                # The padding token starts translations: like hfseq's, its vector is trained.
                module.padding_idx = None
            # BART and its kin take no positions from outside: their tables are told directly.
            if name.endswith("embed_positions"):
                side = "decoder" if "decoder" in name.split(".") else "encoder"
                module.register_forward_hook(functools.partial(self._replace, side))

    def _replace(self, side: str, module: Any, given: Any, found: torch.Tensor) -> torch.Tensor:
        if side not in self._places:
            return found
        return nn.functional.embedding(
            self._places[side] + getattr(module, "offset", 0), module.weight
        )

    def train(self, batches: Iterable[Batch]) -> list[float]:
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

    def _clip(self, most: float) -> None:
        """Scale gradients to the norm ``most``, exactly as optax does (PyTorch adds 1e-6)."""
        if most <= 0:
            return
        grads = [p.grad for p in self.model.parameters() if p.grad is not None]
        norm = torch.linalg.vector_norm(torch.stack([torch.linalg.vector_norm(g) for g in grads]))
        if norm > most:
            for grad in grads:
                grad.mul_(most / norm)

    @torch.no_grad()
    def evaluate(self, batches: Iterable[Batch]) -> float:
        """Return the loss over all targets of the batches."""
        self.model.eval()
        total = count = 0.0
        for batch in batches:
            part, targets = self.loss(batch)
            total, count = total + part.item(), count + targets
        return total / max(count, 1)

    def loss(self, batch: Batch) -> tuple[torch.Tensor, int]:
        logits, labels = self._logits(batch), ids(batch["labels"])
        if "masked_positions" in batch:
            chosen = ids(batch["masked_positions"])
            flat = logits.reshape(len(chosen), -1, logits.shape[-1])
            logits = flat[torch.arange(len(chosen))[:, None], chosen]
        smoothing = self.smoothing if self.model.training else 0.0
        size, count = logits.shape[-1], int((labels != IGNORED).sum())
        total = nn.functional.cross_entropy(
            logits.reshape(-1, size).float(),
            labels.reshape(-1),
            ignore_index=IGNORED,
            # PyTorch spreads over all labels, the right one too.
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
        """RoBERTa's positions begin after the padding id, with which it pads their table."""
        for name, module in self.model.named_modules():
            if name.endswith("position_embeddings"):
                padding = getattr(module, "padding_idx", None)
                return 0 if padding is None else padding + 1
        return 0

    def _pairs(self, batch: Batch) -> torch.Tensor:
        """One pair a row: padding is all that must be hidden."""
        return self.model(
            input_ids=ids(batch["input_ids"]),
            attention_mask=ids(batch["segment_ids"] > 0),
            decoder_input_ids=ids(batch["decoder_input_ids"]),
            use_cache=False,
        ).logits

    def _packed_pairs(self, batch: Batch) -> torch.Tensor:
        """Several pairs a row: the encoder apart, since its mask is not that of the source."""
        source, target = batch["segment_ids"], batch["decoder_segment_ids"]
        self._places = {"encoder": ids(positions(source)), "decoder": ids(positions(target))}
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
        self._places = {}
        return logits


# -- the picture


def draw(result: dict[str, Any], path: Path) -> Path:
    losses: dict[str, Any] = {}

    def curve(label: str, values: list[float], **style: Any) -> None:
        smooth, array = len(values) >= plots.SMOOTH_FROM, np.asarray(values)
        array = plots.smooth(array, len(array) // 25 | 1) if smooth else array
        losses[label] = np.arange(1, len(array) + 1), array, style

    for number, other in enumerate(result["pytorch"]):
        dashes = plots.DASHES[number % len(plots.DASHES)]
        label = f"PyTorch, seed {other['seed']}: {other['final_loss']:.3f}"
        curve(label, other["losses"], color="#b08a3e", dashes=dashes, linewidth=1.1)
    label = f"hfseq: {result['final_loss']:.3f}"
    curve(label, result["hfseq"]["losses"], color=plots.TRAIN_COLOR, linewidth=1.6, alpha=0.85)
    values = np.asarray(result["differences"])
    values = np.where(values > 0, values, np.nan)  # a logarithm has no place for equal losses
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
