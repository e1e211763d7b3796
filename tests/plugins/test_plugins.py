"""Discovery of plugins, and the order in which their hooks are called."""

from __future__ import annotations

import logging
import subprocess
import sys

import pytest

from hfseq import plugins
from hfseq.errors import DataError, PluginConflict, PluginError
from tests.support import plugin_files
from tests.support.plugin_files import ROOT, optimizer, write, write_documented_plugin

project, distribute = plugin_files.project, plugin_files.distribute


# -- discovery -------------------------------------------------------------------------------------


def test_the_architectures_of_this_repository_come_through_entry_points():
    loaded = plugins.load()
    assert not loaded.errors
    assert {"bert", "roberta"} <= set(loaded.architectures)
    assert loaded.registrations("bert") == {"architectures": ["bert"]}


def test_every_lazy_target_is_a_class_of_that_name():
    for entry in plugins.load().architectures.entries():
        for task, target in entry.target.heads.items():
            assert entry.target.load_head(task).__name__ == target.rpartition(":")[2]


def test_every_architecture_but_pairs_has_a_base_model():
    """docs/families.md, which is generated and compared, lists the other heads."""
    architectures = plugins.load().architectures
    without = {name for name in architectures if "Model" not in architectures.get(name).heads}
    assert without == {"encoder-decoder", "vision-encoder-decoder", "speech-encoder-decoder"}


@pytest.mark.parametrize(
    ("name", "alias", "task"),
    [
        *((name, "ForPreTraining", "ForSeq2SeqLM") for name in ("bart", "mbart", "t5", "mt5")),
        *((name, "ForMaskedLM", "ForSeq2SeqLM") for name in ("bart", "mbart")),
        ("roberta", "ForPreTraining", "ForMaskedLM"),
        ("roberta-prelayernorm", "ForPreTraining", "ForMaskedLM"),
        ("xlm-roberta", "ForPreTraining", "ForMaskedLM"),
    ],
)
def test_pretraining_uses_the_class_of_the_objective(name, alias, task):
    heads = plugins.load().architectures.get(name).heads
    assert heads[alias] == heads[task]


def test_load_is_cached():
    assert plugins.load() is plugins.load()


def test_an_installed_distribution_is_found_with_its_version(distribute):
    distribute("acme", "acme-optim", optimizer("acme"), version="2.3")
    loaded = plugins.load()
    assert "acme" in loaded.optimizers
    info = next(info for info in loaded.infos if info.name == "acme-optim")
    assert (info.origin, info.version, info.hooks) == ("acme", "2.3", ("register_optimizers",))


def test_files_in_the_environment_variable_are_plugins(project):
    plugin_files.write_project_file(project, "from hfseq import hookimpl\n\n" + optimizer("local"))
    assert plugins.load().registrations("hfseqfile") == {"optimizers": ["local"]}


def test_missing_file_in_the_environment_variable_is_reported(project, monkeypatch):
    monkeypatch.setenv("HFSEQ_PLUGIN_FILES", "absent.py")
    error = str(plugins.load().errors["absent"])
    assert "HFSEQ_PLUGIN_FILES" in error and "absent.py" in error


def test_a_plugin_file_is_importable_under_its_name(project):
    body = "class Mine: pass\n\n" + optimizer("mine", "hfseqfile:Mine")
    plugin_files.write_project_file(project, "from hfseq import hookimpl\n\n" + body)
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


def test_broken_file_is_an_error_when_passed_explicitly(project, caplog):
    plugin_files.write_project_file(project, "1 / 0")
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
    loaded = plugins.load([write_documented_plugin("load_dataset")])
    loaded.call_first("load_dataset", name="x", arguments=None)
    error = capsys.readouterr().err
    assert "hfseq: bert.register_architectures()" in error
    assert "hfseq: documented_load_dataset.load_dataset(name='x', arguments=None)" in error


def test_discovery_works_from_a_checkout_and_imports_no_heavy_module():
    code = (
        "import sys; from importlib import metadata; metadata.entry_points = lambda **_: ();"
        "from hfseq import plugins; p = plugins.load();"
        "assert 'bert' in p.architectures and not p.errors;"
        "heavy = {'jax', 'flax', 'torch', 'transformers', 'datasets'} & sys.modules.keys();"
        "assert not heavy, heavy"
    )
    subprocess.run([sys.executable, "-c", code], check=True, env={"PYTHONPATH": str(ROOT)})


