"""What happens around a step: what a callback is, and the ones that every run has.

A callback is a function ``f(info)``, called after each step, or an object with some of the moments
of :class:`Callback`, which are those of Transformers' Trainer. A state that it returns replaces the
run's. The order is a promise: before a step Calibrate, InspectSharding, Profile, Histograms; after
it LogMetrics, Evaluate, the user's own, Save.
"""

from __future__ import annotations

import dataclasses
import logging
import math
import sys
import time
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, TypeAlias

import jax
import jax.numpy as jnp
import numpy as np
import optax

from hfseq.checkpoints import files
from hfseq.data.batches import Batches
from hfseq.errors import NonFiniteLoss, UsageError, write_atomically
from hfseq.nn import trees
from hfseq.objectives.base import GeneratedTexts
from hfseq.reports.log import smaller_is_better
from hfseq.training import collectives, evaluation, throughput
from hfseq.training.arguments import TrainingArguments, parse_profile_steps
from hfseq.training.checkpointer import Checkpointer, Progress
from hfseq.training.event_file import Histogram
from hfseq.training.export import Publisher, export
from hfseq.training.setup import Run
from hfseq.training.state import Batch, TrainState, Tree, make_step
from hfseq.training.throughput import Meter
from hfseq.training.trackers import Trackers

if TYPE_CHECKING:
    from tqdm import tqdm

logger = logging.getLogger(__name__)


@dataclasses.dataclass(frozen=True)
class StepInfo:
    """What a callback sees: the run, its state, where it stands, and what was measured last.

    ``batch`` is that of the step; ``metrics`` are the newest by name (``train_loss``,
    ``eval_accuracy``); ``measured`` is what the last step returned, still on the devices: ``loss``,
    ``grad_norm`` and ``bad``. The buffers of ``state`` are the next step's to overwrite: copy what
    is to be kept.
    """

    run: Run
    state: TrainState
    progress: Progress
    batch: Batch | None = None
    metrics: dict[str, float] = dataclasses.field(default_factory=dict)
    step_metrics: Mapping[str, jax.Array] | None = None


class Callback:
    """The moments of a run; a state that one returns replaces the run's.

    ``progress.step`` counts the steps that are done: before a step, and at the beginning, it is
    that of the one before.
    """

    def on_train_begin(self, info: StepInfo) -> TrainState | None:
        """Before the first step of this process."""

    def on_step_begin(self, info: StepInfo) -> TrainState | None:
        """Before a step, whose batch is there."""

    def on_step_end(self, info: StepInfo) -> TrainState | None:
        """After a step."""

    def on_train_end(self, info: StepInfo) -> TrainState | None:
        """After the last step, or the one after which a signal stops the run."""


CallbackFunction: TypeAlias = Callable[[StepInfo], TrainState | None]
EVENTS = ("on_train_begin", "on_step_begin", "on_step_end", "on_train_end")


def every(steps: int, function: CallbackFunction) -> CallbackFunction:
    """Return a callback that calls ``function(info)`` after every ``steps``-th step."""

    def called(info: StepInfo) -> TrainState | None:
        return function(info) if info.progress.step % steps == 0 else None

    return called


def find_handlers(
    moment: str, callbacks: Sequence[Callback | CallbackFunction]
) -> list[CallbackFunction]:
    """Return what is called at a moment, in the order of ``callbacks``.

    Raises:
        UsageError: one is neither a function nor an object with one of the moments.
    """
    found = []
    for callback in callbacks:
        function = getattr(callback, moment, None)
        if not any(hasattr(callback, name) for name in EVENTS):
            if not callable(callback):
                raise UsageError(
                    f"{callback!r} is no callback: give a function of a StepInfo, or an object "
                    f"with one of {', '.join(EVENTS)}"
                )
            function = callback if moment == "on_step_end" else None
        if function is not None:
            found.append(function)
    return found


