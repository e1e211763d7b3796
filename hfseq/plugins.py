"""Discovery of plugins and the registries they fill.

Plugins come, in this order, from hfseq itself (``hfseq.builtin``), from installed distributions
(entry point group ``hfseq``; the architectures in ``plugins/`` too), from ``hfseqfile.py`` in the
working directory and from files named explicitly (``--plugin path.py``). A plugin that is broken is
recorded in ``Plugins.errors`` and the others go on; only a file named explicitly must load.

Environment: ``HFSEQ_PLUGINS=a,b`` loads just these besides hfseq itself,
``HFSEQ_DISABLE_PLUGINS=a,b`` leaves these out, ``HFSEQ_TRACE_PLUGINS=1`` prints every hook call to
standard error.
"""

from __future__ import annotations

import inspect
import logging
import os
import sys
import threading
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pluggy

from hfseq import builtin, discovery, hookspecs
from hfseq.discovery import Candidate
from hfseq.errors import HfseqError, PluginConflict, PluginError, nearest
from hfseq.registry import (
    TASKS,
    ArchitectureSpec,
    Entry,
    Registry,
    broken_plugins,
    check_target,
    describe,
)

__all__ = ["TASKS", "ArchitectureSpec", "Entry", "PluginInfo", "Plugins", "Registry", "load"]

logger = logging.getLogger("hfseq")

#: Registration hooks and the attribute of `Plugins` that each of them fills.
REGISTRIES = {
    "register_architectures": "architectures",
    "register_objectives": "objectives",
    "register_optimizers": "optimizers",
    "register_attention": "attention",
    "register_precisions": "precisions",
    "register_trackers": "trackers",
}
HOOKS = (*REGISTRIES, "load_dataset", "model_card_sections")


@dataclass
class PluginInfo:
    """A plugin that was found: where, in which version, and the hooks it implements."""

    name: str
    origin: str
    version: str | None
    hooks: tuple[str, ...] = ()


