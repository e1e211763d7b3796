"""The import paths of Transformers 4: `from transformers import FlaxBertModel` imports from hfseq.

Importing `hfseq.v4` restores the names and modules of Transformers 4's Flax code, for programs that
cannot be edited, and lets tokenizers decode JAX arrays. Nothing is copied into transformers: its
lazy packages ask hfseq for names that they do not have, so that nothing is imported before it is
needed. A name that hfseq lacks too raises an ImportError that explains this, and `hasattr` returns
False.
"""

from __future__ import annotations

import functools
import importlib
import logging
import re
import sys
from collections.abc import Sequence
from importlib.machinery import ModuleSpec
from types import FunctionType, ModuleType
from typing import TYPE_CHECKING, Any

from hfseq.plugins.import_hooks import find_and_wrap
from hfseq.plugins.registry import __version__

if TYPE_CHECKING:
    from importlib.abc import Loader
else:
    Loader = object  # its module is slow to import

#: Modules of Transformers 4 other than those of its families, and the modules with their names now.
MODULES = {
    "hfseq.modeling_flax_pytorch_utils": "hfseq.modeling.pytorch_utils",
    "transformers.modeling_flax_pytorch_utils": "hfseq.modeling.pytorch_utils",
    "transformers.modeling_flax_outputs": "hfseq.nn.outputs",
    "transformers.modeling_flax_utils": "hfseq.modeling.pretrained",
    "transformers.models.auto.modeling_flax_auto": "hfseq.modeling.auto",
    "transformers.generation.flax_utils": "hfseq.generation",
    "transformers.generation.flax_logits_process": "hfseq.generation",
    # before 4.25
    "transformers.generation_flax_utils": "hfseq.generation",
    "transformers.generation_flax_logits_process": "hfseq.generation",
}

#: Names of Transformers 4 that have other names in hfseq.
_RENAMED = {"ACT2FN": "hfseq.nn.layers:ACTIVATIONS"}

_FAMILY = re.compile(r"transformers\.models\.(\w+)\.modeling_flax_\1")
_PACKAGE = re.compile(r"transformers(\.generation|\.models\.\w+)?")
_UTILITIES = (
    "transformers.file_utils",
    "transformers.utils",
    "transformers.utils.import_utils",
    "transformers.testing_utils",
)
_PREFIXES = ("Flax", "FLAX_")

_ARRAYS = "transformers.utils.generic"


def install() -> None:
    """Activates the old import paths, also in packages that are already imported."""
    for name in (_ARRAYS, *_UTILITIES):
        if name in sys.modules:
            _extend(sys.modules[name])
    if not any(isinstance(finder, _Finder) for finder in sys.meta_path):
        sys.meta_path.insert(0, _Finder())


def is_flax_available() -> bool:
    """Returns True: the Flax classes are those of hfseq."""
    return True


def send_example_telemetry(*_: object, **__: object) -> None:
    """Does nothing. The example scripts of Transformers 4 call it."""


def require_flax(test_case: Any) -> Any:
    """Returns the test case unchanged, because Flax is always available."""
    return test_case


_HELPERS: dict[str, Any] = {
    "FLAX_WEIGHTS_INDEX_NAME": "flax_model.msgpack.index.json",
    "FLAX_WEIGHTS_NAME": "flax_model.msgpack",
    "is_flax_available": is_flax_available,
    "require_flax": require_flax,
    "send_example_telemetry": send_example_telemetry,
}


def _look_up(package: str, name: str) -> Any:
    """Returns the replacement of a name that a package of Transformers no longer has."""
    if name in _HELPERS:
        return _HELPERS[name]
    if name.startswith(_PREFIXES):
        return _get(name, package)
    if "flax" in name and _is_old_module(f"{package}.{name}"):
        return importlib.import_module(f"{package}.{name}")
    raise AttributeError(name)


class _OldModule(ModuleType):
    """A module of Transformers 4 with the names of `targets` and of hfseq, looked up lazily."""

    targets: Sequence[ModuleType]

    def __getattr__(self, name: str) -> Any:
        if name.startswith("__"):
            raise AttributeError(name)
        if name in _HELPERS:
            return _HELPERS[name]
        for target in self.targets:
            if hasattr(target, name):
                return getattr(target, name)
        if name in _RENAMED:
            module, _, renamed = _RENAMED[name].partition(":")
            return getattr(importlib.import_module(module), renamed)
        if name.startswith(_PREFIXES):
            return _get(name, self.__name__)
        # Names that the old module imported, such as its configuration class.
        return getattr(sys.modules[self.__name__.rpartition(".")[0]], name)

    def __dir__(self) -> list[str]:
        return [*super().__dir__(), *self.__all__]

    @property
    def __all__(self) -> list[str]:
        names = {
            name
            for target in self.targets
            for name, value in vars(target).items()
            if name.startswith((*_PREFIXES, "shift_tokens_right"))
            or isinstance(value, FunctionType)
            and value.__module__ == target.__name__
        }
        return sorted(name for name in names if not name.startswith("_"))


