"""The interface of callbacks, and the built-in callbacks of a run.

A callback is either a function `f(info)`, which is called after each step, or an object with some
of the methods of `Callback`. The methods have the same names as in the Transformers `Trainer`. If a
callback returns a state, it replaces the state of the run.

Callbacks are called in a fixed order. Before a step, the order is `Calibrate`, `InspectSharding`,
`Profile`, `Histograms` and the user's callbacks. After a step, it is `StepResults`, `LogMetrics`,
`Evaluate`, the user's callbacks and `Save`.
"""

from __future__ import annotations

import collections
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
    """The information that a callback receives as its argument.

    The buffers of `state` are donated to the next step. Copy arrays that you want to keep.

    Attributes:
        run: The parts of the run that do not change, such as the model and the data.
        state: The current training state.
        progress: The number of completed steps, and other counters.
        batch: The batch of the step, or `None` before the first step.
        metrics: The latest value of each metric by name, e.g. `train_loss` or `eval_accuracy`.
        step_metrics: The outputs of the last step, still on the devices: `loss`, `grad_norm`, `bad`
            (whether the loss or a gradient was not finite) and `tokens` (the number of tokens).
    """

    run: Run
    state: TrainState
    progress: Progress
    batch: Batch | None = None
    metrics: dict[str, float] = dataclasses.field(default_factory=dict)
    step_metrics: Mapping[str, jax.Array] | None = None


class Callback:
    """Base class of callbacks. All methods are optional.

    If a method returns a state, it replaces the state of the run. `info.progress.step` is the
    number of completed steps. In `on_step_begin`, it is therefore the number of the previous step.
    """

    def on_train_begin(self, info: StepInfo) -> TrainState | None:
        """Called before the first step after the run has started or resumed."""

    def on_step_begin(self, info: StepInfo) -> TrainState | None:
        """Called before each step. `info.batch` is the batch of this step."""

    def on_step_end(self, info: StepInfo) -> TrainState | None:
        """Called after each step."""

    def on_train_end(self, info: StepInfo) -> TrainState | None:
        """Called after the last step, or after the step at which a signal stops the run."""


CallbackFunction: TypeAlias = Callable[[StepInfo], TrainState | None]
EVENTS = ("on_train_begin", "on_step_begin", "on_step_end", "on_train_end")


def every(steps: int, function: CallbackFunction) -> CallbackFunction:
    """Returns a callback that calls `function(info)` after every `steps`-th step."""

    def on_step_end(info: StepInfo) -> TrainState | None:
        return function(info) if info.progress.step % steps == 0 else None

    return on_step_end


def find_handlers(
    event: str, callbacks: Sequence[Callback | CallbackFunction]
) -> list[CallbackFunction]:
    """Returns the functions to call for an event, in the order of `callbacks`.

    Args:
        event: A name from `EVENTS`.
        callbacks: Functions, which are called at `on_step_end`, or objects with methods for events.

    Raises:
        UsageError: A callback is neither a function nor an object with one of the methods.
    """
    handlers = []
    for callback in callbacks:
        handler = getattr(callback, event, None)
        if not any(hasattr(callback, name) for name in EVENTS):
            if not callable(callback):
                raise UsageError(
                    f"{callback!r} is not a callback: use a function that accepts a StepInfo, or "
                    f"an object with one of the methods {', '.join(EVENTS)}"
                )
            handler = callback if event == "on_step_end" else None
        if handler is not None:
            handlers.append(handler)
    return handlers


def call_handlers(handlers: Sequence[CallbackFunction], info: StepInfo) -> StepInfo:
    """Calls the functions in order. A state that a function returns is passed to the next one."""
    for handler in handlers:
        state = handler(info)
        if state is not None:
            info = dataclasses.replace(info, state=state)
    return info


# -- before a step