def call_handlers(functions: Sequence[CallbackFunction], info: StepInfo) -> StepInfo:
    """Call one after the other, each with the state that the one before it left."""
    for function in functions:
        state = function(info)
        if state is not None:
            info = dataclasses.replace(info, state=state)
    return info


# -- before a step


class Calibrate(Callback):
    """Measures what the products of an FP8 model need to know of the first batch."""

    def on_step_begin(self, info: StepInfo) -> TrainState | None:
        """Run forwards and backwards once, of which nothing else is kept."""
        if info.progress.step or not info.run.model.overwrite_with_gradient:
            return None
        logger.info("measuring the FP8 scales on the first batch")
        assert info.batch is not None
        measure = info.run.step_function(calibrate=True)
        return measure(info.state, info.run.frozen, info.batch)[0]


class InspectSharding(Callback):
    """Prints for ``--inspect_sharding``, once, what lies where and what the devices exchange."""

    def on_step_begin(self, info: StepInfo) -> None:
        """Report before the first step of this process."""
        if info.step_metrics is None:
            assert info.batch is not None
            collectives.print_report(info.run, info.state, info.batch)


class Profile(Callback):
    """Writes a jax profile of the steps ``first-last``, both included, to ``folder/profile``.

    Steps count from 1, as in the log. A run that goes on in the middle of them profiles the rest.
    """

    def __init__(self, steps: str | None, folder: Path):
        self.folder, self.running = folder / "profile", False
        self.first, self.last = parse_profile_steps(steps) if steps else (0, 0)

    def on_step_begin(self, info: StepInfo) -> None:
        """Start or stop before the next step."""
        step = info.progress.step + 1
        if not self.running and self.first <= step <= self.last:
            # Steps run while the host is ahead of them, so the one before has to be over.
            jax.block_until_ready(info.step_metrics)
            jax.profiler.start_trace(str(self.folder))
            self.running = True
        elif self.running and step > self.last:
            self.on_train_end(info)

    def on_train_end(self, info: StepInfo) -> None:
        """Write what was recorded, once the last step is there."""
        if self.running:
            jax.block_until_ready(info.step_metrics)
            jax.profiler.stop_trace()
            self.running, self.first = False, self.last + 1
            logger.info("profile written to %s (open it with TensorBoard or xprof)", self.folder)


NUM_BINS = 40


class Histograms(Callback):
    """Reports, before every n-th step, the weights that it begins with and its gradients.

    Gradients are those before clipping; tags are ``weights/<path>`` and ``gradients/<path>``. The
    training step is left as it is, to the bit: the gradients come from a second program, which
    takes the step's own batch and random numbers and an optimizer that only looks.
    """

    def __init__(self, trackers: Trackers, steps: int | None):
        self.trackers, self.steps = trackers, steps
        self._look: Callable[[TrainState, Batch], dict] | None = None

    def on_step_begin(self, info: StepInfo) -> None:
        """Report if the next step is one to look at; all processes take part."""
        step = info.progress.step + 1
        if not self.steps or step % self.steps:
            return
        self._look = self._look or make_histogram_function(info.run)
        assert info.batch is not None
        bins = jax.device_get(self._look(info.state, info.batch))
        values = {
            f"{kind}/{trees.join(path)}": to_histogram(leaf)
            for kind, tree in bins.items()
            for path, leaf in tree.items()
        }
        self.trackers.histograms(values, step)


def make_histogram_function(run: Run) -> Callable[[TrainState, Batch], dict]:
    """Return the jitted program that gives the bins of weights and gradients."""

    def all_bins(tree: Tree) -> dict[trees.Path, dict[str, jax.Array]]:
        return {
            path: count_bins(run.layout.cut(path, leaf))  # without the rows that pad the vocabulary
            for path, leaf in trees.flatten(tree).items()
            if jnp.issubdtype(leaf.dtype, jnp.floating)
        }

    looking = optax.GradientTransformation(
        lambda params: all_bins(jax.tree.map(jnp.zeros_like, params)),
        lambda grads, before, params: (jax.tree.map(jnp.zeros_like, grads), all_bins(grads)),
    )
    seed = run.arguments.training.seed
    step = make_step(run.objective, run.model, looking, seed, False, run.carry)

    def look(state: TrainState, batch: Batch) -> dict:
        start = dataclasses.replace(state, opt_state=looking.init(state.params))
        return {
            "weights": all_bins(state.params),
            "gradients": step(start, run.frozen, batch)[0].opt_state,
        }

    return jax.jit(look, out_shardings=jax.NamedSharding(run.mesh, jax.P()))


