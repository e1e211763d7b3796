"""The public names of hfseq, and modules that ``import hfseq`` does not import."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest

import hfseq
from hfseq.plugins import TASKS

ROOT = Path(__file__).resolve().parent.parent
HEAVY = {"jax", "flax", "torch", "transformers", "datasets", "numpy", "pluggy"}


def run(code: str, *flags: str) -> str:
    """Runs ``code`` in a new interpreter and returns its output."""
    command = [sys.executable, *flags, "-c", code]
    folders = os.pathsep.join((str(ROOT), str(ROOT / "plugins")))
    environment = {**os.environ, "PYTHONPATH": folders}
    process = subprocess.run(command, capture_output=True, text=True, cwd=ROOT, env=environment)
    assert process.returncode == 0, process.stderr
    return process.stdout


def test_importing_hfseq_imports_no_heavy_module():
    modules = run("import hfseq, sys; print(*sys.modules)").split()
    assert "hfseq" in modules
    assert not HEAVY & set(modules)


def test_asking_for_a_tool_only_dunder_discovers_no_plugins():
    code = "import hfseq, sys; hasattr(hfseq, '__wrapped__'); print(*sys.modules)"
    assert "hfseq.plugins.manager" not in run(code).split()


@pytest.mark.parametrize("task", TASKS)
def test_every_task_has_an_auto_class_and_the_mapping_of_v4(task):
    auto = getattr(hfseq, "FlaxAutoModel" + task.removeprefix("Model"))
    assert auto.__module__ == "hfseq.modeling.auto"
    assert getattr(hfseq, TASKS[task]) is auto._model_mapping


@pytest.mark.parametrize(
    ("name", "module"),
    [
        ("hookimpl", None),
        ("register_auto_classes", "hfseq.plugins.transformers_hook"),
        ("FlaxPreTrainedModel", "hfseq.modeling.pretrained"),
        ("FlaxMaskedLMOutput", "hfseq.nn.outputs"),
        ("FlaxBertForPreTrainingOutput", "hfseq.nn.outputs"),
        ("FlaxRobertaForMaskedLM", "hfseq_plugins.roberta.modeling"),
        ("FlaxRobertaPreTrainedModel", "hfseq_plugins.roberta.modeling"),
        ("FlaxBertPreTrainedModel", "hfseq_plugins.bert.modeling"),
    ],
)
def test_a_public_name_comes_from_its_module(name, module):
    value = getattr(hfseq, name)
    assert module is None or value.__module__ == module


def test_every_head_of_a_registered_architecture_is_a_public_name():
    names = dir(hfseq)
    for entry in hfseq.plugins.load().architectures.entries():
        for task in entry.target.heads:
            head = entry.target.load_head(task)
            assert head.__name__ in names
            assert getattr(hfseq, head.__name__) is head


@pytest.mark.slow
def test_dir_lists_available_names():
    run("import hfseq; [getattr(hfseq, name) for name in dir(hfseq)]")


def test_submodules_are_reached_without_importing_them_first():
    assert run("import hfseq; print(hfseq.plugins.__name__)").strip() == "hfseq.plugins"


@pytest.mark.parametrize(
    ("name", "meant"),
    [
        ("FlaxRobertaForMaskedLn", "FlaxRobertaForMaskedLM"),
        ("FlaxAutoModelForCasualLM", "FlaxAutoModelForCausalLM"),
        ("hookimp", "hookimpl"),
    ],
)
def test_an_unknown_name_is_an_attribute_error_with_the_nearest_name(name, meant):
    with pytest.raises(AttributeError, match=f"no attribute '{name}'; did you mean '{meant}'"):
        getattr(hfseq, name)


def test_a_name_of_a_broken_plugin_is_an_error_that_mentions_the_plugin(tmp_path, monkeypatch):
    (tmp_path / "hfseqfile.py").write_text("import no_such_module_here")
    monkeypatch.setenv("HFSEQ_PLUGIN_FILES", "hfseqfile.py")
    code = (
        "import os, hfseq; os.chdir({!r})\n"
        "try: hfseq.FlaxToyForMaskedLM\n"
        "except AttributeError as error: print(error)"
    )
    assert "no_such_module_here" in run(code.format(str(tmp_path)))


#: Program that runs ``code`` and prints the imported architecture modules and the families.
LOADED = """
import sys
{code}
print(*(name for name in sys.modules if name.startswith("hfseq_plugins.")))
"""
BERT = """
from hfseq import FlaxAutoModelForMaskedLM
from transformers import BertConfig
config = BertConfig(vocab_size=9, hidden_size=4, num_hidden_layers=1, num_attention_heads=1,
                    intermediate_size=4)
FlaxAutoModelForMaskedLM.from_config(config).save_pretrained({folder!r})
FlaxAutoModelForMaskedLM.from_pretrained({folder!r})
"""
HELP = """
from hfseq.cli import main
try: main(["--help"])
except SystemExit: pass
sys.stdout.write("\\n")
"""


@pytest.mark.slow
@pytest.mark.parametrize("what", ["import", "help", "bert", "old path"])
def test_no_family_is_loaded_that_is_not_used(what, tmp_path):
    code = {
        "import": "import hfseq, transformers",
        "help": HELP,
        "bert": BERT.format(folder=str(tmp_path / "bert")),
        "old path": "import hfseq.v4; from transformers import FlaxBertForMaskedLM",
    }[what]
    loaded = set(run(LOADED.format(code=code)).splitlines()[-1].split())
    # The configurations of hfseq's own architectures are registered with AutoConfig.
    loaded = {name for name in loaded if not name.endswith(".configuration")}
    modeling = {name for name in loaded if name.count(".") > 1}
    if what in ("import", "help"):
        assert not loaded
    else:
        assert modeling and all(name.startswith("hfseq_plugins.bert.") for name in modeling)


# -- flax and jax ----------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("flax", "jax", "added"),
    [("0.12.8", "0.11.0", True), ("0.12.12", "0.11.0", False), ("0.12.8", "0.10.2", False)],
)
def test_prepare_jax_adds_removed_names_only_if_flax_needs_them(monkeypatch, flax, jax, added):
    from jax.experimental import hijax

    from hfseq.plugins import import_hooks

    versions = {"flax": flax, "jax": jax}
    monkeypatch.setattr(import_hooks.metadata, "version", versions.__getitem__)
    for name in import_hooks.HIJAX_NAMES:
        monkeypatch.setattr(hijax, name, None, raising=False)
        monkeypatch.delattr(hijax, name)
    import_hooks.prepare_jax.__wrapped__()
    assert all(hasattr(hijax, name) == added for name in import_hooks.HIJAX_NAMES)


def test_prepare_jax_keeps_existing_names_and_imports_jax_only_if_needed():
    code = (
        "import sys; from hfseq.plugins import import_hooks\n"
        "import_hooks.prepare_jax.__wrapped__(); before = 'jax' in sys.modules\n"
        "from jax.experimental import hijax; names = dict(vars(hijax))\n"
        "import_hooks._version = {'flax': (0, 12, 8), 'jax': (0, 11)}.get\n"
        "import_hooks.prepare_jax.__wrapped__()\n"
        "kept = all(vars(hijax)[name] is value for name, value in names.items())\n"
        "print(before == (import_hooks.metadata.version('jax') >= '0.11'), kept)"
    )
    assert run(code).split() == ["True", "True"]
