"""Discovery of plugins and the registries they fill.

Plugins come, in this order, from hfseq itself (``hfseq.plugins.builtin``), from installed
distributions (entry point group ``hfseq``; first the architectures in ``plugins/``), from
``hfseqfile.py`` in the working directory and from files named explicitly (``--plugin path.py``). A
plugin that is broken is recorded in ``Plugins.errors`` and the others go on; only a file named
explicitly must load. An architecture that somebody else's plugin registers takes the place of
hfseq's own of that model type.

Environment: ``HFSEQ_PLUGINS=a,b`` loads just these besides hfseq itself,
``HFSEQ_DISABLE_PLUGINS=a,b`` leaves these out, ``HFSEQ_TRACE_PLUGINS=1`` prints every hook call to
standard error.
"""

from __future__ import annotations

import configparser
import importlib.util
import inspect
import logging
import os
import re
import sys
import threading
from collections import defaultdict
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass
from importlib import metadata
from pathlib import Path
from types import ModuleType
from typing import Any

import pluggy

from hfseq.errors import HfseqError, PluginConflict, PluginError, did_you_mean
from hfseq.plugins import builtin, hookspecs
from hfseq.plugins.registry import (
    ArchitectureSpec,
    Registry,
    Target,
    __version__,
    broken_plugins_message,
    check_target,
    describe_error,
)

logger = logging.getLogger("hfseq")

GROUP = "hfseq"
IN_TREE = "hfseq"  # the origin of what this repository brings
PROJECT_FILE = "hfseqfile.py"


#: All hooks. What one that begins so registers stands in the `Registry` named by its rest.
HOOKS = tuple(name for name, value in vars(hookspecs).items() if hasattr(value, "hfseq_spec"))
REGISTRIES = tuple(hook.removeprefix("register_") for hook in HOOKS if hook.startswith("register_"))


@dataclass
class PluginInfo:
    """A plugin: where it is from, in which version, and the hooks that it implements.

    ``source`` is what makes its module, or the reason why nothing can.
    """

    name: str
    origin: str
    version: str | None
    source: ModuleType | metadata.EntryPoint | Path | PluginError
    hooks: tuple[str, ...] = ()

    @classmethod
    def from_file(cls, path: Path) -> PluginInfo:
        """Return the plugin in the Python file ``path``; PluginError if there is no such file."""
        path = path.expanduser().resolve()
        if not path.is_file():
            raise PluginError(f"plugin file '{path}' does not exist")
        return cls(path.stem, str(path), None, path)

    @property
    def in_tree(self) -> bool:
        """Whether this repository brings it."""
        return self.origin == IN_TREE

    def load(self) -> Any:
        """Return its module; a file is imported under its own name if that is free."""
        if isinstance(self.source, PluginError):
            raise self.source
        if isinstance(self.source, metadata.EntryPoint):
            return self.source.load()
        if isinstance(self.source, ModuleType):
            return self.source
        path, name = self.source, re.sub(r"\W", "_", self.source.stem)

        def is_path(file: str | None) -> bool:
            return file is not None and Path(file).resolve() == path

        present = sys.modules.get(name)
        if present is not None and is_path(getattr(present, "__file__", None)):
            return present
        other = None if present is not None else importlib.util.find_spec(name)
        if present is not None or other is not None and not is_path(other.origin):
            name = f"hfseq_file_{name}"  # its name means another module
        spec = importlib.util.spec_from_file_location(name, path)
        if spec is None or spec.loader is None:
            raise PluginError(f"plugin file '{path}' is not a Python file")
        module = importlib.util.module_from_spec(spec)
        sys.modules[name] = module
        try:
            spec.loader.exec_module(module)
        except BaseException:
            del sys.modules[name]
            raise
        return module


