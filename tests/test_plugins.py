"""Discovery, validation and calls of plugins; the eight hooks with their documented examples."""

from __future__ import annotations

import logging
import re
import subprocess
import sys
from pathlib import Path
from types import SimpleNamespace

import pytest

from hfseq import hookspecs, plugins
from hfseq.errors import DataError, PluginConflict, PluginError, UsageError
from hfseq.registry import TASKS, ArchitectureSpec, Registry

ROOT = Path(__file__).resolve().parent.parent
GUIDE = (ROOT / "docs" / "plugins.md").read_text(encoding="utf-8")
SPECS = [name for name, value in vars(hookspecs).items() if hasattr(value, "hfseq_spec")]


@pytest.fixture(autouse=True)
def project(tmp_path, monkeypatch):
    """An empty working directory, no settings in the environment, and plugins discovered anew."""
    for variable in ("HFSEQ_PLUGINS", "HFSEQ_DISABLE_PLUGINS", "HFSEQ_TRACE_PLUGINS"):
        monkeypatch.delenv(variable, raising=False)
    monkeypatch.chdir(tmp_path)
    modules = set(sys.modules)
    plugins.unload()
    yield tmp_path
    plugins.unload()
    for name in set(sys.modules) - modules:
        if str(tmp_path) in str(getattr(sys.modules[name], "__file__", "")):
            del sys.modules[name]


def write(path: Path, body: str) -> Path:
    path.write_text("from hfseq import hookimpl\n\n" + body, encoding="utf-8")
    return path


def optimizer(name: str, target: str = "optax:adam") -> str:
    return f"@hookimpl\ndef register_optimizers(register):\n    register({name!r}, {target!r})\n"


@pytest.fixture
def distribute(tmp_path, monkeypatch):
    """Install a fake distribution that offers one plugin module."""

    def install(project: str, plugin: str, body: str, version: str = "1.0") -> None:
        site = tmp_path / f"site_{project}"
        info = site / f"{project}-{version}.dist-info"
        info.mkdir(parents=True)
        module = f"{project}_module"
        write(site / f"{module}.py", body)
        (info / "METADATA").write_text(
            f"Metadata-Version: 2.1\nName: {project}\nVersion: {version}\n"
        )
        (info / "entry_points.txt").write_text(f"[hfseq]\n{plugin} = {module}\n")
        monkeypatch.syspath_prepend(site)

    return install


def documented(hook: str) -> Path:
    """Write the example of ``hook`` from the guide to a file."""
    section = re.search(rf"^### {hook}$(.*?)(?=^##)", GUIDE, re.M | re.S)
    assert section, f"docs/plugins.md has no section '### {hook}'"
    example = re.search(r"```python\n(.*?)```", section[1], re.S)
    assert example, f"docs/plugins.md has no example of {hook}"
    path = Path(f"documented_{hook}.py")
    path.write_text(example[1], encoding="utf-8")
    return path


# -- the hooks -------------------------------------------------------------------------------------


def test_there_are_eight_hooks_and_plugins_knows_them_all():
    assert sorted(SPECS) == sorted(plugins.HOOKS)
    assert len(SPECS) == 8


@pytest.mark.parametrize("hook", SPECS)
def test_every_hook_is_documented_with_an_example_and_has_a_test(hook):
    assert f"def {hook}(" in documented(hook).read_text(encoding="utf-8")
    assert f"test_hook_{hook}" in globals()


def test_hook_register_architectures():
    loaded = plugins.load([documented("register_architectures")])
    spec = loaded.architectures.get("xlm-roberta")
    from transformers import XLMRobertaConfig

    assert spec.load_config() is XLMRobertaConfig
    assert spec.load_head("ForMaskedLM").__name__ == "FlaxRobertaForMaskedLM"
    assert spec.card.startswith("XLM-R") and spec.plugin == "documented_register_architectures"
    with pytest.raises(UsageError, match="no 'ForCausalLM'; it has: ForMaskedLM"):
        spec.load_head("ForCausalLM")