class Calibrate(Callback):
    """Measures the scales of an FP8 model on the first batch."""

    def on_step_begin(self, info: StepInfo) -> TrainState | None:
        """Runs one forward and backward pass before the first step and keeps only the scales."""
        if info.progress.step or not info.run.model.overwrite_with_gradient:
            return None
        logger.info("measuring the FP8 scales on the first batch")
        assert info.batch is not None
        measure = info.run.step_function(calibrate=True)
        return measure(info.state, info.run.frozen, info.batch)[0]


class InspectSharding(Callback):
    """Prints the sharding report of `--inspect_sharding` once."""

    def on_step_begin(self, info: StepInfo) -> None:
        """Prints the report before the first step after the run has started or resumed."""
        if info.step_metrics is None:
            assert info.batch is not None
            collectives.print_report(info.run, info.state, info.batch)


class Profile(Callback):
    """Writes a jax profile of a range of steps to `folder/profile`.

    A run that resumes within the range profiles the remaining steps.

    Args:
        steps: The range of steps as `first-last`, counted from 1, both included. `None` disables
            the profile.
        folder: The output directory.
    """

    def __init__(self, steps: str | None, folder: Path):
        self.folder, self.running = folder / "profile", False
        self.first, self.last = parse_profile_steps(steps) if steps else (0, 0)

    def on_step_begin(self, info: StepInfo) -> None:
        """Starts the profiler before the first step of the range, and stops it after the last."""
        step = info.progress.step + 1
        if not self.running and self.first <= step <= self.last:
            # Steps run asynchronously. Wait for the previous step, so that it is not profiled.
            jax.block_until_ready(info.step_metrics)
            jax.profiler.start_trace(str(self.folder))
            self.running = True
        elif self.running and step > self.last:
            self.on_train_end(info)

    def on_train_end(self, info: StepInfo) -> None:
        """Waits for the last step and writes the profile."""
        if self.running:
            jax.block_until_ready(info.step_metrics)
            jax.profiler.stop_trace()
            self.running, self.first = False, self.last + 1
            logger.info("profile written to %s (open it with TensorBoard or xprof)", self.folder)


NUM_BINS = 40


class Histograms(Callback):
    """Reports histograms of weights and gradients before every n-th step.

    The tags are `weights/<path>` and `gradients/<path>`. The gradients are those before clipping. A
    separate jitted function computes them. It uses the same batch and random numbers as the
    training step, and an optimizer that only records gradients. The training step itself is not
    affected.

    Args:
        trackers: The trackers to report to.
        steps: The number of steps between two reports, or `None` for no histograms.
    """

    def __init__(self, trackers: Trackers, steps: int | None):
        self.trackers, self.steps = trackers, steps
        self._compute_bins: Callable[[TrainState, Batch], dict] | None = None

    def on_step_begin(self, info: StepInfo) -> None:
        """Reports the histograms if they are due. All processes must call this."""
        step = info.progress.step + 1
        if not self.steps or step % self.steps:
            return
        self._compute_bins = self._compute_bins or make_histogram_function(info.run)
        assert info.batch is not None
        bins = jax.device_get(self._compute_bins(info.state, info.batch))
        values = {
            f"{group}/{trees.join(path)}": to_histogram(leaf)
            for group, tree in bins.items()
            for path, leaf in tree.items()
        }
        self.trackers.histograms(values, step)


