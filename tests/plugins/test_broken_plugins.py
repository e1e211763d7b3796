"""Broken and conflicting plugins are reported, and the others are loaded."""

from __future__ import annotations

import re

import pytest

from hfseq import plugins
from hfseq.errors import PluginConflict, PluginError, UsageError
from tests.support import plugin_files
from tests.support.plugin_files import optimizer, write

project, distribute = plugin_files.project, plugin_files.distribute

BROKEN = {
    "import": ("import no_such_module_here", "no_such_module_here"),
    "exit": ("raise SystemExit(3)", "SystemExit"),
    "misspelt": (
        "@hookimpl\ndef register_optimizer(register): pass",
        "unknown hook 'register_optimizer'.*did you mean 'register_optimizers'",
    ),
    "argument": (
        "@hookimpl\ndef register_optimizers(registre): pass",
        r"parameter 'registre', but the hook only has \(register\); did you mean 'register'",
    ),
    "undecorated": (
        "def register_optimizers(register): pass",
        "register_optimizers needs the decorator @hookimpl",
    ),
    "empty": ("", "implements no hook"),
    "wrapper": (
        "@hookimpl(wrapper=True)\ndef load_dataset(name):\n    yield",
        "load_dataset is a hook wrapper",
    ),
    "raises": (
        optimizer("half") + "    raise RuntimeError('no licence')",
        "RuntimeError: no licence",
    ),
    "bad target": (optimizer("x", "optax.adam"), "'optax.adam'; use an object or a string"),
    "no name": (optimizer(""), "the optimizer name '' is not a non-empty string"),
    "unknown task": (
        "@hookimpl\ndef register_architectures(register):\n"
        "    register('x', config='a:B', heads={'ForMaskedLm': 'a:B'})",
        "unknown task 'ForMaskedLm'.*did you mean 'ForMaskedLM'",
    ),
    "bad head": (
        "@hookimpl\ndef register_architectures(register):\n"
        "    register('x', config='a:B', heads={'Model': 'no target'})",
        "Model of architecture 'x' is 'no target'",
    ),
    "bad config": (
        "@hookimpl\ndef register_architectures(register):\n"
        "    register('x', config=None, heads={})",
        "config of architecture 'x' is None",
    ),
}


@pytest.mark.parametrize(("body", "reason"), BROKEN.values(), ids=BROKEN)
def test_a_broken_plugin_is_named_and_the_others_go_on(distribute, caplog, body, reason):
    distribute("broken", "broken", body)
    distribute("works", "works", optimizer("fine"))
    loaded = plugins.load()
    assert list(loaded.errors) == ["broken"]
    assert isinstance(loaded.errors["broken"], PluginError)
    assert "'broken'" in str(loaded.errors["broken"])
    assert re.search(reason, str(loaded.errors["broken"]), re.S)
    assert "'broken'" in caplog.text
    assert "fine" in loaded.optimizers and "bert" in loaded.architectures
    assert loaded.registrations("broken") == {}


def test_an_unknown_name_mentions_the_plugin_that_might_have_it(distribute, caplog):
    distribute("broken", "broken", "import no_such_module_here")
    with pytest.raises(
        UsageError, match=r"unknown optimizer 'sofia'.*'broken'.*no_such_module_here"
    ):
        plugins.load().optimizers.get("sofia")


def test_two_distributions_with_one_plugin_name_are_both_named(distribute, caplog):
    distribute("acme", "shiny", optimizer("a"))
    distribute("zenith", "shiny", optimizer("z"))
    loaded = plugins.load()
    assert isinstance(loaded.errors["shiny"], PluginConflict)
    assert re.search("acme 1.0 and zenith 1.0|zenith 1.0 and acme 1.0", str(loaded.errors["shiny"]))
    assert not {"a", "z"} & set(loaded.optimizers)
    assert "bert" in loaded.architectures


def test_conflict_error_names_both_plugins(distribute, caplog):
    distribute("acme", "acme", optimizer("shiny"))
    distribute("zenith", "zenith", optimizer("shiny"))
    loaded = plugins.load()
    assert isinstance(loaded.errors["zenith"], PluginConflict)
    for ask in (loaded.optimizers.get, loaded.optimizers.__getitem__):
        with pytest.raises(PluginConflict, match="both plugin 'acme' and plugin 'zenith'"):
            ask("shiny")
    assert loaded.optimizers["adamw"].plugin == "core"


def test_plugin_file_with_a_duplicate_name_is_rejected(project):
    path = write(project / "mine.py", optimizer("adamw"))
    with pytest.raises(PluginConflict, match="both plugin 'core' and plugin 'mine'"):
        plugins.load([path])


def test_two_plugin_files_of_one_name_are_a_conflict(project):
    (project / "other").mkdir()
    first = write(project / "mine.py", optimizer("one"))
    second = write(project / "other" / "mine.py", optimizer("two"))
    with pytest.raises(PluginConflict, match="two plugins are named 'mine'"):
        plugins.load([first, second])


def test_a_target_that_cannot_be_imported_names_plugin_and_target(project):
    loaded = plugins.load([write(project / "mine.py", optimizer("lazy", "no_such_module_here:x"))])
    with pytest.raises(
        PluginError, match=r"plugin 'mine': 'no_such_module_here:x' cannot be loaded"
    ):
        loaded.optimizers.get("lazy")


@pytest.mark.slow
def test_a_target_without_that_attribute_names_plugin_and_target(project):
    loaded = plugins.load([write(project / "mine.py", optimizer("lazy", "math:cosinus"))])
    with pytest.raises(PluginError, match=r"'math:cosinus' cannot be loaded: AttributeError"):
        loaded.optimizers.get("lazy")
