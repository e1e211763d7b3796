"""`--log_histograms`: its output, and that it does not affect training."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from hfseq.errors import UsageError
from hfseq.reports.log import RunLog, summarize
from hfseq.training import callbacks
from hfseq.training.event_file import EventFile, Histogram
from tests.training.conftest import losses


def read(folder: Path) -> Any:
    accumulators = pytest.importorskip("tensorboard.backend.event_processing.event_accumulator")
    (run,) = (folder / "runs").iterdir()
    return accumulators.EventAccumulator(str(run), size_guidance={"histograms": 0}).Reload()


def same(first: Any, other: Any) -> bool:
    return all(
        np.array_equal(a, b)
        for a, b in zip(jax.tree.leaves(first), jax.tree.leaves(other), strict=True)
    )


@pytest.mark.slow
@pytest.mark.filterwarnings("ignore::DeprecationWarning")
def test_a_run_reports_weights_and_gradients_and_trains_the_same(train, tmp_path):
    pytest.importorskip("tensorboard")
    begun: dict[int, Any] = {}

    def note(info: Any) -> None:
        begun[info.progress.step] = jax.device_get(info.state.params)

    plain = train("plain", 1, callbacks=[note], max_grad_norm=0.1)
    flags = {"log_histograms": 3, "report_to": "tensorboard,jsonl"}
    watched = train("watched", 1, max_grad_norm=0.1, learning_curve=True, **flags)
    assert losses(plain.folder) == losses(watched.folder)
    assert same(plain.state.params, watched.state.params)
    events = read(watched.folder)
    paths = ["/".join(path) for path in callbacks.trees.flatten(plain.state.params)]
    assert set(events.Tags()["histograms"]) == {
        f"{group}/{path}" for group in ("weights", "gradients") for path in paths
    }
    norms = {}
    for step in (3, 6):
        for path, weights in callbacks.trees.flatten(begun[step - 1]).items():
            tag = f"weights/{'/'.join(path)}"
            (histogram,) = (h for h in events.Histograms(tag) if h.step == step)
            value = histogram.histogram_value
            assert value.num == weights.size == sum(value.bucket)
            assert value.min == weights.min() and value.max == weights.max()
            assert value.sum == pytest.approx(float(weights.sum(dtype=np.float64)), abs=1e-3)
        gradients = (events.Histograms(f"gradients/{path}") for path in paths)
        values = (h.histogram_value for histogram in gradients for h in histogram if h.step == step)
        norms[step] = sum(value.sum_squares for value in values) ** 0.5
    logged = {
        point.step: point.value
        for point in events.Scalars("train_grad_norm")
        if point.step in norms
    }
    assert norms == pytest.approx(logged, rel=1e-4)
    histogram = summarize(RunLog(watched.folder))
    assert (histogram["status"], histogram["step"], histogram["total_steps"]) == ("finished", 6, 6)
    assert RunLog(watched.folder).flags()["learning_rate"] == 3e-3 and not histogram["warnings"]
    assert (watched.folder / "learning_curve.png").exists()


def test_bins_hold_the_finite_values_between_the_smallest_and_the_largest():
    values = np.concatenate([np.linspace(-1, 3, 4001), [np.nan, np.inf, -np.inf]])
    histogram = callbacks.to_histogram(jax.device_get(callbacks.count_bins(jnp.asarray(values))))
    assert (histogram.low, histogram.high, histogram.count) == (-1, 3, 4001)
    assert histogram.edges[0] == -1 and histogram.edges[-1] == 3 and len(histogram.edges) == 41
    assert (
        sum(histogram.counts) == 4001
        and min(histogram.counts) >= 99
        and max(histogram.counts) <= 102
    )
    assert histogram.total == pytest.approx(4001.0) and histogram.sum_squares == pytest.approx(
        9337, rel=1e-3
    )


@pytest.mark.parametrize("values", [[2.0, 2.0, 2.0], [np.nan] * 3, []])
def test_equal_values_and_none_have_bins_too(values):
    histogram = callbacks.to_histogram(
        jax.device_get(callbacks.count_bins(jnp.asarray(values, jnp.float32)))
    )
    assert sum(histogram.counts) == histogram.count == (3 if 2.0 in values else 0)
    assert all(np.diff(histogram.edges) > 0)


@pytest.mark.filterwarnings("ignore::DeprecationWarning")
def test_tensorboard_reads_a_histogram_back(tmp_path):
    pytest.importorskip("tensorboard")
    file = EventFile(tmp_path / "runs" / "now", "host")
    file.histograms({"a/b": Histogram(-1, 1, 3, 0.5, 1.25, [-1, 0, 1], [1, 2])}, 7)
    file.close()
    (histogram,) = read(tmp_path).Histograms("a/b")
    value = histogram.histogram_value
    assert (histogram.step, value.min, value.max, value.num) == (7, -1, 1, 3)
    assert (value.sum, value.sum_squares) == (0.5, 1.25)
    assert sum(value.bucket) == 3 and value.bucket_limit[-1] == 1


def test_a_period_below_one_is_refused(flags):
    from hfseq.training.arguments import parse

    with pytest.raises(UsageError, match="--log_histograms 0: .*at least 1"):
        parse(flags(log_histograms=0))


@pytest.mark.slow
@pytest.mark.parametrize(
    "changes",
    [{"mesh": "data=4,tensor=2"}, {"dtype": "float16"}, {"gradient_accumulation_steps": 2}],
)
@pytest.mark.filterwarnings("ignore::DeprecationWarning")
def test_sharded_and_scaled_runs_are_watched_too(train, changes):
    pytest.importorskip("tensorboard")
    loop = train(log_histograms=2, report_to="tensorboard,jsonl", **changes)
    events = read(loop.folder)
    points = {point.step: point.value for point in events.Scalars("train_grad_norm")}
    tags = [tag for tag in events.Tags()["histograms"] if tag.startswith("gradients/")]
    for step in (2, 4, 6):
        values = (
            h.histogram_value for tag in tags for h in events.Histograms(tag) if h.step == step
        )
        norm = sum(value.sum_squares for value in values) ** 0.5
        if "dtype" not in changes:
            assert norm == pytest.approx(points[step], rel=1e-3)
        assert norm > 0
