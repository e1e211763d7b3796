"""The rules of docs/architecture.md about packages and imports."""

from __future__ import annotations

import ast
import functools
import os
import re
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parent.parent
BRIDGE = "plugins/hfseq_plugins/bridge"
TWIN = "plugins/hfseq_plugins/vq_transformer/torch_files"
FILES = sorted((ROOT / "hfseq").rglob("*.py")) + sorted((ROOT / "plugins").rglob("*.py"))
ROOMS = (
    *("errors", "plugins", "checkpoints", "nn", "generation", "modeling", "data", "pipelines"),
    *("objectives", "reports", "training", "testing", "v4", "cli"),
)
#: Files that the command line imports for ``--help``.
LIGHT = [
    *(ROOT / "hfseq" / "errors.py", ROOT / "hfseq" / "__init__.py"),
    *(
        path
        for path in FILES
        if path.relative_to(ROOT).parts[:2]
        in {("hfseq", room) for room in ("data", "checkpoints", "reports", "plugins")}
    ),
    *(ROOT / "hfseq" / "cli").glob("*.py"),
    ROOT / "hfseq" / "cli" / "plan" / "__init__.py",
    ROOT / "hfseq" / "training" / "arguments.py",
    ROOT / "hfseq" / "pipelines" / "lines.py",
]
HEAVY = ("jax", "flax", "optax", "orbax", "transformers", "datasets", "torch", "huggingface_hub")


@functools.cache
def imports(path: Path, everywhere: bool = True) -> set[str]:
    """Returns the modules that a file imports, or only those at the top level."""
    tree = ast.parse(path.read_text(encoding="utf-8"))
    nodes = ast.walk(tree) if everywhere else _top_level(tree)
    modules: set[str] = set()
    for node in nodes:
        if isinstance(node, ast.Import):
            modules |= {alias.name for alias in node.names}
        elif isinstance(node, ast.ImportFrom) and node.module:
            modules |= {node.module} | {f"{node.module}.{alias.name}" for alias in node.names}
    return modules


def _top_level(tree: ast.Module) -> Iterator[ast.AST]:
    for node in tree.body:
        if isinstance(node, ast.If) and "TYPE_CHECKING" in ast.dump(node.test):
            continue
        yield from ast.walk(node) if not isinstance(node, ast.FunctionDef | ast.ClassDef) else ()


def named(path: Path) -> str:
    return path.relative_to(ROOT).as_posix()


def within(modules: set[str], *roots: str) -> set[str]:
    return {m for m in modules if any(m == root or m.startswith(f"{root}.") for root in roots)}


def test_packages_match_the_documented_order():
    entries = {path.name.removesuffix(".py") for path in (ROOT / "hfseq").iterdir()}
    assert entries - {"__init__", "__pycache__", "py.typed", "templates"} == set(ROOMS)
    contract = (ROOT / ".importlinter").read_text(encoding="utf-8")
    layers = re.findall(r"^    hfseq\.(\w+)$", contract.split("layers =")[1].split("\n\n")[0], re.M)
    assert tuple(reversed(layers)) == ROOMS
    assert " < ".join(ROOMS) in (ROOT / "docs" / "architecture.md").read_text(encoding="utf-8")


def test_imports_follow_the_package_order_without_cycles():
    pytest.importorskip("importlinter")
    # Run in a separate process: its console keeps a reference to standard output.
    code = "import sys; from importlinter import cli; sys.exit(cli.lint_imports(no_cache=True))"
    folders = os.pathsep.join((str(ROOT), str(ROOT / "plugins")))
    process = subprocess.run(
        [sys.executable, "-c", code],
        cwd=ROOT,
        env={**os.environ, "PYTHONPATH": folders},
        capture_output=True,
        text=True,
    )
    assert process.returncode == 0, process.stdout + process.stderr


def test_no_package_imports_the_top_level():
    for path in FILES:
        if named(path).startswith("hfseq/"):
            pattern = r"hfseq\.(Flax|FLAX_)\w+|hfseq\.__version__"
            names = {name for name in imports(path) if re.fullmatch(pattern, name)}
            allowed = {"hfseq.__version__"} if named(path) == "hfseq/__init__.py" else set()
            assert names <= allowed, named(path)


def test_command_line_imports_nothing_heavy():
    heavy = {named(path): within(imports(path, everywhere=False), *HEAVY) for path in LIGHT}
    assert not {path: modules for path, modules in heavy.items() if modules}


def test_in_tree_plugins_use_only_public_packages():
    allowed = ("hfseq.nn", "hfseq.modeling", "hfseq.generation", "hfseq.errors", "hfseq.hookimpl")
    allowed += ("hfseq.RegisterArchitecture",)  # the type of the argument of a hook
    for path in (ROOT / "plugins").rglob("*.py"):
        used = within(imports(path), "hfseq") - {"hfseq"}
        assert used == within(used, *allowed), named(path)


@pytest.mark.parametrize(
    ("module", "files"),
    [
        ("orbax", {"hfseq/training/checkpointer.py"}),
        (
            "torch",
            {
                *("hfseq/testing/torch.py", "hfseq/testing/fresh.py"),
                "hfseq/modeling/pytorch_utils.py",
                "hfseq/cli/consumers.py",  # run in a subprocess, never imported
                # saved with checkpoints, imported only by Transformers
                *(f"{TWIN}/{name}_vq_transformer.py" for name in ("attention", "codebook")),
                *(f"{TWIN}/{name}_vq_transformer.py" for name in ("layers", "modeling", "state")),
                # compare ports with PyTorch
                *(f"hfseq/cli/port/{name}.py" for name in ("__init__", "bisection")),
                *(f"hfseq/cli/port/{name}.py" for name in ("coverage", "verification")),
                # imported only for bridged models
                *(named(path) for path in FILES if named(path).startswith(f"{BRIDGE}/")),
            },
        ),
        ("tensorboardX", set()),
        ("flax.nnx.nn.fp8", set()),
        (
            "jax._src",
            {
                "hfseq/training/processes.py",
                "hfseq/training/aot.py",
                "hfseq/nn/kernels/cudnn.py",
            },
        ),
    ],
)
def test_a_module_is_known_to_few_files(module, files):
    users = {named(path) for path in FILES if within(imports(path), module)}
    assert users <= files


@pytest.mark.parametrize(
    "name", ["__init__", "classes", "export_command", "exported", "heads", "variables"]
)
def test_parts_of_the_bridge_need_no_torch(name):
    path = ROOT / BRIDGE / f"{name}.py"
    assert not within(imports(path, everywhere=False), "torch", "hfseq_plugins.bridge.model")


def test_one_file_touches_the_fp8_functions_of_flax():
    users = [named(path) for path in FILES if "fp8_ops" in path.read_text(encoding="utf-8")]
    assert users == ["hfseq/nn/fp8.py"]


def test_the_walks_of_the_documentation_name_files_that_exist():
    text = (ROOT / "docs" / "architecture.md").read_text(encoding="utf-8")
    steps = re.findall(r"^\d+\. .*", text, re.M)
    files = {
        name
        for step in steps
        for name in re.findall(r"`((?:hfseq|plugins|scripts)/[\w/]+\.py)`", step)
    }
    assert len(files) > 12
    for name in files:
        assert (ROOT / name).is_file(), name
