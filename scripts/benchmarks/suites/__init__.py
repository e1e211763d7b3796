"""What ``run.py`` measures: a module a suite, found by name.

A suite is a module with ``TITLE``, ``SUMMARY`` (what benchmarks/tables.md says above its table),
``COLUMNS`` and ``cases(options)``; ``remarks(rows)`` may add lines below the table and ``PICTURE``
a picture. Its top level needs the standard library alone: what runs imports what it needs.
"""

from __future__ import annotations

import importlib
from typing import Any

SUITES = (
    *("limits", "train", "inference", "generation", "data", "startup", "checkpoint", "memory"),
    *("scaling", "data_scale"),
)


def load(name: str) -> Any:
    """Return the module of a suite."""
    return importlib.import_module(f"suites.{name}")
