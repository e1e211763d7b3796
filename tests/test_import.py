"""The public names of hfseq, and modules that ``import hfseq`` does not import."""

from __future__ import annotations

import os
import subprocess
import sys
from importlib import metadata
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
def test_dir_lists_what_can_be_got():
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


def test_a_name_of_a_broken_plugin_is_an_error_that_mentions_the_plugin(tmp_path):
    (tmp_path / "hfseqfile.py").write_text("import no_such_module_here")
    code = (
        "import os, hfseq; os.chdir({!r})\n"
        "try: hfseq.FlaxToyForMaskedLM\n"
        "except AttributeError as error: print(error)"
    )
    assert "no_such_module_here" in run(code.format(str(tmp_path)))


def test_a_star_import_is_harmless():
    run("from hfseq import *")


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
        "old path": "import hfseq; from transformers import FlaxBertForMaskedLM",
    }[what]
    loaded = set(run(LOADED.format(code=code)).splitlines()[-1].split())
    modeling = {name for name in loaded if name.count(".") > 1}
    if what in ("import", "help"):
        assert not loaded
    else:
        assert modeling and all(name.startswith("hfseq_plugins.bert.") for name in modeling)


# -- flax and jax ----------------------------------------------------------------------------------


def test_prepare_jax_gives_placeholders_for_what_jax_removed(monkeypatch):
    from jax.experimental import hijax

    from hfseq.plugins import transformers_hook as compat

    monkeypatch.setattr(metadata, "version", lambda name: "0.12.8")
    for name in compat.HIJAX_NAMES:
        monkeypatch.setattr(hijax, name, None, raising=False)
        monkeypatch.delattr(hijax, name)
    compat.prepare_jax()
    for name in compat.HIJAX_NAMES:
        assert isinstance(getattr(hijax, name), type)


def test_prepare_jax_touches_nothing_where_flax_needs_nothing(monkeypatch):
    from jax.experimental import hijax

    from hfseq.plugins import transformers_hook as compat

    monkeypatch.setattr(metadata, "version", lambda name: "0.12.12")
    for name in compat.HIJAX_NAMES:
        monkeypatch.setattr(hijax, name, None, raising=False)
        monkeypatch.delattr(hijax, name)
    compat.prepare_jax()
    assert not any(hasattr(hijax, name) for name in compat.HIJAX_NAMES)


def test_prepare_jax_leaves_alone_what_is_there():
    code = (
        "from jax.experimental import hijax\n"
        "before = dict(vars(hijax))\n"
        "from hfseq.plugins.transformers_hook import HIJAX_NAMES, prepare_jax\n"
        "prepare_jax()\n"
        "print(all(vars(hijax)[name] is before[name] for name in HIJAX_NAMES if name in before))"
    )
    assert run(code).strip() == "True"


@pytest.mark.slow
def test_flax_imports_after_hfseq_which_prepares_jax_first():
    code = (
        "import importlib.util, sys, hfseq\n"
        "from hfseq.plugins import transformers_hook\n"
        "known = sys.modules\n"
        "transformers_hook.prepare_jax = lambda: print('flax' in known, 'flax.core' in known)\n"
        "importlib.util.find_spec('flax')\n"
        "assert 'jax' not in sys.modules\n"
        "from flax import nnx; nnx.Module\n"
        "import flax; print('hfseq' in type(flax.__loader__).__module__)"
    )
    # The module exists but has not been executed: checking for flax does not import it.
    assert run(code).split() == ["True", "False", "False"]