def test_hook_register_objectives():
    import jax.numpy as jnp

    copying = plugins.load([documented("register_objectives")]).objectives.get("copying")
    objective = copying(None, None, None)

    def model(input_ids, attention_mask, params, dropout_rng, train, extra):
        return SimpleNamespace(logits=jnp.zeros((1, 3, 4))), extra

    rows = {"input_ids": jnp.array([[1, 2, 0]]), "segment_ids": jnp.array([[1, 1, 0]])}
    batch = objective.collate(rows, None, 1)
    total, count, extra = objective.loss(model, {}, batch, None, False, {"codebook": 1})
    assert (float(total), int(count)) == (pytest.approx(2 * 1.3862944), 2)
    assert extra == {"extra": {"codebook": 1}, "totals": {}}
    assert objective.metrics({"loss": 4.0, "count": 2})["loss"] == 2.0


def test_hook_register_optimizers():
    import jax.numpy as jnp

    factory = plugins.load([documented("register_optimizers")]).optimizers.get("ademamix")
    transform = factory(
        lambda step: 0.1, SimpleNamespace(weight_decay=0.5), lambda params: {"w": False}
    )
    params = {"w": jnp.ones(2)}
    updates, _ = transform.update({"w": jnp.ones(2)}, transform.init(params), params)
    assert (updates["w"] < 0).all()


def test_hook_register_attention():
    import numpy as np

    function = plugins.load([documented("register_attention")]).attention.get("cosine")
    x = np.random.default_rng(0).normal(size=(1, 3, 2, 4)).astype("float32")
    np.testing.assert_allclose(function(x, x, x), function(5 * x, x, x), rtol=1e-5)


def test_hook_register_precisions():
    recipe = plugins.load([documented("register_precisions")]).precisions.get("bfloat16-careful")()
    assert recipe.matches("encoder/layer/0/output/dense")
    assert not recipe.matches("encoder/layer/0/attention/self/query")


def test_hook_register_trackers(tmp_path):
    make = plugins.load([documented("register_trackers")]).trackers.get("csv")
    tracker = make(tmp_path, None, {})
    tracker.log({"train_loss": 1.5}, 3)
    tracker.close()
    assert (tmp_path / "metrics.csv").read_text().splitlines() == ["3,train_loss,1.5"]


def test_hook_load_dataset(tmp_path):
    (tmp_path / "text").write_text("one\ntwo\n")
    loaded = plugins.load([documented("load_dataset")])
    splits = loaded.call_first("load_dataset", name="lines:text", arguments=None)
    assert splits["train"]["text"][:] == ["one", "two"]
    assert loaded.call_first("load_dataset", name="oscar", arguments=None) is None


def test_hook_model_card_sections():
    loaded = plugins.load([documented("model_card_sections")])
    sections = loaded.call_all("model_card_sections", context={"train_runtime": 7200})
    assert sections == ["## Energy\n\nAbout 0.6 kWh, at 300 W for 2.0 hours."]


# -- discovery -------------------------------------------------------------------------------------


def test_the_architectures_of_this_repository_come_through_entry_points():
    loaded = plugins.load()
    assert not loaded.errors
    assert {"bert", "roberta"} <= set(loaded.architectures)
    assert loaded.adds("bert") == {"architectures": ["bert"]}


def test_every_lazy_target_of_the_in_tree_architectures_is_a_class_of_its_own_name():
    for entry in plugins.load().architectures.entries():
        for task, target in entry.target.heads.items():
            assert entry.target.load_head(task).__name__ == target.rpartition(":")[2]


def test_load_is_cached():
    assert plugins.load() is plugins.load()


def test_an_installed_distribution_is_found_with_its_version(distribute):
    distribute("acme", "acme-optim", optimizer("acme"), version="2.3")
    loaded = plugins.load()
    assert "acme" in loaded.optimizers
    info = next(info for info in loaded.infos if info.name == "acme-optim")
    assert (info.origin, info.version, info.hooks) == ("acme", "2.3", ("register_optimizers",))


def test_hfseqfile_in_the_working_directory_is_a_plugin(project):
    write(project / "hfseqfile.py", optimizer("local"))
    assert plugins.load().adds("hfseqfile") == {"optimizers": ["local"]}


def test_a_plugin_file_is_importable_under_its_name(project):
    body = "class Mine: pass\n\n" + optimizer("mine", "hfseqfile:Mine")
    write(project / "hfseqfile.py", body)
    mine = plugins.load().optimizers.get("mine")
    assert sys.modules["hfseqfile"].Mine is mine


def test_a_plugin_file_never_replaces_a_module_of_the_same_name(project):
    import json

    plugins.load([write(project / "json.py", optimizer("mine"))])
    assert sys.modules["json"] is json
    assert "mine" in plugins.load().optimizers


