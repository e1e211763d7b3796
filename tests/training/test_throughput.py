"""FLOPs against a count by hand, and rates that leave pauses out."""

from __future__ import annotations

import types

import numpy as np
import pytest

from hfseq.training import throughput


def test_step_flops_counts_weights_attention_and_the_tied_head():
    params = {
        "dense": {"kernel": np.zeros((8, 16)), "bias": np.zeros(16)},
        "embeddings": {"embedding": np.zeros((100, 8))},
    }
    config = types.SimpleNamespace(vocab_size=100, hidden_size=8, num_hidden_layers=2)
    flops = throughput.step_flops(params, config, tokens=64, length=32, head_tokens=10)
    assert flops == 64 * (6 * 8 * 16 + 12 * 2 * 8 * 32) + 6 * 10 * 100 * 8


def test_the_meter_divides_tokens_by_time_without_pauses(monkeypatch):
    now = iter([100.0, 110.0, 110.0])
    monkeypatch.setattr(throughput.time, "perf_counter", lambda: next(now))
    meter = throughput.Meter(flops_per_token=2.0, peak=100.0)
    meter.add(300)
    meter.add(300)
    meter.pause(4.0)
    assert meter.read() == {
        "train_tokens_per_second": pytest.approx(100.0),
        "train_mfu": pytest.approx(2.0),
    }


def test_a_machine_without_a_data_sheet_is_measured():
    assert throughput.measured_flops("float32", 256) > 1e8
    assert throughput.peak_memory_gb() > 0.05
