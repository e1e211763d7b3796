"""What can be added to hfseq and who added it: hooks, discovery, and the tables that they fill.

The public names are resolved when they are first used, so that a command that needs none of them
loads neither pluggy nor a plugin.
"""

from __future__ import annotations

import importlib
from typing import TYPE_CHECKING, Any

from hfseq.plugins.registry import __version__ as __version__

if TYPE_CHECKING:
    from hfseq.plugins.hookspecs import hookimpl as hookimpl
    from hfseq.plugins.manager import PluginInfo as PluginInfo
    from hfseq.plugins.manager import Plugins as Plugins
    from hfseq.plugins.manager import load as load
    from hfseq.plugins.manager import unload as unload
    from hfseq.plugins.registry import TASKS as TASKS
    from hfseq.plugins.registry import ArchitectureSpec as ArchitectureSpec

_MODULES = {
    "ArchitectureSpec": "registry",
    "PluginInfo": "manager",
    "Plugins": "manager",
    "TASKS": "registry",
    "hookimpl": "hookspecs",
    "load": "manager",
    "register_auto_classes": "transformers_hook",
    "unload": "manager",
}


def __getattr__(name: str) -> Any:
    if name not in _MODULES:
        raise AttributeError(f"module 'hfseq.plugins' has no attribute '{name}'")
    return getattr(importlib.import_module(f"hfseq.plugins.{_MODULES[name]}"), name)
