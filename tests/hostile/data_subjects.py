"""Valid data files and run files of each type, and functions that read them."""

from __future__ import annotations

import base64
import json
import shutil
from pathlib import Path
from typing import Any

TEXTS = [f"the law of land {i} is read by all who live there" for i in range(12)]
PAIRS = [(f"sentence number {i}", f"Satz Nummer {i}") for i in range(12)]


def write_texts(folder: Path) -> None:
    (folder / "a.txt").write_text("\n".join(TEXTS) + "\n")


def write_jsonl(folder: Path) -> None:
    rows = [json.dumps({"id": i, "text": text, "tags": ["a"]}) for i, text in enumerate(TEXTS)]
    (folder / "a.jsonl").write_text("\n".join(rows) + "\n")


def write_csv(folder: Path) -> None:
    rows = [f'{i},"{text}, and so on"' for i, text in enumerate(TEXTS)]
    (folder / "a.csv").write_text("\n".join(["id,text", *rows]) + "\n")


def write_parquet(folder: Path) -> None:
    import pyarrow
    import pyarrow.parquet

    pyarrow.parquet.write_table(pyarrow.table({"text": TEXTS}), folder / "a.parquet")


def load_text(folder: Path) -> None:
    """Reads all documents as for language modeling."""
    from hfseq.data.arguments import DataArguments
    from hfseq.data.sources import load_splits

    files = [str(path) for path in folder.glob("a.*")]
    splits = load_splits(
        DataArguments(
            train_file=files, data_cache_dir=str(folder / "cache"), validation_split_percentage=10
        )
    )
    _tokens(splits["train"], splits.text_column, folder)


def _tokens(dataset: Any, column: str, folder: Path) -> None:
    from hfseq.data.tokenize import tokenize

    store = tokenize(dataset, _byte_tokenizer(), column, cache_dir=folder / "cache")
    assert sum(len(store[i]) for i in range(len(store))) == store.total_tokens


_tokenizers: list[Any] = []


def _byte_tokenizer() -> Any:
    from hfseq.data.tokenizers import train_tokenizer

    if not _tokenizers:
        _tokenizers.append(train_tokenizer([], "vq_transformer", "bytes"))
    return _tokenizers[0]


def load_stream(folder: Path) -> None:
    from hfseq.data.arguments import DataArguments
    from hfseq.data.sources import load_splits
    from hfseq.data.streaming import StreamingBatches

    files = [str(path) for path in folder.glob("a.*")]
    splits = load_splits(
        DataArguments(
            train_file=files,
            streaming=True,
            validation_split_percentage=0,
            data_cache_dir=str(folder / "cache"),
        )
    )
    batches = StreamingBatches(splits["train"], _byte_tokenizer(), splits.text_column, 16, 2, 0)
    for _ in range(3):
        batches.next()


def write_pairs_json(folder: Path) -> None:
    rows = [json.dumps({"translation": {"en": s, "de": t}}) for s, t in PAIRS]
    (folder / "p.jsonl").write_text("\n".join(rows) + "\n")


def write_pairs_csv(folder: Path) -> None:
    rows = [f'"{s}","{t}"' for s, t in PAIRS]
    (folder / "p.csv").write_text("\n".join(["en,de", *rows]) + "\n")


def write_pairs_parquet(folder: Path) -> None:
    import pyarrow
    import pyarrow.parquet

    columns = {"en": [s for s, _ in PAIRS], "de": [t for _, t in PAIRS]}
    pyarrow.parquet.write_table(pyarrow.table(columns), folder / "p.parquet")


def write_aligned(folder: Path) -> None:
    for side, name in enumerate(("p.en", "p.de")):
        (folder / name).write_text("\n".join(pair[side] for pair in PAIRS) + "\n")


def load_parallel(folder: Path) -> None:
    from hfseq.data.arguments import TranslationArguments
    from hfseq.data.parallel import load_pairs

    files = sorted(str(path) for path in folder.glob("p.*"))
    splits = load_pairs(
        TranslationArguments(
            train_file=files,
            data_cache_dir=str(folder / "cache"),
            validation_split_percentage=0,
            test_split_percentage=0,
        )
    )
    assert all(isinstance(row["source"], str) for row in splits["train"])


def write_records(folder: Path) -> None:
    from tests.data import test_tfds

    (folder / "dataset_info.json").write_text(json.dumps(test_tfds.info("train")))
    for number, shard in enumerate(test_tfds.SHARDS):
        name = f"tiny-train.tfrecord-{number:05}-of-00003"
        (folder / name).write_bytes(base64.b64decode(shard))


def load_records(folder: Path) -> None:
    from hfseq.data.arguments import TranslationArguments
    from hfseq.data.parallel import load_pairs

    splits = load_pairs(
        TranslationArguments(
            dataset_name=f"tfds:{folder}",
            data_cache_dir=str(folder / "cache"),
            validation_split_percentage=0,
            test_split_percentage=0,
        )
    )
    assert len(splits["train"])


