"""The training loop, read from top to bottom: mesh, model, data, state, steps, callbacks."""

from __future__ import annotations

import contextlib
import dataclasses
import logging
import math
import signal
import sys
import time
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import jax

from hfseq import plugins
from hfseq.checkpoints import files
from hfseq.checkpoints.storage import Workspace, check_output_dir
from hfseq.data.arguments import OBJECTIVES, convert
from hfseq.errors import UsageError
from hfseq.nn import sharding, trees
from hfseq.training import (
    callbacks,
    checkpointer,
    collectives,
    evaluation,
    export,
    output,
    processes,
    setup,
    state,
    throughput,
)
from hfseq.training import setup as resume
from hfseq.training import setup as windows
from hfseq.training import state as states
from hfseq.training.arguments import Arguments
from hfseq.training.callbacks import Profiler
from hfseq.training.checkpointer import Checkpointer, set_damaged_aside
from hfseq.training.loader import Loader
from hfseq.training.optimizers import make_optimizer, make_schedule
from hfseq.training.output import require_device, use_compilation_cache
from hfseq.training.processes import StopSignal
from hfseq.training.trackers import make_trackers

logger = logging.getLogger(__name__)


def compile_step(loop: Loop) -> Any:
    """Return ``step(state, batch)``, jitted with the run's shardings; the state is donated."""
    return _compiled(loop, calibrate=False)


def calibrate(loop: Loop, batch: Any) -> None:
    """Measure what the model's products need to know of ``batch`` before its first step (FP8).

    A forward and a backward pass of which nothing else is kept; models without such collections
    need none.
    """
    if not loop.model.overwritten_extra:
        return
    logger.info("measuring the FP8 scales on the first batch")
    loop.state, _ = _compiled(loop, calibrate=True)(loop.state, batch)


def _compiled(loop: Loop, calibrate: bool) -> Any:
    training = loop.training
    step = states.make_step(
        loop.objective, loop.model, loop.optimizer, training.seed,
        training.on_non_finite == "skip", loop.memory(), calibrate,
    )  # fmt: skip
    places = (loop.state_shardings, None)
    return jax.jit(step, donate_argnums=0, out_shardings=places, in_shardings=places)


Callback = Callable[["Loop"], None]


