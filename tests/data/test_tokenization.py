import multiprocessing
import subprocess
import sys
import time
from pathlib import Path

import numpy as np
import pytest

from hfseq.data.arguments import CausalArguments
from hfseq.data.sources import load_splits
from hfseq.data.store import TokenStore
from hfseq.data.tokenize import count_words, tokenize
from hfseq.data.tokenizers import train_tokenizer
from hfseq.errors import DataError, UsageError
from tests.data.samples import make_texts

pytestmark = pytest.mark.filterwarnings("ignore:unclosed file:ResourceWarning")


@pytest.fixture
def dataset(texts):
    from datasets import Dataset

    return Dataset.from_dict({"text": [*texts, "", "  \n", None]})


def run(dataset, tokenizer, tmp_path, **options):
    return tokenize(dataset, tokenizer, "text", cache_dir=tmp_path / "cache", **options)


def test_documents_are_those_the_tokenizer_gives(dataset, tokenizer, texts, tmp_path):
    store = run(dataset, tokenizer, tmp_path)
    assert len(store) == len(texts)  # blank ones are left out
    for i, text in enumerate(texts):
        assert store[i].tolist() == tokenizer(text)["input_ids"]
    assert store.tokens.dtype == np.int32
    assert store.pad_token_id == tokenizer.pad_token_id
    assert store.header["largest_id"] == store.tokens.max()


def test_lines_are_truncated_with_their_closing_token(dataset, tokenizer, texts, tmp_path):
    store = run(dataset, tokenizer, tmp_path, line_by_line=True, max_length=8)
    for i, text in enumerate(texts):
        expected = tokenizer(text, truncation=True, max_length=8)["input_ids"]
        assert store[i].tolist() == expected
    assert len(tokenizer(" ".join(texts))["input_ids"]) > 8  # the tokenizer is not modified


def test_long_documents_give_no_warning(tokenizer, tmp_path, recwarn, caplog):
    from datasets import Dataset

    store = run(Dataset.from_dict({"text": ["lov " * 3000]}), tokenizer, tmp_path)
    assert store.total_tokens > tokenizer.model_max_length
    assert not recwarn.list and "longer than" not in caplog.text


@pytest.mark.slow
@pytest.mark.parametrize("method", ["spawn", "fork"])
def test_processes_give_the_same_store(tokenizer, tmp_path, monkeypatch, method):
    from datasets import Dataset

    from hfseq.data import tokenize as module

    if method == "fork" and (sys.version_info >= (3, 12) or "jax" in sys.modules):
        pytest.skip("forking warns here: jax is loaded, or Python is 3.12 or later")
    context = multiprocessing.get_context(method)
    monkeypatch.setattr(module.multiprocessing, "get_context", lambda *_: context)
    dataset = Dataset.from_dict({"text": make_texts(2500, seed=4)})
    item = run(dataset, tokenizer, tmp_path)
    two = tokenize(dataset, tokenizer, "text", cache_dir=tmp_path / "other", num_proc=2)
    np.testing.assert_array_equal(item.tokens, two.tokens)
    np.testing.assert_array_equal(item.offsets, two.offsets)


def test_store_is_reused_until_its_inputs_change(dataset, tokenizer, tmp_path, monkeypatch):
    from hfseq.data import tokenize as module

    created = []
    original = module._encode_range
    monkeypatch.setattr(module, "_encode_range", lambda *a: created.append(1) or original(*a))

    def count(*args, **options):
        created.clear()
        run(*args, tmp_path, **options)
        return bool(created)

    assert count(dataset, tokenizer)
    assert not count(dataset, tokenizer)
    assert count(dataset, tokenizer, overwrite=True)
    assert count(dataset.select(range(10)), tokenizer)
    assert count(dataset, tokenizer, line_by_line=True, max_length=8)
    assert count(dataset, tokenizer, line_by_line=True, max_length=9)
    assert count(dataset, train_tokenizer(make_texts(50), "roberta", vocab_size=300))


def test_padding_or_truncating_with_the_tokenizer_does_not_change_the_key(
    dataset, tokenizer, tmp_path
):
    run(dataset, tokenizer, tmp_path)
    tokenizer(["a", "a b c"], padding=True, truncation=True, max_length=5)
    run(dataset, tokenizer, tmp_path)
    assert len(list((tmp_path / "cache").glob("tokens-*/"))) == 1


def test_reference_positions_become_continuations(tokenizer, tmp_path):
    from datasets import Dataset

    dataset = Dataset.from_dict({"text": ["en lov", "om alle"], "chinese_ref": [[2], [1, 99]]})
    store = run(dataset, tokenizer, tmp_path)
    first = len(tokenizer("en lov")["input_ids"])
    assert np.flatnonzero(store.continues).tolist() == [2, first + 1]
    assert isinstance(TokenStore.open(next((tmp_path / "cache").glob("tokens-*/"))), TokenStore)