def test_extra_files_are_added_once(project):
    path = write(project / "extra.py", optimizer("extra"))
    plugins.load()
    assert "extra" in plugins.load([path, path]).optimizers
    assert len([info for info in plugins.load([path]).infos if info.name == "extra"]) == 1


def test_an_extra_file_that_does_not_exist_is_an_error(project):
    with pytest.raises(PluginError, match=r"nothing\.py' does not exist"):
        plugins.load(["nothing.py"])


def test_an_extra_file_that_is_broken_is_an_error_every_time(project):
    (project / "bad.py").write_text("import no_such_module_here")
    for _ in range(2):
        with pytest.raises(PluginError, match=r"'bad' .*no_such_module_here"):
            plugins.load(["bad.py"])
    assert "bad" not in sys.modules


def test_a_broken_hfseqfile_is_an_error_when_named_explicitly(project, caplog):
    (project / "hfseqfile.py").write_text("1 / 0")
    assert "ZeroDivisionError" in str(plugins.load().errors["hfseqfile"])
    with pytest.raises(PluginError, match="ZeroDivisionError"):
        plugins.load(["hfseqfile.py"])


def test_hfseq_plugins_restricts(monkeypatch, distribute):
    distribute("acme", "acme", optimizer("acme"))
    monkeypatch.setenv("HFSEQ_PLUGINS", "bert, acme")
    loaded = plugins.load()
    assert [info.name for info in loaded.infos] == ["core", "bert", "acme"]


def test_hfseq_plugins_with_an_unknown_name_says_so(monkeypatch, caplog):
    monkeypatch.setenv("HFSEQ_PLUGINS", "brt")
    assert "did you mean 'bert'?" in str(plugins.load().errors["brt"])
    assert "HFSEQ_PLUGINS names 'brt'" in caplog.text


def test_hfseq_disable_plugins_excludes_without_importing(monkeypatch, distribute):
    distribute("acme", "acme", "raise SystemExit('imported')")
    monkeypatch.setenv("HFSEQ_DISABLE_PLUGINS", "acme,roberta")
    loaded = plugins.load()
    assert not loaded.errors
    assert "roberta" not in loaded.architectures and "bert" in loaded.architectures


def test_hfseq_trace_plugins_prints_each_call(monkeypatch, capsys, project):
    monkeypatch.setenv("HFSEQ_TRACE_PLUGINS", "1")
    loaded = plugins.load([documented("load_dataset")])
    loaded.call_first("load_dataset", name="x", arguments=None)
    error = capsys.readouterr().err
    assert "hfseq: bert.register_architectures()" in error
    assert "hfseq: documented_load_dataset.load_dataset(name='x', arguments=None)" in error


def test_discovery_works_from_a_checkout_and_imports_no_heavy_module():
    code = (
        "import sys; from hfseq import plugins; p = plugins.load();"
        "assert 'bert' in p.architectures and not p.errors;"
        "heavy = {'jax', 'flax', 'torch', 'transformers', 'datasets'} & sys.modules.keys();"
        "assert not heavy, heavy"
    )
    subprocess.run([sys.executable, "-c", code], check=True, env={"PYTHONPATH": str(ROOT)})


# -- what is wrong with plugins --------------------------------------------------------------------

