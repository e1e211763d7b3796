"""Registries and their entries."""

from __future__ import annotations

from types import SimpleNamespace

import pytest

from hfseq.errors import PluginConflict, PluginError, UsageError
from hfseq.plugins import TASKS, ArchitectureSpec
from hfseq.plugins.registry import Registry
from tests.support.plugin_files import GUIDE


def test_a_registry_lists_names_and_the_nearest_one():
    registry = Registry("optimizer", {})
    registry.add("adamw", "core", "optax:adamw")
    assert (list(registry), len(registry), "adamw" in registry) == (["adamw"], 1, True)
    with pytest.raises(UsageError, match="available: adamw; did you mean 'adamw'"):
        registry.get("adamv")


def test_duplicate_registration_is_an_error():
    registry = Registry("optimizer", {})
    registry.add("x", "mine", object())
    with pytest.raises(PluginConflict, match="plugin 'mine' registers the optimizer 'x' twice"):
        registry.add("x", "mine", object())


def test_architecture_targets_may_be_objects():
    rules = [(".*", ())]
    spec = ArchitectureSpec("x", config=SimpleNamespace, heads={"Model": int}, sharding=rules)
    assert (spec.load_config(), spec.load_head("Model")) == (SimpleNamespace, int)
    assert spec.load_sharding() is rules and spec.config_name == "SimpleNamespace"
    assert ArchitectureSpec("x", config="a:B").load_sharding() is None


def test_a_head_that_no_auto_class_loads_goes_by_the_end_of_its_name():
    heads = {"Model": int, "WithProjection": "clip:FlaxCLIPTextModelWithProjection"}
    spec = ArchitectureSpec("clip", config=SimpleNamespace, heads=heads)
    assert list(spec.heads) == ["Model", "WithProjection"]
    with pytest.raises(
        PluginError, match="unknown task 'WithProjektion'.*not the end of the class name"
    ):
        ArchitectureSpec("x", config=int, heads={"WithProjektion": heads["WithProjection"]})
    with pytest.raises(PluginError, match="unknown task ''"):
        ArchitectureSpec("x", config=int, heads={"": "clip:FlaxCLIPTextModelWithProjection"})


def test_head_without_auto_class_is_selected_by_name(monkeypatch):
    import hfseq
    from hfseq.cli.inspect import _classes
    from hfseq.modeling.auto import find_class
    from hfseq_plugins.bert.modeling import FlaxBertModel

    class FlaxBertModelWithProjection(FlaxBertModel):
        pass

    spec = hfseq.plugins.load().architectures["bert"].target
    monkeypatch.setitem(spec.heads, "WithProjection", FlaxBertModelWithProjection)
    assert hfseq.FlaxBertModelWithProjection is FlaxBertModelWithProjection
    stored = {"model_type": "bert", "architectures": ["BertModelWithProjection"]}
    assert find_class(stored, "here") is FlaxBertModelWithProjection
    assert (
        find_class({"model_type": "bert"}, "here", task="WithProjection")
        is spec.heads["WithProjection"]
    )
    assert "FlaxBertModelWithProjection" in _classes(spec)


def test_the_guide_lists_every_task():
    for task in TASKS:
        assert f"`{task}`" in GUIDE
