"""The plugin system: its hooks, the discovery of plugins, and the registries of their names.

Public names are imported on first use, so that commands without plugins do not import pluggy.
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
    from hfseq.plugins.registry import FALLBACK_TASKS as FALLBACK_TASKS
    from hfseq.plugins.registry import TASKS as TASKS
    from hfseq.plugins.registry import ArchitectureSpec as ArchitectureSpec
    from hfseq.plugins.transformers_hook import register_auto_classes as register_auto_classes
    from hfseq.plugins.untranslated import NotTranslated as NotTranslated
    from hfseq.plugins.untranslated import refuse_untranslated as refuse_untranslated

_PUBLIC = {
    "hookspecs": ("hookimpl",),
    "manager": ("PluginInfo", "Plugins", "load", "unload"),
    "registry": ("FALLBACK_TASKS", "TASKS", "ArchitectureSpec"),
    "transformers_hook": ("register_auto_classes",),
    "untranslated": ("NotTranslated", "refuse_untranslated"),
}


def __getattr__(name: str) -> Any:
    for module, names in _PUBLIC.items():
        if name in names:
            return getattr(importlib.import_module(f"hfseq.plugins.{module}"), name)
    raise AttributeError(f"module 'hfseq.plugins' has no attribute '{name}'")
