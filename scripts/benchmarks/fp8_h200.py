"""Training steps compiled for an H200 without one: is every product that should be FP8 an FP8 one?

    python scripts/benchmarks/fp8_h200.py --target h200_target.txtpb --packages DIR

``--target`` is XLA's description of the GPU (GpuTargetConfigProto as text; its ``runtime_version``
must be there, or XLA leaves FP8 out without a word). ``--packages`` is a folder beside the
environment with what compiles for CUDA, for the version of jax that is installed:

    pip install --no-deps --target DIR jax-cuda12-plugin==VERSION jax-cuda12-pjrt==VERSION \
        nvidia-cuda-nvcc-cu12

Each architecture's full step (loss, gradients, AdamW) is compiled in each recipe, and the matrix
products of the result are counted by the type of their operands. A Linear at FP8's sites has three:
forward, gradient of the input, gradient of the kernel. Exit code 1 if one of them is not FP8.
``--models`` adds to the table of an earlier run at the same sizes.
"""

from __future__ import annotations

import argparse
import contextlib
import dataclasses
import json
import os
import sys
import time
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

if __name__ == "__main__":
    sys.path.insert(0, str(Path(__file__).resolve().parent))

import fp8_hlo
import fp8_step
import harness
import report

# Products that share an operand (keys and values of all decoder layers) stay apart, to be counted.
SEPARATE = {"xla_disable_hlo_passes": "dot-merger"}
CUBLAS = {"xla_gpu_enable_triton_gemm": False}
RECIPES = ("bfloat16", "fp8_delayed", "fp8_current")
PLACES, CHOICES = ("target", "packages", "dump", "output"), ("models", "recipes")
FP8 = tuple(name for name in RECIPES if name.startswith("fp8"))


@dataclasses.dataclass
class Counts:
    """What was found in the compiled step of an architecture (``name``) in a recipe (``group``)."""

    name: str
    group: str
    targeted: int
    kernels: dict[str, int] = dataclasses.field(default_factory=dict)
    seconds: float = 0.0
    status: str = "ok"

    @property
    def found(self) -> int:
        """Products with FP8 operands."""
        return self.kernels.get(fp8_hlo.FP8_PRODUCT, 0)

    @property
    def right(self) -> bool:
        """Whether all targeted products, and no others, are FP8."""
        return self.status == "ok" and self.found == self.targeted


def use_packages(folder: Path | None) -> None:
    """Let jax find the CUDA compiler in ``folder``; before jax is imported."""
    os.environ["JAX_PLATFORMS"] = "cpu"
    if folder is None:
        return
    compiler = folder / "nvidia" / "cuda_nvcc"
    lacking = [p for p in (folder / "jax_plugins", compiler / "bin" / "ptxas") if not p.exists()]
    if lacking:
        raise SystemExit(
            f"--packages {folder} has no {lacking[0].relative_to(folder)}: fill it with\n"
            f"  pip install --no-deps --target {folder} jax-cuda12-plugin==VERSION "
            "jax-cuda12-pjrt==VERSION nvidia-cuda-nvcc-cu12\n"
            "where VERSION is that of the installed jax"
        )
    sys.path.append(str(folder))
    os.environ["PATH"] = f"{compiler / 'bin'}{os.pathsep}{os.environ.get('PATH', '')}"
    flags = f"--xla_gpu_cuda_data_dir={compiler}"
    os.environ["XLA_FLAGS"] = f"{os.environ.get('XLA_FLAGS', '')} {flags}".strip()


def read_target(path: Path) -> str:
    """Return the description of the GPU; SystemExit if it is none, or would switch FP8 off."""
    if not path.is_file():
        raise SystemExit(f"--target {path}: there is no such file")
    text = path.read_text()
    for field in ("gpu_device_info", "runtime_version"):
        if field not in text:
            raise SystemExit(
                f"--target {path} has no {field}: it is no GpuTargetConfigProto of a GPU with a "
                "CUDA runtime, and XLA would compile without FP8 products"
            )
    return text


