"""Inputs of the commands: directories of runs and models, and commands that read them."""

from __future__ import annotations

import contextlib
import io
import json
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

from tests.hostile import model_subjects as models
from tests.hostile.data_subjects import TEXTS


def command(*words: object) -> None:
    """Runs ``hfseq`` in this process, without converting errors to exit codes."""
    from hfseq.cli import build_parser

    arguments = build_parser().parse_args(list(map(str, words)))
    # Use the error handler that `run_command` sets for output.
    with contextlib.redirect_stdout(io.TextIOWrapper(io.BytesIO(), "utf-8", "backslashreplace")):
        arguments.run(arguments)


def commands(*lines: str) -> Callable[[Path], None]:
    """Returns a function that runs commands, in which ``DIR`` is replaced by the folder."""

    def run(folder: Path) -> None:
        failed: Exception | None = None
        for line in lines:
            shutil.rmtree(folder / "out", ignore_errors=True)
            try:
                command(*(word.replace("DIR", str(folder)) for word in line.split("|")))
            except OSError as error:  # HfseqError is often an OSError
                failed = error
            except Exception as error:
                from hfseq.errors import HfseqError

                if not isinstance(error, HfseqError):
                    raise
                failed = error
        if failed:
            raise failed

    return run


# -- runs


def write_run(folder: Path, scale: float = 1.0) -> None:
    folder.mkdir(exist_ok=True)
    rows: list[dict[str, Any]] = [{"step": 0, "time": 5.0, "run": {"max_steps": 40, "seed": 1}}]
    for step in range(2, 31):
        rows.append(
            {
                "step": step,
                "time": 5.0 + step,
                "train_loss": 3 * scale - step / 20,
                "train_runtime": 1.5 * step,
                "tokens_seen": 512 * step,
                "tokens_per_second": 341.0,
                "mfu": 0.31,
                "train_learning_rate": 1e-3 / step,
                "epoch": step / 10,
            }
        )
        if step % 10 == 0:
            rows.append({"step": step, "time": 5.5 + step, "eval_loss": 3.1, "eval_bleu": 12.0})
    (folder / "metrics.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    flags = {
        "max_steps": 40,
        "learning_rate": 1e-3,
        "metric_for_best_model": "loss",
        "greater_is_better": None,
        "tags": ["a"],
        "total_steps": 40,
    }
    (folder / "training_args.json").write_text(json.dumps(flags))


def write_runs(folder: Path) -> None:
    write_run(folder / "a")
    write_run(folder / "b", 0.5)


# -- models with their tokenizers


def save_reader(folder: Path) -> None:
    """Saves a masked language model, which `fill-mask` and `inspect` read."""
    from hfseq_plugins.bert.modeling import FlaxBertForMaskedLM
    from tests.support.models import bert_config

    models.save_tokenizer(folder)
    FlaxBertForMaskedLM(bert_config(num_hidden_layers=1, vocab_size=120)).save_pretrained(folder)


def save_writer(folder: Path) -> None:
    from hfseq.data.tokenizers import train_tokenizer
    from hfseq_plugins.gpt2.modeling import FlaxGPT2LMHeadModel
    from tests.support.models import gpt2_config

    train_tokenizer(TEXTS, "gpt2", vocab_size=300, output_dir=folder, min_frequency=1)
    FlaxGPT2LMHeadModel(gpt2_config(n_layer=1, vocab_size=300)).save_pretrained(folder)


def save_translator(folder: Path) -> None:
    from hfseq.data.tokenizers import train_tokenizer
    from hfseq_plugins.t5.modeling import FlaxT5ForConditionalGeneration
    from tests.support.models import t5_config

    train_tokenizer(TEXTS, "t5", vocab_size=200, output_dir=folder, min_frequency=1)
    FlaxT5ForConditionalGeneration(t5_config(num_layers=1, vocab_size=200)).save_pretrained(folder)


