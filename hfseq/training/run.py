"""The run, read from top to bottom: ``main`` is all that a training script does."""

from __future__ import annotations

import contextlib
import dataclasses
import signal
import sys
import time
from collections.abc import Sequence
from pathlib import Path

import jax

from hfseq import plugins
from hfseq.checkpoints import hub, network
from hfseq.training import accelerator_flags, output_directory, processes
from hfseq.training.arguments import Arguments, with_data_arguments
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
    sample_outputs,
    write_card,
    write_results,
)
from hfseq.training.loader import Loader
from hfseq.training.processes import StopSignal
from hfseq.training.setup import Run, build_run, restore_or_initialize
from hfseq.training.state import TrainState
from hfseq.training.throughput import make_meter
from hfseq.training.trackers import make_trackers


@dataclasses.dataclass(frozen=True)
class Result:
    """A run that has ended: what it was, its last state, where it stands, its last metrics."""

    run: Run
    state: TrainState
    progress: Progress
    metrics: dict[str, float]

    @property
    def folder(self) -> Path:
        """Where the run left its model."""
        return self.run.folder


def main(
    arguments: Arguments,
    objective: str,
    *,
    callbacks: Sequence[Callback | CallbackFunction] = (),
    devices: Sequence[jax.Device] | None = None,
) -> Result:
    """Train, evaluate and predict as the flags say; every process of the run calls it.

    ``callbacks`` are called after each step, behind evaluation and before saving; see
    :mod:`hfseq.training.callbacks`. ``devices`` are all by default.

    Raises:
        HfseqError: what is wrong with flags, data or checkpoints, or with the run. SystemExit: a
            signal stopped the run, which was saved.
    """
    arguments = with_data_arguments(objective, arguments)
    training = arguments.training
    accelerator_flags.apply_flags(training.accelerator_flags)
    with contextlib.ExitStack() as stack:
        # -- where: processes, plugins, the output directory, devices
        stack.enter_context(processes.session(arguments.processes))
        processes.check_flags_agree(arguments.as_dict(), objective, training.plugin)
        plugins.load(extra=training.plugin)
        hub.set_timeout(training.hub_timeout)
        if processes.process_count() > 1:
            network.ignore_open_connections()
        source = arguments.model.model_name_or_path
        workspace = stack.enter_context(output_directory.prepare_output_dir(training, source))
        output_directory.require_device(training.device)
        output_directory.use_compilation_cache(training.compilation_cache_dir)
        # -- what: a resumed run keeps its batch, so its progress is read before any data
        checkpointer = Checkpointer(workspace.path, training.save_total_limit)
        restored_from, progress = checkpointer, Progress()
        if training.do_train:
            restored_from, progress = find_checkpoint(checkpointer, training.resume_from_checkpoint)
        run = build_run(arguments, objective, workspace.path, progress, devices)
        run, state = restore_or_initialize(run, restored_from, progress)
        # -- go
        trackers = make_trackers(
            training.report_to if jax.process_index() == 0 else "none",
            run.folder,
            training,
            arguments.as_dict() | {"total_steps": run.total_steps},
            progress.step if training.do_train else None,
        )
        stack.callback(trackers.close)
        publisher = Publisher(training, workspace, checkpointer)
        metrics: dict[str, float] = {}
        evaluate = Evaluate(trackers)
        stop = stack.enter_context(StopSignal())
        try:
            if training.do_train:
                assert run.data is not None
                meter = evaluate.meter = make_meter(
                    run.model,
                    run.objective,
                    run.data,
                    run.batch.rows,
                    run.batch.length,
                    training.peak_tflops,
                )
                with progress_bar(run, progress) as bar:
                    around = [
                        Calibrate(),
                        *([InspectSharding()] if training.inspect_sharding else []),
                        Profile(None if jax.process_index() else training.profile, run.folder),
                        Histograms(trackers, training.log_histograms),
                        LogMetrics(trackers, meter, checkpointer, bar),
                        evaluate,
                        *callbacks,
                        Save(checkpointer, publisher, meter),
                    ]
                    state = train(run, state, progress, around, stop, metrics)
            # -- judge the last weights, then those that stay if they are others
            info = StepInfo(run, state, progress, metrics=metrics)
            if not stop.received:
                if training.do_eval and evaluate.step != progress.step:
                    evaluate.evaluate(info)
                chosen = None
                if training.do_train:
                    chosen = choose_weights(run, state, progress, checkpointer)
                if chosen is not None:
                    state, info = chosen, dataclasses.replace(info, state=chosen)
                    export(run, state, run.folder)
                    publisher.upload_to_storage()
                    if training.do_eval:
                        evaluate.evaluate(info)
                if training.do_predict:
                    evaluate.predict(info)
            # -- results, curve, card, push
            checkpointer.finish(progress.best_step)
            # By all processes: their parameters are gathered for it.
            examples = sample_outputs(run, state, evaluate.texts) if training.do_train else []
            if jax.process_index() == 0:
                if evaluate.texts is None and examples:  # else shown when they were written
                    text = markdown_table(("given", "model"), examples)
                    trackers.text("eval_samples", text, progress.step)
                write_results(run.folder, metrics)
                if training.do_train:
                    write_card(run, progress, draw_curve(run), examples)
                publisher.finish("End of training", stop)
        finally:
            checkpointer.wait_and_log_errors()
        if stop.received:
            sys.exit(training.sigterm_exit_code if stop.received == signal.SIGTERM else 130)
    return Result(run, state, progress, metrics)


def train(
    run: Run,
    state: TrainState,
    progress: Progress,
    callbacks: Sequence[Callback | CallbackFunction],
    stop: StopSignal,
    metrics: dict[str, float] | None = None,
) -> TrainState:
    """Take the steps that are left, until the last or until ``stop``; returns the last state.

    ``progress`` moves along, and callbacks read and write ``metrics``. ``state`` is used up.
    """
    assert run.data is not None and run.data.train is not None
    seed, micro = run.arguments.training.seed, run.batch.micro_batches
    loader = Loader(run.data.train, run.objective, run.mesh, micro, seed, progress.stream)
    step = run.step_function()
    before, after = (find_handlers(f"on_step_{when}", callbacks) for when in ("begin", "end"))
    info = StepInfo(run, state, progress, metrics={} if metrics is None else metrics)
    info = call_handlers(find_handlers("on_train_begin", callbacks), info)
    # Collectives of two steps at once can deadlock on a CPU.
    blocking = jax.default_backend() == "cpu"
    started, seconds = time.perf_counter(), progress.seconds
    with contextlib.closing(loader.batches(progress.step, run.total_steps)) as batches:
        for item in batches:
            info = call_handlers(before, dataclasses.replace(info, batch=item.batch))
            state, measured = step(info.state, run.frozen, item.batch)
            if blocking:
                jax.block_until_ready(measured)
            progress.step, progress.stream = item.step + 1, item.position
            progress.tokens_seen += item.tokens
            progress.seconds = seconds + time.perf_counter() - started
            info = call_handlers(
                after, dataclasses.replace(info, state=state, step_metrics=measured)
            )
            if stop.should_stop_after(progress.step):
                break
    return call_handlers(find_handlers("on_train_end", callbacks), info).state
