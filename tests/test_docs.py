"""The documentation builds without a warning, and what it shows runs."""

from __future__ import annotations

import os
import re
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parent.parent
DOCS = ROOT / "docs"
FOLDERS = ("api", "benchmarks", "families", "tutorials")
NOTEBOOKS = sorted(DOCS.glob("notebooks/*.ipynb"))
PAGES = sorted([*DOCS.glob("*.md"), *(p for name in FOLDERS for p in DOCS.glob(f"{name}/*.md"))])


def named(page: Path) -> str:
    return page.relative_to(ROOT).as_posix()


@pytest.mark.slow
def test_the_documentation_builds_without_a_warning(tmp_path):
    done = sphinx("html", tmp_path, "-W", "-n")
    assert done.returncode == 0, done.stderr
    for page in [*PAGES, *NOTEBOOKS]:
        assert (tmp_path / page.relative_to(DOCS)).with_suffix(".html").exists()


@pytest.mark.slow
@pytest.mark.skipif(not os.environ.get("HFSEQ_TEST_NETWORK"), reason="HFSEQ_TEST_NETWORK is unset")
def test_web_links_are_plausible(tmp_path):
    done = sphinx("linkcheck", tmp_path)
    assert done.returncode == 0, (tmp_path / "output.txt").read_text(encoding="utf-8")


def sphinx(builder: str, target: Path, *options: str) -> subprocess.CompletedProcess:
    for name in ("sphinx", "myst_nb", "furo"):
        pytest.importorskip(name)
    command = [sys.executable, "-m", "sphinx", "--keep-going", "-q", "-b", builder, *options]
    return subprocess.run([*command, str(DOCS), str(target)], capture_output=True, text=True)


def test_every_page_is_in_a_table_of_contents():
    listed = set()
    text = "".join(
        (DOCS / name).read_text(encoding="utf-8") for name in ("index.md", "families.md")
    )
    for toctree in re.findall(r"```\{toctree\}\n(.*?)```", text, flags=re.S):
        listed |= {line for line in toctree.splitlines() if line and not line.startswith(":")}
    pages = {page.relative_to(DOCS).with_suffix("").as_posix() for page in [*PAGES, *NOTEBOOKS]}
    assert listed == pages - {"index"}


@pytest.mark.parametrize("page", [ROOT / "README.md", *PAGES], ids=named)
def test_file_links_exist(page):
    for target in re.findall(r"\]\(([^)#:]+)(?:#[^)]*)?\)", page.read_text(encoding="utf-8")):
        assert (page.parent / target).exists(), target
        # Sphinx knows the pages below docs/ only.
        inside = (page.parent / target).resolve().is_relative_to(DOCS)
        assert inside or not page.is_relative_to(DOCS) or not target.endswith(".md"), target


@pytest.mark.parametrize("page", [ROOT / "README.md", *PAGES], ids=named)
def test_flags_in_commands_exist(page):
    """Every --flag of our scripts in a documented command is one that the script has."""
    from hfseq.cli.tokenizer import DataArguments, TokenizerArguments
    from hfseq.data.arguments import OBJECTIVES
    from hfseq.training.arguments import (
        ModelArguments,
        ProcessArguments,
        TrainingArguments,
        flag_names,
    )

    sys.path[:0] = [str(ROOT / "scripts"), str(ROOT / "scripts" / "benchmarks")]
    from inference import InferenceArguments
    from make_docs import SCRIPTS

    known = {
        script: flag_names(
            (ModelArguments, OBJECTIVES[objective], TrainingArguments, ProcessArguments)
        )
        for script, objective in SCRIPTS.items()
    } | {
        "train_tokenizer.py": flag_names((TokenizerArguments, DataArguments)),
        "run_bert_flax.py": flag_names((InferenceArguments,)),
    }
    text = page.read_text(encoding="utf-8").replace("\\\n", " ")
    for line in re.findall(r"^.*scripts/.*$", text, flags=re.M):
        for script, flags in known.items():
            # a launcher has its own before
            _, _, given = line.partition(f"python scripts/{script}")
            if given:
                used = set(re.findall(r"(?<!\S)--([a-z]\w*)", given))
                assert used <= flags, (line, used - flags)