INSPECT = ("inspect|DIR|--headers_only|--values", "inspect|DIR|--headers_only|--json")
REPORT = ("report|DIR", "report|DIR|--json", "report|DIR|--plot|DIR/out/curve.png")
COMPARE = tuple(
    f"compare|DIR/a|DIR/b|{rest}"
    for rest in ("--no_plot", "--no_plot|--json", "--plot|DIR/out/c.png|--x|tokens")
)
PLAN = ("plan|--config|DIR|--devices|h200:8|--length|32|--no_compile",)
SAFETENSORS, INDEX = "model.safetensors", "model.safetensors.index.json"
CONFIG, GENERATION = "config.json", "generation_config.json"
TOKENIZER = ("tokenizer.json", "tokenizer_config.json")

#: Commands that only read files. The values are as in `subjects.SUBJECTS`.
READING: dict[str, tuple[str, tuple[str, ...], Callable[[Path], None], Callable]] = {
    "report": ("lines", ("metrics.jsonl",), write_run, commands(*REPORT)),
    "report-flags": ("json", ("training_args.json",), write_run, commands(*REPORT[:2])),
    "compare": ("lines", ("a/metrics.jsonl", "b/metrics.jsonl"), write_runs, commands(*COMPARE)),
    "compare-flags": ("json", ("a/training_args.json",), write_runs, commands(*COMPARE[:2])),
    "inspect": ("safetensors", (SAFETENSORS,), save_reader, commands(*INSPECT)),
    "inspect-index": ("json", (INDEX,), models.save_shards, commands(*INSPECT)),
    "inspect-msgpack": (
        "msgpack",
        ("flax_model.msgpack",),
        models.save_msgpack,
        commands(*INSPECT),
    ),
    "inspect-json": ("json", (CONFIG, *TOKENIZER), save_reader, commands(*INSPECT)),
    "inspect-generation": ("json", (CONFIG, GENERATION), save_writer, commands(*INSPECT)),
    "inspect-fp8": (
        "safetensors",
        ("fp8_params.safetensors",),
        models.save_fp8,
        commands(*INSPECT),
    ),
    "inspect-names": ("json", (CONFIG,), models.save_twin, commands("inspect|DIR")),
    "inspect-shapes": ("safetensors", (SAFETENSORS,), models.save_bert, commands("inspect|DIR")),
    "convert": ("safetensors", (SAFETENSORS,), models.save_bert, commands("convert|DIR|DIR/out")),
    "convert-msgpack": (
        "msgpack",
        ("flax_model.msgpack",),
        models.save_msgpack,
        commands("convert|DIR|DIR/out|--strict"),
    ),
    "convert-json": (
        "json",
        (CONFIG, GENERATION),
        models.save_gpt2,
        commands("convert|DIR|DIR/out|--to|msgpack|--dtype|bfloat16"),
    ),
    "plan-encoder": ("json", (CONFIG,), models.save_bert, commands(*PLAN)),
    "plan-decoder": ("json", (CONFIG,), models.save_gpt2, commands(*PLAN)),
}

#: Commands that run a model.
RUNNING: dict[str, tuple[str, tuple[str, ...], Callable[[Path], None], Callable]] = {
    "fill-mask": (
        "json",
        (CONFIG, *TOKENIZER),
        save_reader,
        commands("fill-mask|DIR|the <mask> of land|law <mask>"),
    ),
    "generate": (
        "json",
        (CONFIG, GENERATION, *TOKENIZER),
        save_writer,
        commands("generate|DIR|the law|--max_new_tokens|4"),
    ),
    "translate": (
        "json",
        (CONFIG, GENERATION, *TOKENIZER),
        save_translator,
        commands("translate|DIR|the law of land|--max_new_tokens|4|--num_beams|2|--disable_tqdm"),
    ),
}

#: Commands that trace and compile programs, which takes additional time and memory.
COMPILING = (*RUNNING, *(n for n in READING if n.startswith(("convert", "plan"))))