def gpu(target: str) -> Any:
    """Return the sharding of one GPU that is only described."""
    import numpy as np
    from jax.experimental import topologies
    from jax.sharding import Mesh, NamedSharding, PartitionSpec

    described = topologies.get_topology_desc(
        platform="cuda", topology_name="h200", target_config=target, topology="1x1x1"
    )
    return NamedSharding(Mesh(np.array(described.devices[:1]), ("data",)), PartitionSpec())


@contextlib.contextmanager
def tracing_for_gpu() -> Iterator[None]:
    """Let the library believe that it runs on a GPU: some code has a form for CPUs alone."""
    import jax

    real = jax.default_backend
    jax.default_backend = lambda: "gpu"
    try:
        yield
    finally:
        jax.default_backend = real


def compiled(
    prepared: fp8_step.Prepared, place: Any, cublas: bool = False, separate: bool = True
) -> Any:
    """Compile a step for the GPU at ``place``; returns the program.

    ``cublas``: no products of Triton; ``separate``: products that share an operand stay apart.
    """
    import jax

    def there(leaf: Any) -> Any:
        return jax.ShapeDtypeStruct(leaf.shape, leaf.dtype, sharding=place)

    arguments = jax.tree.map(there, (prepared.abstract(), prepared.batches[0]))
    with tracing_for_gpu():
        traced = jax.jit(prepared.step, donate_argnums=0).trace(*arguments)
    lowered = traced.lower(lowering_platforms=("cuda",))
    options = (SEPARATE if separate else {}) | (CUBLAS if cublas else {})
    return lowered.compile(compiler_options=options)


def count(
    name: str, recipe: str, size: fp8_step.Size, place: Any, dump: Path | None, cublas: bool
) -> Counts:
    """Compile and count; what fails is noted."""
    row, started = Counts(name, recipe, 0), time.perf_counter()
    try:
        if recipe in FP8:
            row.targeted = fp8_step.targeted(name, size)
        text = compiled(fp8_step.prepare(name, recipe, size), place, cublas).as_text()
        if dump is not None:
            dump.mkdir(parents=True, exist_ok=True)
            (dump / f"{name}.{recipe}.hlo").write_text(text)
        row.kernels = fp8_hlo.count_kinds(text)
    except Exception as error:
        row.status = f"failed: {type(error).__name__}: {error}".splitlines()[0][:200]
    row.seconds = round(time.perf_counter() - started, 1)
    return row


def section(result: dict[str, Any]) -> str:
    """Return what benchmarks/tables.md shows."""
    columns = ["", "recipe", "targeted", "FP8 products", "other products", "kernels"]
    lines = []
    for row in result["rows"]:
        kernels = row["kernels"]
        found = [str(row["targeted"]), str(kernels.get(fp8_hlo.FP8_PRODUCT, 0))]
        found += [str(kernels.get(fp8_hlo.PRODUCT, 0)), str(sum(kernels.values()))]
        if row["status"] != "ok":
            found = [row["status"], *["-"] * 3]
        lines.append([row["name"], row["group"], *found])
    size, versions = result["options"], result["machine"]["versions"]
    facts = (
        f"Width {size['width']}, {size['layers']} layers, {size['batch_size']} rows of "
        f"{size['length']}, vocabulary {size['vocab_size']}; compiled for "
        f"{result['target']} without a GPU (jax {versions.get('jax')}), products by "
        f"{'cuBLASLt' if size['cublas'] else 'Triton (no autotuning)'}, none merged with another."
    )
    return f"{harness.table(columns, lines)}\n\n{facts}\n\n`{result['command']}`"


