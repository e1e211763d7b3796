"""Runs functions when a module of another library is imported, and prepares jax for flax."""

from __future__ import annotations

import functools
import logging
import sys
from collections.abc import Callable, Sequence
from importlib import metadata
from importlib.machinery import ModuleSpec
from types import ModuleType
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from importlib.abc import Loader
else:
    Loader = object  # importlib.abc is slow to import

logger = logging.getLogger("hfseq")

#: Names that flax 0.12.8 imports from ``jax.experimental.hijax``, but which jax 0.11 removed. Flax
#: only uses these names for its opt-in hijax variables, which hfseq does not use.
HIJAX_NAMES = ("HiPrimitive", "MutableHiType", "AvalQDD", "AvalMutableQDD", "QDD")


@functools.cache
def prepare_jax() -> None:
    """Makes flax 0.12.8 importable with jax 0.11 and later.

    Adds placeholder classes to JAX for the names that are missing. If the installed versions are
    compatible, this function does nothing and does not import JAX. hfseq calls it before it imports
    Flax or a plugin.
    """
    if _version("flax") >= (0, 12, 12) or _version("jax") < (0, 11):
        return
    from jax.experimental import hijax

    for name in HIJAX_NAMES:
        if not hasattr(hijax, name):
            setattr(hijax, name, type(name, (), {"__module__": hijax.__name__}))


def _version(package: str) -> tuple[int, ...]:
    """Returns the installed version as a tuple, or ``(0,)`` if the package is not installed."""
    try:
        parts = metadata.version(package).split(".")
    except metadata.PackageNotFoundError:
        return (0,)
    return tuple(int(part) for part in parts if part.isdecimal())


def find_and_wrap(
    calling_finder: object,
    name: str,
    path: Sequence[str] | None,
    target: ModuleType | None,
    after_load: Callable[[ModuleType], None],
) -> ModuleSpec | None:
    """Finds a module with the other finders, and calls a function after the module is loaded.

    Args:
        calling_finder: The finder that calls this function. It is skipped in the search.
        name: Name of the module, as in ``find_spec``.
        path: Search path, as in ``find_spec``.
        target: Target, as in ``find_spec``.
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
                spec.loader = _WrappedLoader(spec.loader, after_load)
            return spec
    return None


class _WrappedLoader(Loader):
    """Loads a module with its original loader, and then calls a function with the module.

    The attributes of the loaded module refer to the original loader.
    """

    def __init__(self, loader: Loader, after_load: Callable[[ModuleType], None]) -> None:
        self._loader, self._after = loader, after_load

    def create_module(self, spec: ModuleSpec) -> ModuleType | None:
        return self._loader.create_module(spec)

    def exec_module(self, module: ModuleType) -> None:
        module.__loader__ = self._loader
        if module.__spec__ is not None:
            module.__spec__.loader = self._loader
        self._loader.exec_module(module)
        try:  # the module may have replaced itself in sys.modules
            self._after(sys.modules.get(module.__name__, module))
        except Exception as error:
            logger.warning("hfseq cannot extend the module %s: %s", module.__name__, error)
