"""Fixtures of short training runs, and a check that torch is installed."""

from __future__ import annotations

import pytest

from tests.training.conftest import corpus, flags, train  # noqa: F401 (fixtures)

pytest.importorskip("torch")
