"""The training loop, its flags and its callbacks.

A submodule is imported when one of its names, such as `Callback`, is first used. Importing this
package is therefore fast.
"""

from __future__ import annotations

import importlib
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from hfseq.training.arguments import Arguments as Arguments
    from hfseq.training.arguments import parse as parse
    from hfseq.training.callbacks import Callback as Callback
    from hfseq.training.callbacks import StepInfo as StepInfo
    from hfseq.training.callbacks import every as every
    from hfseq.training.checkpointer import Progress as Progress
    from hfseq.training.run import Result as Result
    from hfseq.training.run import main as main
    from hfseq.training.setup import Run as Run
    from hfseq.training.state import TrainState as TrainState

_MODULES = {
    "Arguments": "arguments",
    "Callback": "callbacks",
    "Progress": "checkpointer",
    "Result": "run",
    "Run": "setup",
    "StepInfo": "callbacks",
    "TrainState": "state",
    "every": "callbacks",
    "main": "run",
    "parse": "arguments",
}


def __getattr__(name: str) -> Any:
    if name not in _MODULES:
        raise AttributeError(f"module 'hfseq.training' has no attribute '{name}'")
    return getattr(importlib.import_module(f"hfseq.training.{_MODULES[name]}"), name)
