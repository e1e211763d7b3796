"""A tiny corpus, tokenizers that are trained on it, and functions for short training runs."""

from __future__ import annotations

import json
import os
import random
import signal
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

import pytest

from tests.support.models import trees_equal

if TYPE_CHECKING:
    from tests.support import runs

WORDS = (
    "the law of every land is read by all who live there and some who do not yet know it".split()
)
TINY = (
    "hidden_size=32,num_hidden_layers=1,num_attention_heads=4,intermediate_size=64,"
    "max_position_embeddings=40"
)
TWO_LAYERS = f"{TINY},num_hidden_layers=2"

SIDES = (
    "encoder_layers=1,decoder_layers=1,encoder_attention_heads=4,decoder_attention_heads=4,"
    "encoder_ffn_dim=64,decoder_ffn_dim=64"
)
# The flags of each objective that differ from masked LM, such as those of a tiny model and its
# tokenizer.
OBJECTIVES = {
    "mlm": {},
    "clm": {
        "model_type": "gpt2",
        "config_overrides": "n_embd=32,n_layer=1,n_head=4,n_positions=40",
        "max_seq_length": None,
        "block_size": 32,
    },
    "rtd": {
        "model_type": "electra",
        "config_overrides": "embedding_size=16,hidden_size=32,num_hidden_layers=1,"
        "num_attention_heads=4,intermediate_size=64,max_position_embeddings=40",
    },
    "sop": {
        "model_type": "albert",
        "config_overrides": "embedding_size=16,hidden_size=32,num_hidden_layers=2,"
        "num_attention_heads=4,intermediate_size=64,max_position_embeddings=40",
    },
    "span_mlm": {
        "model_type": "t5",
        "config_overrides": "d_model=32,d_kv=8,d_ff=64,num_layers=1,num_heads=4",
        "tokenizer_name": "t5",
    },
    "denoising": {
        "model_type": None,
        "config_overrides": f"d_model=32,max_position_embeddings=40,{SIDES}",
    },
    "translation": {
        "model_type": "bart",
        "config_overrides": f"d_model=32,max_position_embeddings=40,{SIDES}",
        "tokenizer_name": "marian",
        "train_file": "train-pairs.jsonl",
        "validation_file": "valid-pairs.jsonl",
        "predict_with_generate": False,
    },
}