class Plugins:
    """All plugins of this process and what they added."""

    def __init__(self) -> None:
        self.errors: dict[str, Exception] = {}
        self.infos: list[PluginInfo] = []
        self.architectures = Registry("architecture", self.errors)
        self.objectives = Registry("objective", self.errors)
        self.optimizers = Registry("optimizer", self.errors)
        self.attention = Registry("attention implementation", self.errors)
        self.precisions = Registry("precision", self.errors)
        self.trackers = Registry("tracker", self.errors)
        self.manager = pluggy.PluginManager("hfseq")
        self.manager.add_hookspecs(hookspecs)

    def discover(self) -> None:
        """Find and load everything but the files named explicitly."""
        from hfseq import __version__

        self._add(Candidate("core", "hfseq", __version__, lambda: builtin))
        for candidate in discovery.candidates():
            self._add(candidate)

    def add_file(self, path: str | os.PathLike[str]) -> None:
        """Load the plugin in the file ``path``, once; any failure is raised."""
        candidate = discovery.file_candidate(Path(path))
        present = [info.name for info in self.infos if info.origin == candidate.origin]
        if not present:
            self._add(candidate, strict=True)
        elif present[0] in self.errors:
            raise self.errors[present[0]]

    def call_all(self, hook: str, **arguments: Any) -> list[Any]:
        """Return what the plugins answer, without None, in the order they were loaded.

        A plugin that raises is left out with a warning.
        """
        answers = []
        for plugin, function in self._implementations(hook):
            try:
                answers.append(self._call(plugin, hook, function, arguments))
            except Exception as error:
                logger.warning("plugin '%s' failed in %s: %s", plugin, hook, describe(error))
        return [answer for answer in answers if answer is not None]

    def call_first(self, hook: str, **arguments: Any) -> Any:
        """Return the first answer that is not None; plugins loaded last are asked first.

        An error of hfseq's own kinds is meant for the user and raised at once. After any other the
        next plugin is asked, and only if nobody answers is it raised, naming the plugin.
        """
        failure: PluginError | None = None
        for plugin, function in reversed(list(self._implementations(hook))):
            try:
                answer = self._call(plugin, hook, function, arguments)
            except HfseqError:
                raise
            except Exception as error:
                failure = PluginError(f"plugin '{plugin}' failed in {hook}: {describe(error)}")
                failure.__cause__ = error
                continue
            if answer is not None:
                return answer
        if failure:
            raise failure
        return None

    def broken(self) -> str:
        """Return a clause for error messages on the plugins that could not be loaded."""
        return broken_plugins(self.errors)

    def adds(self, plugin: str) -> dict[str, list[str]]:
        """Return the names that ``plugin`` registered, by kind."""
        by_kind = {kind: getattr(self, kind).names(plugin) for kind in REGISTRIES.values()}
        return {kind: names for kind, names in by_kind.items() if names}

    def _add(self, candidate: Candidate, strict: bool = False) -> None:
        info = PluginInfo(candidate.name, candidate.origin, candidate.version)
        try:
            self._load(candidate, info)
        except (Exception, SystemExit) as error:
            failure = error if isinstance(error, PluginError) else _failure(info, error)
            if strict:
                raise failure from error
            self.errors[info.name] = failure
            logger.warning("%s", describe(failure))
        self.infos.append(info)

    def _load(self, candidate: Candidate, info: PluginInfo) -> None:
        for other in self.infos:
            if other.name == info.name:
                raise PluginConflict(
                    f"two plugins are named '{info.name}': {other.origin} and {info.origin}"
                )
        module = candidate.load()
        info.hooks = self._check_hooks(info.name, module)
        self.manager.register(module, name=info.name)
        try:
            for hook in REGISTRIES.keys() & set(info.hooks):
                self._collect(hook, info.name)
        except BaseException:
            # all of a plugin or nothing: half of one would fail later and elsewhere
            self.manager.unregister(name=info.name)
            for kind in REGISTRIES.values():
                getattr(self, kind).discard(info.name)
            raise

    def _check_hooks(self, plugin: str, module: Any) -> tuple[str, ...]:
        """Return the hooks that ``module`` implements; PluginError where one cannot work."""
        found = []
        for attribute in dir(module):
            options = self.manager.parse_hookimpl_opts(module, attribute)
            if options is None:
                value = inspect.getattr_static(module, attribute)
                if attribute in HOOKS and getattr(value, "__module__", None) == module.__name__:
                    raise PluginError(f"plugin '{plugin}': {attribute} lacks @hookimpl")
                continue
            hook = options.get("specname") or attribute
            if hook not in HOOKS:
                raise PluginError(
                    f"plugin '{plugin}' implements the unknown hook '{hook}'; "
                    f"hooks: {', '.join(HOOKS)}{nearest(hook, HOOKS)}"
                )
            if options.get("wrapper") or options.get("hookwrapper"):
                raise PluginError(f"plugin '{plugin}': {hook} is a wrapper; write a plain hook")
            _check_arguments(plugin, hook, getattr(module, attribute))
            found.append(hook)
        if not found:
            raise PluginError(f"plugin '{plugin}' implements no hook; hooks: {', '.join(HOOKS)}")
        return tuple(hook for hook in HOOKS if hook in found)

    def _collect(self, hook: str, plugin: str) -> None:
        registry: Registry = getattr(self, REGISTRIES[hook])

        def register(name: str, target: Any) -> None:
            what = f"the {registry.kind} '{name}'"
            registry.add(name, plugin, check_target(target, plugin, what))

        def register_architecture(model_type: str, **description: Any) -> None:
            spec = ArchitectureSpec(model_type, plugin=plugin, **description)
            registry.add(model_type, plugin, spec)

        is_architecture = hook == "register_architectures"
        for owner, function in self._implementations(hook):
            if owner == plugin:
                arguments = {"register": register_architecture if is_architecture else register}
                self._call(plugin, hook, function, arguments)

    def _implementations(self, hook: str) -> Iterator[tuple[str, Callable[..., Any]]]:
        for implementation in getattr(self.manager.hook, hook).get_hookimpls():
            yield implementation.plugin_name, implementation.function

    def _call(
        self, plugin: str, hook: str, function: Callable[..., Any], arguments: dict[str, Any]
    ) -> Any:
        """Call one implementation with those of ``arguments`` that it takes."""
        wanted = {name: arguments[name] for name in inspect.signature(function).parameters}
        if os.environ.get("HFSEQ_TRACE_PLUGINS") == "1":
            shown = ", ".join(f"{k}={v!r:.60}" for k, v in wanted.items() if k != "register")
            print(f"hfseq: {plugin}.{hook}({shown})", file=sys.stderr)
        return function(**wanted)


def _failure(info: PluginInfo, error: BaseException) -> PluginError:
    failure = PluginError(
        f"plugin '{info.name}' ({info.origin}) cannot be loaded: {describe(error)}"
    )
    failure.__cause__ = error
    return failure


def _check_arguments(plugin: str, hook: str, function: Callable[..., Any]) -> None:
    offered = list(inspect.signature(getattr(hookspecs, hook)).parameters)
    for name in inspect.signature(function).parameters:
        if name not in offered:
            raise PluginError(
                f"plugin '{plugin}': {hook} takes '{name}', but the hook passes only "
                f"({', '.join(offered)}){nearest(name, offered)}"
            )


_lock = threading.RLock()
_plugins: Plugins | None = None


def load(extra: Iterable[str | os.PathLike[str]] = ()) -> Plugins:
    """Return the plugins of this process, discovering them at the first call.

    ``extra`` are paths of plugin files to add, each of them once. PluginError if one does not load.
    """
    global _plugins
    with _lock:
        if _plugins is None:
            _plugins = Plugins()
            _plugins.discover()
        for path in extra:
            _plugins.add_file(path)
        return _plugins


def unload() -> None:
    """Forget all plugins; the next `load` discovers them anew. For tests and notebooks."""
    global _plugins
    with _lock:
        _plugins = None
