"""Tests that the generated parts of the documentation are up to date."""

from __future__ import annotations

import dataclasses
import re
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[2]
sys.path.insert(0, str(ROOT / "scripts"))
import make_docs

import hfseq
from hfseq import plugins
from hfseq.cli.tokenizer import TokenizerArguments
from hfseq.data.arguments import OBJECTIVES
from hfseq.training.arguments import ModelArguments, ProcessArguments, TrainingArguments
from hfseq.v4 import paths


@pytest.fixture(autouse=True, scope="module")
def only_our_plugins():
    """Unloads the plugins that other tests have loaded."""
    plugins.unload()
    yield
    plugins.unload()


PARTS = (ModelArguments, *OBJECTIVES.values(), TrainingArguments, ProcessArguments)


def test_the_generated_documentation_is_current():
    documents = make_docs.documents()
    families = {*(ROOT / "docs" / "families").glob("*.md")}
    names = ("README.md", "docs/families.md", "docs/flags.md", "docs/flax_classes.md")
    assert documents.keys() >= {*families, *(ROOT / name for name in names)}
    stale = [
        path.relative_to(ROOT).as_posix()
        for path, text in documents.items()
        if path.read_text(encoding="utf-8") != text
    ]
    assert not stale, "run python scripts/make_docs.py"


def test_every_flag_is_listed():
    listed = set(re.findall(r"^\| `--(\w+)", make_docs.flags(), flags=re.M))
    for part in (*PARTS, TokenizerArguments):
        assert {field.name for field in dataclasses.fields(part)} <= listed, part


def test_every_script_with_an_objective_has_its_flags_listed():
    sections = make_docs.flags().split("\n## ")
    for script, objective in make_docs.SCRIPTS.items():
        assert (ROOT / "scripts" / script).exists()
        own = next(section for section in sections if section.startswith(script))
        shared = next(section for section in sections if section.startswith("All"))
        listed = set(re.findall(r"^\| `--(\w+)", own + shared, flags=re.M))
        assert {field.name for field in dataclasses.fields(OBJECTIVES[objective])} <= listed


def test_v4_table_has_all_names_and_marks_missing_ones():
    table = make_docs.flax_classes()
    rows = dict(re.findall(r"^\| `(Flax\w+)` \| .+ \| (.+) \| .+ \|$", table, flags=re.M))
    assert list(rows) == list(paths.flax_classes()) and len(rows) == 183
    for name, since in rows.items():
        assert (since == "not yet") == (not hasattr(hfseq, name)), name
        assert since == "not yet" or re.fullmatch(r"\d+\.\d+\.\d+", since)


@pytest.mark.slow
def test_twins_of_the_table_are_classes_of_pytorch():
    pytest.importorskip("torch")
    import transformers

    twins = re.findall(r"^\| `(Flax\w+)` .*\| `(\w+)` \|$", make_docs.flax_classes(), flags=re.M)
    assert len(twins) == 183 - 3
    for name, twin in twins:
        assert hasattr(transformers, twin), name
        kind = getattr(hfseq, name, None)
        if "module_class" in vars(kind or int):
            assert kind.torch_class_name() == twin


@pytest.mark.slow
def test_check_lists_stale_files_and_writes_nothing(tmp_path, monkeypatch, capsys):
    (tmp_path / "docs" / "families").mkdir(parents=True)
    page = f"# RoBERTa\n{make_docs.BEGIN_CLASSES} old {make_docs.END_CLASSES}\n"
    (tmp_path / "docs" / "families" / "roberta.md").write_text(page)
    readme = f"before {make_docs.BEGIN} old {make_docs.END} after"
    (tmp_path / "README.md").write_text(readme)
    options = f"before {make_docs.BEGIN_OPTIONS} old {make_docs.END_OPTIONS} after"
    (tmp_path / "docs" / "generation.md").write_text(options)
    monkeypatch.setattr(make_docs, "ROOT", tmp_path)
    assert make_docs.main(check=True) == 1
    assert capsys.readouterr().out.count("not up to date") == 6
    assert (tmp_path / "README.md").read_text() == readme
    assert make_docs.main(check=False) == 0 and make_docs.main(check=True) == 0
    assert "[RoBERTa](docs/families/roberta.md)" in (tmp_path / "README.md").read_text()
