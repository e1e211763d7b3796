"""What the documentation says about the code is current."""

from __future__ import annotations

import dataclasses
import re
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[2]
sys.path.insert(0, str(ROOT / "scripts"))
import make_docs
import train_tokenizer

from hfseq import plugins
from hfseq.data.arguments import OBJECTIVES
from hfseq.training.arguments import ModelArguments, ProcessArguments, TrainingArguments


@pytest.fixture(autouse=True)
def only_our_plugins(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    plugins.unload()
    yield
    plugins.unload()


FAMILIES = [
    f"docs/families/{path.stem}.md" for path in sorted((ROOT / "docs/families").glob("*.md"))
]
PARTS = (ModelArguments, *OBJECTIVES.values(), TrainingArguments, ProcessArguments)


@pytest.mark.parametrize("path", ["README.md", "docs/flags.md", *FAMILIES])
def test_the_generated_documentation_is_current(path):
    wanted = make_docs.documents()[ROOT / path]
    current = (ROOT / path).read_text(encoding="utf-8")
    assert current == wanted, "run python scripts/make_docs.py"


@pytest.mark.parametrize("part", [*PARTS, train_tokenizer.TokenizerArguments])
def test_every_flag_is_listed(part):
    listed = set(re.findall(r"^\| `--(\w+)", make_docs.flags(), flags=re.M))
    assert {field.name for field in dataclasses.fields(part)} <= listed


def test_every_script_with_an_objective_has_its_flags_listed():
    sections = make_docs.flags().split("\n## ")
    for script, objective in make_docs.SCRIPTS.items():
        assert (ROOT / "scripts" / script).exists()
        own = next(section for section in sections if section.startswith(script))
        shared = next(section for section in sections if section.startswith("Every"))
        listed = set(re.findall(r"^\| `--(\w+)", own + shared, flags=re.M))
        assert {field.name for field in dataclasses.fields(OBJECTIVES[objective])} <= listed


def test_the_table_has_every_architecture_and_leads_to_its_page():
    table = make_docs.architectures()
    for name in plugins.load().architectures:
        page = plugins.load().architectures[name].plugin
        assert f"| [`{name}`](docs/families/{page}.md) |" in table


def test_the_table_has_every_class_in_full_or_by_its_stem():
    table = make_docs.architectures()
    for name in ("FlaxGPT2Model", "FlaxGPT2LMHeadModel", "FlaxT5EncoderModel", "FlaxBertFor…"):
        assert f"`{name}`" in table
    assert "FlaxBertForMaskedLM" not in table


def test_the_classes_of_a_family_are_those_of_its_module():
    table = make_docs.classes("t5")
    assert "| `FlaxT5EncoderModel` | – | The encoder of T5 alone |" in table
    assert "`FlaxT5PreTrainedModel`" not in table


@pytest.mark.slow
def test_check_names_what_is_stale_and_writes_nothing(tmp_path, monkeypatch, capsys):
    (tmp_path / "docs").mkdir()
    readme = f"before {make_docs.BEGIN} old {make_docs.END} after"
    (tmp_path / "README.md").write_text(readme)
    options = f"before {make_docs.BEGIN_OPTIONS} old {make_docs.END_OPTIONS} after"
    (tmp_path / "docs" / "generation.md").write_text(options)
    monkeypatch.setattr(make_docs, "ROOT", tmp_path)
    assert make_docs.main(check=True) == 1
    assert capsys.readouterr().out.count("not current") == 3
    assert (tmp_path / "README.md").read_text() == readme
    assert make_docs.main(check=False) == 0 and make_docs.main(check=True) == 0
    assert "`roberta`" in (tmp_path / "README.md").read_text()
