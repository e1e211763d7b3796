"""The import paths of Transformers 4: `from transformers import FlaxBertModel` imports from hfseq.

Importing `hfseq.v4` restores the names and modules of Transformers 4's Flax code, for programs that
cannot be edited. It also lets tokenizers and processors read and return JAX arrays (`tensors`), and
restores class methods of configurations (`configurations`).

No classes are copied into transformers. If a lazily loaded package of transformers does not have a
name, it looks the name up in hfseq, so that classes are only imported when they are used. If hfseq
does not have the name either, importing it raises an ImportError with an explanation, and `hasattr`
returns False.
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

from hfseq.plugins.import_hooks import find_and_wrap
from hfseq.plugins.registry import __version__
from hfseq.v4 import attributes, configurations, tensors

if TYPE_CHECKING:
    from importlib.abc import Loader
else:
    Loader = object  # its module is slow to import

#: Maps modules of Transformers 4 to the modules of hfseq that now define their names. Modules of
#: model families are not included.
MODULES = {
    "hfseq.modeling_flax_pytorch_utils": "hfseq.modeling.pytorch_utils",
    "transformers.modeling_flax_pytorch_utils": "hfseq.modeling.pytorch_utils",
    "transformers.modeling_flax_outputs": "hfseq.nn.outputs",
    "transformers.modeling_flax_utils": "hfseq.modeling.pretrained",
    "transformers.models.auto.modeling_flax_auto": "hfseq.modeling.auto",
    "transformers.generation.flax_utils": "hfseq.generation",
    "transformers.generation.flax_logits_process": "hfseq.generation",
    # Names of these modules before Transformers 4.25.
    "transformers.generation_flax_utils": "hfseq.generation",
    "transformers.generation_flax_logits_process": "hfseq.generation",
}

#: Names of Transformers 4 that have other names in hfseq.
_RENAMED = {"ACT2FN": "hfseq.nn.layers:ACTIVATIONS"}

#: Replacements of names that hfseq does not provide, for error messages.
_REPLACEMENTS = {
    **dict.fromkeys(
        ("GreedyState", "SampleState", "BeamSearchState"),
        "`generate`, whose loop has no public state. `logits_processor=` changes the logits",
    ),
    "BloomGELU": "`jax.nn.gelu(x, approximate=True)`",
    "Identity": "`lambda x, **kwargs: x`",
}

_FAMILY = re.compile(r"transformers\.models\.(\w+)\.modeling_flax_\1")
_PACKAGE = re.compile(r"transformers(\.generation|\.models\.\w+)?")
_UTILITIES = (
    "transformers.file_utils",
    "transformers.utils",
    "transformers.utils.import_utils",
    "transformers.testing_utils",
)
_PREFIXES = ("Flax", "FLAX_")
_DOCUMENTATION = ("_DOCSTRING", "_FOR_DOC")
_EXTRACTOR = "FeatureExtractor"


def install() -> None:
    """Activates the old import paths, also in packages that are already imported."""
    for name, extend in _EXTENSIONS.items():
        if name in sys.modules:
            extend(sys.modules[name])
    if not any(isinstance(finder, _Finder) for finder in sys.meta_path):
        sys.meta_path.insert(0, _Finder())


def is_flax_available() -> bool:
    """Returns True, because hfseq provides the Flax classes."""
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
    if name.endswith(_EXTRACTOR):  # image processors had two names in Transformers 4
        return getattr(sys.modules[package], name.removesuffix(_EXTRACTOR) + "ImageProcessor")
    raise AttributeError(name)


class _OldModule(ModuleType):
    """Replaces a module of Transformers 4.

    Names are looked up on first use: in `functions`, in the modules `targets`, then in hfseq.
    """

    targets: Sequence[ModuleType]

    def __getattr__(self, name: str) -> Any:
        if name.startswith("__"):
            raise AttributeError(name)
        if name in _HELPERS:
            return _HELPERS[name]
        if name == "logger":
            from transformers.utils import logging as transformers_logging

            return transformers_logging.get_logger(self.__name__)
        if name.endswith(_DOCUMENTATION):
            return ""  # text for docstrings
        from hfseq.v4 import functions

        if name.startswith("FLAX_") and name.endswith("_MAPPING_NAMES"):
            return functions.mapping_names(name)
        own_functions = functions.FUNCTIONS.get(self.__name__.rpartition(".")[2], {})
        if name in own_functions:
            return own_functions[name]
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
        if name in _EXTENSIONS:
            return find_and_wrap(self, name, path, target, after_load=_EXTENSIONS[name])
        if _is_old_module(name):
            # The module is declared as a package, so that Python looks up missing names as
            # submodules. This finder then raises an error with an explanation.
            return ModuleSpec(name, _Loader(), is_package=True)
        parent, _, last = name.rpartition(".")
        if _FAMILY.fullmatch(name) and parent.rpartition(".")[2] in flax_classes().values():
            # The argument `name` is omitted. With it, Python would ignore this error in `from
            # transformers.models.whisper import ...` and raise one without the explanation.
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
    """Adds the helper functions of Transformers 4 to a module in `_UTILITIES`.

    If the module defines the class of lazily loaded packages, this class is also extended to look
    up missing names in hfseq.
    """
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


#: Functions that extend modules of transformers when they are loaded.
_EXTENSIONS: dict[str, Callable[[ModuleType], None]] = {
    **dict.fromkeys(_UTILITIES, _extend),
    **dict.fromkeys(tensors.BATCHES, tensors.return_jax),
    **dict.fromkeys(configurations.MODULES, configurations.add_methods),
    tensors.GENERIC: tensors.read_jax,
    attributes.BASE: attributes.register_models,
}


def _is_old_module(name: str) -> bool:
    return name in MODULES or bool(_hfseq_modules(name))


def _hfseq_modules(name: str) -> list[str]:
    """Returns the names of the hfseq modules that replace a module of Transformers 4."""
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
    """Returns the object in hfseq for a name of Transformers 4.

    Raises:
        AttributeError: hfseq does not have it. The message explains why.
    """
    try:
        return getattr(importlib.import_module("hfseq"), name)
    except AttributeError as error:
        if name in flax_classes():
            raise AttributeError(_missing_message(f"{name} is a class")) from None
        raise AttributeError(
            f"hfseq has no equivalent of '{name}' of '{module_name}' ({error}). "
            f"{_replacement(name, module_name)}. See docs/migration.md#the-old-import-paths"
        ) from None


def _replacement(name: str, module_name: str) -> str:
    """Returns a sentence that names the replacement of an object of an old module."""
    if name in _REPLACEMENTS:
        return f"Use {_REPLACEMENTS[name]}"
    layers = [target for target in _hfseq_modules(module_name) if _FAMILY.fullmatch(module_name)]
    if layers:
        return f"If it is a layer, use the NNX layers of `{layers[0]}`"
    return "Use the names that `hfseq` exports"


def _missing_message(subject: str) -> str:
    return (
        f"{subject} of Transformers 4 that hfseq {__version__} does not have yet. "
        "docs/flax_classes.md lists all of them"
    )
