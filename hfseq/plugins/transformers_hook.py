"""Extends the Auto classes of Transformers with the architectures that Transformers lacks.

After ``import hfseq``, ``AutoConfig`` finds the configuration classes of such architectures, so
that ``AutoTokenizer`` works for their checkpoints, and ``AutoModel*`` returns their Flax classes.
Model types of Transformers are unchanged. Without PyTorch, the top-level ``transformers.AutoModel``
is a dummy; import it from ``transformers.models.auto.modeling_auto`` instead.

The mappings of Transformers get tables that query hfseq's plugin registry at each lookup. Thus
nothing is imported before it is needed, a plugin cannot break ``import transformers``, and plugins
that are loaded later are found too.
"""

from __future__ import annotations

import functools
import importlib
import logging
import sys
from collections.abc import Callable, Container, Iterator, MutableMapping, Sequence
from importlib.machinery import ModuleSpec
from types import ModuleType
from typing import TYPE_CHECKING, Any

from hfseq.errors import HfseqError, UsageError
from hfseq.plugins.registry import (
    TASKS,
    ArchitectureSpec,
    describe_error,
    target_name,
    torch_auto_class_name,
)

if TYPE_CHECKING:
    from importlib.abc import Loader
else:
    Loader = object  # importlib.abc is slow to import

logger = logging.getLogger("hfseq")

_AUTO = "transformers.models.auto"
_EXTENDED = (f"{_AUTO}.configuration_auto", f"{_AUTO}.modeling_auto")
_ARRAYS = "transformers.utils.generic"


def install() -> None:
    """Extends the mappings of Transformers as soon as their modules are imported."""
    for name in (_ARRAYS, *_EXTENDED):
        if name in sys.modules:
            _extend(sys.modules[name])
    if not any(isinstance(finder, _Finder) for finder in sys.meta_path):
        sys.meta_path.insert(0, _Finder())


def register_auto_classes() -> None:
    """Imports and extends the Auto classes of Transformers, which ``import hfseq`` does lazily."""
    for name in _EXTENDED:
        _extend(importlib.import_module(name))


class ConfigMapping(MutableMapping[str, Any]):
    """Maps model types to configuration classes: registered ones, then those of plugins."""

    def __init__(self, stock: Container[str], registered: dict[str, type]) -> None:
        self._stock, self._registered = stock, registered

    def __getitem__(self, model_type: str) -> Any:
        if model_type in self._registered:
            return self._registered[model_type]
        return _custom(self._stock)[model_type].load_config()

    def __contains__(self, model_type: object) -> bool:
        return model_type in self._registered or model_type in _custom(self._stock)

    def __setitem__(self, model_type: str, config: type) -> None:
        self._registered[model_type] = config

    def __delitem__(self, model_type: str) -> None:
        del self._registered[model_type]

    def __iter__(self) -> Iterator[str]:
        return iter(list({**self._registered, **_custom(self._stock)}))

    def __len__(self) -> int:
        return len(list(iter(self)))


class _LazyClass(type):
    """Placeholder for the Flax class of a task, which is imported on first use."""

    _load: Callable[[], Any]

    def __new__(mcs, spec: ArchitectureSpec, task: str) -> _LazyClass:
        # With this module name, Transformers treats the class like a built-in one, so that
        # trust_remote_code=True prefers the code of a checkpoint.
        load = staticmethod(lambda: spec.load_head(task))
        content = {"_load": load, "__module__": f"{_AUTO}.hfseq"}
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


def _custom(stock: Container[str]) -> dict[str, ArchitectureSpec]:
    """Returns the architectures whose model type is not in ``stock``, those of Transformers."""
    from hfseq.plugins.manager import load

    try:
        entries = load().architectures.entries()
    except Exception as error:
        logger.warning("hfseq's plugins cannot be loaded: %s", error)
        return {}
    return {entry.name: entry.target for entry in entries if entry.name not in stock}


def _extend(module: ModuleType) -> None:
    """Extends an imported module of Transformers, unless this has been done."""
    if module.__name__ == _ARRAYS:
        _read_jax(module)
        return
    if module.__name__.endswith("configuration_auto"):
        configs = module.CONFIG_MAPPING
        if not isinstance(configs._extra_content, ConfigMapping):
            configs._extra_content = ConfigMapping(configs._mapping, configs._extra_content)
        return
    stock = sys.modules[_EXTENDED[0]].CONFIG_MAPPING._mapping
    for task in TASKS:
        mapping = getattr(module, torch_auto_class_name(task))._model_mapping
        if not isinstance(mapping._extra_content, ArchitectureMapping):
            extra = ArchitectureMapping(task, lambda spec: spec.model_type not in stock, _LazyClass)
            extra.update(mapping._extra_content)
            mapping._extra_content = extra


class _Finder:
    """Import hook that prepares JAX before Flax is imported, and extends Transformers modules."""

    def find_spec(
        self, name: str, path: Sequence[str] | None, target: ModuleType | None = None
    ) -> ModuleSpec | None:
        if name == "flax":
            return find_and_wrap(self, name, path, target, before_load=prepare_jax)
        if name in (_ARRAYS, *_EXTENDED):
            return find_and_wrap(self, name, path, target, after_load=_extend)
        return None


def _read_jax(module: ModuleType) -> None:
    """Allows tokenizers to decode JAX arrays like NumPy arrays, as in Transformers 4."""
    original = getattr(module, "_get_frameworks_and_test_func", None)
    if original is None or hasattr(original, "__wrapped__"):
        return

    @functools.wraps(original)
    def frameworks(value: Any) -> Any:
        is_jax = type(value).__module__.partition(".")[0] in ("jax", "jaxlib")
        return {"np": lambda _: True} if is_jax else original(value)

    module._get_frameworks_and_test_func = frameworks  # type: ignore[attr-defined]


