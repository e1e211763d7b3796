"""FLOPs compared with a manual count, and rates without pauses."""

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


def test_step_flops_count_the_experts_that_process_a_token():
    experts = {"gate_up_proj": np.zeros((4, 10, 8)), "down_proj": np.zeros((4, 8, 5))}
    params = {"mlp": {"gate": {"kernel": np.zeros((8, 4))}, "experts": experts}}
    config = types.SimpleNamespace(vocab_size=100, hidden_size=8, num_experts_per_tok=2)
    flops = throughput.step_flops(params, config, tokens=64, length=32, head_tokens=0)
    assert flops == 64 * 6 * (8 * 4 + 2 * (10 * 8 + 8 * 5))


def test_an_encoder_decoder_s_flops_are_those_of_its_two_sides():
    params = {
        "encoder": {"dense": {"kernel": np.zeros((8, 16))}},
        "decoder": {"dense": {"kernel": np.zeros((8, 4))}},
        "shared": {"embedding": np.zeros((100, 8))},
    }
    config = types.SimpleNamespace(vocab_size=100, hidden_size=8, num_hidden_layers=2)
    model = types.SimpleNamespace(abstract_params=params, config=config)
    objective = types.SimpleNamespace(target_length=lambda length: 5, head_share=lambda: 1.0)
    attention = 12 * 2 * 8
    encoder = 3 * 32 * (6 * 8 * 16 + attention * 32)
    decoder = 3 * 5 * (6 * 8 * 4 + attention * (5 + 32)) + 6 * 15 * 100 * 8
    keys_and_values = 6 * 2 * 2 * 8 * 8 * 3 * (32 - 5)  # of the encoder's tokens, not the targets
    flops = throughput.run_flops(model, objective, 3, 32)
    assert flops == encoder + decoder + keys_and_values
    objective.target_length = lambda length: 0
    assert throughput.run_flops(model, objective, 3, 32) == throughput.step_flops(
        params, config, 96, 32, 96
    )


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
    assert throughput.measure_flops("float32", 256) > 1e8
    assert throughput.peak_memory_gb() > 0.05


# -- the peak
# ---------------------------------------------------------------------------------------


def devices_of(monkeypatch, device_kind, platform, count, processes=1):
    device = types.SimpleNamespace(device_kind=device_kind, platform=platform)
    monkeypatch.setattr(throughput.jax, "devices", lambda: [device] * count)
    monkeypatch.setattr(throughput.jax, "device_count", lambda: count)
    monkeypatch.setattr(throughput.jax, "process_count", lambda: processes)


def test_a_known_device_has_its_data_sheet_s_peak_and_all_of_all_hosts_count(monkeypatch):
    devices_of(monkeypatch, "NVIDIA H200", "gpu", 16, processes=2)
    assert throughput.peak_flops("bfloat16") == 16 * 989e12
    assert throughput.peak_flops("float32") == 16 * 494e12
    assert throughput.peak_flops(None) == 16 * 494e12
    assert throughput.peak_flops("bfloat16", peak_tflops=800) == 16 * 800e12


def test_an_unknown_accelerator_is_measured_and_multiplied(monkeypatch):
    devices_of(monkeypatch, "Example X1", "gpu", 4)
    monkeypatch.setattr(throughput, "measure_flops", lambda dtype: 7e12)
    assert throughput.peak_flops("bfloat16") == 4 * 7e12


def test_devices_of_a_cpu_share_its_cores_and_processes_add_up(monkeypatch, caplog):
    devices_of(monkeypatch, "cpu", "cpu", 8, processes=2)
    monkeypatch.setattr(throughput, "measure_flops", lambda dtype: 3e11)
    with caplog.at_level("INFO"):
        assert throughput.peak_flops("float32") == 2 * 3e11
    assert "0.6 TFLOP/s: 0.3 TFLOP/s per process" in caplog.text
    assert "measured matrix multiplication) times 2" in caplog.text
    assert throughput.peak_flops("float32", peak_tflops=0.5) == 1e12