class _Finder:
    """Finds the old modules, and extends the utilities of transformers when they are loaded."""

    def find_spec(
        self, name: str, path: Sequence[str] | None, target: ModuleType | None = None
    ) -> ModuleSpec | None:
        if name == _ARRAYS or name in _UTILITIES:
            return find_and_wrap(self, name, path, target, after_load=_extend)
        if _is_old_module(name):
            # A package, so that missing names are looked up as submodules and this finder can
            # explain the error.
            return ModuleSpec(name, _Loader(), is_package=True)
        parent, _, last = name.rpartition(".")
        if _FAMILY.fullmatch(name) and parent.rpartition(".")[2] in flax_classes().values():
            # Without `name`: `from transformers.models.whisper import ...` would hide the error.
            raise ModuleNotFoundError(_missing_message(f"{name} is a module"))
        if _is_old_module(parent) or last.startswith(_PREFIXES) and _PACKAGE.fullmatch(parent):
            try:
                _get(last, parent)
            except AttributeError as error:
                raise ImportError(str(error), name=parent) from None
        return None


class _OldLogger(logging.Handler):
    """Forwards hfseq's log records to the handlers of a logger of Transformers 4."""

    def __init__(self, name: str):
        super().__init__()
        self.old = logging.getLogger(name)

    def emit(self, record: logging.LogRecord) -> None:
        for handler in self.old.handlers:
            handler.handle(record)


class _Loader(Loader):
    def create_module(self, spec: ModuleSpec) -> ModuleType:
        module = _OldModule(spec.name, f"The names of Transformers 4's `{spec.name}`, from hfseq.")
        module.targets = [importlib.import_module(target) for target in _hfseq_modules(spec.name)]
        if spec.name == "transformers.modeling_flax_utils":
            logging.getLogger("hfseq.modeling").addHandler(_OldLogger(spec.name))
        return module

    def exec_module(self, module: ModuleType) -> None:
        pass


def _extend(module: ModuleType) -> None:
    """Adds the old helpers to one of `_UTILITIES`, and the old names to its lazy packages."""
    if module.__name__ == _ARRAYS:
        _read_jax(module)
        return
    for name, helper in _HELPERS.items():
        vars(module).setdefault(name, helper)
    lazy = getattr(module, "_LazyModule", None)
    if lazy is None or hasattr(lazy.__getattr__, "__wrapped__"):
        return
    original = lazy.__getattr__

    @functools.wraps(original)
    def getattr_with_hfseq(package: ModuleType, name: str) -> Any:
        try:
            return original(package, name)
        except AttributeError:
            if not _PACKAGE.fullmatch(package.__name__):
                raise
            try:
                return _look_up(package.__name__, name)
            except AttributeError as error:
                if name.startswith(_PREFIXES):
                    raise error from None
            raise

    lazy.__getattr__ = getattr_with_hfseq


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


def _is_old_module(name: str) -> bool:
    return name in MODULES or bool(_hfseq_modules(name))


def _hfseq_modules(name: str) -> list[str]:
    """Returns the names of hfseq's modules for the name of a module of Transformers 4."""
    if name in MODULES:
        return [MODULES[name]]
    match = _FAMILY.fullmatch(name)
    if match is None:
        return []
    from hfseq.plugins import load

    entries = load().architectures.entries()
    specs = [entry.target for entry in entries if entry.name.replace("-", "_") == match[1]]
    head_classes = [spec.load_head(task) for spec in specs for task in spec.heads]
    return list(dict.fromkeys(head_class.__module__ for head_class in head_classes))


def flax_classes() -> dict[str, str]:
    """Returns the Flax names that Transformers 4.57 exported, with the folder of each family."""
    from importlib.resources import files

    text = files("hfseq.v4").joinpath("flax_classes.tsv").read_text(encoding="utf-8")
    rows = [line.split("\t") for line in text.splitlines()]
    return {name: family for family, name in rows}


def _get(name: str, module_name: str) -> Any:
    """Returns what hfseq has under a name of Transformers 4.

    Raises:
        AttributeError: hfseq does not have it. The message explains why.
    """
    try:
        return getattr(importlib.import_module("hfseq"), name)
    except AttributeError as error:
        if name in flax_classes():
            raise AttributeError(_missing_message(f"{name} is a class")) from None
        raise AttributeError(
            f"hfseq has no equivalent of '{name}' of '{module_name}' ({error}). See "
            "docs/migration.md#imports"
        ) from None


def _missing_message(subject: str) -> str:
    return (
        f"{subject} of Transformers 4 that hfseq {__version__} does not have yet. "
        "docs/flax_classes.md lists all of them"
    )
