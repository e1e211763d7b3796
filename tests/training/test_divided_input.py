"""Each process fetches, decodes and collates only its rows of a batch."""

from __future__ import annotations

import json

import jax
import numpy as np
import pytest
from safetensors.numpy import load_file

from hfseq.data.batches import RowRandom
from hfseq.training import setup
from hfseq.training.arguments import parse, with_data_arguments
from hfseq.training.checkpointer import Progress
from tests.support import stored_runs
from tests.support.audio import write_bad_audio, write_words
from tests.support.images import draw_digits, write_bad_images
from tests.support.tiers import first
from tests.training.conftest import losses
from tests.training.test_distributed_processes import Processes
from tests.training.test_image_classification_loop import SIZES as VIT
from tests.training.test_wav2vec2_loop import SIZES as WAV2VEC2

COUNTER = """
import atexit
from pathlib import Path
import jax
import hfseq.data.{module} as module
from hfseq import hookimpl

@hookimpl
def register_optimizers(register):
    pass

call, counted = module.{reader}.__call__, []
def count(self, sources, *args):
    counted.extend(source.name for source in sources)
    return call(self, sources, *args)
module.{reader}.__call__ = count
def write():
    path = Path({folder!r}, f"{{jax.process_index()}}.txt")
    path.write_text("\\n".join(counted))
atexit.register(write)
"""
COMMON = {
    **{"do_train": True, "do_eval": True, "decode_workers": 0, "per_device_eval_batch_size": 4},
    **{"optim": "sgd", "logging_steps": 1, "report_to": "jsonl", "card_samples": 0},
    "compilation_cache_dir": "none",
}
OBJECTIVES = [name for name in stored_runs.RUNS if name != "streaming"]


@pytest.mark.parametrize("name", first(OBJECTIVES, "mlm", "windows", "wav2vec2"))
def test_arrays_of_a_row_do_not_depend_on_other_rows(name, tmp_path):
    objective_name, flags = stored_runs.RUNS[name]
    flags = stored_runs._COMMON | flags | {"output_dir": tmp_path, "data_cache_dir": tmp_path}
    data = str(stored_runs.STORED / "data")
    words = [f"--{k}={v}".replace(stored_runs.DATA, data) for k, v in flags.items() if v]
    arguments = with_data_arguments(objective_name, parse(words, objective=objective_name))
    run = setup.build_run(arguments, objective_name, tmp_path, Progress(), jax.devices()[:1])
    source, objective = run.data.train, run.objective
    count = source.batch_size
    for step in (0, len(source) - 1):  # the last batch has rows that fill it

        def collated(part, groups, step=step):
            rows = source.fetch(step, part)
            batch = objective.collate(rows, RowRandom(1, step, part), groups)
            return batch | {"tokens": objective.count_tokens(rows)}

        whole = collated(np.arange(count), 4)
        parts = [collated(part, 2) for part in np.split(np.arange(count), 2)]
        for key, array in whole.items():
            pieces = [part[key] for part in parts]
            if key in objective.variable_width:
                fill = objective.variable_width[key]
                assert max(piece.shape[1] for piece in pieces) == array.shape[1], key
                pieces = [
                    np.pad(
                        piece,
                        [
                            (0, 0),
                            (0, array.shape[1] - piece.shape[1]),
                            *[(0, 0)] * (piece.ndim - 2),
                        ],
                        constant_values=fill,
                    )
                    for piece in pieces
                ]
            np.testing.assert_array_equal(np.concatenate(pieces), array, err_msg=key)


def run_two_ways(objective, module, reader, flags, tmp_path):
    """Runs with one process of two devices and with two processes, and compares the results.

    Returns the sources that each of the two processes read, the metrics, and the output of both.
    """
    flags = COMMON | flags
    counter = COUNTER.replace("{module}", module).replace("{reader}", reader)
    for name in ("one", "two"):
        (tmp_path / f"read-{name}").mkdir()
        code = counter.format(folder=str(tmp_path / f"read-{name}"))
        (tmp_path / f"{name}.py").write_text(code)
        words = [f"--{key}={value}" for key, value in flags.items()]
        words += [f"--output_dir={tmp_path / name}", f"--plugin={tmp_path / name}.py"]
        count = 1 if name == "one" else 2
        texts = Processes(words, count, 2 // count, objective).ends(0)
    read = [
        path.read_text().split("\n")
        for name in ("one", "two")
        for path in sorted((tmp_path / f"read-{name}").iterdir())
    ]
    weights = [load_file(tmp_path / name / "model.safetensors") for name in ("one", "two")]
    for name, value in weights[0].items():
        np.testing.assert_array_equal(weights[1][name], value, err_msg=name)
    assert losses(tmp_path / "one") == losses(tmp_path / "two")
    results = [
        json.loads((tmp_path / name / "eval_results.json").read_text()) for name in ("one", "two")
    ]
    assert results[0].keys() == results[1].keys()
    metrics = [
        {key: value for key, value in result.items() if not key.endswith("runtime")}
        for result in results
    ]
    assert metrics[0] == metrics[1]
    tokens_seen = [
        [
            record["tokens_seen"]
            for record in map(
                json.loads, (tmp_path / name / "metrics.jsonl").read_text().splitlines()
            )
            if "tokens_seen" in record
        ]
        for name in ("one", "two")
    ]
    assert tokens_seen[0] == tokens_seen[1] and tokens_seen[0]
    whole, first_part, second_part = map(sorted, read)
    assert sorted(first_part + second_part) == whole
    return first_part, second_part, metrics[0], texts


@pytest.mark.slow
def test_two_processes_share_the_images_of_a_batch(tmp_path):
    pytest.importorskip("PIL")
    draw_digits(tmp_path / "images", 10)
    problems = write_bad_images(tmp_path / "images" / "0")
    draw_digits(tmp_path / "validation", 5, seed=1)
    write_bad_images(tmp_path / "validation" / "1")
    flags = {
        **{"model_type": "vit", "config_overrides": VIT, "image_size": 32, "augment": True},
        **{"train_dir": tmp_path / "images", "validation_dir": tmp_path / "validation"},
        **{"global_batch_size": 8, "gradient_accumulation_steps": 2},
        **{"max_steps": 6, "learning_rate": 0.1},
    }
    first_part, second_part, metrics, texts = run_two_ways(
        "image_classification", "images", "ImageDecoder", flags, tmp_path
    )
    assert len(first_part) == len(second_part)
    assert metrics["eval_left_out"] == len(problems)
    for name in problems:  # logged by the process that read it
        assert sum(name in text for text in texts) >= 1, name


@pytest.mark.slow
def test_two_processes_share_the_audio_of_a_batch(tmp_path):
    pytest.importorskip("soundfile")
    write_words(tmp_path / "audio", 40)
    write_words(tmp_path / "validation", 8, seed=1)
    problems = write_bad_audio(tmp_path / "validation" / "bad")
    flags = {
        **{"config_overrides": WAV2VEC2, "mask_time_prob": 0.5},
        **{"train_dir": tmp_path / "audio", "validation_dir": tmp_path / "validation"},
        **{"max_duration_in_seconds": 0.5, "min_duration_in_seconds": 0.1},
        **{"pad_to_multiple_of": 100, "global_batch_size": 4},
        **{"max_steps": 20, "learning_rate": 0.01},
    }
    _, _, metrics, _ = run_two_ways("wav2vec2", "audio", "AudioReader", flags, tmp_path)
    assert metrics["eval_left_out"] == len(problems)
