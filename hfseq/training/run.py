"""The training run. `main` trains, evaluates and saves a model as the flags describe."""

from __future__ import annotations

import contextlib
import dataclasses
import functools
import json
import logging
import signal
import sys
import time
from collections.abc import Sequence
from pathlib import Path

import jax

from hfseq import plugins
from hfseq.checkpoints import hub, network
from hfseq.checkpoints.storage import Workspace
from hfseq.modeling import FlaxPreTrainedModel
from hfseq.training import accelerator_flags, optimizers, output_directory, processes
from hfseq.training.arguments import Arguments, TrainingArguments, with_data_arguments
from hfseq.training.callbacks import (
    Calibrate,
    Callback,
    CallbackFunction,
    Evaluate,
    Histograms,
    InspectSharding,
    LogMetrics,
    Profile,
    Save,
    StepInfo,
    StepResults,
    call_handlers,
    find_handlers,
    progress_bar,
)
from hfseq.training.checkpointer import Checkpointer, Progress, find_checkpoint
from hfseq.training.evaluation import markdown_table
from hfseq.training.export import (
    Publisher,
    choose_weights,
    draw_curve,
    export,
    json_metrics,
    sample_outputs,
    write_card,
    write_results,
)
from hfseq.training.loader import Loader
from hfseq.training.processes import StopSignal
from hfseq.training.reference import precompute
from hfseq.training.setup import Run, build_run, restore_or_initialize
from hfseq.training.state import TrainState
from hfseq.training.throughput import make_meter
from hfseq.training.trackers import Trackers, make_trackers

logger = logging.getLogger(__name__)


@dataclasses.dataclass(frozen=True)
class Result:
    """The result of a finished run.

    Attributes:
        run: The parts of the run that do not change during training, such as its flags and data.
        state: The final training state.
        progress: The counters at the end of the run, such as the number of steps.
        metrics: The latest value of each metric.
    """

    run: Run
    state: TrainState
    progress: Progress
    metrics: dict[str, float]

    @property
    def folder(self) -> Path:
        """The output directory, which contains the trained model."""
        return self.run.folder

    @functools.cached_property
    def model(self) -> FlaxPreTrainedModel:
        """The trained model, which is loaded from `folder` when it is first accessed.

        With several processes, all processes must access this attribute.
        """
        return type(self.run.model).from_pretrained(self.folder)


def main(
    arguments: Arguments,
    objective: str,
    *,
    callbacks: Sequence[Callback | CallbackFunction] = (),
    devices: Sequence[jax.Device] | None = None,
) -> Result:
    """Trains, evaluates and predicts, as the flags describe.

    If the run has several processes, all of them must call this function.

    Args:
        arguments: The flags.
        objective: Name of the objective.
        callbacks: Functions that are called after each step, or callback objects. They are called
            after the evaluation that may follow a step, and before its checkpoint is saved. See
            `hfseq.training.callbacks`.
        devices: The devices to use. Default: all.

    Returns:
        The result of the run.

    Raises:
        HfseqError: The flags, the data or a checkpoint are invalid, or the run failed.
        SystemExit: A signal stopped the run, after it saved a checkpoint.
    """
    arguments = with_data_arguments(objective, arguments)
    training = arguments.training
    accelerator_flags.apply_flags(training.accelerator_flags)
    with contextlib.ExitStack() as stack:
        if training.json:
            stack.enter_context(contextlib.redirect_stdout(sys.stderr))
        workspace = _set_up_processes(arguments, objective, stack)
        checkpointer = Checkpointer(workspace.path, training.save_total_limit)
        run, state, progress = _build(arguments, objective, checkpointer, workspace, devices)
        trackers = _open_trackers(run, progress)
        stack.callback(trackers.close)
        session = _Session(
            run=run,
            progress=progress,
            checkpointer=checkpointer,
            publisher=Publisher(training, workspace, checkpointer),
            trackers=trackers,
            evaluate=Evaluate(trackers),
            stop=stack.enter_context(StopSignal()),
        )
        try:
            if training.do_train:
                state = _train(session, state, callbacks)
            if not session.stop.received:
                state = _finish_state(session, state)
            _write_outputs(session, state)
        finally:
            checkpointer.wait_and_log_errors()
        if session.stop.received:
            is_sigterm = session.stop.received == signal.SIGTERM
            sys.exit(training.sigterm_exit_code if is_sigterm else 130)
        prints_json = training.json and jax.process_index() == 0
    if prints_json:
        output = {"output_dir": str(run.folder), "steps": progress.step}
        print(json.dumps(output | {"metrics": json_metrics(session.metrics)}, indent=2))
    return Result(run, state, progress, session.metrics)