def count_bins(leaf: jax.Array) -> dict[str, jax.Array]:
    """Return counts (BINS,) of the finite values, their limits and their sums; float32."""
    values = leaf.astype(jnp.float32).reshape(-1)
    finite = jnp.isfinite(values)
    low = jnp.min(jnp.where(finite, values, jnp.inf), initial=jnp.inf)
    high = jnp.max(jnp.where(finite, values, -jnp.inf), initial=-jnp.inf)
    some = jnp.any(finite)
    low, high = jnp.where(some, low, 0.0), jnp.where(some, high, 0.0)
    kept = jnp.where(finite, values, low)
    width = jnp.where(high > low, (high - low) / NUM_BINS, 1.0)
    place = jnp.clip(((kept - low) / width).astype(jnp.int32), 0, NUM_BINS - 1)
    counts = jnp.zeros(NUM_BINS, jnp.int32).at[place].add(finite.astype(jnp.int32))
    kept = jnp.where(finite, values, 0.0)
    sums = {"total": kept.sum(), "squares": jnp.square(kept).sum()}
    return {"counts": counts, "low": low, "high": high, **sums}


def to_histogram(bins: Mapping[str, np.ndarray]) -> Histogram:
    """Return what :func:`bins_of` counted, with the edges of the bins."""
    low, high = float(bins["low"]), float(bins["high"])
    edges = np.linspace(low, high if high > low else low + NUM_BINS, NUM_BINS + 1)
    counts = bins["counts"].tolist()
    return Histogram(
        low, high, sum(counts), float(bins["total"]), float(bins["squares"]), edges.tolist(), counts
    )


# -- after a step


class LogMetrics(Callback):
    """Reads the sums of the log window, empties it, and reports: every ``logging_steps``."""

    def __init__(self, trackers: Trackers, meter: Meter, checkpointer: Checkpointer, bar: tqdm):
        self.trackers, self.meter, self.bar = trackers, meter, bar
        self.checkpointer = checkpointer
        self._tokens = 0

    def on_train_begin(self, info: StepInfo) -> None:
        """Start the clock."""
        self._tokens = info.progress.tokens_seen
        self.meter.reset()

    def on_step_end(self, info: StepInfo) -> TrainState | None:
        """Count the step, and log where that is due."""
        run, progress, training = info.run, info.progress, info.run.arguments.training
        step, seen = progress.step, progress.tokens_seen
        self.meter.add(seen - self._tokens)
        self._tokens = seen
        self.bar.update(1)
        first, last = step == 1 and training.logging_first_step, step == run.total_steps
        if step % training.logging_steps and not first and not last:
            return None
        sums = {name: float(x) for name, x in jax.device_get(info.state.window).items()}
        if bad := sums.pop("bad_steps"):
            if training.on_non_finite == "stop":
                raise non_finite_loss_error(self.checkpointer, step)
            logger.warning(
                "%d steps up to %d had a non-finite loss or gradient and were skipped",
                int(bad),
                step,
            )
        assert run.schedule is not None and info.step_metrics is not None and run.data is not None
        rate = float(run.schedule(step - 1))
        measured = run.objective.metrics(sums) | evaluation.extra_metrics(run, info.state)
        info.metrics.update(
            {f"train_{name}": value for name, value in measured.items()},
            train_learning_rate=rate,
            train_grad_norm=float(info.step_metrics["grad_norm"]),
            tokens_seen=float(seen),
            **self.meter.read(),
            peak_memory_gb=throughput.peak_memory_gb(),
            train_runtime=progress.seconds,
        )
        if isinstance(run.data.train, Batches):
            info.metrics["epoch"] = step / len(run.data.train)
        own = {name: v for name, v in info.metrics.items() if not name.startswith("eval_")}
        self.trackers.log(own, step)
        self.bar.set_postfix(loss=f"{measured['loss']:.3f}")
        if self.bar.disable and jax.process_index() == 0:
            line = f"Step... ({step} | Loss: {measured['loss']:.6g}, Learning Rate: {rate:.6g})"
            print(line, flush=True)
        zeros: dict[str, jax.Array] = {  # device_put would have all processes compare theirs
            name: jax.make_array_from_callback(
                old.shape, old.sharding, np.zeros(old.shape, old.dtype).__getitem__
            )
            for name, old in info.state.window.items()
        }
        return dataclasses.replace(info.state, window=zeros)