def discover_plugins() -> Iterator[PluginInfo]:
    """Yield the plugins of the environment that the environment variables let through.

    Those of this repository come first, so that others can take their places. Names that nobody
    has, or more than one of the others, come as plugins whose loading fails with the reason.
    """
    only, without = (
        {name.strip() for name in os.environ.get(variable, "").split(",")} - {""}
        for variable in ("HFSEQ_PLUGINS", "HFSEQ_DISABLE_PLUGINS")
    )
    known = _checkout()
    in_checkout = bool(known)
    points = metadata.entry_points(group=GROUP)
    for point in sorted(points, key=lambda point: (point.name, point.value)):
        origin, version = (point.dist.name, point.dist.version) if point.dist else ("?", None)
        origin = IN_TREE if origin.lower() == IN_TREE else origin
        if not (in_checkout and origin == IN_TREE):
            known.append(PluginInfo(point.name, origin, version, point))
    if Path(PROJECT_FILE).is_file():
        known.append(PluginInfo.from_file(Path(PROJECT_FILE)))
    by_name: dict[str, list[PluginInfo]] = defaultdict(list)
    for info in known:
        if info.name in without or only and info.name not in only:
            continue
        if info.in_tree:
            yield info
        else:
            by_name[info.name].append(info)
    for name, claims in by_name.items():
        if len(claims) == 1:
            yield claims[0]
            continue
        origins = " and ".join(" ".join(filter(None, (c.origin, c.version))) for c in claims)
        message = (
            f"the plugin name '{name}' is claimed by {origins}, so none of them is loaded; "
            f"uninstall one or set HFSEQ_DISABLE_PLUGINS={name}"
        )
        yield PluginInfo(name, origins, None, PluginConflict(message))
    names = {info.name for info in known}
    for name in sorted(only - names):
        message = (
            f"HFSEQ_PLUGINS names '{name}', which no plugin is called{did_you_mean(name, names)}"
        )
        yield PluginInfo(name, "HFSEQ_PLUGINS", None, PluginError(message))


def _checkout() -> list[PluginInfo]:
    """Return the plugins named in ``setup.cfg`` where hfseq runs from its source tree.

    They come before the installed metadata of an editable install, which are as old as that
    install.
    """
    root = Path(__file__).resolve().parents[2]
    settings = configparser.ConfigParser()
    if not settings.read(root / "setup.cfg", encoding="utf-8"):
        return []
    if settings.get("metadata", "name", fallback="") != "hfseq":
        return []
    if importlib.util.find_spec("hfseq_plugins") is None:
        sys.path.append(str(root / "plugins"))
    lines = settings.get("options.entry_points", GROUP, fallback="").split("\n")
    pairs = [[part.strip() for part in line.split("=")] for line in lines if "=" in line]
    points = [metadata.EntryPoint(name, value, GROUP) for name, value in pairs]
    return [PluginInfo(point.name, IN_TREE, __version__, point) for point in points]