def make_histogram_function(run: Run) -> Callable[[TrainState, Batch], dict]:
    """Returns a jitted function `(state, batch) -> bins`.

    `bins` has the entries "weights" and "gradients". Each of them maps the path of a parameter to
    the result of `count_bins`.
    """

    def all_bins(tree: Tree) -> dict[trees.Path, dict[str, jax.Array]]:
        return {
            path: count_bins(run.layout.cut(path, leaf))  # without vocabulary padding
            for path, leaf in trees.flatten(tree).items()
            if jnp.issubdtype(leaf.dtype, jnp.floating)
        }

    recorder = optax.GradientTransformation(
        lambda params: all_bins(jax.tree.map(jnp.zeros_like, params)),
        lambda grads, old_state, params: (jax.tree.map(jnp.zeros_like, grads), all_bins(grads)),
    )
    seed = run.arguments.training.seed
    step = make_step(run.objective, run.model, recorder, seed, False, run.carry)

    def compute_bins(state: TrainState, batch: Batch) -> dict:
        start = dataclasses.replace(state, opt_state=recorder.init(state.params))
        return {
            "weights": all_bins(state.params),
            "gradients": step(start, run.frozen, batch)[0].opt_state,
        }

    return jax.jit(compute_bins, out_shardings=jax.NamedSharding(run.mesh, jax.P()))


def count_bins(leaf: jax.Array) -> dict[str, jax.Array]:
    """Counts the finite values of an array in `NUM_BINS` bins.

    Returns:
        A dict with `counts`, int32 `(NUM_BINS,)`, and these float32 scalars over the finite values:
        `low` (minimum), `high` (maximum), `total` (sum) and `squares` (sum of squares).
    """
    values = leaf.astype(jnp.float32).reshape(-1)
    finite = jnp.isfinite(values)
    low = jnp.min(jnp.where(finite, values, jnp.inf), initial=jnp.inf)
    high = jnp.max(jnp.where(finite, values, -jnp.inf), initial=-jnp.inf)
    any_finite = jnp.any(finite)
    low, high = jnp.where(any_finite, low, 0.0), jnp.where(any_finite, high, 0.0)
    finite_values = jnp.where(finite, values, low)
    width = jnp.where(high > low, (high - low) / NUM_BINS, 1.0)
    bin_index = jnp.clip(((finite_values - low) / width).astype(jnp.int32), 0, NUM_BINS - 1)
    counts = jnp.zeros(NUM_BINS, jnp.int32).at[bin_index].add(finite.astype(jnp.int32))
    finite_values = jnp.where(finite, values, 0.0)
    sums = {"total": finite_values.sum(), "squares": jnp.square(finite_values).sum()}
    return {"counts": counts, "low": low, "high": high, **sums}


def to_histogram(bins: Mapping[str, np.ndarray]) -> Histogram:
    """Converts the output of `count_bins` to a `Histogram` with bin edges."""
    low, high = float(bins["low"]), float(bins["high"])
    edges = np.linspace(low, high if high > low else low + NUM_BINS, NUM_BINS + 1)
    counts = bins["counts"].tolist()
    return Histogram(
        low, high, sum(counts), float(bins["total"]), float(bins["squares"]), edges.tolist(), counts
    )


# -- after a step


class StepResults(Callback):
    """Reads the results of each step, counts its tokens, and stops the run at a NaN.

    A step with a NaN or infinite loss or gradient stops the run, unless `--on_non_finite skip` is
    set. The results of a step are read `delay` steps later. The device has usually computed them by
    then, so the next step does not have to wait. :meth:`finish` reads all remaining results. It is
    called before metrics are logged or a checkpoint is saved.

    Args:
        checkpointer: The checkpoints of the run. The error mentions the latest one.
        delay: Number of steps after which the results of a step are read.
    """

    def __init__(self, checkpointer: Checkpointer, delay: int):
        self.checkpointer, self.delay = checkpointer, delay
        self._results: collections.deque[tuple[int, Mapping[str, jax.Array]]] = collections.deque()

    def on_step_end(self, info: StepInfo) -> None:
        """Keeps the results of this step, and reads results that are at least `delay` steps old.

        Raises:
            NonFiniteLoss: The loss or a gradient of one of the steps that are read is not finite.
        """
        assert info.step_metrics is not None
        self._results.append((info.progress.step, info.step_metrics))
        self._read(info, self.delay)

    def finish(self, info: StepInfo) -> None:
        """Reads all remaining results. Raises `NonFiniteLoss` like :meth:`on_step_end`."""
        self._read(info, 0)

    def _read(self, info: StepInfo, delay: int) -> None:
        while len(self._results) > delay:
            step, results = self._results.popleft()
            info.progress.tokens_seen += int(results["tokens"])
            if info.run.arguments.training.on_non_finite != "stop" or not bool(results["bad"]):
                continue
            self.checkpointer.wait_and_log_errors()
            latest_step = self.checkpointer.latest_step()
            saved = f"the checkpoint of step {latest_step} is kept"
            raise NonFiniteLoss(
                f"the loss or a gradient became NaN or infinite at step {step}; "
                f"{saved if latest_step else 'nothing was saved yet'}. Use a lower "
                "--learning_rate, --max_grad_norm 1, more --warmup_steps, or --on_non_finite skip"
            )


