import json

import numpy as np
import pytest

from hfseq.data.arguments import DataArguments
from hfseq.data.batches import PackedRows
from hfseq.data.sources import load_splits
from hfseq.data.streaming import StreamingBatches
from hfseq.data.tokenize import tokenize
from hfseq.errors import DataError
from tests.data.samples import make_texts
from tests.support.tiers import first

pytestmark = pytest.mark.filterwarnings("ignore:unclosed file:ResourceWarning")
LENGTH, BATCH = 16, 4


@pytest.fixture
def shards(tmp_path):
    for i in range(3):
        texts = make_texts(120, seed=i)
        texts[5] = ""  # blank documents are skipped
        (tmp_path / f"part-{i}.txt").write_text("\n".join(texts) + "\n")
    return str(tmp_path / "part-*.txt")


def open_stream(files, percentage=0):
    arguments = DataArguments(
        train_file=[files], streaming=True, validation_split_percentage=percentage
    )
    return load_splits(arguments)["train"]


def make(files, tokenizer, percentage=0, **options):
    options = {"seed": 1, "block_rows": 40} | options
    dataset = open_stream(files, percentage)
    return StreamingBatches(dataset, tokenizer, "text", LENGTH, BATCH, **options)


def rows_of(batches):
    return np.concatenate([batch["input_ids"][batch["valid"]] for batch in batches])


def same(a, b):
    return all(np.array_equal(a[name], b[name]) for name in a) and a.keys() == b.keys()


@pytest.mark.parametrize(
    "options",
    [
        {},
        {"cross_documents": True},
        {"cross_documents": True, "keep_blank": True},
        {"append_eos": True},
    ],
)
def test_without_shuffling_a_stream_gives_the_rows_of_the_store(
    shards, tokenizer, tmp_path, options
):
    arguments = DataArguments(train_file=[shards], validation_split_percentage=0)
    store = tokenize(
        load_splits(arguments)["train"],
        tokenizer,
        "text",
        cache_dir=tmp_path,
        keep_blank=options.get("keep_blank", False),
        append_eos=options.get("append_eos", False),
    )
    rows = PackedRows(store, LENGTH, options.get("cross_documents", False))
    expected = rows.fetch(np.arange(len(rows)))
    batches = list(make(shards, tokenizer, shuffle=False, **options).epoch_batches())
    for name, array in expected.items():
        actual = np.concatenate([batch[name][batch["valid"]] for batch in batches])
        np.testing.assert_array_equal(actual, array)


def test_each_epoch_has_every_token_in_a_new_order(shards, tokenizer):
    stream = make(shards, tokenizer)
    first, second = (rows_of(stream.epoch_batches()) for _ in range(2))
    assert sorted(first.ravel().tolist()) == sorted(second.ravel().tolist())
    assert not np.array_equal(first, second)
    plain = rows_of(make(shards, tokenizer, shuffle=False).epoch_batches())
    assert sorted(plain.ravel().tolist()) == sorted(first.ravel().tolist())
    assert not np.array_equal(plain, first)


@pytest.mark.parametrize("percentage", [0, 10])
@pytest.mark.parametrize("line_by_line", [False, True])
@pytest.mark.parametrize("block_rows", first([4, 40, 10_000], 4))
def test_resume_gives_the_same_batches(shards, tokenizer, line_by_line, block_rows, percentage):
    options = {"line_by_line": line_by_line, "block_rows": block_rows, "percentage": percentage}
    stream, states, batches = make(shards, tokenizer, **options), [], []
    for _ in range(2):
        for batch in stream.epoch_batches():
            batches.append(batch)
            states.append(json.loads(json.dumps(stream.state())))
    assert stream.epoch == 2
    for stop in [0, 1, 7, len(batches) // 2 - 1, len(batches) // 2, len(batches) - 3]:
        resumed = make(shards, tokenizer, **options)
        resumed.restore(states[stop])
        for expected in batches[stop + 1 : stop + 30]:
            assert same(resumed.next(), expected)


def test_a_used_stream_can_be_restored_too(shards, tokenizer):
    stream = make(shards, tokenizer)
    start = stream.state()
    first = [stream.next() for _ in range(30)]
    stream.restore(start)
    assert all(same(stream.next(), batch) for batch in first)


def test_lines_are_one_document_a_row(shards, tokenizer):
    stream = make(shards, tokenizer, line_by_line=True, shuffle=False)
    rows = rows_of(stream.epoch_batches())
    assert len(rows) == 3 * 119
    text = make_texts(1, seed=0)[0]
    expected = tokenizer(text, truncation=True, max_length=LENGTH, padding="max_length")
    assert rows[0].tolist() == expected["input_ids"]


def test_the_last_batch_is_filled_up_and_marked(shards, tokenizer):
    batches = list(make(shards, tokenizer, line_by_line=True).epoch_batches())
    assert all(batch["input_ids"].shape == (BATCH, LENGTH) for batch in batches)
    assert sum(int((~batch["valid"]).sum()) for batch in batches) == -(3 * 119) % BATCH


def test_process_batches_concatenate_to_the_global_batch(shards, tokenizer):
    full = make(shards, tokenizer).next()
    parts = [make(shards, tokenizer).next(slice(i, i + 2)) for i in (0, 2)]
    combined = {name: np.concatenate([part[name] for part in parts]) for name in full}
    assert same(full, combined)


def test_a_map_style_dataset_can_be_streamed(tokenizer):
    from datasets import Dataset

    dataset = Dataset.from_dict({"text": make_texts(20)})
    stream = StreamingBatches(dataset, tokenizer, "text", LENGTH, BATCH, seed=0)
    assert next(iter(stream))["input_ids"].shape == (BATCH, LENGTH)


def test_a_stream_without_text_is_an_error(tokenizer):
    from datasets import Dataset

    dataset = Dataset.from_dict({"text": ["", " "]})
    with pytest.raises(DataError, match="the stream contains no text"):
        StreamingBatches(dataset, tokenizer, "text", LENGTH, BATCH, seed=0).next()


def test_broken_stream_error_names_the_position(tmp_path, tokenizer):
    (tmp_path / "a.txt").write_text("hei\n" * 1000)
    (tmp_path / "b.txt").write_bytes(b"god dag\nbl\xe5b\xe6r\n")
    dataset = open_stream(str(tmp_path / "*.txt"))
    stream = StreamingBatches(dataset, tokenizer, "text", LENGTH, BATCH, seed=0)
    with pytest.raises(DataError, match="in epoch 0, shard [01]: UnicodeDecodeError"):
        while stream.epoch == 0:
            stream.next()
