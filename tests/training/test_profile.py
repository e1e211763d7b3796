"""``--profile`` and ``--peak_tflops`` on one device, several, and several processes."""

from __future__ import annotations

import json

import pytest

from hfseq.errors import UsageError
from hfseq.training import callbacks
from hfseq.training.checkpointer import Progress
from tests.training.test_distributed_processes import Processes


def logged(folder):
    return [json.loads(line) for line in (folder / "metrics.jsonl").read_text().splitlines()]


def assert_mfu(folder, peak: float) -> None:
    """The MFU is tokens per second times FLOPs per token over the peak: a constant factor."""
    rates = [
        (r["train_mfu"], r["train_tokens_per_second"]) for r in logged(folder) if "train_mfu" in r
    ]
    factors = {mfu / rate for mfu, rate in rates}
    assert len(rates) == 3 and max(factors) == pytest.approx(min(factors), rel=1e-3)
    # 2 layers of width 32 and a vocabulary of 300: about 200 thousand FLOPs per token.
    assert 5e4 < max(factors) * peak < 5e5


@pytest.mark.slow
@pytest.mark.alone
@pytest.mark.parametrize("count", [1, 8])
def test_a_run_on_one_device_or_several_writes_its_profile_and_mfu(train, count):
    loop = train(devices=count, max_steps=3, profile="2-3", peak_tflops=0.5, do_train=True)
    traces = list((loop.folder / "profile").rglob("*.xplane.pb"))
    assert len(traces) == 1 and traces[0].stat().st_size > 1000
    assert_mfu(loop.folder, 0.5e12)


@pytest.mark.slow
def test_of_several_processes_the_first_writes_a_profile_and_the_peaks_add_up(flags, tmp_path):
    arguments = flags(max_steps=3, profile="2-3", peak_tflops=0.5, do_train=True)
    Processes(arguments, 2).ends(0)
    assert len(list((tmp_path / "run" / "profile").rglob("*.xplane.pb"))) == 1
    assert_mfu(tmp_path / "run", 2 * 0.5e12)


def before(step):
    """The information that callbacks receive before a step."""
    return callbacks.StepInfo(None, None, Progress(step=step - 1))


def test_profile_covers_its_steps(monkeypatch, tmp_path):
    calls = []
    monkeypatch.setattr(callbacks.jax.profiler, "start_trace", lambda folder: calls.append("start"))
    monkeypatch.setattr(callbacks.jax.profiler, "stop_trace", lambda: calls.append("stop"))
    profile = callbacks.Profile("2-3", tmp_path)
    for step in range(1, 7):
        profile.on_step_begin(before(step))
        calls.append(step)
    assert calls == [1, "start", 2, 3, "stop", 4, 5, 6]


def test_resumed_run_profiles_the_remaining_steps(monkeypatch, tmp_path):
    calls = []
    monkeypatch.setattr(callbacks.jax.profiler, "start_trace", lambda folder: calls.append("start"))
    monkeypatch.setattr(callbacks.jax.profiler, "stop_trace", lambda: calls.append("stop"))
    profile = callbacks.Profile("2-9", tmp_path)
    profile.on_step_begin(before(5))
    profile.on_step_begin(before(6))
    profile.on_train_end(before(7))
    profile.on_train_end(before(7))
    assert calls == ["start", "stop"]


@pytest.mark.parametrize("steps", ["ten", "5", "5-2", "0-3", "-3", "1-2-3"])
def test_invalid_profile_ranges_are_rejected(flags, steps):
    from hfseq.training.arguments import parse

    with pytest.raises(UsageError, match="--profile .* first-last"):
        parse(flags(profile=steps))


@pytest.mark.parametrize("peak", ["0", "-1", "nan"])
def test_a_peak_is_positive(flags, peak):
    from hfseq.training.arguments import parse

    with pytest.raises(UsageError, match="--peak_tflops .*a positive number"):
        parse(flags(peak_tflops=peak))
