"""The documentation builds without a warning, and what it shows runs."""

from __future__ import annotations

import re
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parent.parent
PAGES = sorted((ROOT / "docs").glob("*.md"))


@pytest.mark.slow
def test_the_documentation_builds_without_a_warning(tmp_path):
    for name in ("sphinx", "myst_parser", "furo"):
        pytest.importorskip(name)
    command = [sys.executable, "-m", "sphinx", "-W", "-n", "--keep-going", "-q", "-b", "html"]
    done = subprocess.run(
        [*command, str(ROOT / "docs"), str(tmp_path)], capture_output=True, text=True
    )
    assert done.returncode == 0, done.stderr
    for page in PAGES:
        assert (tmp_path / f"{page.stem}.html").exists()


@pytest.mark.parametrize("page", [ROOT / "README.md", *PAGES], ids=lambda page: page.name)
def test_links_to_files_lead_somewhere(page):
    for target in re.findall(r"\]\(([^)#:]+)(?:#[^)]*)?\)", page.read_text(encoding="utf-8")):
        assert (page.parent / target).exists(), target


@pytest.mark.parametrize("page", [ROOT / "README.md", *PAGES], ids=lambda page: page.name)
def test_flags_in_commands_exist(page):
    """Every --flag of our scripts in a documented command is one that the script has."""
    from hfseq.flags import names
    from hfseq.training.arguments import PARTS

    sys.path.insert(0, str(ROOT / "scripts"))
    from train_tokenizer import DataArguments, TokenizerArguments

    known = {
        "run_mlm_flax.py": names(PARTS),
        "train_tokenizer.py": names((TokenizerArguments, DataArguments)),
    }
    text = page.read_text(encoding="utf-8").replace("\\\n", " ")
    for line in re.findall(r"^.*scripts/.*$", text, flags=re.M):
        for script, flags in known.items():
            if f"python scripts/{script}" in line:
                used = set(re.findall(r"(?<!\S)--([a-z]\w*)", line))
                assert used <= flags, (line, used - flags)