def test_a_slow_tokenizer_works_too(tmp_path):
    from datasets import Dataset

    class Letters:
        pad_token_id = None

        def __call__(self, texts, verbose=True, truncation=False, max_length=None):
            return {"input_ids": [[ord(c) for c in text][:max_length] for text in texts]}

        def get_vocab(self):
            return {"a": 97}

    dataset = Dataset.from_dict({"text": ["abc", "d"]})
    assert run(dataset, Letters(), tmp_path).tokens.tolist() == [97, 98, 99, 100]
    short = run(dataset, Letters(), tmp_path, line_by_line=True, max_length=2)
    assert short.tokens.tolist() == [97, 98, 100]


def test_blank_documents_only_are_an_error(tokenizer, tmp_path):
    from datasets import Dataset

    with pytest.raises(DataError, match="no document is left"):
        run(Dataset.from_dict({"text": ["", " "]}), tokenizer, tmp_path)
    assert not list((tmp_path / "cache").glob("tokens-*/"))


def test_line_by_line_needs_a_length(dataset, tokenizer, tmp_path):
    with pytest.raises(UsageError, match="--max_seq_length"):
        run(dataset, tokenizer, tmp_path, line_by_line=True)


def test_real_norwegian_law(shared_data, tmp_path):
    from hfseq.data.arguments import DataArguments
    from hfseq.data.sources import load_splits

    file = shared_data / "norwegian-laws" / "valid.jsonl"
    splits = load_splits(DataArguments(train_file=[str(file)], validation_split_percentage=0))
    tokenizer = train_tokenizer(splits["train"]["text"], "roberta", vocab_size=2000)
    store = tokenize(splits["train"], tokenizer, "text", cache_dir=tmp_path)
    assert tokenizer.decode(store[0], skip_special_tokens=True) == splits["train"][0]["text"]


def test_words_are_counted_with_the_end_of_each_line():
    from datasets import Dataset

    texts = [" a b c \n", "d e", "", " \n", "f\ng h\n", "\n\n"]
    dataset = Dataset.from_dict({"text": texts})
    assert count_words(dataset, "text") == 4 + 3 + 5
    assert count_words(dataset, "text", keep_blank=True) == 4 + 3 + 5 + 1 + 2


@pytest.mark.parametrize(("split", "published"), [("valid", 217_646), ("test", 245_569)])
@pytest.mark.parametrize("sample_by", ["line", "document"])
def test_the_words_of_wikitext_are_as_many_as_published(shared_data, split, published, sample_by):
    arguments = CausalArguments(
        train_file=[str(shared_data / "wikitext-2" / f"{split}.txt")],
        sample_by=sample_by,
        cross_documents=True,
        validation_split_percentage=0,
    )
    dataset = load_splits(arguments)["train"]
    assert count_words(dataset, "text", arguments.keep_blank) == published


def test_blank_lines_are_kept_on_request(tokenizer, tmp_path):
    (tmp_path / "a.txt").write_text("en lov\n \nfor alle\n")
    stores = {}
    for keep in (True, False):
        arguments = CausalArguments(
            train_file=[str(tmp_path / "a.txt")],
            cross_documents=True,
            keep_linebreaks=keep,
            validation_split_percentage=0,
        )
        dataset = load_splits(arguments)["train"]
        stores[keep] = tokenize(
            dataset, tokenizer, "text", cache_dir=tmp_path, keep_blank=arguments.keep_blank
        )
    assert [tokenizer.decode(stores[True][i]) for i in range(len(stores[True]))] == [
        "<s>en lov\n</s>",
        "<s> \n</s>",
        "<s>for alle\n</s>",
    ]
    assert [tokenizer.decode(stores[False][i]) for i in range(len(stores[False]))] == [
        "<s>en lov</s>",
        "<s>for alle</s>",
    ]


PARENT = """
import os, pathlib, sys, time
from hfseq.data import tokenize

class Slow:
    def __len__(self):
        return 8

    def __getitem__(self, rows):
        pathlib.Path(sys.argv[1], str(os.getpid())).touch()
        time.sleep(60)

if __name__ == "__main__":
    sys.modules.setdefault("jax", None) if sys.argv[2] == "spawn" else None
    list(tokenize._parallel(Slow(), None, "text", 2))
"""


def is_running(pid):
    try:
        return Path("/proc", pid, "stat").read_text().rpartition(")")[2].split()[0] != "Z"
    except FileNotFoundError:
        return False


@pytest.mark.parametrize("method", ["fork", pytest.param("spawn", marks=pytest.mark.slow)])
def test_processes_that_tokenise_end_with_a_killed_parent(tmp_path, method):
    (tmp_path / "pids").mkdir()
    (tmp_path / "parent.py").write_text(PARENT)
    command = [sys.executable, str(tmp_path / "parent.py"), str(tmp_path / "pids"), method]
    parent = subprocess.Popen(command, cwd=Path(__file__).parents[2])
    try:
        limit = time.monotonic() + 60
        while len(workers := [*(tmp_path / "pids").iterdir()]) < 2 and time.monotonic() < limit:
            time.sleep(0.05)
        assert len(workers) == 2
    finally:
        parent.kill()
        parent.wait()
    limit = time.monotonic() + 30  # takes less than a second on an idle machine
    while alive := [file.name for file in workers if is_running(file.name)]:
        assert time.monotonic() < limit, f"processes {alive} outlive their parent"
        time.sleep(0.05)
