"""`hfseq quickstart`: trains a tokenizer and a masked language model in a few minutes.

The training text is part of Python: its language reference and docstrings. Modules of the standard
library are parsed, not imported. The same Python version gives the same text.
"""

from __future__ import annotations

import argparse
import ast
import contextlib
import hashlib
import json
import os
import re
import shlex
import subprocess
import sys
import sysconfig
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from hfseq.cli.text import add_json, print_json

# Tests and vendored copies are not documentation; site-packages is not the standard library.
SKIPPED = {"__pycache__", "ensurepip", "idlelib", "lib2to3", "test", "tests", "turtledemo"}
SKIPPED |= {"dist-packages", "pydoc_data", "site-packages"}
DOCUMENTED = (ast.Module, ast.ClassDef, ast.FunctionDef, ast.AsyncFunctionDef)
MIN_LENGTH = 40  # characters; shorter docstrings contain little text
SEPARATOR_LINES = re.compile(r"([-*=~^#_.])\1{3,}")  # underlines of headings


def topics() -> Iterator[str]:
    """Yields the language reference, as ``help("for")`` shows it."""
    from pydoc_data.topics import topics

    for name in sorted(topics):
        yield topics[name]


def docstrings(library: Path) -> Iterator[str]:
    """Yields the docstrings of all modules under ``library``, in the order of their paths."""
    for path in sorted(library.rglob("*.py")):
        if SKIPPED & set(path.relative_to(library).parts):
            continue
        try:
            tree = ast.parse(path.read_bytes())
        except (SyntaxError, ValueError):  # templates that are not valid Python
            continue
        for node in ast.walk(tree):
            if isinstance(node, DOCUMENTED):
                yield ast.get_docstring(node) or ""


def documents() -> Iterator[str]:
    """Yields each distinct document with normalized white space and without separator lines."""
    unique_lines = set()
    for source in (topics(), docstrings(Path(sysconfig.get_path("stdlib")))):
        for text in source:
            line = " ".join(SEPARATOR_LINES.sub("", text).split())
            if len(line) >= MIN_LENGTH and line not in unique_lines:
                unique_lines.add(line)
                yield line


def write_corpus(path: Path) -> None:
    """Writes the corpus to ``path``, one JSON object ``{"text": ...}`` per document."""
    path.parent.mkdir(parents=True, exist_ok=True)
    # Sorted by hash, so that each part of the corpus is a random sample.
    lines = sorted(documents(), key=lambda line: hashlib.sha256(line.encode()).digest())
    with path.open("w", encoding="utf-8") as file:
        file.writelines(json.dumps({"text": line}, ensure_ascii=False) + "\n" for line in lines)
    print(f"{path}: {len(lines):,} documents, {sum(map(len, lines)) / 1e6:.1f} million characters")


CONFIG = (
    "hidden_size=192,num_hidden_layers=2,num_attention_heads=3,intermediate_size=768,"
    "initializer_range=0.05,hidden_dropout_prob=0,attention_probs_dropout_prob=0"
)
SENTENCES = (
    "Return <mask> if the object is a string.",
    "If the file does not exist, an exception is <mask>.",
    "If the argument is <mask>, the default value is used.",
)


def add_quickstart(parser: argparse.ArgumentParser) -> None:
    """Adds the flags of ``hfseq quickstart``."""
    parser.add_argument(
        "--output_dir", default="quickstart", help="Directory to write to. Default: quickstart."
    )
    parser.add_argument(
        "--max_steps", type=int, default=1000, help="Number of training steps. Default: 1000."
    )
    add_json(
        parser,
        "Print a JSON object with the output of each command under the keys tokenizer, train and "
        "fill-mask. All other output goes to standard error.",
    )


def run_quickstart(arguments: argparse.Namespace) -> int:
    """Writes a corpus, trains a tokenizer and a model, and fills masks.

    Each step after the corpus runs an hfseq command in a separate process. The command line is
    printed, so that users can copy it.
    """
    if not arguments.json:
        return _run_steps(arguments, None)
    result: dict[str, Any] = {}
    with contextlib.redirect_stdout(sys.stderr):
        code = _run_steps(arguments, result)
    if not code:
        print_json(result)
    return code


def _run_steps(arguments: argparse.Namespace, result: dict[str, Any] | None) -> int:
    """Runs the steps and returns the exit code.

    Args:
        arguments: The flags.
        result: Dictionary that receives the JSON output of each command, by command name. If
            `None`, the commands print text instead.
    """
    folder = Path(arguments.output_dir)
    corpus, tokenizer, model = folder / "corpus.jsonl", folder / "tokenizer", folder / "model"
    announce("Writing a corpus from Python's language reference and docstrings")
    write_corpus(corpus)
    # Nothing is downloaded, and all caches stay in this directory.
    cache = folder.resolve() / "cache"
    environment = os.environ | {
        "HF_HUB_OFFLINE": "1",
        "HF_DATASETS_DISABLE_PROGRESS_BARS": "1",
        "TRANSFORMERS_NO_ADVISORY_WARNINGS": "1",
        "HFSEQ_CACHE": str(cache),
        "HF_DATASETS_CACHE": str(cache / "datasets"),
    }
    steps = {
        "Training a tokenizer on it": (
            *("tokenizer", "--train_file", corpus, "--model_type", "roberta"),
            *("--vocab_size", 4000, "--output_dir", tokenizer, "--overwrite"),
        ),
        "Training a RoBERTa with 1.8 million parameters (the loss starts at 8.4)": (
            *("train", "mlm", "--output_dir", model, "--overwrite_output_dir"),
            *("--model_type", "roberta", "--tokenizer_name", tokenizer, "--train_file", corpus),
            *("--config_overrides", CONFIG, "--max_seq_length", 64, "--mlm_probability", 0.3),
            *("--validation_split_percentage", 3, "--per_device_train_batch_size", 32),
            *("--per_device_eval_batch_size", 32, "--max_steps", arguments.max_steps),
            *("--optim", "muon", "--learning_rate", 5e-3, "--weight_decay", 0.01),
            *("--warmup_steps", arguments.max_steps // 20),
            *("--logging_steps", 50, "--eval_steps", 250),
            *("--save_strategy", "no", "--run_name", "RoBERTa on Python's documentation"),
        ),
        "Loading it and filling masks": ("fill-mask", model, "--top_k", 3, *SENTENCES),
    }
    for title, words in steps.items():
        command = [str(word) for word in words]
        announce(title)
        print(f"$ {shlex.join(['hfseq', *command])}", flush=True)
        process = subprocess.run(
            [sys.executable, "-m", "hfseq.cli", *command, *["--json"] * (result is not None)],
            env=environment,
            check=False,
            stdout=None if result is None else subprocess.PIPE,
        )
        if process.returncode:
            return process.returncode
        if result is not None:
            result[command[0]] = json.loads(process.stdout)
    announce(f"Done. The model is in {model}, with a model card and learning_curve.png")
    print(f"View its curves: pip install tensorboard && tensorboard --logdir {model}/runs")
    print(
        f'Try your own sentences: hfseq fill-mask {model} "Raises an <mask> if the key is missing."'
    )
    return 0


def announce(text: str) -> None:
    """Prints the title of a step."""
    print(f"\n==> {text}", flush=True)
