"""Adds architectures that Transformers does not have to the Auto classes of Transformers.

After ``import hfseq``, ``AutoConfig`` finds the configuration classes of such architectures.
``AutoTokenizer`` then works for their checkpoints, and ``AutoModel*`` returns their Flax classes.
Model types that Transformers defines are unchanged. Without PyTorch, ``transformers.AutoModel`` is
a dummy object; import the class from ``transformers.models.auto.modeling_auto`` instead.

The registration uses the public ``register`` functions of the Auto classes. It happens when the
Auto modules are first imported, so that ``import hfseq`` stays fast. Architectures of plugins that
are loaded later are registered at that time.
"""

from __future__ import annotations

import importlib
import logging
import sys
from collections.abc import Callable, Sequence
from importlib.machinery import ModuleSpec
from types import ModuleType
from typing import TYPE_CHECKING, Any, ClassVar

from hfseq.errors import HfseqError
from hfseq.plugins.import_hooks import find_and_wrap
from hfseq.plugins.registry import (
    TASKS,
    ArchitectureSpec,
    describe_error,
    target_name,
    torch_auto_class_name,
)

if TYPE_CHECKING:
    from hfseq.plugins.manager import Plugins

logger = logging.getLogger("hfseq")

_AUTO = "transformers.models.auto"
_CONFIGS, _MODELS = f"{_AUTO}.configuration_auto", f"{_AUTO}.modeling_auto"


#: Registered architectures by model type, with the Auto modules in which they are registered.
_registered: dict[str, tuple[ArchitectureSpec, list[Any]]] = {}


def install() -> None:
    """Registers the architectures now, or when the Auto modules are imported."""
    missing = [name for name in (_CONFIGS, _MODELS) if _imported(name) is None]
    if missing and not any(isinstance(finder, _Finder) for finder in sys.meta_path):
        sys.meta_path.insert(0, _Finder())
    if len(missing) < 2:
        _load_and_register()


def register_auto_classes() -> None:
    """Imports the Auto classes of Transformers and registers the architectures.

    Programs need not call this function: after ``import hfseq``, the architectures are registered
    automatically when a program imports the Auto classes.
    """
    for name in (_CONFIGS, _MODELS):
        importlib.import_module(name)
    _load_and_register()


def register_architectures(plugins: Plugins) -> None:
    """Adds architectures that Transformers does not have to the imported Auto modules."""
    configs, models = _imported(_CONFIGS), _imported(_MODELS)
    if configs is None:
        return
    modules = [configs, models]
    for entry in plugins.architectures.entries():
        spec: ArchitectureSpec = entry.target
        known = _registered.get(spec.model_type)
        is_known = known is not None and known[0] is spec and known[1] == modules
        if is_known or spec.model_type in configs.CONFIG_MAPPING_NAMES:
            continue
        _registered[spec.model_type] = spec, modules
        try:
            config_class = spec.load_config()
            configs.AutoConfig.register(spec.model_type, config_class)
            for task in TASKS if models is not None else ():
                if task in spec.heads:
                    auto_class = getattr(models, torch_auto_class_name(task))
                    auto_class.register(config_class, _LazyClass(spec, task))
        except (HfseqError, ValueError, TypeError) as error:
            logger.warning(
                "AutoConfig cannot load '%s': %s", spec.model_type, describe_error(error)
            )


def _imported(name: str) -> ModuleType | None:
    """Returns a module if its import is complete, and otherwise `None`."""
    module = sys.modules.get(name)
    initializing = getattr(getattr(module, "__spec__", None), "_initializing", False)
    return None if initializing and name not in _Finder.loaded else module


def _load_and_register() -> None:
    """Loads the plugins and registers their architectures.

    If another thread is already loading the plugins, that thread also registers the architectures.
    """
    from hfseq.plugins import manager

    if register_architectures not in manager.load_listeners:
        manager.load_listeners.append(register_architectures)
    try:
        manager.load_unless_busy()
    except Exception as error:
        logger.warning("hfseq's plugins cannot be loaded: %s", error)


class _LazyClass(type):
    """Placeholder for the Flax class of a task, which is imported on first use."""

    _load: Callable[[], Any]

    def __new__(mcs, spec: ArchitectureSpec, task: str) -> _LazyClass:
        # With this module name, Transformers treats the class like a built-in one, so that
        # trust_remote_code=True prefers the code of a checkpoint.
        load = staticmethod(lambda: spec.load_head(task))
        content = {
            "_load": load,
            "__module__": f"{_AUTO}.hfseq",
            "config_class": spec.load_config(),
        }
        return super().__new__(mcs, target_name(spec.heads[task]), (), content)

    def __init__(cls, spec: ArchitectureSpec, task: str) -> None:
        super().__init__(cls.__name__, (), {})

    def __getattr__(cls, name: str) -> Any:
        if name.startswith("__"):
            raise AttributeError(name)
        return getattr(cls._load(), name)

    def __call__(cls, *args: Any, **kwargs: Any) -> Any:
        return cls._load()(*args, **kwargs)

    def __instancecheck__(cls, instance: object) -> bool:
        return isinstance(instance, cls._load())


class _Finder:
    """Import hook that registers the architectures after an Auto module has been imported.

    The hook removes itself when both Auto modules have been imported.
    """

    loaded: ClassVar[set[str]] = set()

    def find_spec(
        self, name: str, path: Sequence[str] | None, target: ModuleType | None = None
    ) -> ModuleSpec | None:
        if name in (_CONFIGS, _MODELS):
            return find_and_wrap(self, name, path, target, after_load=self._after_load)
        return None

    def _after_load(self, module: ModuleType) -> None:
        self.loaded.add(module.__name__)
        if _imported(_CONFIGS) and _imported(_MODELS) and self in sys.meta_path:
            sys.meta_path.remove(self)
        _load_and_register()