class LogMetrics(Callback):
    """Logs the metrics every `logging_steps` steps.

    The metrics are computed from the sums in `TrainState.window`, which are reset after each log.

    Args:
        trackers: The trackers to log to.
        meter: The meter for throughput.
        results: The callback that reads the results of the steps. Before each log, it counts the
            tokens of all steps so far, and stops the run if a loss is not finite.
        bar: The progress bar.
    """

    def __init__(self, trackers: Trackers, meter: Meter, results: StepResults, bar: tqdm):
        self.trackers, self.meter, self.bar = trackers, meter, bar
        self.results = results
        self._tokens = 0

    def on_train_begin(self, info: StepInfo) -> None:
        """Starts measuring throughput."""
        self._tokens = info.progress.tokens_seen
        self.meter.reset()

    def on_step_end(self, info: StepInfo) -> TrainState | None:
        """Updates the progress bar, and logs the metrics if they are due."""
        run, progress, training = info.run, info.progress, info.run.arguments.training
        step = progress.step
        self.bar.update(1)
        is_first, is_last = step == 1 and training.logging_first_step, step == run.total_steps
        if step % training.logging_steps and not is_first and not is_last:
            return None
        self.results.finish(info)
        tokens_seen = progress.tokens_seen
        self.meter.add(tokens_seen - self._tokens)
        self._tokens = tokens_seen
        sums = {name: float(x) for name, x in jax.device_get(info.state.window).items()}
        if bad_steps := sums.pop("bad_steps"):
            logger.warning(
                "%d steps since the last log, up to step %d, were skipped because of a non-finite "
                "loss or gradient",
                int(bad_steps),
                step,
            )
        assert run.schedule is not None and info.step_metrics is not None and run.data is not None
        learning_rate = float(run.schedule(step - 1))
        window_metrics = evaluation.metrics_of(run, sums, "train")
        window_metrics |= evaluation.extra_metrics(run, info.state)
        info.metrics.update(
            {f"train_{name}": value for name, value in window_metrics.items()},
            train_learning_rate=learning_rate,
            train_grad_norm=float(info.step_metrics["grad_norm"]),
            tokens_seen=float(tokens_seen),
            **self.meter.read(),
            peak_memory_gb=throughput.peak_memory_gb(),
            train_runtime=progress.seconds,
        )
        if isinstance(run.data.train, Batches):
            info.metrics["epoch"] = step / len(run.data.train)
        logged_metrics = {
            name: v for name, v in info.metrics.items() if not name.startswith("eval_")
        }
        self.trackers.log(logged_metrics, step)
        self.bar.set_postfix(loss=f"{window_metrics['loss']:.3f}")
        if self.bar.disable and jax.process_index() == 0:
            loss = window_metrics["loss"]
            line = f"Step... ({step} | Loss: {loss:.6g}, Learning Rate: {learning_rate:.6g})"
            print(line, flush=True)
        # jax.device_put would compare the values of all processes before it creates the arrays.
        zeros: dict[str, jax.Array] = {
            name: jax.make_array_from_callback(
                old_sum.shape, old_sum.sharding, np.zeros(old_sum.shape, old_sum.dtype).__getitem__
            )
            for name, old_sum in info.state.window.items()
        }
        return dataclasses.replace(info.state, window=zeros)


