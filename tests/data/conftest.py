import gc
import json
import os
import warnings
from pathlib import Path

import pytest

from tests.data.samples import make_texts

SHARED = Path(__file__).resolve().parents[2].parent / "shared" / "data"


@pytest.fixture(autouse=True)
def own_caches(tmp_path_factory, monkeypatch):
    """Keeps the caches of datasets and hfseq out of the home directory."""
    import datasets

    directory = tmp_path_factory.mktemp("cache")
    monkeypatch.setattr(datasets.config, "HF_DATASETS_CACHE", directory / "datasets")
    monkeypatch.setitem(os.environ, "HFSEQ_CACHE", str(directory / "hfseq"))
    datasets.disable_progress_bars()
    yield
    with warnings.catch_warnings():  # datasets leaves files of a stream open
        warnings.simplefilter("ignore", ResourceWarning)
        gc.collect()


@pytest.fixture(scope="session")
def tokenizer():
    from hfseq.data.tokenizers import train_tokenizer

    return train_tokenizer(make_texts(300), "roberta", vocab_size=350)


@pytest.fixture
def texts():
    return make_texts(200, seed=1)


@pytest.fixture
def corpus(tmp_path, texts):
    file = tmp_path / "corpus.jsonl"
    file.write_text("".join(json.dumps({"id": i, "text": t}) + "\n" for i, t in enumerate(texts)))
    return file


@pytest.fixture
def shared_data():
    if not SHARED.is_dir():
        pytest.skip(f"no shared data next to the repository ({SHARED.name} does not exist)")
    return SHARED
