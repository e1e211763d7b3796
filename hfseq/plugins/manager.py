"""Discovers plugins and collects their registrations.

Plugins are loaded in this order: hfseq itself (``hfseq.plugins.builtin``), the in-tree families
(the packages in ``hfseq_plugins``), installed distributions (entry point group ``hfseq``), and
files that the user passes (``HFSEQ_PLUGIN_FILES``, ``--plugin path.py``). If a plugin cannot be
loaded, its error is stored in ``Plugins.errors`` and the other plugins are loaded. A broken file of
``--plugin`` raises its error instead. An architecture of a third-party plugin replaces the in-tree
architecture with the same model type.

Environment variables:

- ``HFSEQ_PLUGIN_FILES=a.py,dir/b.py`` loads these plugin files in each program.
- ``HFSEQ_PLUGINS=a,b`` loads only these plugins, in addition to hfseq itself.
- ``HFSEQ_DISABLE_PLUGINS=a,b`` does not load these plugins.
- ``HFSEQ_TRACE_PLUGINS=1`` prints every hook call to standard error.
"""

from __future__ import annotations

import importlib
import importlib.util
import inspect
import logging
import os
import pkgutil
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

from hfseq.errors import HfseqError, PluginConflict, PluginError, UsageError, did_you_mean
from hfseq.plugins import builtin, hookspecs
from hfseq.plugins.import_hooks import prepare_jax
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
IN_TREE = "hfseq"  # the origin of the plugins in this repository
FAMILIES = "hfseq_plugins"
#: If a file with this name is in the current directory but is not loaded, a warning mentions it.
PROJECT_FILE = "hfseqfile.py"


#: All hooks. The hook ``register_X`` fills the attribute ``X`` of `Plugins`, which is a `Registry`.
HOOKS = tuple(name for name, value in vars(hookspecs).items() if hasattr(value, "hfseq_spec"))
REGISTRIES = tuple(hook.removeprefix("register_") for hook in HOOKS if hook.startswith("register_"))


@dataclass
class PluginInfo:
    """Describes a plugin and where it comes from.

    Attributes:
        name: The name of the plugin.
        origin: The distribution that contains the plugin, or the path of its file.
        version: The version of the distribution, or `None`.
        source: The module, or the entry point or path from which it is imported. If the plugin
            cannot be loaded, the error.
        hooks: The hooks that the plugin implements.
    """

    name: str
    origin: str
    version: str | None
    source: ModuleType | metadata.EntryPoint | Path | PluginError
    hooks: tuple[str, ...] = ()

    @classmethod
    def from_file(cls, path: Path) -> PluginInfo:
        """Returns the plugin in a Python file. Raises `PluginError` if the file does not exist."""
        path = path.expanduser().resolve()
        if not path.is_file():
            raise PluginError(f"plugin file '{path}' does not exist")
        return cls(path.stem, str(path), None, path)

    @property
    def in_tree(self) -> bool:
        """Whether the plugin is part of this repository."""
        return self.origin == IN_TREE

    def load(self) -> Any:
        """Imports and returns the module.

        A file is imported under its file name, unless another module already has this name.
        """
        prepare_jax()
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
            name = f"hfseq_file_{name}"  # another module has this name
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
    """Yields the installed plugins and files that the environment variables select.

    In-tree plugins come first, so that third-party plugins can replace their architectures. For an
    unknown name in ``HFSEQ_PLUGINS``, and for a name that several third-party plugins have, the
    result contains a placeholder, which raises an error with an explanation when it is loaded.
    """
    enabled, disabled = (
        {name.strip() for name in os.environ.get(variable, "").split(",")} - {""}
        for variable in ("HFSEQ_PLUGINS", "HFSEQ_DISABLE_PLUGINS")
    )
    infos = _in_tree()
    entry_points = metadata.entry_points(group=GROUP)
    for entry_point in sorted(
        entry_points, key=lambda entry_point: (entry_point.name, entry_point.value)
    ):
        origin, version = (
            (entry_point.dist.name, entry_point.dist.version) if entry_point.dist else ("?", None)
        )
        if origin.lower() != IN_TREE:  # skip entry points of an older installation of hfseq
            infos.append(PluginInfo(entry_point.name, origin, version, entry_point))
    for path in plugin_files():
        try:
            infos.append(PluginInfo.from_file(path))
        except PluginError as error:
            message = f"HFSEQ_PLUGIN_FILES: {error}"
            yield PluginInfo(path.stem, str(path), None, PluginError(message))
    by_name: dict[str, list[PluginInfo]] = defaultdict(list)
    for info in infos:
        if info.name in disabled or enabled and info.name not in enabled:
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
            f"the plugin name '{name}' is used by {origins}, so none of them is loaded. "
            f"Uninstall one of them or set HFSEQ_DISABLE_PLUGINS={name}"
        )
        yield PluginInfo(name, origins, None, PluginConflict(message))
    names = {info.name for info in infos}
    for name in sorted(enabled - names):
        message = (
            f"HFSEQ_PLUGINS names '{name}', but no plugin has this name{did_you_mean(name, names)}"
        )
        yield PluginInfo(name, "HFSEQ_PLUGINS", None, PluginError(message))