def progress_bar(run: Run, progress: Progress) -> tqdm:
    """Returns a progress bar. Only process 0 displays it, on a terminal or in a notebook."""
    from tqdm import tqdm

    hidden = run.arguments.training.disable_tqdm or jax.process_index() != 0
    return tqdm(
        total=run.total_steps,
        initial=progress.step,
        unit="step",
        desc="Training",
        disable=hidden or not (sys.stderr.isatty() or "ipykernel" in sys.modules),
    )


PREDICTIONS_FILE, REFERENCES_FILE = "generated_predictions.txt", "generated_references.txt"


class Evaluate(Callback):
    """Evaluates according to `eval_strategy`, logs the metrics, and updates the best metric.

    Attributes:
        texts: The last generated texts, or `None`.
        evaluated_step: The step of the last evaluation, or -1 if this evaluation did not include
            the whole validation split.
    """

    def __init__(self, trackers: Trackers, meter: Meter | None = None):
        self.trackers, self.meter = trackers, meter
        self.texts: GeneratedTexts | None = None
        self.evaluated_step = -1
        self._notes: dict[str, str] = {}

    def on_step_end(self, info: StepInfo) -> None:
        """Evaluates on at most `max_eval_batches` batches if an evaluation is due."""
        training = info.run.arguments.training
        if is_due(info, training.eval_strategy, training.eval_steps):
            started = time.perf_counter()
            self.evaluate(info, training.max_eval_batches)
            if self.meter is not None:
                self.meter.pause(time.perf_counter() - started)

    def evaluate(self, info: StepInfo, limit: int | None = None) -> None:
        """Evaluates on the validation split.

        Args:
            info: The current step.
            limit: Maximum number of batches. Default: all.
        """
        training, progress = info.run.arguments.training, info.progress
        result = evaluation.evaluate(info.run, info.state, "validation", limit)
        self._report(info, "validation", result)
        self.evaluated_step = progress.step if result.is_complete else -1
        assert info.run.data is not None
        batches, max_batches = info.run.data.evaluation, training.max_eval_batches
        uses_subset = max_batches is not None and batches is not None and max_batches < len(batches)
        # Metrics of a subset and of the whole split are not comparable. If the evaluations during
        # training use a subset, an evaluation of the whole split does not update the best metric.
        if not (result.is_complete and training.eval_strategy != "no" and uses_subset):
            update_best_metric(training, progress, result.metrics)

    def predict(self, info: StepInfo) -> None:
        """Evaluates on the test split, and saves predictions or texts in the output directory."""
        run = info.run
        result = evaluation.evaluate(run, info.state, "test")
        if jax.process_index() == 0:
            run.folder.mkdir(parents=True, exist_ok=True)
            if result.texts is None:
                run.objective.save_predictions(result.per_example, "test", run.folder)
            else:
                for name, texts in (
                    (PREDICTIONS_FILE, result.texts.hypotheses),
                    (REFERENCES_FILE, result.texts.references),
                ):
                    # One text per line: line breaks within a text become spaces.
                    lines = (" ".join(text.split()) + "\n" for text in texts)
                    write_atomically(run.folder / name, "".join(lines))
        self._report(info, "test", result)

    def _report(self, info: StepInfo, split: str, result: evaluation.Evaluation) -> None:
        prefix, step = evaluation.PREFIXES[split], info.progress.step
        if result.texts is not None:
            self.texts = result.texts
            for name, note in result.texts.notes.items():
                if self._notes.get(f"{prefix}_{name}") != note:  # not logged yet
                    self._notes[f"{prefix}_{name}"] = note
                    logger.info("%s_%s: %s", prefix, name, note)
            count = getattr(info.run.arguments.data, "text_samples", 0)
            rows = evaluation.select_samples(result.texts, count)
            if text := evaluation.markdown_table(("source", "reference", "model"), rows):
                self.trackers.text(f"{prefix}_samples", text, step)
        info.metrics.update(result.metrics)
        self.trackers.log(result.metrics, step)
        if jax.process_index() == 0:
            printed_metrics = {k: v for k, v in result.metrics.items() if not k.endswith("runtime")}
            line = ", ".join(f"{name}: {value:.6g}" for name, value in printed_metrics.items())
            title = "Eval" if split == "validation" else "Predict"
            # Without training, the step of the evaluated model is unknown.
            label = f"{step} | " if step else ""
            print(f"{title}... ({label}{line or 'no labels to evaluate'})", flush=True)