#: Names that flax 0.12.8 imports from ``jax.experimental.hijax``, but which jax 0.11 removed. Only
#: Flax's opt-in hijax variables use them, and hfseq does not use those.
HIJAX_NAMES = ("HiPrimitive", "MutableHiType", "AvalQDD", "AvalMutableQDD", "QDD")


def prepare_jax() -> None:
    """Makes flax 0.12.8 importable with jax 0.11 and later.

    Missing names in JAX become placeholder classes. Compatible versions are not changed. After
    ``import hfseq``, the first import of Flax calls this function.
    """
    from importlib import metadata

    if int(metadata.version("flax").split(".")[2]) >= 12:  # 0.12.12 uses none of the names
        return
    from jax.experimental import hijax

    for name in HIJAX_NAMES:
        if not hasattr(hijax, name):
            setattr(hijax, name, type(name, (), {"__module__": hijax.__name__}))


def find_and_wrap(
    calling_finder: object,
    name: str,
    path: Sequence[str] | None,
    target: ModuleType | None,
    *,
    before_load: Callable[[], None] | None = None,
    after_load: Callable[[ModuleType], None] | None = None,
) -> ModuleSpec | None:
    """Finds a module with other finders, and runs a function before or after it is loaded.

    Args:
        calling_finder: The finder that calls this function, which is not queried.
        name: Name of the module, as in ``find_spec``.
        path: Search path, as in ``find_spec``.
        target: Target, as in ``find_spec``.
        before_load: Function to call before the module is loaded.
        after_load: Function to call with the loaded module. Its errors become warnings.

    Returns:
        The spec of the module, or `None` if it is not found.
    """
    for finder in sys.meta_path:
        if (
            finder is not calling_finder
            and (spec := finder.find_spec(name, path, target)) is not None
        ):
            if spec.loader is not None:
                spec.loader = _WrappedLoader(spec.loader, before_load, after_load)
            return spec
    return None


class _WrappedLoader(Loader):
    """Loads a module with another loader, and removes itself from the module."""

    def __init__(
        self,
        loader: Loader,
        before_load: Callable[[], None] | None,
        after_load: Callable[[ModuleType], None] | None,
    ) -> None:
        self._loader, self._before, self._after = loader, before_load, after_load

    def create_module(self, spec: ModuleSpec) -> ModuleType | None:
        return self._loader.create_module(spec)

    def exec_module(self, module: ModuleType) -> None:
        module.__loader__ = self._loader
        if module.__spec__ is not None:
            module.__spec__.loader = self._loader
        if self._before:
            self._before()
        self._loader.exec_module(module)
        try:
            if self._after:  # the module may have replaced itself in sys.modules
                self._after(sys.modules.get(module.__name__, module))
        except Exception as error:
            logger.warning("hfseq cannot extend %s: %s", module.__name__, error)


class ArchitectureMapping(MutableMapping[type, Any]):
    """Maps configuration classes to the model classes of a task in the plugin registry.

    Configuration classes are identified by ``model_type`` and class name, so that lookups do not
    import modules.

    Args:
        task: The task.
        predicate: Selects architectures. Default: all.
        make_value: Returns the value for an architecture and a task. Default: the model class.
    """

    def __init__(
        self,
        task: str,
        predicate: Callable[[ArchitectureSpec], bool] = lambda spec: True,
        make_value: Callable[[ArchitectureSpec, str], Any] = ArchitectureSpec.load_head,
    ) -> None:
        self.task = task
        self._wanted, self._value = predicate, make_value
        self._registered: dict[type, Any] = {}
        self._values: dict[str, tuple[ArchitectureSpec, Any]] = {}

    def specs(self) -> list[ArchitectureSpec]:
        """Returns the registered architectures that have a head for the task."""
        from hfseq.plugins.manager import load

        specs = [entry.target for entry in load().architectures.entries()]
        return [spec for spec in specs if self.task in spec.heads and self._wanted(spec)]

    def register(self, key: type, value: type, exist_ok: bool = False) -> None:
        """Adds a model class for a configuration class, as ``FlaxAutoModel.register`` does."""
        if key in self and not exist_ok:
            raise UsageError(f"{key.__name__} already has a class for {self.task}: {self[key]}")
        self[key] = value

    def _find(self, key: object) -> ArchitectureSpec | None:
        model_type, name = getattr(key, "model_type", None), getattr(key, "__name__", None)
        for spec in self.specs():
            if spec.model_type == model_type and spec.config_name == name:
                return spec
        return None

    def __getitem__(self, key: type) -> Any:
        if key in self._registered:
            return self._registered[key]
        spec = self._find(key)
        if spec is None:
            raise KeyError(key)
        cached_spec, value = self._values.get(spec.model_type, (None, None))
        if cached_spec is not spec:
            value = self._value(spec, self.task)
            self._values[spec.model_type] = (spec, value)
        return value

    def __contains__(self, key: object) -> bool:
        return key in self._registered or self._find(key) is not None

    def __setitem__(self, key: type, value: type) -> None:
        self._registered[key] = value

    def __delitem__(self, key: type) -> None:
        del self._registered[key]

    def __iter__(self) -> Iterator[type]:
        """Yields the configuration classes. Skips those that fail to import, with a warning."""
        for spec in self.specs():
            try:
                yield spec.load_config()
            except HfseqError as error:
                logger.warning("%s", describe_error(error))
        yield from list(self._registered)

    def __len__(self) -> int:
        return len(self.specs()) + len(self._registered)