@dataclasses.dataclass(frozen=True)
class _Session:
    """The objects that all phases of a run share: training, evaluation, and writing the outputs."""

    run: Run
    progress: Progress
    checkpointer: Checkpointer
    publisher: Publisher
    trackers: Trackers
    evaluate: Evaluate
    stop: StopSignal
    metrics: dict[str, float] = dataclasses.field(default_factory=dict)

    @property
    def training(self) -> TrainingArguments:
        return self.run.arguments.training


def _set_up_processes(
    arguments: Arguments, objective: str, stack: contextlib.ExitStack
) -> Workspace:
    """Connects the processes, loads plugins, and prepares the output directory and the devices."""
    training = arguments.training
    stack.enter_context(processes.session(arguments.processes))
    processes.check_flags_agree(arguments.as_dict(), objective, training.plugin)
    plugins.load(extra=training.plugin)
    hub.set_timeout(training.hub_timeout)
    if processes.process_count() > 1:
        network.ignore_open_connections()
    model = arguments.model.model_name_or_path
    workspace = stack.enter_context(output_directory.prepare_output_dir(training, model))
    output_directory.require_device(training.device)
    output_directory.use_compilation_cache(training.compilation_cache_dir)
    return workspace


def _build(
    arguments: Arguments,
    objective: str,
    checkpointer: Checkpointer,
    workspace: Workspace,
    devices: Sequence[jax.Device] | None,
) -> tuple[Run, TrainState, Progress]:
    """Builds the run, and restores or initializes its state.

    The progress is read first, because a resumed run keeps its global batch size, which determines
    how the data is loaded.
    """
    training = arguments.training
    restored_from, progress = checkpointer, Progress()
    if training.do_train:
        restored_from, progress = find_checkpoint(checkpointer, training.resume_from_checkpoint)
    run = build_run(arguments, objective, workspace.path, progress, devices)
    run, state = restore_or_initialize(run, restored_from, progress)
    run = precompute(run, state)
    if training.do_train and training.resume_from_checkpoint:
        checkpointer.go_back(progress.step, workspace.push)
    return run, state, progress


def _open_trackers(run: Run, progress: Progress) -> Trackers:
    training = run.arguments.training
    return make_trackers(
        training.report_to if jax.process_index() == 0 else "none",
        run.folder,
        training,
        run.arguments.as_dict() | {"total_steps": run.total_steps},
        progress.step if training.do_train else None,
    )


def _train(
    session: _Session, state: TrainState, callbacks: Sequence[Callback | CallbackFunction]
) -> TrainState:
    """Trains with the built-in callbacks and those of the user, and returns the last state."""
    run, training = session.run, session.training
    assert run.data is not None
    meter = session.evaluate.meter = make_meter(
        run.model,
        run.objective,
        run.data,
        run.batch.rows,
        run.batch.length,
        training.peak_tflops,
    )
    log_settings(run, session.progress.step)
    if not session.progress.step and run.objective.compares_samples:
        session.progress.first_samples = sample_outputs(run, state, None)
    # On a CPU, a step has ended before the callbacks run, so its results can be read immediately.
    delay = 0 if jax.default_backend() == "cpu" else 4
    results = StepResults(session.checkpointer, delay)
    with progress_bar(run, session.progress) as bar:
        all_callbacks = [
            Calibrate(),
            *([InspectSharding()] if training.inspect_sharding else []),
            Profile(None if jax.process_index() else training.profile, run.folder),
            Histograms(session.trackers, training.log_histograms),
            results,
            LogMetrics(session.trackers, meter, results, bar),
            session.evaluate,
            *callbacks,
            Save(results, session.publisher, meter),
        ]
        return train(run, state, session.progress, all_callbacks, session.stop, session.metrics)