class Loop:
    """A training run. ``Loop(arguments, "mlm").run()`` is all that a script does.

    ``add_callback(function, every=n)`` calls ``function(loop)`` after every n-th step; the function
    may read ``loop.state``, ``loop.progress`` and ``loop.metrics``.
    """

    def __init__(self, arguments: Arguments, objective: str, devices: Sequence[Any] | None = None):
        self.arguments, self.training, self.devices = arguments, arguments.training, devices
        self.objective_name = objective
        if objective in OBJECTIVES:
            arguments.data = convert(arguments.data, OBJECTIVES[objective])
        self.progress = checkpointer.Progress()
        self.metrics: dict[str, float] = {}
        self._callbacks: list[tuple[Callback, int]] = []
        self.evaluated_step = -1
        self.last_step: Any = None  # what the last training step measured
        self.written: Any = None  # the texts of the last evaluation that wrote some
        self.notes: dict[str, str] = {}
        self.restore_from: Checkpointer | None = None
        self.restore_step: int | None = None

    def add_callback(self, function: Callback, every: int = 1) -> None:
        """Call ``function(loop)`` after every ``every``-th step."""
        self._callbacks.append((function, every))

    def run(self) -> dict[str, float]:
        """Train and evaluate as the flags say; returns the last metrics."""
        with processes.session(self.arguments.processes), contextlib.ExitStack() as self._held:
            return self._run()

    def _run(self) -> dict[str, float]:
        training = self.training
        # -- where: directory, devices, mesh
        processes.agree_on_flags(self.arguments, self.objective_name)
        plugins.load(extra=training.plugin)
        self.workspace = Workspace(training.output_dir)
        self.folder = self.workspace.path
        with processes.first() as leads:
            processes.check_writable(self.folder)
            if leads:
                if training.do_train:
                    self._held.enter_context(output.hold(self.folder))
                self.workspace.pull()
                self._check_folder()
                if training.do_train and not training.resume_from_checkpoint:
                    set_damaged_aside(self.folder)
        if training.do_train or self.workspace.is_remote:
            processes.check_shared(self.folder)
        require_device(training.device)
        use_compilation_cache(training.compilation_cache_dir)
        self.mesh = sharding.make_mesh(training.mesh, self.devices)
        processes.connect(self.mesh)
        # -- what: tokenizer, configuration, model, objective
        objective_class = plugins.load().objectives.get(self.objective_name)
        if training.do_predict and not objective_class.predicts:
            raise UsageError(
                f"--do_predict: '{self.objective_name}' training has no test split to judge; "
                "clm (its loss) and translation (what is written) have it, and classification"
            )
        with processes.first():  # the tokenizer may have to be made
            self.tokenizer = setup.load_tokenizer(self.arguments, objective_class, self.folder)
        config = setup.load_config(self.arguments, self.tokenizer, objective_class)
        self.model = setup.build_model(self.arguments, config, objective_class.auto_class)
        self.objective = objective_class(self.arguments.data, self.tokenizer, config)
        self.layout = setup.lay_out(self.model, self.mesh, training.sequence_parallel)
        self.objective.prepare(self.model)
        # -- data: the global batch is fixed first
        self.checkpoints = Checkpointer(self.folder, training.save_total_limit)
        resume.read_progress(self)
        self.batch_size, self.micro = self._batch_size()
        length = self.objective.choose_length(self.model.max_length())
        self.windows = windows.plan(self.arguments, self.objective, self.model, length)
        resume.keep_windows(self)
        if training.do_train:
            tokens = self.windows.length if self.windows else length
            self.model.check_training(self.batch_size * tokens)
        shards = sharding.data_shards(self.mesh)
        eval_batch = training.per_device_eval_batch_size * shards
        self.data = setup.prepare_data(
            self.arguments, self.tokenizer, self.objective, self.objective.row_length(length),
            self.batch_size, eval_batch, self.windows,
        )  # fmt: skip
        found = {"data": self.data.description, "step to go on from": self.restore_step}
        processes.agree(found, "give all of them the same files")
        self._check_sequence_axis(length)
        evaluation.check_metric(self)
        # -- state: restored, or initialised where it lies
        self._make_optimizer()
        self._make_state()
        self.eval_step = jax.jit(
            states.make_eval_step(self.objective, self.model),
            out_shardings=jax.NamedSharding(self.mesh, jax.P()),  # every process reads all of it
        )
        self.read_extra = jax.jit(self.model.extra_metrics)
        # -- go
        self.trackers = make_trackers(
            training.report_to if jax.process_index() == 0 else "none", self.folder, training,
            self.arguments.as_dict() | {"total_steps": self.total_steps},
            self.progress.step if training.do_train else None,
        )  # fmt: skip
        self.publisher = export.Publisher(self)
        with StopSignal() as self.stop:
            try:
                if training.do_train:
                    self._train(length)
                if not self.stop.received:
                    self._judge()
                export.complete(self)
            finally:
                self.checkpoints.settle()
                for tracker in self.trackers:
                    tracker.close()
        if self.stop.received:
            sys.exit(training.sigterm_exit_code if self.stop.received == signal.SIGTERM else 130)
        return self.metrics

    def _judge(self) -> None:
        """Evaluate the last weights, then those that stay if they are others, then predict."""
        training = self.training
        if training.do_eval and self.evaluated_step != self.progress.step:
            self.metrics |= self.evaluate()
        going = training.do_train and not self.stop.received
        if going and export.choose_weights(self) and training.do_eval:
            self.metrics |= self.evaluate()
        if training.do_predict and not self.stop.received:
            self.metrics |= evaluation.predict(self)

    # -- preparation

    def _check_folder(self) -> None:
        """Refuse to train where something else lies, and to move away what is to be loaded."""
        training, source = self.training, self.arguments.model.model_name_or_path
        if not training.do_train:
            return
        same = source and Path(source).absolute() == self.folder.absolute()
        if same and training.overwrite_output_dir:
            raise UsageError(
                f"--overwrite_output_dir would move the weights of --model_name_or_path {source} "
                "aside before they are read: give another --output_dir"
            )
        check_output_dir(self.folder, training.overwrite_output_dir)

    def _check_sequence_axis(self, length: int) -> None:
        axes = ["sequence", *(["tensor"] if self.training.sequence_parallel else [])]
        ways = math.prod(self.mesh.shape[name] for name in axes)
        flag = "--mesh " + ",".join(f"{name}={self.mesh.shape[name]}" for name in axes)
        flag += " with --sequence_parallel" if len(axes) > 1 else ""
        parts = {"row": length, "target row": self.objective.target_length(length)}
        if self.windows:
            parts["window"] = self.windows.length
        for name, tokens in parts.items():
            if tokens % ways:
                raise UsageError(
                    f"{flag} does not divide the {tokens} tokens of a {name}: give a length that "
                    f"is a multiple of {ways}, or another mesh"
                )

    def _batch_size(self) -> tuple[int, int]:
        """Return rows a step and micro-batches; a resumed run keeps its batch on any devices."""
        training, shards = self.training, sharding.data_shards(self.mesh)
        micro = training.gradient_accumulation_steps
        size = training.global_batch_size or training.per_device_train_batch_size * shards * micro
        kept = self.progress.global_batch_size
        if kept and size != kept and training.global_batch_size is None:
            logger.warning(
                "going on with the run's %d rows a step (the flags alone would give %d)", kept, size
            )
            size = kept
        if size % (shards * micro):
            raise UsageError(
                f"a step has {size} rows, which do not divide by {shards} data shards x {micro} "
                f"micro-batches: give --global_batch_size a multiple of {shards * micro}"
            )
        self.progress.global_batch_size = size
        return size, micro

    def _total_steps(self) -> int:
        if self.training.max_steps > 0:
            return self.training.max_steps
        if self.arguments.data.streaming:
            raise UsageError("--streaming needs --max_steps: the length of a stream is not known")
        return max(1, round(len(self.data.train) * self.training.num_train_epochs))

    def _make_optimizer(self) -> None:
        """Build schedule and optimizer; evaluation alone needs neither."""
        import optax

        self.total_steps, self.optimizer = 0, optax.identity()
        if self.training.do_train:
            self.total_steps = self._total_steps()
            width = getattr(self.model.config, "hidden_size", None)
            self.schedule = make_schedule(self.training, self.total_steps, width)
            factory = plugins.load().optimizers.get(self.training.optim)
            self.optimizer = make_optimizer(
                factory, self.training, self.schedule, self.model.stacked_prefixes
            )

    def _make_state(self) -> None:
        """Initialise or restore the state; parameters and moments never lie whole on one host."""
        training, memory = self.training, self.memory()
        names = tuple(sorted({"loss", "count", *self.objective.sums}))

        def build(params: Any, extra: Any) -> Any:
            return states.make_state(
                params, self.optimizer, extra, states.zero_window(names),
                self.model.precision.compute_dtype if training.do_train else None,
                None if memory is None else self.model.init_cache(memory.rows, 0),
            )  # fmt: skip

        shapes = {p: leaf for p, leaf in trees.flatten(self.model.params_shape_tree).items()}
        padded = trees.unflatten(
            {
                path: jax.ShapeDtypeStruct(
                    self.layout.padded(path, leaf.shape), self.arguments.model.param_dtype
                )
                for path, leaf in shapes.items()
            }
        )
        places = self.layout.shardings({p: leaf.shape for p, leaf in shapes.items()})
        abstract = jax.eval_shape(build, padded, self.model.extra_shape_tree)
        self.state_shardings = states.state_shardings(abstract, places, self.mesh, memory)
        if self.restore_step is None:
            params, extra = setup.make_params(self.arguments, self.model, self.layout)
            self.state = jax.jit(build, out_shardings=self.state_shardings, donate_argnums=0)(
                params, extra
            )
            return
        target = jax.tree.map(
            lambda leaf, place: jax.ShapeDtypeStruct(leaf.shape, leaf.dtype, sharding=place),
            abstract, self.state_shardings,
        )  # fmt: skip
        assert self.restore_from is not None
        self.state = self.restore_from.restore(self.restore_step, target)
        logger.info("resumed from step %d of %s", self.restore_step, training.output_dir)

    def memory(self) -> state.Memory | None:
        """Return how what the model knows of earlier windows is carried, if it is."""
        if self.windows is None:
            return None
        count, stacked = self.windows.count, self.model.stacked_prefixes
        return state.Memory(self.batch_size, count, tuple(stacked))

    # -- training

    def _train(self, length: int) -> None:
        training, progress = self.training, self.progress
        feed = Loader(self.data.train, self.objective, self.mesh, self.micro, training.seed)
        feed.restore(progress.stream)
        compiled = compile_step(self)
        self.meter = throughput.make_meter(
            self.model, self.objective, self.data, self.batch_size, length, training.peak_tflops
        )
        profiler = Profiler(training.profile if not jax.process_index() else None, self.folder)
        watcher = callbacks.Watcher(self)
        started, before = time.perf_counter(), progress.seconds
        # Collectives of two steps at once can deadlock on a CPU.
        blocking = jax.default_backend() == "cpu"
        with contextlib.ExitStack() as stack:
            bar = stack.enter_context(callbacks.progress_bar(self))
            batches = stack.enter_context(
                contextlib.closing(feed.batches(progress.step, self.total_steps))
            )
            for number, batch, count, position in batches:
                if not progress.step:
                    calibrate(self, batch)
                if training.inspect_sharding and self.last_step is None:
                    collectives.report(self, compiled, batch)
                profiler.at(number + 1, self.last_step)
                watcher.at(number + 1, batch)
                self.state, now = compiled(self.state, batch)
                if blocking:
                    jax.block_until_ready(now)
                self.last_step, progress.step, progress.stream = now, number + 1, position
                progress.tokens_seen += count
                self.meter.add(count)
                progress.seconds = before + time.perf_counter() - started
                bar.update(1)
                self._after_step(bar)
                if self.stop.after(progress.step):
                    break
        profiler.close(self.last_step)
        self._save()
        self.checkpoints.wait()

    def _after_step(self, bar: Any) -> None:
        """Log, evaluate, call back, save, each when its time has come; the order is a promise."""
        training, step = self.training, self.progress.step
        last = step == self.total_steps
        first = step == 1 and training.logging_first_step
        if step % training.logging_steps == 0 or first or last:
            callbacks.log(self, bar)
        if self._due(training.eval_strategy, training.eval_steps):
            started = time.perf_counter()
            self.metrics |= self.evaluate(training.max_eval_batches)
            self.meter.pause(time.perf_counter() - started)
        for function, every in self._callbacks:
            if step % every == 0:
                function(self)
        if self._due(training.save_strategy, training.save_steps) and not last:
            started = time.perf_counter()
            self._save()
            self.meter.pause(time.perf_counter() - started)

    def _due(self, strategy: str | None, every: int | None) -> bool:
        if strategy == "steps":
            return every is not None and self.progress.step % every == 0
        if strategy == "epoch" and not self.arguments.data.streaming:
            return self.progress.step % len(self.data.train) == 0
        return False

    def report(self, metrics: dict[str, float], step: int) -> None:
        """Send metrics to every tracker."""
        for tracker in self.trackers:
            tracker.log(metrics, step)

    # -- evaluation and saving

    def evaluate(self, limit: int | None = None) -> dict[str, float]:
        """Evaluate on the validation split, report, and note whether it is the best.

        ``limit`` is how many batches to read; by default the whole split.
        """
        return evaluation.evaluate(self, limit)

    def _save(self) -> None:
        """Save a checkpoint and the model itself, unless a step since the last log went wrong."""
        if self.training.on_non_finite == "stop" and float(self.state["window"]["bad_steps"]):
            callbacks.not_finite(self, 1)
        progress = self.progress
        self.checkpoints.save(
            progress.step, self.state, dataclasses.asdict(progress), progress.best_step
        )
        if not (self.folder / files.SAFETENSORS).exists():
            # Weights without any checkpoint would look like somebody else's model after a kill.
            self.checkpoints.wait()
        export.save_model(self)
        self.publisher.publish(f"Training in progress, step {progress.step}")