def plugin_files() -> list[Path]:
    """Returns the paths in ``HFSEQ_PLUGIN_FILES``."""
    names = os.environ.get("HFSEQ_PLUGIN_FILES", "").split(",")
    return [Path(name.strip()) for name in names if name.strip()]


def _in_tree() -> list[PluginInfo]:
    """Returns the families in ``hfseq_plugins``, one plugin per package."""
    root = Path(__file__).resolve().parents[2] / "plugins"
    if importlib.util.find_spec(FAMILIES) is None and root.is_dir():  # hfseq is not installed
        sys.path.append(str(root))
    package = importlib.import_module(FAMILIES)
    modules = pkgutil.iter_modules(package.__path__)
    names = sorted(m.name for m in modules if m.ispkg and m.name not in package.SHARED)
    points = [metadata.EntryPoint(name, f"{FAMILIES}.{name}", GROUP) for name in names]
    return [PluginInfo(point.name, IN_TREE, __version__, point) for point in points]


class Plugins:
    """The loaded plugins of this process and their registrations.

    Attributes:
        errors: The error of each broken plugin by name.
        infos: All plugins in the order of loading, including broken ones.
        architectures, objectives, optimizers, tokenizers, attention, precisions, trackers: The
            registries.
        manager: The pluggy plugin manager.
    """

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
        """Loads all plugins except the files of ``--plugin``."""
        for info in (PluginInfo("core", IN_TREE, __version__, builtin), *discover_plugins()):
            self._add(info)

    def add_file(self, path: str | os.PathLike[str]) -> None:
        """Loads the plugin in a file, unless it is already loaded.

        Raises:
            PluginError: The plugin cannot be loaded.
        """
        new = PluginInfo.from_file(Path(path))
        present = [info.name for info in self.infos if info.origin == new.origin]
        if not present:
            self._add(new, strict=True)
        elif present[0] in self.errors:
            raise self.errors[present[0]]

    def call_all(self, hook: str, **arguments: Any) -> list[Any]:
        """Calls a hook of all plugins.

        A plugin that raises an error is skipped with a warning.

        Args:
            hook: Name of the hook.
            **arguments: Arguments of the hook.

        Returns:
            The results that are not `None`, in the order in which the plugins were loaded.
        """
        answers = []
        for plugin, function in self._implementations(hook):
            try:
                answers.append(self._call(plugin, hook, function, arguments))
            except Exception as error:
                logger.warning("plugin '%s' failed in %s: %s", plugin, hook, describe_error(error))
        return [answer for answer in answers if answer is not None]

    def call_first(self, hook: str, **arguments: Any) -> Any:
        """Calls a hook of one plugin after the other until a plugin returns a result.

        Plugins that were loaded later are called first.

        Args:
            hook: Name of the hook.
            **arguments: Arguments of the hook.

        Returns:
            The first result that is not `None`, or `None`.

        Raises:
            HfseqError: A plugin raised this error. It is not converted, because its message is for
                the user.
            PluginError: A plugin raised another error, and no other plugin returned a result.
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

    def find_architecture(
        self, model_type: str, task: str, bridge: bool | str = False
    ) -> ArchitectureSpec:
        """Returns the architecture that provides a task of a model type.

        Args:
            model_type: The model type.
            task: The task, such as ``"ForMaskedLM"``.
            bridge: False for a registered architecture, True for the architecture of the hook
                ``fallback_architecture``. ``"auto"`` uses the registered architecture if it has the
                task, and the hook otherwise.

        Raises:
            UsageError: No such architecture exists, or it does not have the task.
        """
        if bridge not in (True, False, "auto"):
            raise UsageError(f"bridge={bridge!r} is unknown: use True, False or 'auto'")
        registered = model_type in self.architectures
        has_task = registered and task in self.architectures.get(model_type).heads
        if not bridge or bridge == "auto" and has_task:
            return self._registered_architecture(model_type, task)
        spec = self.call_first("fallback_architecture", model_type=model_type, task=task)
        if spec is None:
            raise UsageError(
                f"no plugin provides the architecture '{model_type}' with the task '{task}' for "
                f"bridge={bridge!r}" + self.broken_message()
            )
        return ArchitectureSpec(model_type, **{"plugin": "bridge", **spec})

    def _registered_architecture(self, model_type: str, task: str) -> ArchitectureSpec:
        if model_type not in self.architectures:
            raise UsageError(
                self.architectures.unknown_message(model_type)
                + ". Other architectures of Transformers run with bridge=True or --bridge"
            )
        spec = self.architectures.get(model_type)
        if task not in spec.heads:
            raise UsageError(
                f"architecture '{model_type}' has no class {task} (available: "
                f"{', '.join(spec.heads)}). Other classes of Transformers run with bridge=True or "
                "--bridge"
            )
        return spec

    def broken_message(self) -> str:
        """Returns a clause about broken plugins for error messages, or an empty string."""
        return broken_plugins_message(self.errors)

    def registrations(self, plugin: str) -> dict[str, list[str]]:
        """Returns the names that a plugin registered, grouped by registry."""
        by_kind = {registry: getattr(self, registry).names(plugin) for registry in REGISTRIES}
        return {registry: names for registry, names in by_kind.items() if names}

    def _add(self, info: PluginInfo, strict: bool = False) -> None:
        try:
            self._load(info)
        except (Exception, SystemExit) as error:
            failure: BaseException = error
            if not isinstance(failure, PluginError):
                failure = PluginError(
                    f"plugin '{info.name}' ({info.origin}) cannot be loaded: "
                    f"{describe_error(error)}"
                )
                failure.__cause__ = error
            if strict:
                raise failure from error
            self.errors[info.name] = failure
            logger.warning("%s", describe_error(failure))
        self.infos.append(info)

    def _load(self, info: PluginInfo) -> None:
        loaded = {other.name: other for other in self.infos}
        if info.name in loaded and loaded[info.name].in_tree:
            info.name = f"{Path(info.origin).name}:{info.name}"
        if info.name in loaded:
            raise PluginConflict(
                f"two plugins are named '{info.name}': {loaded[info.name].origin} and {info.origin}"
            )
        module = info.load()
        info.hooks = self._check_hooks(info.name, module)
        self.manager.register(module, name=info.name)
        try:
            for registry in REGISTRIES:
                self._collect(registry, info)
        except BaseException:
            # Remove the names that the plugin has already registered. If they were used later, they
            # could cause other errors.
            self.manager.unregister(name=info.name)
            for registry in REGISTRIES:
                getattr(self, registry).discard(info.name)
            raise
        replaced = [e for e in self.architectures.entries() if e.plugin == info.name and e.replaced]
        if replaced:
            names = ", ".join(f"'{entry.name}'" for entry in replaced)
            logger.warning(
                "plugin '%s' (%s) replaces the in-tree architecture %s",
                info.name,
                info.origin,
                names,
            )

    def _check_hooks(self, plugin: str, module: ModuleType) -> tuple[str, ...]:
        """Returns the hooks that a module implements. Raises `PluginError` if one is invalid."""
        implemented = set()
        for attribute in dir(module):
            options = self.manager.parse_hookimpl_opts(module, attribute)
            if options is None:
                value = inspect.getattr_static(module, attribute)
                if attribute in HOOKS and getattr(value, "__module__", None) == module.__name__:
                    raise PluginError(
                        f"plugin '{plugin}': {attribute} needs the decorator @hookimpl"
                    )
                continue
            hook = options.get("specname") or attribute
            if hook not in HOOKS:
                raise PluginError(
                    f"plugin '{plugin}' implements the unknown hook '{hook}'; "
                    f"available hooks: {', '.join(HOOKS)}{did_you_mean(hook, HOOKS)}"
                )
            if options.get("wrapper") or options.get("hookwrapper"):
                raise PluginError(
                    f"plugin '{plugin}': {hook} is a hook wrapper, which is not supported"
                )
            parameters = list(inspect.signature(getattr(hookspecs, hook)).parameters)
            for name in inspect.signature(getattr(module, attribute)).parameters:
                if name not in parameters:
                    raise PluginError(
                        f"plugin '{plugin}': {hook} has the parameter '{name}', but the hook "
                        f"only has ({', '.join(parameters)}){did_you_mean(name, parameters)}"
                    )
            implemented.add(hook)
        if not implemented:
            raise PluginError(
                f"plugin '{plugin}' implements no hook; available hooks: {', '.join(HOOKS)}"
            )
        return tuple(hook for hook in HOOKS if hook in implemented)

    def _collect(self, registry_name: str, info: PluginInfo) -> None:
        registry: Registry = getattr(self, registry_name)
        plugin = info.name
        replaceable = () if info.in_tree else {other.name for other in self.infos if other.in_tree}

        def register(name: str, target: Target) -> None:
            description = f"the {registry.kind} '{name}'"
            registry.add(name, plugin, check_target(target, plugin, description))

        def register_architecture(model_type: str, **description: Any) -> None:
            spec = ArchitectureSpec(model_type, plugin=plugin, **description)
            registry.add(model_type, plugin, spec, replaceable=replaceable)

        arguments = {
            "register": register_architecture if registry_name == "architectures" else register
        }
        for owner, function in self._implementations(f"register_{registry_name}"):
            if owner == plugin:
                self._call(plugin, f"register_{registry_name}", function, arguments)

    def _implementations(self, hook: str) -> Iterator[tuple[str, Callable[..., Any]]]:
        for implementation in getattr(self.manager.hook, hook).get_hookimpls():
            yield implementation.plugin_name, implementation.function

    def _call(
        self, plugin: str, hook: str, function: Callable[..., Any], arguments: dict[str, Any]
    ) -> Any:
        """Calls an implementation of a hook with the arguments that its signature contains."""
        accepted = {name: arguments[name] for name in inspect.signature(function).parameters}
        if os.environ.get("HFSEQ_TRACE_PLUGINS") == "1":
            listing = ", ".join(f"{k}={v!r:.60}" for k, v in accepted.items() if k != "register")
            print(f"hfseq: {plugin}.{hook}({listing})", file=sys.stderr)
        return function(**accepted)


#: Functions that are called with the loaded plugins after each `load`.
load_listeners: list[Callable[[Plugins], object]] = []

_lock = threading.RLock()
_plugins: Plugins | None = None


def load(extra: Iterable[str | os.PathLike[str]] = ()) -> Plugins:
    """Returns the plugins of this process. The first call discovers them.

    Args:
        extra: Paths of additional plugin files. Each file is loaded once.

    Raises:
        PluginError: One of the files in `extra` is broken.
    """
    global _plugins
    with _lock:
        is_first = _plugins is None
        if _plugins is None:
            _plugins = Plugins()
            _plugins.discover()
        for path in extra:
            _plugins.add_file(path)
        if is_first:
            _mention_project_file(_plugins)
        for listener in load_listeners:
            listener(_plugins)
        return _plugins


def _mention_project_file(loaded: Plugins) -> None:
    """Warns about a plugin file in the current directory that is not loaded."""
    path = Path(PROJECT_FILE).resolve()
    if path.is_file() and all(info.origin != str(path) for info in loaded.infos):
        logger.warning(
            "%s in the current directory is not loaded automatically, because that would run its "
            "code. To load it, pass --plugin %s or set HFSEQ_PLUGIN_FILES=%s",
            *[PROJECT_FILE] * 3,
        )


def load_unless_busy() -> None:
    """Loads the plugins, unless another thread is loading them.

    An import hook calls this function. If it waited for a thread that imports modules, both threads
    could wait for each other forever.
    """
    if _lock.acquire(blocking=False):
        try:
            load()
        finally:
            _lock.release()


def unload() -> None:
    """Removes all plugins, so that the next `load` discovers them again.

    This is useful in tests and notebooks.
    """
    global _plugins
    with _lock:
        _plugins = None