def non_finite_loss_error(checkpointer: Checkpointer, step: int) -> NonFiniteLoss:
    """Return the error that stops a run, which says what is kept of it."""
    checkpointer.wait_and_log_errors()
    kept = checkpointer.latest_step()
    saved = f"the checkpoint of step {kept} is kept" if kept else "nothing was saved yet"
    return NonFiniteLoss(
        f"the loss or a gradient became NaN or infinite at step {step} or since the last log; "
        f"{saved}. Lower --learning_rate, set --max_grad_norm 1, warm up for longer, or use "
        "--on_non_finite skip"
    )


def progress_bar(run: Run, progress: Progress) -> tqdm:
    """Return a progress bar, which shows on a terminal only."""
    from tqdm import tqdm

    hidden = run.arguments.training.disable_tqdm or jax.process_index() != 0
    return tqdm(
        total=run.total_steps,
        initial=progress.step,
        unit="step",
        desc="Training",
        disable=hidden or not sys.stderr.isatty(),
    )


PREDICTIONS_FILE, REFERENCES_FILE = "generated_predictions.txt", "generated_references.txt"


class Evaluate(Callback):
    """Evaluates, reports, and notes the best: when ``eval_strategy`` says so, and when asked.

    ``texts`` are what the model wrote last, ``step`` is that of the last evaluation of the whole
    split.
    """

    def __init__(self, trackers: Trackers, meter: Meter | None = None):
        self.trackers, self.meter = trackers, meter
        self.texts: GeneratedTexts | None = None
        self.step = -1
        self._notes: dict[str, str] = {}

    def on_step_end(self, info: StepInfo) -> None:
        """Evaluate if that is due, on at most ``max_eval_batches``."""
        training = info.run.arguments.training
        if is_due(info, training.eval_strategy, training.eval_steps):
            started = time.perf_counter()
            self.evaluate(info, training.max_eval_batches)
            if self.meter is not None:
                self.meter.pause(time.perf_counter() - started)

    def evaluate(self, info: StepInfo, limit: int | None = None) -> None:
        """Evaluate on the validation split now; numbers of a part do not count as its own."""
        training, progress = info.run.arguments.training, info.progress
        done = evaluation.evaluate(info.run, info.state, "validation", limit)
        self._report(info, "validation", done)
        self.step = progress.step if done.is_complete else -1
        assert info.run.data is not None
        batches, most = info.run.data.evaluation, training.max_eval_batches
        parts = most is not None and batches is not None and most < len(batches)
        # Numbers of a part and of the whole do not compare: where there are parts, they count.
        if not (done.is_complete and training.eval_strategy != "no" and parts):
            update_best_metric(training, progress, done.metrics)

    def predict(self, info: StepInfo) -> None:
        """Judge the test split, and keep what was predicted or written in the run's folder."""
        run = info.run
        done = evaluation.evaluate(run, info.state, "test")
        if jax.process_index() == 0:
            run.folder.mkdir(parents=True, exist_ok=True)
            if done.texts is None:
                run.objective.save_predictions(done.per_example, "test", run.folder)
            else:
                for name, texts in (
                    (PREDICTIONS_FILE, done.texts.hypotheses),
                    (REFERENCES_FILE, done.texts.references),
                ):
                    # One text a line: line breaks within a text become spaces.
                    lines = (" ".join(text.split()) + "\n" for text in texts)
                    write_atomically(run.folder / name, "".join(lines))
        self._report(info, "test", done)

    def _report(self, info: StepInfo, split: str, done: evaluation.Evaluation) -> None:
        prefix, step = evaluation.PREFIXES[split], info.progress.step
        if done.texts is not None:
            self.texts = done.texts
            for name, note in done.texts.notes.items():
                if self._notes.get(f"{prefix}_{name}") != note:  # once a run
                    self._notes[f"{prefix}_{name}"] = note
                    logger.info("%s_%s: %s", prefix, name, note)
            count = getattr(info.run.arguments.data, "text_samples", 0)
            rows = evaluation.select_samples(done.texts, count)
            if text := evaluation.markdown_table(("source", "reference", "model"), rows):
                self.trackers.text(f"{prefix}_samples", text, step)
        info.metrics.update(done.metrics)
        self.trackers.log(done.metrics, step)
        if jax.process_index() == 0:
            shown = {k: v for k, v in done.metrics.items() if not k.endswith("runtime")}
            line = ", ".join(f"{name}: {value:.6g}" for name, value in shown.items())
            title = "Eval" if split == "validation" else "Predict"
            print(f"{title}... ({step} | {line or 'no labels to judge by'})", flush=True)