def write_examples(folder: Path) -> None:
    rows = [{"sentence": text, "label": i % 2} for i, text in enumerate(TEXTS)]
    (folder / "e.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))


def write_example_table(folder: Path) -> None:
    rows = [f"{i % 2}\t{text}" for i, text in enumerate(TEXTS)]
    (folder / "e.tsv").write_text("\n".join(["label\tsentence", *rows]) + "\n")


def write_example_parquet(folder: Path) -> None:
    import pyarrow
    import pyarrow.parquet

    table = {"sentence": TEXTS, "label": [i % 2 for i in range(len(TEXTS))]}
    pyarrow.parquet.write_table(pyarrow.table(table), folder / "e.parquet")


def load_examples(folder: Path) -> None:
    from hfseq.data.arguments import ClassificationArguments
    from hfseq.data.classification import choose_columns
    from hfseq.data.tables import read_table

    arguments = ClassificationArguments(train_file=["given"])
    for path in folder.glob("e.*"):
        table = read_table(str(path), "--train_file", arguments)
        first, _, label = choose_columns(table, arguments, True)
        assert len(table.columns[first]) == len(table.columns[label])  # type: ignore[index]


def write_store(folder: Path) -> None:
    import numpy as np

    from hfseq.data import store

    ids = np.arange(40, dtype=np.int32)
    chunks = [(ids, np.array([10, 30]), (ids % 2).astype(np.uint8))]
    store.build_store(folder / "tokens", lambda: chunks, {"fingerprint": "x", "pad_token_id": 0})
    (folder / "tokens.lock").unlink(missing_ok=True)


def load_store(folder: Path) -> None:
    from hfseq.data.batches import PackedRows
    from hfseq.data.store import TokenStore

    opened = TokenStore.open(folder / "tokens")
    rows = PackedRows(opened, 8)
    rows.fetch(list(range(len(rows))))  # type: ignore[arg-type]
    assert all(len(opened[i]) for i in range(len(opened)))


def write_arrays(folder: Path) -> None:
    import numpy as np

    np.save(folder / "x.npy", np.arange(96, dtype=np.uint8).reshape(6, 4, 4))
    np.savez_compressed(folder / "x.npz", np.arange(96, dtype=np.uint8).reshape(6, 4, 4))


def load_arrays(folder: Path) -> None:
    from hfseq.data import sources

    for name in ("x.npy", "x.npz"):
        images = sources.ByteArrays.read([str(folder / name)], "--train_file")
        assert images.content.reshape(len(images), -1).sum() >= 0


# -- files of runs


def save_checkpoint(folder: Path) -> None:
    import jax.numpy as jnp

    from hfseq.training.checkpointer import Checkpointer, Progress
    from hfseq.training.state import TrainState

    checkpoints = Checkpointer(folder)
    params = {"kernel": jnp.ones((4, 8)), "bias": jnp.zeros(8)}
    state = TrainState(params, (), {}, jnp.int32(3), {})
    checkpoints.save(state, Progress(step=3, tokens_seen=12))
    checkpoints.finish()


def save_unsealed(folder: Path) -> None:
    """Saves a checkpoint of a run that was killed before the checksums were written."""
    save_checkpoint(folder)
    (folder / "checkpoints" / "3" / "checksums.json").unlink()


def load_checkpoint(folder: Path) -> None:
    import jax

    from hfseq.training.checkpointer import Checkpointer
    from hfseq.training.state import TrainState

    checkpoints = Checkpointer(folder)
    for step in checkpoints.steps():
        checkpoints.verify_checksums(step)
        checkpoints.read_progress(step)
        shapes = {"params": {"kernel": (4, 8), "bias": (8,)}}
        sharding = jax.sharding.SingleDeviceSharding(jax.devices()[0])
        params = {
            name: jax.ShapeDtypeStruct(shape, "float32", sharding=sharding)
            for name, shape in shapes["params"].items()
        }
        number = jax.ShapeDtypeStruct((), "int32", sharding=sharding)
        abstract = TrainState(params, (), {}, number, {})  # type: ignore[arg-type]
        checkpoints.restore(step, abstract)


def write_log(folder: Path) -> None:
    rows = [{"step": i, "time": i, "train_loss": 3 - i / 9, "eval_loss": 3.0} for i in range(9)]
    (folder / "metrics.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))


def load_log(folder: Path) -> None:
    from hfseq.reports.cards import load_training_numbers
    from hfseq.training.trackers import make_trackers

    load_training_numbers(folder / "metrics.jsonl")
    for tracker in make_trackers(["jsonl"], folder, None, {}, 4):
        tracker.log({"train_loss": 1.0}, 5)
        tracker.close()


def write_arguments(folder: Path) -> None:
    values = {"output_dir": "x", "learning_rate": 1e-3, "max_steps": 4, "report_to": ["jsonl"]}
    (folder / "run.json").write_text(json.dumps(values))
    shutil.copy(folder / "run.json", folder / "run.yaml")


def load_arguments(folder: Path) -> None:
    from hfseq.training.arguments import parse

    for name in ("run.json", "run.yaml"):
        try:
            parse([str(folder / name)])
        except SystemExit as end:  # argparse exits after an error message
            assert end.code == 2