class Plugins:
    """All plugins of this process and what they added."""

    def __init__(self) -> None:
        self.errors: dict[str, BaseException] = {}
        self.infos: list[PluginInfo] = []
        self.architectures = Registry("architecture", self.errors)
        self.objectives = Registry("objective", self.errors)
        self.optimizers = Registry("optimizer", self.errors)
        self.tokenizers = Registry("tokenizer model type", self.errors)
        self.attention = Registry("attention implementation", self.errors)
        self.precisions = Registry("precision", self.errors)
        self.trackers = Registry("tracker", self.errors)
        self.manager = pluggy.PluginManager("hfseq")
        self.manager.add_hookspecs(hookspecs)

    def discover(self) -> None:
        """Find and load everything but the files named explicitly."""
        for info in (PluginInfo("core", IN_TREE, __version__, builtin), *discover_plugins()):
            self._add(info)

    def add_file(self, path: str | os.PathLike[str]) -> None:
        """Load the plugin in the file ``path``, once; any failure is raised."""
        new = PluginInfo.from_file(Path(path))
        present = [info.name for info in self.infos if info.origin == new.origin]
        if not present:
            self._add(new, strict=True)
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
                logger.warning("plugin '%s' failed in %s: %s", plugin, hook, describe_error(error))
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
                failure = PluginError(
                    f"plugin '{plugin}' failed in {hook}: {describe_error(error)}"
                )
                failure.__cause__ = error
                continue
            if answer is not None:
                return answer
        if failure:
            raise failure
        return None

    def broken_message(self) -> str:
        """Return a clause for error messages on the plugins that could not be loaded."""
        return broken_plugins_message(self.errors)

    def registrations(self, plugin: str) -> dict[str, list[str]]:
        """Return the names that ``plugin`` registered, by kind."""
        by_kind = {kind: getattr(self, kind).names(plugin) for kind in REGISTRIES}
        return {kind: names for kind, names in by_kind.items() if names}

    def _add(self, info: PluginInfo, strict: bool = False) -> None:
        try:
            self._load(info)
        except (Exception, SystemExit) as error:
            failure: BaseException = error
            if not isinstance(failure, PluginError):
                failure = PluginError(
                    f"plugin '{info.name}' ({info.origin}) cannot be loaded: {describe_error(error)}"
                )
                failure.__cause__ = error
            if strict:
                raise failure from error
            self.errors[info.name] = failure
            logger.warning("%s", describe_error(failure))
        self.infos.append(info)

    def _load(self, info: PluginInfo) -> None:
        others = {other.name: other for other in self.infos}
        if info.name in others and others[info.name].in_tree:
            info.name = f"{Path(info.origin).name}:{info.name}"
        if info.name in others:
            raise PluginConflict(
                f"two plugins are named '{info.name}': {others[info.name].origin} and {info.origin}"
            )
        module = info.load()
        info.hooks = self._check_hooks(info.name, module)
        self.manager.register(module, name=info.name)
        try:
            for kind in REGISTRIES:
                self._collect(kind, info)
        except BaseException:
            # all of a plugin or nothing: half of one would fail later and elsewhere
            self.manager.unregister(name=info.name)
            for kind in REGISTRIES:
                getattr(self, kind).discard(info.name)
            raise
        replaced = [e for e in self.architectures.entries() if e.plugin == info.name and e.replaced]
        if replaced:
            names = ", ".join(f"'{entry.name}'" for entry in replaced)
            logger.warning(
                "plugin '%s' (%s) takes the place of hfseq's own %s", info.name, info.origin, names
            )

    def _check_hooks(self, plugin: str, module: ModuleType) -> tuple[str, ...]:
        """Return the hooks that ``module`` implements; PluginError where one cannot work."""
        implemented = set()
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
                    f"hooks: {', '.join(HOOKS)}{did_you_mean(hook, HOOKS)}"
                )
            if options.get("wrapper") or options.get("hookwrapper"):
                raise PluginError(f"plugin '{plugin}': {hook} is a wrapper; write a plain hook")
            offered = list(inspect.signature(getattr(hookspecs, hook)).parameters)
            for name in inspect.signature(getattr(module, attribute)).parameters:
                if name not in offered:
                    raise PluginError(
                        f"plugin '{plugin}': {hook} takes '{name}', but the hook passes only "
                        f"({', '.join(offered)}){did_you_mean(name, offered)}"
                    )
            implemented.add(hook)
        if not implemented:
            raise PluginError(f"plugin '{plugin}' implements no hook; hooks: {', '.join(HOOKS)}")
        return tuple(hook for hook in HOOKS if hook in implemented)

    def _collect(self, kind: str, info: PluginInfo) -> None:
        registry: Registry = getattr(self, kind)
        plugin = info.name
        give_way = () if info.in_tree else {other.name for other in self.infos if other.in_tree}

        def register(name: str, target: Target) -> None:
            what = f"the {registry.kind} '{name}'"
            registry.add(name, plugin, check_target(target, plugin, what))

        def register_architecture(model_type: str, **description: Any) -> None:
            spec = ArchitectureSpec(model_type, plugin=plugin, **description)
            registry.add(model_type, plugin, spec, replaceable=give_way)

        arguments = {"register": register_architecture if kind == "architectures" else register}
        for owner, function in self._implementations(f"register_{kind}"):
            if owner == plugin:
                self._call(plugin, f"register_{kind}", function, arguments)

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
