"""The distribution: what ``setup.cfg`` lists, and a wheel built from it."""

from __future__ import annotations

import configparser
import os
import subprocess
import sys
import zipfile
from pathlib import Path

import pytest

import hfseq

ROOT = Path(__file__).resolve().parent.parent
SETTINGS = configparser.ConfigParser()
SETTINGS.read(ROOT / "setup.cfg", encoding="utf-8")


def listed(section: str, option: str) -> list[str]:
    return [line.strip() for line in SETTINGS[section][option].splitlines() if line.strip()]


def packages_on_disk() -> set[str]:
    found = set()
    for root, name in ((ROOT, "hfseq"), (ROOT / "plugins", "hfseq_plugins")):
        for file in (root / name).rglob("*.py"):
            found.add(".".join(file.parent.relative_to(root).parts))
    return found


def test_every_package_on_disk_is_listed():
    assert set(listed("options", "packages")) == packages_on_disk()


@pytest.mark.parametrize("package", sorted(packages_on_disk()))
def test_every_package_has_an_init_file(package):
    # a namespace package is importable from a checkout and easily lost in an installation
    root = ROOT / "plugins" if package.startswith("hfseq_plugins") else ROOT
    assert (root / Path(*package.split(".")) / "__init__.py").is_file()


def test_every_in_tree_plugin_has_an_entry_point():
    points = dict(
        map(str.strip, line.split("=")) for line in listed("options.entry_points", "hfseq")
    )
    on_disk = {name for name in packages_on_disk() if name.count(".") == 1 and "plugins." in name}
    assert set(points.values()) == on_disk


def test_every_data_file_is_packaged():
    patterns = listed("options.package_data", "hfseq")
    folder = ROOT / "hfseq"
    packaged = {path for pattern in patterns for path in folder.glob(pattern)}
    present = {
        path for path in folder.rglob("*") if path.is_file() and "__pycache__" not in path.parts
    }
    assert {path for path in present if path.suffix != ".py"} == packaged


def test_pytorch_is_no_requirement_of_the_core():
    names = " ".join(listed("options", "install_requires"))
    assert "torch" not in names and "accelerate" not in names


def test_pyproject_names_the_build_backend_and_nothing_else():
    assert len((ROOT / "pyproject.toml").read_text(encoding="utf-8").splitlines()) == 3


def test_the_version_is_that_of_the_package():
    assert SETTINGS["metadata"]["version"] == "attr: hfseq.__version__"
    assert hfseq.__version__.count(".") == 2


@pytest.mark.slow
def test_the_wheel_has_every_module_and_finds_its_plugins(tmp_path):
    pytest.importorskip("setuptools", minversion="77")
    pip = [sys.executable, "-m", "pip", "--disable-pip-version-check", "-q"]
    # setuptools is here already, so the build needs no network
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
    assert {"hfseq/py.typed", "hfseq/templates/new_architecture.py.txt"} <= names
    target = tmp_path / "site"
    subprocess.run([*pip, "install", "--no-deps", "--target", str(target), str(wheel)], check=True)
    environment = {**os.environ, "PYTHONPATH": str(target)}
    command = [sys.executable, "-m", "hfseq.cli", "plugins"]
    done = subprocess.run(
        command, cwd=tmp_path, env=environment, check=True, capture_output=True, text=True
    )
    assert "bert (hfseq" in done.stdout and "error" not in done.stdout


def copy(folder: Path) -> Path:
    """Copy the sources: setuptools leaves build products beside them."""
    import shutil

    target = folder / "source"
    target.mkdir()
    for name in ("setup.cfg", "pyproject.toml", "LICENSE", "README.md"):
        if (ROOT / name).exists():
            shutil.copy(ROOT / name, target)
    for name in ("hfseq", "plugins"):
        shutil.copytree(ROOT / name, target / name, ignore=shutil.ignore_patterns("__pycache__"))
    return target