@pytest.fixture(scope="session")
def corpus(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A folder with texts (train.jsonl, valid.jsonl), pairs of texts, and trained tokenizers."""
    from hfseq.data.tokenizers import train_tokenizer

    folder = tmp_path_factory.mktemp("corpus")
    draw = random.Random(0)
    texts = [" ".join(draw.choices(WORDS, k=draw.randint(5, 60))) for _ in range(120)]
    texts = [text.replace(" not", ". The not") for text in texts]  # sentences of ten words
    for name, part in (("train", texts[:100]), ("valid", texts[100:])):
        lines = (json.dumps({"text": text}) for text in part)
        (folder / f"{name}.jsonl").write_text("\n".join(lines) + "\n")
        pairs = [{"source": text[:90], "target": text[:90].upper()} for text in part]
        (folder / f"{name}-pairs.jsonl").write_text("".join(f"{json.dumps(p)}\n" for p in pairs))
    both = [*texts, *(text[:90].upper() for text in texts)]
    for family, name, tokenizer_texts in (
        ("roberta", "tokenizer", texts),
        ("t5", "t5", texts),
        ("marian", "marian", both),
    ):
        train_tokenizer(
            tokenizer_texts, family, vocab_size=300, output_dir=folder / name, min_frequency=1
        )
    return folder


@pytest.fixture
def flags(corpus: Path, tmp_path: Path) -> Callable[..., list[str]]:
    """Returns a function that makes the flags of a tiny run, by default with masked LM.

    Keywords of the function add or replace flags, and the value `None` removes a flag.
    """

    def make(output: str = "run", objective: str = "mlm", **changes: Any) -> list[str]:
        objective_flags: dict[str, Any] = dict(OBJECTIVES[objective])
        for name in ("tokenizer_name", "train_file", "validation_file"):
            if name in objective_flags:
                objective_flags[name] = corpus / objective_flags[name]
        values = {
            "output_dir": tmp_path / output,
            "model_type": "roberta",
            "config_overrides": TINY,
            "tokenizer_name": corpus / "tokenizer",
            "train_file": corpus / "train.jsonl",
            "validation_file": corpus / "valid.jsonl",
            "data_cache_dir": corpus / "cache",
            "max_seq_length": 32,
            "global_batch_size": 16,
            "learning_rate": 3e-3,
            "warmup_steps": 2,
            "max_steps": 6,
            "logging_steps": 1,
            "report_to": "jsonl",
            "compilation_cache_dir": "none",
            "card_samples": 0,
            **objective_flags,
        } | changes
        return [f"--{name}={value}" for name, value in values.items() if value is not None]

    return make


@pytest.fixture
def train(flags: Callable[..., list[str]]) -> Callable[..., Any]:
    """Returns a function that trains in this process on the first `devices` devices.

    Keywords of the function add or replace flags, as in `flags`.
    """

    def run(
        output: str = "run",
        devices: int = 8,
        objective: str = "mlm",
        callbacks: Sequence[Any] = (),
        learning_curve: bool = False,
        **changes: Any,
    ) -> runs.Trained:
        from tests.support import runs

        argv = flags(output, objective, **changes)
        return runs.train(argv, objective, devices, callbacks, learning_curve)

    return run


def losses(folder: Path) -> dict[int, float]:
    """Returns the training loss of each logged step."""
    records = map(json.loads, (folder / "metrics.jsonl").read_text().splitlines())
    return {r["step"]: r["train_loss"] for r in records if "train_loss" in r}


def make_runner(objective: str, output_dir: Path, **defaults: Any) -> Callable[..., Any]:
    """Returns a function that trains in this process with these flags.

    Keywords of the function add or replace flags, and the value `None` removes a flag.
    """
    shared = {"logging_steps": 1, "report_to": "jsonl", "compilation_cache_dir": "none"}

    def run(
        output: str = "run", devices: int = 1, callbacks: Sequence[Any] = (), **changes: Any
    ) -> runs.Trained:
        from tests.support import runs

        values = {"output_dir": output_dir / output, **shared, **defaults} | changes
        argv = [f"--{name}={value}" for name, value in values.items() if value is not None]
        return runs.train(argv, objective, devices, callbacks)

    return run


def stop_at(step: int) -> Callable[[Any], None]:
    """Returns a callback that sends SIGTERM to this process after the step `step`."""

    def stop(info: Any) -> None:
        if info.progress.step == step:
            os.kill(os.getpid(), signal.SIGTERM)

    return stop


def assert_same(first: dict[int, float], other: dict[int, float], relative: float = 1e-5) -> None:
    """Asserts that the losses of two runs are equal up to rounding."""
    assert first.keys() == other.keys() and first
    for step, value in first.items():
        assert value == pytest.approx(other[step], rel=relative), step


def check_resume(run: Callable[..., Any], step: int = 3, **options: Any) -> tuple[Any, Any]:
    """Asserts that a run that is stopped and resumed has the results of an uninterrupted run.

    Args:
        run: A function such as the result of `make_runner`.
        step: The step after which the run is stopped.
        **options: Flags of both runs.

    Returns:
        The uninterrupted run and the resumed one.
    """
    uninterrupted = run("whole", **options)
    with pytest.raises(SystemExit):
        run("parts", callbacks=[stop_at(step)], **options)
    resumed = run("parts", **options)
    assert resumed.start_step == step
    assert trees_equal(uninterrupted.state.params, resumed.state.params)
    assert losses(uninterrupted.folder) == losses(resumed.folder)
    return uninterrupted, resumed


def check_two_devices(run: Callable[..., Any], **options: Any) -> tuple[Any, Any]:
    """Asserts that a run on two devices has the same losses as a run on one device.

    Returns:
        The run on one device and the run on two devices.
    """
    single, two = (run(f"on-{n}", devices=n, mesh=f"data={n}", **options) for n in (1, 2))
    assert_same(losses(two.folder), losses(single.folder))
    return single, two
