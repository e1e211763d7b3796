import errno
import json
import multiprocessing
import os
import signal
import time

import numpy as np
import pytest

from hfseq.data import store
from hfseq.data.store import TokenStore
from hfseq.errors import DataError

HEADER = {"fingerprint": "f", "pad_token_id": 1}


def chunk(*documents):
    return (
        np.concatenate([np.array(d, np.int32) for d in documents]),
        np.array([len(d) for d in documents], np.int64),
        None,
    )


def build(path, chunks=(), **options):
    return store.build_store(path, lambda: iter(chunks), HEADER, **options)


def test_written_rows_are_read_back(tmp_path):
    built = build(tmp_path / "s", [chunk([1, 2, 3], [], [4]), chunk([]), chunk([5, 6])])
    assert len(built) == 3 and built.total_tokens == 6
    assert [built[i].tolist() for i in range(3)] == [[1, 2, 3], [4], [5, 6]]
    assert built.header["largest_id"] == 6
    assert built.continues is None
    assert TokenStore.open(tmp_path / "s").tokens.tolist() == [1, 2, 3, 4, 5, 6]


def test_a_second_build_opens_the_first(tmp_path):
    build(tmp_path / "s", [chunk([1])])
    assert build(tmp_path / "s", [chunk([2])]).tokens.tolist() == [1]
    assert build(tmp_path / "s", [chunk([3])], overwrite=True).tokens.tolist() == [3]


def test_open_readers_survive_replacement(tmp_path):
    old = build(tmp_path / "s", [chunk([1, 2])])
    build(tmp_path / "s", [chunk([3])], overwrite=True)
    assert old.tokens.tolist() == [1, 2]


def test_failed_write_keeps_the_previous_store(tmp_path):
    build(tmp_path / "s", [chunk([1])])

    def failing():
        yield chunk([2])
        raise OSError(errno.ENOSPC, "No space left on device")

    for path in (tmp_path / "s", tmp_path / "t"):
        with pytest.raises(DataError, match="No space left on device.*--data_cache_dir"):
            store.build_store(path, failing, HEADER, overwrite=True)
    assert sorted(p.name for p in tmp_path.iterdir() if p.is_dir()) == ["s"]
    assert TokenStore.open(tmp_path / "s").tokens.tolist() == [1]


def _write_slowly(path, started):
    def chunks():
        yield chunk(list(range(100_000)))
        started.set()
        time.sleep(60)
        yield chunk([1])

    store.build_store(path, chunks, HEADER)


def test_killed_writer_leaves_no_store_or_lock(tmp_path):
    context = multiprocessing.get_context("spawn")
    started = context.Event()
    process = context.Process(target=_write_slowly, args=(tmp_path / "s", started))
    process.start()
    assert started.wait(60)
    os.kill(process.pid, signal.SIGKILL)
    process.join()
    assert list(tmp_path.glob("s.tmp-*")) and not (tmp_path / "s").exists()
    assert build(tmp_path / "s", [chunk([7])]).tokens.tolist() == [7]
    assert not list(tmp_path.glob("s.tmp-*"))  # the files of the killed process are removed


def _race(path, value, ready, results):
    def chunks():
        time.sleep(0.2)
        yield chunk([value])

    ready.wait()
    results.put((value, store.build_store(path, chunks, HEADER).tokens.tolist()))


@pytest.mark.slow
def test_processes_that_race_end_with_one_store(tmp_path):
    context = multiprocessing.get_context("spawn")
    ready, results = context.Event(), context.Queue()
    processes = [
        context.Process(target=_race, args=(tmp_path / "s", value, ready, results))
        for value in (1, 2)
    ]
    for process in processes:
        process.start()
    time.sleep(0.5)
    ready.set()
    visited = [results.get(timeout=60)[1] for _ in processes]
    for process in processes:
        process.join()
    assert visited[0] == visited[1]


@pytest.mark.parametrize("name", [store.TOKENS_FILE, store.OFFSETS_FILE, store.HEADER_FILE])
def test_a_damaged_store_is_refused_and_rebuilt(tmp_path, name):
    build(tmp_path / "s", [chunk([1, 2, 3])])
    file = tmp_path / "s" / name
    file.write_bytes(file.read_bytes()[:-3])
    with pytest.raises(DataError, match="is not a token store|bytes instead of"):
        TokenStore.open(tmp_path / "s")
    assert build(tmp_path / "s", [chunk([4])]).tokens.tolist() == [4]


def test_another_version_is_refused(tmp_path):
    build(tmp_path / "s", [chunk([1])])
    header = tmp_path / "s" / store.HEADER_FILE
    header.write_text(json.dumps(json.loads(header.read_text()) | {"version": 99}))
    with pytest.raises(DataError, match="version 99"):
        TokenStore.open(tmp_path / "s")