def parse(arguments: Sequence[str] | None = None) -> argparse.Namespace:
    """Read the flags."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--target", type=Path, required=True, help="the GPU, as a text proto")
    parser.add_argument("--packages", type=Path, help="folder of the CUDA plugin and compiler")
    parser.add_argument("--models", nargs="+", help="architectures; all by default")
    parser.add_argument("--recipes", nargs="+", default=list(RECIPES), choices=RECIPES)
    parser.add_argument("--width", type=int, default=256, help="hidden size (256)")
    parser.add_argument("--layers", type=int, default=1, help="layers of every stack (1)")
    parser.add_argument("--batch_size", type=int, default=8, help="rows a step (8)")
    parser.add_argument("--length", type=int, default=128, help="tokens a row (128)")
    parser.add_argument("--vocab_size", type=int, default=1024, help="(1024)")
    parser.add_argument("--cublas", action="store_true", help="products by cuBLASLt, not Triton")
    parser.add_argument("--dump", type=Path, help="folder that gets the compiled HLO")
    parser.add_argument(
        "--output", type=Path, default=harness.ROOT / "docs",
        help="gets benchmarks/tables.md and fp8_h200.json",
    )  # fmt: skip
    return parser.parse_args(arguments)


def problems(rows: Sequence[Counts]) -> list[str]:
    """Return a line for every row whose products are not what they should be."""
    return [
        f"{row.name} in {row.group}: {row.found} of {row.targeted} targeted products are FP8"
        for row in rows
        if row.status == "ok" and not row.right
    ]


def command(options: argparse.Namespace) -> str:
    """Return the command that makes the whole table, with names instead of places."""
    given = ["--target", options.target.name, "--packages", "DIR"]
    usual = vars(parse(given))
    for name, value in vars(options).items():
        if name not in (*PLACES, *CHOICES) and value != usual[name]:
            given += [f"--{name}"] + ([] if value is True else [str(value)])
    return report.command("fp8_h200", given)


def kept(result: dict[str, Any], output: Path) -> dict[tuple[str, str], Counts]:
    """Return the rows of an earlier run at the same sizes, which this one adds to."""
    path = output / "benchmarks" / f"{result['benchmark']}.json"
    earlier = json.loads(path.read_text()) if path.exists() else {"options": {}}
    sizes, versions = (
        [{k: v for k, v in r["options"].items() if k not in CHOICES} for r in (earlier, result)],
        [r.get("machine", {}).get("versions", {}).get("jax") for r in (earlier, result)],
    )
    if sizes[0] != sizes[1] or versions[0] != versions[1] or earlier["target"] != result["target"]:
        return {}
    names = [field.name for field in dataclasses.fields(Counts)]
    rows = (Counts(**{name: row[name] for name in names}) for row in earlier["rows"])
    return {(row.name, row.group): row for row in rows}


def order(row: Counts) -> tuple[str, int]:
    """Sort by architecture, then as recipes are listed."""
    return row.name, RECIPES.index(row.group)


def main(arguments: Sequence[str] | None = None) -> int:
    """Compile, count, print and write; exit code 1 if a targeted product is not FP8."""
    options = parse(arguments)
    target = read_target(options.target)
    use_packages(options.packages)
    sys.path[:0] = [str(harness.ROOT), str(harness.ROOT / "plugins")]
    place = gpu(target)
    size = fp8_step.Size(
        options.width, options.layers, options.batch_size, options.length, options.vocab_size
    )
    result = {
        "benchmark": "fp8_h200", "command": command(options), "machine": harness.machine_facts(),
        "options": {key: value for key, value in vars(options).items() if key not in PLACES},
        "target": place.mesh.devices.flat[0].device_kind,
    }  # fmt: skip
    made = {}
    for name in options.models or fp8_step.architectures():
        for recipe in options.recipes:
            row = count(name, recipe, size, place, options.dump, options.cublas)
            made[name, recipe] = row
            report.tell(f"{row}")
    rows = sorted((kept(result, options.output) | made).values(), key=order)
    result["rows"] = [dataclasses.asdict(row) | {"fp8_products": row.found} for row in rows]
    result["problems"] = problems(rows)
    return report.publish(result, section(result), options.output, failed=bool(problems(rows)))


if __name__ == "__main__":
    sys.exit(main())