def update_best_metric(
    training: TrainingArguments, progress: Progress, metrics: Mapping[str, float]
) -> None:
    """Remember the step whose ``metric_for_best_model`` is the best so far."""
    name = f"eval_{training.metric_for_best_model.removeprefix('eval_')}"
    if name not in metrics:
        raise UsageError(f"--metric_for_best_model {name}: there is only {', '.join(metrics)}")
    greater = training.greater_is_better
    if greater is None:
        greater = not smaller_is_better(name)
    best, value = progress.best_metric, metrics[name]
    better = best is None or (value > best if greater else value < best)
    if math.isfinite(value) and better:
        progress.best_metric, progress.best_step = value, progress.step


def is_due(info: StepInfo, strategy: str | None, steps: int | None) -> bool:
    """Tell whether something is due after the step: every so many steps, or at an epoch's end."""
    step = info.progress.step
    if strategy == "steps":
        return steps is not None and step % steps == 0
    train = info.run.data and info.run.data.train
    return strategy == "epoch" and isinstance(train, Batches) and step % len(train) == 0


class Save(Callback):
    """Saves a checkpoint and the model itself, and publishes them: by ``save_strategy``."""

    def __init__(self, checkpointer: Checkpointer, publisher: Publisher, meter: Meter):
        self.checkpointer, self.publisher, self.meter = checkpointer, publisher, meter

    def on_step_end(self, info: StepInfo) -> None:
        """Save if that is due; after the last step the end of training does."""
        training = info.run.arguments.training
        last = info.progress.step == info.run.total_steps
        if is_due(info, training.save_strategy, training.save_steps) and not last:
            started = time.perf_counter()
            self.save(info)
            self.meter.pause(time.perf_counter() - started)

    def on_train_end(self, info: StepInfo) -> None:
        """Save, whatever the strategy, and wait for it."""
        self.save(info)
        self.checkpointer.wait()

    def save(self, info: StepInfo) -> None:
        """Save now, unless a step since the last log went wrong."""
        run, progress = info.run, info.progress
        stops = run.arguments.training.on_non_finite == "stop"
        if stops and float(info.state.window["bad_steps"]):
            raise non_finite_loss_error(self.checkpointer, progress.step)
        self.checkpointer.save(info.state, progress)
        if not (run.folder / files.SAFETENSORS).exists():
            # Weights without any checkpoint would look like somebody else's model after a kill.
            self.checkpointer.wait()
        export(run, info.state, run.folder)
        self.publisher.publish(f"Training in progress, step {progress.step}")