def log_settings(run: Run, first_step: int) -> None:
    """Logs the settings of the training steps, including defaults and values computed from data."""
    training, model = run.arguments.training, run.arguments.model
    values = {
        name: getattr(training, name)
        for name in (
            *("seed", "optim", "learning_rate", "lr_scheduler_type", "weight_decay"),
            *("max_grad_norm", "logging_steps", "eval_strategy", "save_strategy"),
        )
    }
    values["warmup_steps"] = optimizers.num_warmup_steps(training, run.total_steps)
    for name in ("eval", "save"):
        if values[f"{name}_strategy"] == "steps":
            values[f"{name}_steps"] = getattr(training, f"{name}_steps")
    values |= {"precision": run.model.precision.name, "param_dtype": model.param_dtype}
    count = run.batch.micro_batches
    logger.info(
        "training steps %d to %d, %d rows per step in %d micro-batch%s, with %s",
        first_step + 1,
        run.total_steps,
        run.batch.rows,
        count,
        "es" if count > 1 else "",
        " ".join(f"--{name} {value}" for name, value in values.items()),
    )


def _finish_state(session: _Session, state: TrainState) -> TrainState:
    """Evaluates the last weights, selects the final weights, and predicts with them.

    `choose_weights` describes how the final weights can differ from the last weights. If they do,
    they are exported and evaluated too.

    Returns:
        The state with the final weights.
    """
    run, training, evaluate = session.run, session.training, session.evaluate
    info = StepInfo(run, state, session.progress, metrics=session.metrics)
    if training.do_eval and evaluate.evaluated_step != session.progress.step:
        evaluate.evaluate(info)
    final_state = None
    if training.do_train:
        final_state = choose_weights(run, state, session.progress, session.checkpointer)
    if final_state is not None:
        state, info = final_state, dataclasses.replace(info, state=final_state)
        export(run, state, run.folder)
        session.publisher.upload_to_storage()
        if training.do_eval:
            evaluate.evaluate(info)
    if training.do_predict:
        evaluate.predict(info)
    return state


def _write_outputs(session: _Session, state: TrainState) -> None:
    """Writes the results, the learning curve and the model card, and uploads the directory."""
    run, progress, training = session.run, session.progress, session.training
    session.checkpointer.finish(progress.best_step)
    texts = session.evaluate.texts
    # All processes must call this, because parameters are gathered.
    examples = sample_outputs(run, state, texts) if training.do_train else []
    if jax.process_index() != 0:
        return
    if texts is None and examples:  # generated texts were already logged
        table = markdown_table(("input", "model"), examples)
        session.trackers.text("eval_samples", table, progress.step)
    write_results(run.folder, session.metrics)
    if training.do_train:
        write_card(run, progress, draw_curve(run), examples)
    session.publisher.finish("End of training", session.stop)


def train(
    run: Run,
    state: TrainState,
    progress: Progress,
    callbacks: Sequence[Callback | CallbackFunction],
    stop: StopSignal,
    metrics: dict[str, float] | None = None,
) -> TrainState:
    """Runs the remaining training steps.

    Args:
        run: The run.
        state: The state to start from. Its buffers are donated to the first step, so it must not be
            used afterwards.
        progress: The counters, which are updated in place.
        callbacks: The callbacks, in the order in which they are called.
        stop: Stops training after the current step if a signal was received.
        metrics: The dict of metrics that callbacks read and update. Default: a new dict.

    Returns:
        The last state.
    """
    assert run.data is not None and run.data.train is not None
    seed, micro = run.arguments.training.seed, run.batch.micro_batches
    loader = Loader(run.data.train, run.objective, run.mesh, micro, seed, progress.stream)
    step = run.step_function()
    before_step, after_step = (
        find_handlers(f"on_step_{when}", callbacks) for when in ("begin", "end")
    )
    info = StepInfo(run, state, progress, metrics={} if metrics is None else metrics)
    info = call_handlers(find_handlers("on_train_begin", callbacks), info)
    # On a CPU, the collectives of two concurrent steps can deadlock, so each step must end before
    # the next one starts.
    blocking = jax.default_backend() == "cpu"
    started, seconds = time.perf_counter(), progress.seconds
    with contextlib.closing(loader.batches(progress.step, run.total_steps)) as batches:
        for item in batches:
            info = call_handlers(before_step, dataclasses.replace(info, batch=item.batch))
            state, measured = step(info.state, run.frozen, item.batch)
            if blocking:
                jax.block_until_ready(measured)
            progress.step, progress.stream = item.step + 1, item.position
            progress.seconds = seconds + time.perf_counter() - started
            info = call_handlers(
                after_step, dataclasses.replace(info, state=state, step_metrics=measured)
            )
            if stop.should_stop_after(progress.step):
                break
    return call_handlers(find_handlers("on_train_end", callbacks), info).state
