"""Types of files that hfseq reads: functions that write a valid file, and that read it.

Modules that are slow to import are imported when a subject is created or read.
"""

from __future__ import annotations

import random
from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from tests.hostile import command_subjects
from tests.hostile import data_subjects as data
from tests.hostile import model_subjects as models
from tests.hostile.mutators import MUTATORS


@dataclass
class Subject:
    """Files in a folder, which of them are mutated and how, and a function that reads them."""

    name: str
    kind: str
    mutated: tuple[str, ...]
    load: Callable[[Path], Any]
    files: dict[str, bytes] = field(default_factory=dict)

    def write_files(self, folder: Path, number: int | None = None) -> int:
        """Writes the files of a case, or the valid files without a number; returns their size."""
        draw = random.Random(f"{self.name}/{number}")
        selected = draw.choice(self.mutated) if number is not None else None
        size = 0
        for name, content in self.files.items():
            if name == selected:
                good = self.kind == "number"
                content = str(number).encode() if good else MUTATORS[self.kind](content, draw)
            path = folder / name
            path.parent.mkdir(parents=True, exist_ok=True)
            path.write_bytes(content)
            size += len(content)
        return size


def make(name: str, scratch: Path) -> Subject:
    """Creates a subject. Its valid files are written to a folder in ``scratch``."""
    if name == "misbehaving":
        return Subject(name, "number", ("number",), misbehave, {"number": b"good"})
    kind, mutated, files, load = SUBJECTS[name]
    folder = scratch / name
    if not folder.exists():
        folder.mkdir(parents=True)
        files(folder)
    contents = {
        path.relative_to(folder).as_posix(): path.read_bytes()
        for path in sorted(folder.rglob("*"))
        if path.is_file()
    }
    return Subject(name, kind, mutated or tuple(contents), load, contents)


def misbehave(folder: Path) -> None:
    """Misbehaves according to the number in a file. The guard must detect it."""
    import os
    import pickle
    import subprocess

    match (folder / "number").read_text():
        case "0":
            raise KeyError("no message for people")
        case "1":
            os.abort()
        case "2":
            sum(bytearray(200 << 20)[:: 1 << 12])
        case "3":
            (folder / ".." / ".." / "written").write_text("x")
        case "4":
            pickle.loads(b"cos\ngetcwd\n(tR.")
        case "5":
            subprocess.run(["true"])
        case "6":
            raise OSError("it is damaged")


SAFETENSORS, INDEX = "model.safetensors", "model.safetensors.index.json"
CONFIG, GENERATION = "config.json", "generation_config.json"
#: By name: mutator, mutated files (all files if empty), functions that write and read the files.
SUBJECTS: dict[str, tuple[str, tuple[str, ...], Callable[[Path], None], Callable]] = {
    "safetensors": ("safetensors", (SAFETENSORS,), models.save_bert, models.load_tensors),
    "safetensors-model": ("safetensors", (SAFETENSORS,), models.save_bert, models.load_bert),
    "index": ("json", (INDEX,), models.save_shards, models.load_tensors),
    "msgpack": ("msgpack", ("flax_model.msgpack",), models.save_msgpack, models.load_tensors),
    "msgpack-model": ("msgpack", ("flax_model.msgpack",), models.save_msgpack, models.load_bert),
    "pytorch-bin": ("bytes", ("pytorch_model.bin",), models.save_torch, models.load_tensors),
    "config-bert": ("json", (CONFIG,), models.save_bert, models.load_bert),
    "config-gpt2": (
        "json",
        (CONFIG, "generation_config.json"),
        models.save_gpt2,
        models.load_decoder,
    ),
    "config-marian": ("json", (CONFIG,), models.save_marian, models.load_seq2seq),
    "config-twin": ("json", (CONFIG,), models.save_twin, models.load_seq2seq),
    "config-vq": ("json", (CONFIG,), models.save_vq, models.load_decoder),
    "config-training": ("json", (CONFIG,), models.save_bert, models.load_config),
    "fp8-sidecar": ("safetensors", ("fp8_params.safetensors",), models.save_fp8, models.load_fp8),
    "tokenizer": ("json", (), models.save_tokenizer, models.load_tokenizer),
    "text": ("text", (), data.write_texts, data.load_text),
    "jsonl": ("lines", (), data.write_jsonl, data.load_text),
    "csv": ("text", (), data.write_csv, data.load_text),
    "parquet": ("bytes", (), data.write_parquet, data.load_text),
    "stream": ("lines", (), data.write_jsonl, data.load_stream),
    "pairs-jsonl": ("lines", (), data.write_pairs_json, data.load_parallel),
    "pairs-csv": ("text", (), data.write_pairs_csv, data.load_parallel),
    "pairs-parquet": ("bytes", (), data.write_pairs_parquet, data.load_parallel),
    "pairs-aligned": ("text", (), data.write_aligned, data.load_parallel),
    "tfrecord": ("bytes", (), data.write_records, data.load_records),
    "tfds-info": ("json", ("dataset_info.json",), data.write_records, data.load_records),
    "examples-jsonl": ("lines", (), data.write_examples, data.load_examples),
    "examples-tsv": ("text", (), data.write_example_table, data.load_examples),
    "examples-parquet": ("bytes", (), data.write_example_parquet, data.load_examples),
    "store": ("bytes", (), data.write_store, data.load_store),
    "store-header": ("json", ("tokens/header.json",), data.write_store, data.load_store),
    "arrays": ("bytes", (), data.write_arrays, data.load_arrays),
    "checkpoint": ("bytes", (), data.save_checkpoint, data.load_checkpoint),
    "checkpoint-unsealed": ("bytes", (), data.save_unsealed, data.load_checkpoint),
    "log": ("lines", (), data.write_log, data.load_log),
    "arguments": ("json", (), data.write_arguments, data.load_arguments),
    **command_subjects.READING,
    **command_subjects.RUNNING,
}