# -- precedence ------------------------------------------------------------------------------------


def family(model_type, config="transformers:BertConfig", head="somewhere:FlaxMyBert"):
    return (
        "@hookimpl\ndef register_architectures(register):\n"
        f"    register({model_type!r}, config={config!r}, heads={{'Model': {head!r}}})\n"
    )


def test_named_plugin_replaces_the_in_tree_family_with_one_message(project, caplog):
    body = family("bert", head="math:floor")
    path = write(project / "mine.py", body)
    loaded = plugins.load([path])
    plugins.load([path])
    assert loaded.architectures["bert"].plugin == "mine" and "roberta" in loaded.architectures
    assert loaded.registrations("bert") == {} and loaded.registrations("mine") == {
        "architectures": ["bert"]
    }
    messages = [r.getMessage() for r in caplog.records]
    assert messages == [f"plugin 'mine' ({path}) replaces the in-tree architecture 'bert'"]
    import math

    from transformers import BertConfig

    from hfseq import FlaxAutoModel

    assert FlaxAutoModel._model_mapping[BertConfig] is math.floor


def test_installed_plugin_replaces_family_in_any_order(distribute, caplog):
    distribute("aaa", "aaa", family("bert"))
    distribute("zzz", "zzz", family("roberta"))
    loaded = plugins.load()
    assert not loaded.errors
    assert [loaded.architectures[name].plugin for name in ("bert", "roberta")] == ["aaa", "zzz"]


def test_two_plugins_of_others_that_claim_one_family_of_hfseqs_clash(distribute, caplog):
    distribute("aaa", "aaa", family("bert"))
    distribute("zzz", "zzz", family("bert"))
    loaded = plugins.load()
    with pytest.raises(PluginConflict, match="both plugin 'aaa' and plugin 'zzz'"):
        loaded.architectures.get("bert")


def test_replaced_family_returns_if_the_plugin_fails(project, caplog):
    path = write(project / "half.py", family("bert") + "    raise RuntimeError('no licence')\n")
    with pytest.raises(PluginError, match="no licence"):
        plugins.load([path])
    assert plugins.load().architectures["bert"].plugin == "bert"


@pytest.mark.parametrize("installed", [True, False])
def test_a_plugin_may_be_called_like_one_of_hfseqs(project, distribute, caplog, installed):
    if installed:
        distribute("acme", "bert", family("bert"))
        loaded, name = plugins.load(), "acme:bert"
    else:
        loaded, name = plugins.load([write(project / "bert.py", family("bert"))]), "bert.py:bert"
    assert not loaded.errors
    assert loaded.architectures["bert"].plugin == name
    assert {"bert", name} <= {info.name for info in loaded.infos}


# -- calls -----------------------------------------------------------------------------------------

ANSWER = "@hookimpl\ndef load_dataset(name):\n    {}\n"


def test_the_plugin_loaded_last_answers_first_and_arguments_may_be_left_out(project):
    paths = [write(project / f"{n}.py", ANSWER.format(f"return {n!r}")) for n in ("one", "two")]
    assert plugins.load(paths).call_first("load_dataset", name="x", arguments=None) == "two"


def test_a_failing_plugin_does_not_stop_another_from_answering(project):
    first = write(project / "one.py", ANSWER.format("return 'one'"))
    bad = write(project / "bad.py", ANSWER.format("raise KeyError(name)"))
    assert plugins.load([first, bad]).call_first("load_dataset", name="x", arguments=None) == "one"


def test_failing_hook_error_names_the_plugin(project):
    bad = write(project / "bad.py", ANSWER.format("raise KeyError(name)"))
    with pytest.raises(PluginError, match="plugin 'bad' failed in load_dataset: KeyError: 'x'"):
        plugins.load([bad]).call_first("load_dataset", name="x", arguments=None)


def test_user_errors_of_plugins_are_raised_unchanged(project):
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
