"""Real processes on this machine: same result as one process, and they end together."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from safetensors.numpy import load_file

from hfseq.cli.launch import free_port
from tests.support import stored_runs
from tests.support.environment import FLAGS
from tests.training.conftest import losses

SCRIPTS = Path(__file__).parents[2] / "scripts"
OF_OBJECTIVE = {
    "mlm": "run_mlm_flax.py",
    "clm": "run_clm_flax.py",
    "span_mlm": "run_t5_mlm_flax.py",
    "translation": "run_translation_flax.py",
    "classification": "run_classification_flax.py",
    "image_classification": "run_image_classification_flax.py",
    "wav2vec2": "run_wav2vec2_pretrain_flax.py",
    "dpo": "run_dpo_flax.py",
    "kto": "run_kto_flax.py",
    "embedding": "run_embedding_flax.py",
    "cross_encoder": "run_cross_encoder_flax.py",
}


class Processes:
    """The processes of one run. `flags` is one list for all, or one list per process."""

    def __init__(
        self,
        flags: Sequence[Any],
        count: int,
        devices: int = 1,
        objective: str = "mlm",
        cwd: Sequence[Path] | None = None,
        only: int | None = None,
    ):
        each = flags if isinstance(flags[0], list) else [flags] * count
        address = f"localhost:{free_port()}"
        environment = os.environ | {
            "XLA_FLAGS": " ".join(FLAGS[1:]),  # without that of eight devices
            "JAX_NUM_CPU_DEVICES": str(devices),
            "PYTHONPATH": os.pathsep.join(sys.path),
            "OMP_NUM_THREADS": "1",
        }
        self.running = [
            subprocess.Popen(
                [
                    sys.executable,
                    str(SCRIPTS / OF_OBJECTIVE[objective]),
                    *each[number],
                    f"--coordinator_address={address}",
                    f"--num_processes={count}",
                    f"--process_id={number}",
                ],
                env=environment,
                stdout=subprocess.PIPE,
                stderr=subprocess.STDOUT,
                text=True,
                cwd=cwd[number] if cwd else None,
            )
            for number in range(count)
            if only is None or number == only
        ]

    def ends(self, *codes: int, within: float = 900) -> list[str]:
        """Waits, checks the exit codes (one for all, or one each), and returns the outputs."""
        end = time.monotonic() + within
        try:
            texts = [p.communicate(timeout=max(end - time.monotonic(), 1))[0] for p in self.running]
        finally:
            for process in self.running:
                process.kill()
        exit_codes = [process.returncode for process in self.running]
        expected_codes = list(codes) if len(codes) > 1 else list(codes) * len(exit_codes)
        assert exit_codes == expected_codes, "\n---\n".join(texts)
        return texts

    def reaches(self, step: int, folder: Path, within: float = 600) -> None:
        """Waits until the log contains a step."""
        end = time.monotonic() + within
        while time.monotonic() < end:
            if (folder / "metrics.jsonl").exists() and max(losses(folder), default=0) >= step:
                return
            if any(process.poll() is not None for process in self.running):
                break
            time.sleep(0.05)
        self.ends(0, within=5)
        pytest.fail(f"step {step} was never logged")


def results(folder: Path) -> dict[str, float]:
    return json.loads((folder / "eval_results.json").read_text())


def assert_same(reference_folder: Path, other: Path, without: Sequence[str] = ()) -> None:
    """Asserts that two runs have the same losses and weights.

    Args:
        reference_folder: The output directory of a run.
        other: The output directory of the other run.
        without: Names of weights whose gradient is zero. The optimizer divides the rounding errors
            of such a gradient by their own size.
    """
    first, second = (losses(folder) for folder in (reference_folder, other))
    assert first.keys() == second.keys()
    assert max(abs(first[step] - second[step]) for step in first) < 1e-5
    first_weights, other_weights = (
        load_file(folder / "model.safetensors") for folder in (reference_folder, other)
    )
    assert first_weights.keys() == other_weights.keys()
    for name in first_weights.keys() - set(without):
        value = first_weights[name]
        np.testing.assert_allclose(other_weights[name], value, rtol=0, atol=1e-5, err_msg=name)


def test_two_processes_match_one_and_only_the_first_writes(flags, train, tmp_path):
    options = {"save_steps": 2, "mesh": "fsdp=2", "max_steps": 4}
    train("one", devices=2, **options)
    texts = Processes(flags("two", **options), 2).ends(0)
    assert_same(tmp_path / "one", tmp_path / "two")
    names = {path.name for path in (tmp_path / "one").iterdir()}
    drawn = {"learning_curve.png"}  # not by `train`
    assert names | drawn == {path.name for path in (tmp_path / "two").iterdir()}
    single, two = (results(tmp_path / name)["eval_loss"] for name in ("one", "two"))
    assert single == pytest.approx(two, abs=1e-5)
    assert "Step... (4 |" in texts[0] and "Step..." not in texts[1] and "Eval" not in texts[1]
    # One process restores the checkpoint of two. The run is complete and only exports it again.
    exported = load_file(tmp_path / "two" / "model.safetensors")
    restored = train("two", devices=1, **options | {"mesh": "data=1", "do_train": True})
    assert restored.start_step == restored.progress.step == 4
    again = load_file(tmp_path / "two" / "model.safetensors")
    assert all(np.array_equal(again[name], value) for name, value in exported.items())


@pytest.mark.slow
def test_processes_of_two_devices_share_a_tensor_axis(flags, train, tmp_path):
    options = {"objective": "clm", "mesh": "data=1,fsdp=2,tensor=2", "max_steps": 4}
    train("one", devices=4, **options)
    Processes(flags("two", **options), 2, devices=2, objective="clm").ends(0)
    assert_same(tmp_path / "one", tmp_path / "two")


@pytest.mark.slow
def test_a_signal_to_one_process_stops_all_at_one_step(flags, train, tmp_path):
    options = {"max_steps": 400, "logging_steps": 10, "save_strategy": "no", "do_train": True}
    running = Processes(flags("run", **options | {"sigterm_exit_code": 143}), 2)
    running.reaches(20, tmp_path / "run")
    running.running[1].send_signal(signal.SIGTERM)
    texts = running.ends(143)
    assert "all processes save and stop at step" in texts[0]
    stopped = int(texts[0].split("stop at step ")[1].split()[0])
    assert 20 < stopped < 400
    assert [path.name for path in (tmp_path / "run" / "checkpoints").iterdir()] == [str(stopped)]


@pytest.mark.slow
def test_a_killed_process_ends_the_others_soon(flags, tmp_path):
    options = {"max_steps": 4000, "logging_steps": 10, "save_strategy": "no"}
    running = Processes([*flags("run", **options), "--heartbeat_timeout=30"], 2)
    running.reaches(10, tmp_path / "run")
    running.running[1].kill()
    texts = running.ends(1, -signal.SIGKILL, within=60)
    assert "the connection to another process was lost" in texts[0]


@pytest.mark.slow
def test_processes_that_disagree_all_end(flags):
    each = [flags("run", learning_rate=rate) for rate in (0.1, 0.2)]
    for text in Processes(each, 2).ends(2, within=120):
        assert "--learning_rate is 0.1 in process 0 and 0.2 in process 1" in text


@pytest.mark.slow
def test_a_process_that_never_comes_is_named(flags):
    alone = Processes([*flags("run"), "--coordinator_timeout=3"], 2, only=0)
    assert "not all 2 processes connected to the coordinator at localhost:" in alone.ends(1)[0]


# -- slow ------------------------------------------------------------------------------------------


@pytest.mark.slow
@pytest.mark.parametrize(
    ("objective", "count", "devices", "mesh"),
    [
        ("mlm", 4, 1, "data=4"),
        ("mlm", 4, 1, "data=2,tensor=2"),
        ("mlm", 2, 4, "data=2,fsdp=2,tensor=2"),
        ("clm", 4, 2, "data=4,tensor=2"),
        ("clm", 2, 1, "data=1,tensor=2"),
        ("span_mlm", 2, 2, "data=2,fsdp=2"),
        ("translation", 2, 1, "data=2"),
    ],
)
def test_more_processes_meshes_and_objectives(
    flags, train, tmp_path, objective, count, devices, mesh
):
    options = {"objective": objective, "mesh": mesh, "max_steps": 4, "save_steps": 2}
    options["card_samples"] = 2
    train("one", devices=count * devices, **options)
    Processes(flags("several", **options), count, devices, objective).ends(0)
    assert_same(tmp_path / "one", tmp_path / "several")
    samples = [
        json.loads((tmp_path / name / "run.json").read_text()).get("sample_outputs")
        for name in ("one", "several")
    ]
    assert samples[0] == samples[1]
    assert samples[0] or objective == "translation"  # whose samples come from an evaluation


@pytest.mark.slow
def test_every_process_writes_all_translations(flags, train, tmp_path):
    options = {"objective": "translation", "predict_with_generate": True, "max_steps": 2}
    single = train("one", devices=2, **options)
    Processes(flags("two", **options), 2, objective="translation").ends(0)
    assert_same(tmp_path / "one", tmp_path / "two")
    assert results(tmp_path / "two")["eval_chrf"] == pytest.approx(
        single.metrics["eval_chrf"], abs=1e-5
    )


@pytest.mark.slow
def test_run_resumes_with_another_number_of_processes(flags, train, tmp_path):
    options = {"save_steps": 2, "lr_scheduler_type": "constant_with_warmup"}
    train("whole", devices=4, **options)
    for count, devices, until in ((4, 1, 2), (2, 2, 4), (1, 4, 6)):
        Processes(flags("parts", **options | {"max_steps": until}), count, devices).ends(0)
    assert_same(tmp_path / "whole", tmp_path / "parts")


@pytest.mark.slow
def test_a_killed_coordinator_ends_the_others_soon(flags, tmp_path):
    options = {"max_steps": 4000, "logging_steps": 10, "save_strategy": "no"}
    options["global_batch_size"] = 12
    running = Processes([*flags("run", **options), "--heartbeat_timeout=10"], 3)
    running.reaches(10, tmp_path / "run")
    running.running[0].kill()
    for process in running.running:
        process.communicate(timeout=60)
    ended = [process.returncode for process in running.running]
    assert ended[0] == -signal.SIGKILL and all(ended)


@pytest.mark.slow
def test_a_directory_of_each_machine_is_refused(flags, tmp_path):
    folders = [tmp_path / name for name in ("a", "b")]
    for folder in folders:
        folder.mkdir()
    arguments = [*flags(), "--output_dir=run"]
    for text in Processes(arguments, 2, cwd=folders).ends(2, within=120):
        assert "is not the folder that process 0 writes" in text


@pytest.mark.slow
def test_an_error_of_one_process_ends_all(flags, tmp_path):
    missing = tmp_path / "missing"  # a cache that one machine cannot write
    missing.write_text("a file")
    arguments = flags()
    each = [arguments, [*arguments, f"--data_cache_dir={missing}"]]
    first, second = Processes(each, 2).ends(1, within=120)
    assert "error: process 1 on " in first and "Not a directory" in first
    assert "Not a directory" in second


@pytest.mark.slow
def test_classification_gathers_the_predictions_of_all_processes(flags, tmp_path):
    import jax

    from hfseq.training.arguments import parse
    from hfseq.training.run import main

    for name, count in (("labelled", 40), ("judged", 19), ("asked", 11)):
        rows = ({"sentence": "the law" * (i % 3 + 1), "label": i % 2} for i in range(count))
        lines = "".join(json.dumps(row) + "\n" for row in rows)
        (tmp_path / f"{name}.jsonl").write_text(lines)
    options = {
        "train_file": tmp_path / "labelled.jsonl",
        "validation_file": tmp_path / "judged.jsonl",
        "test_file": tmp_path / "asked.jsonl",
        "per_device_eval_batch_size": 4,
        "do_train": True,
        "do_eval": True,
        "do_predict": True,
    }
    argument_list = flags("one", **options)
    arguments = parse(argument_list, objective="classification")
    main(arguments, "classification", devices=jax.devices()[:2])
    Processes(flags("two", **options), 2, objective="classification").ends(0)
    assert_same(tmp_path / "one", tmp_path / "two")
    single, two = (results(tmp_path / name) for name in ("one", "two"))
    assert single["eval_accuracy"] == two["eval_accuracy"]
    predictions = [sorted((tmp_path / name).glob("*results*.tsv"))[0] for name in ("one", "two")]
    assert predictions[0].read_text() == predictions[1].read_text()


@pytest.mark.slow
@pytest.mark.parametrize(
    ("objective", "options"),
    [("kto", {}), ("dpo", {"precompute_ref_log_probs": True})],
)
def test_two_processes_learn_preferences_like_one(tmp_path, objective, options):
    """KTO pairs prompts with completions of rows that the other process holds."""
    values = stored_runs.record(objective)["flags"] | {"learning_rate": 1e-2, "packing": None}
    values = {name: value for name, value in (values | options).items() if value is not None}
    data = stored_runs.STORED / "data"
    stored_runs.run(objective, values, data, tmp_path / "one")
    words = [f"--{name}={value}" for name, value in values.items()]
    words = [word.replace(stored_runs.DATA, str(data)) for word in words]
    each = [[*words, f"--output_dir={tmp_path / 'two'}", f"--data_cache_dir={tmp_path / 'cache'}"]]
    Processes(each * 2, 2, objective=objective).ends(0)
    assert_same(tmp_path / "one", tmp_path / "two")


@pytest.mark.slow
@pytest.mark.parametrize("objective", ["embedding", "cross_encoder"])
def test_chunks_use_the_negatives_of_all_processes(objective, flags, tmp_path):
    import random

    import jax

    from hfseq.training.arguments import parse
    from hfseq.training.run import main
    from tests.training.conftest import WORDS

    draw, words = random.Random(0), sorted(set(WORDS))
    rows = []
    for _ in range(40):
        text = draw.sample(words, 4)
        rows.append({"anchor": " ".join(text[:2]), "positive": " ".join(text)})
    lines = "".join(json.dumps(row) + "\n" for row in rows)
    (tmp_path / "pairs.jsonl").write_text(lines)
    options = {
        "train_file": tmp_path / "pairs.jsonl",
        "validation_file": tmp_path / "pairs.jsonl",
        "max_seq_length": None,
        "loss": "multiple_negatives_ranking",
        "batch_sampler": "no_duplicates",
        "per_device_eval_batch_size": 8,
        "do_train": True,
        "do_eval": True,
    }
    # Each device has four of eight rows, which chunks of three do not divide.
    arguments = parse(flags("one", **options), objective=objective)
    main(arguments, objective, devices=jax.devices()[:1])
    # The candidates of an evaluation are the texts of a batch, which has eight rows in both runs.
    chunks = {**options, "mini_batch_size": 3, "per_device_eval_batch_size": 4}
    Processes(flags("two", **chunks), 2, objective=objective).ends(0)
    # A number that is added to the scores of all candidates does not change this loss.
    assert_same(tmp_path / "one", tmp_path / "two", without=["classifier.out_proj.bias"])
    for name, value in results(tmp_path / "one").items():
        if name.startswith("eval_") and "per_second" not in name and "runtime" not in name:
            assert results(tmp_path / "two")[name] == pytest.approx(value, abs=1e-5), name
