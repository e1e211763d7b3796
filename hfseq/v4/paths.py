"""The import paths of Transformers 4: ``from transformers import FlaxBertModel`` gives hfseq's.

Once hfseq is imported, the names and the modules that held Transformers 4's Flax code are found
again, for programs that cannot be edited. Nothing is copied into transformers: its lazy packages
ask hfseq for names that they do not have, so nothing is imported before it is needed. A name that
hfseq lacks too is an ImportError that says so, and ``hasattr`` says no.
"""

from __future__ import annotations

import functools
import importlib
import logging
import re
import sys
from collections.abc import Callable, Sequence
from importlib.machinery import ModuleSpec
from types import FunctionType, ModuleType
from typing import TYPE_CHECKING, Any

from hfseq.plugins.registry import __version__
from hfseq.plugins.transformers_hook import find_and_wrap

if TYPE_CHECKING:
    from importlib.abc import Loader
else:
    Loader = object  # its module is slow to import

#: Modules that Transformers 4 had beside those of its families, and where their names are now.
MODULES = {
    "hfseq.modeling_flax_pytorch_utils": "hfseq.v4.pytorch_utils",
    "transformers.modeling_flax_pytorch_utils": "hfseq.v4.pytorch_utils",
    "transformers.modeling_flax_outputs": "hfseq.nn.outputs",
    "transformers.modeling_flax_utils": "hfseq.modeling.pretrained",
    "transformers.models.auto.modeling_flax_auto": "hfseq.modeling.auto",
    "transformers.generation.flax_utils": "hfseq.generation",
    "transformers.generation.flax_logits_process": "hfseq.generation",
    # before 4.25
    "transformers.generation_flax_utils": "hfseq.generation",
    "transformers.generation_flax_logits_process": "hfseq.generation",
}

#: Names of Transformers 4 that are called otherwise here.
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

_resolve: Callable[[str], Any]  # what finds hfseq's own names


def install(resolve: Callable[[str], Any]) -> None:
    """Make the old paths lead to what ``resolve`` finds, in packages that are there already too."""
    global _resolve
    _resolve = resolve
    for name in _UTILITIES:
        if name in sys.modules:
            _extend(sys.modules[name])
    if not any(isinstance(finder, _Finder) for finder in sys.meta_path):
        sys.meta_path.insert(0, _Finder())


def is_flax_available() -> bool:
    """Tell whether there are Flax classes: there are, hfseq's."""
    return True


def send_example_telemetry(*_: object, **__: object) -> None:
    """Send nothing; Transformers 4's example scripts call it."""


def require_flax(test_case: Any) -> Any:
    """Skip no test for want of Flax."""
    return test_case


_HELPERS: dict[str, Any] = {
    "FLAX_WEIGHTS_INDEX_NAME": "flax_model.msgpack.index.json",
    "FLAX_WEIGHTS_NAME": "flax_model.msgpack",
    "is_flax_available": is_flax_available,
    "require_flax": require_flax,
    "send_example_telemetry": send_example_telemetry,
}


def _look_up(package: str, name: str) -> Any:
    """Return what a package of Transformers 4 had under a name that it has no more."""
    if name in _HELPERS:
        return _HELPERS[name]
    if name.startswith(_PREFIXES):
        return _get(name, package)
    if "flax" in name and _found(f"{package}.{name}"):
        return importlib.import_module(f"{package}.{name}")
    raise AttributeError(name)


class _OldModule(ModuleType):
    """A module of Transformers 4: the names of ``homes``, and those of hfseq, as they are asked."""

    homes: Sequence[ModuleType]

    def __getattr__(self, name: str) -> Any:
        if name.startswith("__"):
            raise AttributeError(name)
        if name in _HELPERS:
            return _HELPERS[name]
        for home in self.homes:
            if hasattr(home, name):
                return getattr(home, name)
        if name in _RENAMED:
            module, _, renamed = _RENAMED[name].partition(":")
            return getattr(importlib.import_module(module), renamed)
        if name.startswith(_PREFIXES):
            return _get(name, self.__name__)
        # its configuration and the like, which the module imported
        return getattr(sys.modules[self.__name__.rpartition(".")[0]], name)

    def __dir__(self) -> list[str]:
        return [*super().__dir__(), *self.__all__]

    @property
    def __all__(self) -> list[str]:
        found = {
            name
            for home in self.homes
            for name, value in vars(home).items()
            if name.startswith((*_PREFIXES, "shift_tokens_right"))
            or isinstance(value, FunctionType)
            and value.__module__ == home.__name__
        }
        return sorted(name for name in found if not name.startswith("_"))