BROKEN = {
    "import": ("import no_such_module_here", "no_such_module_here"),
    "exit": ("raise SystemExit(3)", "SystemExit"),
    "misspelt": (
        "@hookimpl\ndef register_optimizer(register): pass",
        "unknown hook 'register_optimizer'.*did you mean 'register_optimizers'",
    ),
    "argument": (
        "@hookimpl\ndef register_optimizers(registre): pass",
        r"takes 'registre', but the hook passes only \(register\); did you mean 'register'",
    ),
    "undecorated": ("def register_optimizers(register): pass", "lacks @hookimpl"),
    "empty": ("", "implements no hook"),
    "wrapper": (
        "@hookimpl(wrapper=True)\ndef load_dataset(name):\n    yield",
        "write a plain hook",
    ),
    "raises": (
        optimizer("half") + "    raise RuntimeError('no licence')",
        "RuntimeError: no licence",
    ),
    "bad target": (optimizer("x", "optax.adam"), "'optax.adam'; give an object or a string"),
    "no name": (optimizer(""), "the optimizer name '' is empty"),
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
    assert loaded.adds("broken") == {}


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


def test_two_plugins_that_claim_one_name_are_both_named_when_it_is_asked_for(distribute, caplog):
    distribute("acme", "acme", optimizer("shiny"))
    distribute("zenith", "zenith", optimizer("shiny"))
    loaded = plugins.load()
    assert isinstance(loaded.errors["zenith"], PluginConflict)
    for ask in (loaded.optimizers.get, loaded.optimizers.__getitem__):
        with pytest.raises(PluginConflict, match="both plugin 'acme' and plugin 'zenith'"):
            ask("shiny")
    assert loaded.optimizers["adamw"].plugin == "core"


def test_a_file_that_claims_a_taken_name_does_not_load(project):
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


def test_a_target_without_that_attribute_names_plugin_and_target(project):
    loaded = plugins.load([write(project / "mine.py", optimizer("lazy", "math:cosinus"))])
    with pytest.raises(PluginError, match=r"'math:cosinus' cannot be loaded: AttributeError"):
        loaded.optimizers.get("lazy")


# -- calls -----------------------------------------------------------------------------------------

ANSWER = "@hookimpl\ndef load_dataset(name):\n    {}\n"


def test_the_plugin_loaded_last_answers_first_and_arguments_may_be_left_out(project):
    paths = [write(project / f"{n}.py", ANSWER.format(f"return {n!r}")) for n in ("one", "two")]
    assert plugins.load(paths).call_first("load_dataset", name="x", arguments=None) == "two"


def test_a_failing_plugin_does_not_stop_another_from_answering(project):
    one = write(project / "one.py", ANSWER.format("return 'one'"))
    bad = write(project / "bad.py", ANSWER.format("raise KeyError(name)"))
    assert plugins.load([one, bad]).call_first("load_dataset", name="x", arguments=None) == "one"


def test_a_failure_is_raised_with_the_plugins_name_where_nobody_answers(project):
    bad = write(project / "bad.py", ANSWER.format("raise KeyError(name)"))
    with pytest.raises(PluginError, match="plugin 'bad' failed in load_dataset: KeyError: 'x'"):
        plugins.load([bad]).call_first("load_dataset", name="x", arguments=None)


def test_an_error_meant_for_the_user_is_raised_as_it_is(project):
    body = "from hfseq.errors import DataError\n" + ANSWER.format(
        "raise DataError('no such shelf')"
    )
    path = write(project / "shelf.py", body)
    with pytest.raises(DataError, match="^no such shelf$"):
        plugins.load([path]).call_first("load_dataset", name="x", arguments=None)


def test_a_failing_card_section_is_left_out_with_a_warning(project, caplog):
    body = "@hookimpl\ndef model_card_sections(context):\n    {}\n"
    bad = write(project / "bad.py", body.format("raise RuntimeError('oops')"))
    good = write(project / "good.py", body.format("return '## Good'"))
    with caplog.at_level(logging.WARNING):
        answers = plugins.load([bad, good]).call_all("model_card_sections", context={})
    assert answers == ["## Good"]
    assert "plugin 'bad' failed in model_card_sections: RuntimeError: oops" in caplog.text


# -- registries ------------------------------------------------------------------------------------


def test_a_registry_lists_names_and_the_nearest_one():
    registry = Registry("optimizer", {})
    registry.add("adamw", "core", "optax:adamw")
    assert (list(registry), len(registry), "adamw" in registry) == (["adamw"], 1, True)
    with pytest.raises(UsageError, match="available: adamw; did you mean 'adamw'"):
        registry.get("adamv")


def test_a_plugin_that_registers_a_name_twice_is_told_so():
    registry = Registry("optimizer", {})
    registry.add("x", "mine", object())
    with pytest.raises(PluginConflict, match="plugin 'mine' registers the optimizer 'x' twice"):
        registry.add("x", "mine", object())


def test_an_architecture_may_be_given_as_objects():
    rules = [(".*", ())]
    spec = ArchitectureSpec("x", config=SimpleNamespace, heads={"Model": int}, sharding=rules)
    assert (spec.load_config(), spec.load_head("Model")) == (SimpleNamespace, int)
    assert spec.load_sharding() is rules and spec.config_name == "SimpleNamespace"
    assert ArchitectureSpec("x", config="a:B").load_sharding() is None


def test_the_guide_lists_every_task():
    for task in TASKS:
        assert f"`{task}`" in GUIDE
