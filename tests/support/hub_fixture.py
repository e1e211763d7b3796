"""The ``hub`` fixture: a fake Hub for the Hugging Face libraries in this process.

``huggingface_hub`` reads HF_ENDPOINT when it is imported. The fixture therefore sets the
environment variables, for subprocesses and for libraries that are imported later, and also patches
the modules that are already imported.
"""

from __future__ import annotations

import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

from tests.support.fake_hub import FakeHub

ENVIRONMENT = {
    "HF_TOKEN": "hf_test",
    "HF_HUB_DISABLE_XET": "1",
    "HF_HUB_DISABLE_TELEMETRY": "1",
    "HF_HUB_DISABLE_PROGRESS_BARS": "1",
    "HF_HUB_DISABLE_UPDATE_CHECK": "1",
    "HF_HUB_OFFLINE": "0",
    "TRANSFORMERS_OFFLINE": "0",
    "HF_DATASETS_OFFLINE": "0",
    "NO_PROXY": "127.0.0.1,localhost",
    "no_proxy": "127.0.0.1,localhost",
}


@pytest.fixture
def hub(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[FakeHub]:
    """A running fake Hub at the address ``hub.url``.

    The token "hf_test" belongs to the user "user".
    """
    with FakeHub() as server:
        use_fake_hub(server.url, tmp_path / "hf_home", monkeypatch)
        yield server


def use_fake_hub(url: str, home: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Makes the Hugging Face libraries use ``url``, with an empty cache under ``home``."""
    for name, value in {**ENVIRONMENT, "HF_ENDPOINT": url, "HF_HOME": str(home)}.items():
        monkeypatch.setenv(name, value)
    monkeypatch.delenv("HF_HUB_CACHE", raising=False)

    from huggingface_hub import constants, hf_api
    from huggingface_hub.utils import close_session

    close_session()  # existing clients keep the proxies of the old environment
    template = url + "/{repo_id}/resolve/{revision}/{filename}"
    patches = {
        "ENDPOINT": url,
        "HUGGINGFACE_CO_URL_TEMPLATE": template,
        "HF_HUB_CACHE": str(home / "hub"),
        "HF_HOME": str(home),
        "HF_TOKEN_PATH": str(home / "token"),
        "HF_HUB_DISABLE_XET": True,
        "HF_HUB_OFFLINE": False,
        "HF_HUB_DISABLE_TELEMETRY": True,
    }
    for name, value in patches.items():
        monkeypatch.setattr(constants, name, value)
    monkeypatch.setattr(hf_api.api, "endpoint", url)
    if transformers_hub := sys.modules.get("transformers.utils.hub"):
        monkeypatch.setattr(transformers_hub, "_hf_api", None, raising=False)
    if datasets_config := sys.modules.get("datasets.config"):
        monkeypatch.setattr(datasets_config, "HF_ENDPOINT", url)
        monkeypatch.setattr(datasets_config, "HF_HUB_OFFLINE", False, raising=False)


class FastClock:
    """Replaces the ``time`` module of a client. ``sleep`` returns immediately and is recorded."""

    def __init__(self) -> None:
        self.waits: list[float] = []

    def sleep(self, seconds: float) -> None:
        self.waits.append(seconds)

    def __getattr__(self, name: str) -> object:
        import time

        return getattr(time, name)


@pytest.fixture
def no_waiting(monkeypatch: pytest.MonkeyPatch) -> FastClock:
    """Makes huggingface_hub and hfseq retry without waiting.

    ``no_waiting.waits`` contains the seconds that they would have waited.
    """
    from huggingface_hub.utils import _http

    from hfseq.checkpoints import hub as hub_retry

    clock = FastClock()
    monkeypatch.setattr(_http, "time", clock)
    monkeypatch.setattr(hub_retry, "time", clock)
    return clock