class _Finder:
    """Finds the old modules, and has transformers' utilities extended once they are loaded."""

    def find_spec(
        self, name: str, path: Sequence[str] | None, target: ModuleType | None = None
    ) -> ModuleSpec | None:
        if name in _UTILITIES:
            return find_and_wrap(self, name, path, target, after_load=_extend)
        if _found(name):
            # A package is asked for modules where it lacks a name, and so this finder says why.
            return ModuleSpec(name, _Loader(), is_package=True)
        place, _, last = name.rpartition(".")
        if _FAMILY.fullmatch(name) and place.rpartition(".")[2] in flax_classes().values():
            # without a name: `from transformers.models.whisper import …` would not pass it on
            raise ModuleNotFoundError(_absent(f"{name} is a module"))
        if _found(place) or last.startswith(_PREFIXES) and _PACKAGE.fullmatch(place):
            try:
                _get(last, place)
            except AttributeError as error:
                raise ImportError(str(error), name=place) from None
        return None


class _OldLogger(logging.Handler):
    """Tells whoever listens to a logger of Transformers 4 what hfseq says in its place."""

    def __init__(self, name: str):
        super().__init__()
        self.old = logging.getLogger(name)

    def emit(self, record: logging.LogRecord) -> None:
        for handler in self.old.handlers:
            handler.handle(record)


class _Loader(Loader):
    def create_module(self, spec: ModuleSpec) -> ModuleType:
        module = _OldModule(spec.name, f"What Transformers 4 had in ``{spec.name}``, of hfseq.")
        module.homes = [importlib.import_module(home) for home in _homes(spec.name)]
        if spec.name == "transformers.modeling_flax_utils":
            logging.getLogger("hfseq.modeling").addHandler(_OldLogger(spec.name))
        return module

    def exec_module(self, module: ModuleType) -> None:
        pass


def _extend(module: ModuleType) -> None:
    """Give one of `_UTILITIES` the helpers it had, and lazy packages the names they had."""
    for name, helper in _HELPERS.items():
        vars(module).setdefault(name, helper)
    lazy = getattr(module, "_LazyModule", None)
    if lazy is None or hasattr(lazy.__getattr__, "__wrapped__"):
        return
    ask = lazy.__getattr__

    @functools.wraps(ask)
    def ask_hfseq_too(package: ModuleType, name: str) -> Any:
        try:
            return ask(package, name)
        except AttributeError:
            if not _PACKAGE.fullmatch(package.__name__):
                raise
            try:
                return _look_up(package.__name__, name)
            except AttributeError as error:
                if name.startswith(_PREFIXES):
                    raise error from None
            raise

    lazy.__getattr__ = ask_hfseq_too


def _found(name: str) -> bool:
    return name in MODULES or bool(_homes(name))


def _homes(name: str) -> list[str]:
    """Return the modules with hfseq's classes of a family, by the name of v4's module."""
    if name in MODULES:
        return [MODULES[name]]
    match = _FAMILY.fullmatch(name)
    if match is None:
        return []
    from hfseq.plugins import load

    entries = load().architectures.entries()
    specs = [entry.target for entry in entries if entry.name.replace("-", "_") == match[1]]
    heads = [spec.load_head(task) for spec in specs for task in spec.heads]
    return list(dict.fromkeys(head.__module__ for head in heads))


def flax_classes() -> dict[str, str]:
    """Return the Flax names that Transformers 4.57 exported, each with its family's folder."""
    from importlib.resources import files

    text = files("hfseq.v4").joinpath("flax_classes.tsv").read_text(encoding="utf-8")
    rows = [line.split("\t") for line in text.splitlines()]
    return {name: family for family, name in rows}


def _get(name: str, place: str) -> Any:
    """Return what hfseq has under a name of Transformers 4; AttributeError that says what is."""
    try:
        return _resolve(name)
    except AttributeError as error:
        if name in flax_classes():
            raise AttributeError(_absent(f"{name} is a class")) from None
        raise AttributeError(
            f"hfseq has nothing for '{name}' of '{place}' ({error}); see docs/migration.md#imports"
        ) from None


def _absent(what: str) -> str:
    return (
        f"{what} of Transformers 4 that hfseq {__version__} does not have yet; "
        "docs/flax_classes.md lists all of them"
    )