def update_best_metric(
    training: TrainingArguments, progress: Progress, metrics: Mapping[str, float]
) -> None:
    """Records the step in `progress` if its `metric_for_best_model` is the best so far.

    Raises:
        UsageError: The metrics do not contain `metric_for_best_model`.
    """
    name = f"eval_{training.metric_for_best_model.removeprefix('eval_')}"
    if name not in metrics:
        raise UsageError(
            f"--metric_for_best_model {name}: this metric is not computed. Available metrics: "
            f"{', '.join(metrics)}"
        )
    greater = training.greater_is_better
    if greater is None:
        greater = not smaller_is_better(name)
    best, value = progress.best_metric, metrics[name]
    better = best is None or (value > best if greater else value < best)
    if math.isfinite(value) and better:
        progress.best_metric, progress.best_step = value, progress.step


def is_due(info: StepInfo, strategy: str | None, steps: int | None) -> bool:
    """Returns whether an evaluation or a save is due after this step.

    Args:
        info: The run after the step.
        strategy: "steps" (every `steps` steps), "epoch" (at the end of each epoch) or "no".
        steps: The number of steps between two evaluations or saves with the strategy "steps".
    """
    step = info.progress.step
    if strategy == "steps":
        return steps is not None and step % steps == 0
    train = info.run.data and info.run.data.train
    return strategy == "epoch" and isinstance(train, Batches) and step % len(train) == 0


class Save(Callback):
    """Saves checkpoints and the model according to `save_strategy`, and publishes the model.

    With `load_best_model_at_end`, the run is also saved after each evaluation with the best metric
    so far.
    """

    def __init__(self, results: StepResults, publisher: Publisher, meter: Meter):
        self.results, self.publisher, self.meter = results, publisher, meter
        self.checkpointer = results.checkpointer

    def on_step_end(self, info: StepInfo) -> None:
        """Saves if a save is due. After the last step, `on_train_end` saves instead."""
        training = info.run.arguments.training
        is_last = info.progress.step == info.run.total_steps
        is_best = training.load_best_model_at_end and info.progress.best_step == info.progress.step
        is_due_now = is_due(info, training.save_strategy, training.save_steps)
        if (is_due_now or is_best) and not is_last:
            started = time.perf_counter()
            self.save(info)
            self.meter.pause(time.perf_counter() - started)

    def on_train_end(self, info: StepInfo) -> None:
        """Saves regardless of the strategy, and waits until the checkpoint is complete."""
        self.save(info)
        self.checkpointer.wait()

    def save(self, info: StepInfo) -> None:
        """Saves the checkpoint and the model.

        Raises:
            NonFiniteLoss: A step had a NaN or infinite loss or gradient.
        """
        run, progress = info.run, info.progress
        self.results.finish(info)
        self.checkpointer.save(info.state, progress)
        if not (run.folder / files.SAFETENSORS).exists():
            # Before the first export, wait until the checkpoint is complete. If the run were killed
            # between the two, the weights without a checkpoint would look like an unrelated model.
            self.checkpointer.wait()
        export(run, info.state, run.folder)
        self.publisher.publish(f"Training in progress, step {progress.step}")
