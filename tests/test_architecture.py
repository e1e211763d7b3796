"""What docs/architecture.md promises about imports."""

from __future__ import annotations

import ast
from collections.abc import Iterator
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parent.parent
TWIN = "plugins/hfseq_plugins/vq_transformer/torch_files"
FILES = sorted((ROOT / "hfseq").rglob("*.py")) + sorted((ROOT / "plugins").rglob("*.py"))


def imports(path: Path, everywhere: bool = True) -> set[str]:
    """The modules that a file imports; without ``everywhere`` those at its top level only."""
    tree = ast.parse(path.read_text(encoding="utf-8"))
    nodes = ast.walk(tree) if everywhere else _top_level(tree)
    found: set[str] = set()
    for node in nodes:
        if isinstance(node, ast.Import):
            found |= {alias.name for alias in node.names}
        elif isinstance(node, ast.ImportFrom) and node.module:
            found.add(node.module)
            if node.module in ("hfseq", "hfseq_plugins"):
                found |= {f"{node.module}.{alias.name}" for alias in node.names}
    return found


def _top_level(tree: ast.Module) -> Iterator[ast.AST]:
    for node in tree.body:
        if isinstance(node, ast.If) and "TYPE_CHECKING" in ast.dump(node.test):
            continue
        yield from ast.walk(node) if not isinstance(node, ast.FunctionDef | ast.ClassDef) else ()


def named(path: Path) -> str:
    return path.relative_to(ROOT).as_posix()


def within(modules: set[str], *roots: str) -> set[str]:
    return {m for m in modules if any(m == root or m.startswith(f"{root}.") for root in roots)}


@pytest.mark.parametrize("room", ["nn", "data", "objectives"])
def test_lower_rooms_do_not_import_training(room):
    for path in (ROOT / "hfseq" / room).rglob("*.py"):
        assert not within(imports(path), "hfseq.training"), named(path)


@pytest.mark.parametrize(
    "name",
    [
        *("modeling", "seq2seq", "inputs", "pretrained", "weights", "checkpoint_files", "outputs"),
        "trees",
    ],
)
def test_models_import_neither_training_nor_data(name):
    path = ROOT / "hfseq" / f"{name}.py"
    assert not within(imports(path), "hfseq.training", "hfseq.data", "hfseq.objectives")


@pytest.mark.parametrize(
    "path",
    [
        *sorted((ROOT / "hfseq" / "data").rglob("*.py")),
        *(ROOT / "hfseq" / f"{name}.py" for name in ("hub", "storage", "cli", "flags", "errors")),
        *(ROOT / "hfseq" / f"{name}.py" for name in ("plugins", "registry")),
        *(ROOT / "hfseq" / f"{name}.py" for name in ("metrics", "hardware")),
        *sorted((ROOT / "hfseq" / "commands").glob("*.py")),
        *(ROOT / "hfseq" / f"translation_{name}.py" for name in ("files", "stream")),
        ROOT / "hfseq" / "training" / "arguments.py",
        ROOT / "hfseq" / "training" / "process_arguments.py",
        *sorted((ROOT / "hfseq" / "training").glob("tracking.py")),
    ],
    ids=named,
)
def test_what_the_command_line_needs_imports_nothing_heavy(path):
    heavy = ("jax", "flax", "optax", "transformers", "datasets", "torch", "huggingface_hub")
    assert not within(imports(path, everywhere=False), *heavy)


def test_plugins_use_only_what_a_third_party_can_use():
    rooms = ("nn", "modeling", "seq2seq", "outputs", "generation", "errors")
    allowed = [*(f"hfseq.{room}" for room in rooms), "hfseq.hookimpl", "hfseq.FlaxPreTrainedModel"]
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
                *("hfseq/testing/torch.py", "hfseq/checkpoints/files.py"),
                "hfseq/v4/pytorch_utils.py",
                # shipped with checkpoints, imported by Transformers alone
                *(f"{TWIN}/{name}_vq_transformer.py" for name in ("attention", "codebook")),
                *(f"{TWIN}/{name}_vq_transformer.py" for name in ("layers", "modeling", "state")),
            },
        ),
        ("tensorboardX", set()),
        ("flax.nnx.nn.fp8", set()),
        ("jax._src", {"hfseq/training/processes.py"}),
    ],
)
def test_a_module_is_known_to_few_files(module, files):
    users = {named(path) for path in FILES if within(imports(path), module)}
    assert users <= files


def test_nothing_in_the_library_imports_an_architecture():
    for path in (ROOT / "hfseq").rglob("*.py"):
        assert not within(imports(path), "hfseq_plugins"), named(path)


def test_one_file_touches_the_fp8_functions_of_flax():
    users = [named(path) for path in FILES if "fp8_ops" in path.read_text(encoding="utf-8")]
    assert users == ["hfseq/nn/fp8.py"]
