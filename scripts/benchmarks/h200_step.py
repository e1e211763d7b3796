"""What a training step moves and needs on an H200, compiled without one.

    python scripts/benchmarks/h200_step.py --target h200_target.txtpb --packages DIR
    python scripts/benchmarks/h200_step.py … --steps gpt2:16x1024 --top 40     the largest kernels

``--target`` and ``--packages`` are those of fp8_h200.py. Each step is the loop's (loss, gradients,
AdamW) at base width with a few layers. Of every kernel of the compiled program the bytes of its
operands and results are added up: at the bandwidth of the GPU they take a time that no kernel can
beat, to be compared with that of the products at its peak. Attention is XLA's: cuDNN's cannot be
compiled without a GPU.
"""

from __future__ import annotations

import argparse
import collections
import dataclasses
import re
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Any

if __name__ == "__main__":
    sys.path.insert(0, str(Path(__file__).resolve().parent))

import fp8_h200
import fp8_hlo
import fp8_step
import harness
import report

BANDWIDTH, PEAK = 4.8e12, 989e12  # of an H200, bytes a second and half-precision FLOP/s
STEPS = ("roberta:32x512", "gpt2:16x1024")
SHOWN = (fp8_hlo.PRODUCT, fp8_hlo.REST, fp8_hlo.OPTIMIZER, fp8_hlo.COPY)


@dataclasses.dataclass
class Found:
    """What the compiled step of a model (``name``, ``group`` its batch) consists of."""

    name: str
    group: str
    kernels: int
    bytes: dict[str, int]
    temporary: int
    flops: float
    status: str = "ok"

    @property
    def moved(self) -> int:
        """Bytes of all kernels."""
        return sum(self.bytes.values())


def parse(arguments: Sequence[str] | None = None) -> argparse.Namespace:
    """Read the flags."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--target", type=Path, required=True, help="the GPU, as a text proto")
    parser.add_argument("--packages", type=Path, help="folder of the CUDA plugin and compiler")
    parser.add_argument("--steps", nargs="+", default=list(STEPS), help="MODEL:ROWSxLENGTH")
    parser.add_argument("--precision", default="bfloat16", help="recipe (bfloat16)")
    parser.add_argument("--width", type=int, default=768, help="hidden size (768)")
    parser.add_argument("--layers", type=int, default=2, help="layers of every stack (2)")
    parser.add_argument("--vocab_size", type=int, default=50257, help="(50257)")
    parser.add_argument("--top", type=int, default=0, help="print so many of the largest kernels")
    parser.add_argument(
        "--output", type=Path, default=harness.ROOT / "docs",
        help="gets benchmarks/tables.md and h200_step.json",
    )  # fmt: skip
    options = parser.parse_args(arguments)
    for step in options.steps:
        if not re.fullmatch(r"\w+:[1-9]\d*x[1-9]\d*", step):
            parser.error(f"--steps {step}: give MODEL:ROWSxLENGTH, e.g. gpt2:16x1024")
    return options


def look(step: str, options: argparse.Namespace, place: Any) -> Found:
    """Compile a step and add up what it moves."""
    from hfseq.training import throughput

    name, _, batch = step.partition(":")
    rows, length = map(int, batch.split("x"))
    size = fp8_step.Size(options.width, options.layers, rows, length, options.vocab_size)
    prepared = fp8_step.prepare(name, options.precision, size)
    program = fp8_h200.compiled(prepared, place, cublas=True, separate=False)
    traffic = fp8_hlo.Module(program.as_text()).traffic()
    moved: collections.Counter[str] = collections.Counter()
    for _, kind, count in traffic:
        moved[kind] += count
    largest = sorted(traffic, key=lambda kernel: -kernel[2])[: options.top]
    for kernel, kind, count in largest:
        report.tell(f"{count / 1e6:9.1f} MB  {kind:24s} {kernel.shape[:64]:64s} {kernel.op_name}")
    flops = throughput.run_flops(prepared.module, prepared.objective, rows, length)
    temporary = program.memory_analysis().temp_size_in_bytes
    return Found(name, batch, len(traffic), dict(moved), temporary, flops)


def section(result: dict[str, Any]) -> str:
    """Return what benchmarks/tables.md shows."""
    columns = ["", "batch", "kernels", *SHOWN, "moved", "least by bytes", "least by products",
               "temporary"]  # fmt: skip
    lines = [
        [
            row["name"], row["group"], str(row["kernels"]),
            *(f"{row['bytes'].get(kind, 0) / 1e9:.2f} GB" for kind in SHOWN),
            f"{row['moved'] / 1e9:.1f} GB", f"{row['moved'] / BANDWIDTH * 1e3:.2f} ms",
            f"{row['flops'] / PEAK * 1e3:.2f} ms", f"{row['temporary'] / 1e9:.2f} GB",
        ]
        for row in result["rows"]
    ]  # fmt: skip
    size, versions = result["options"], result["machine"]["versions"]
    facts = (
        f"Width {size['width']}, {size['layers']} layers, vocabulary {size['vocab_size']}, "
        f"{size['precision']}, no dropout; compiled for {result['target']} without a GPU (jax "
        f"{versions.get('jax')}), products by cuBLAS, attention by XLA; 4.8 TB/s, 989 TFLOP/s."
    )
    return f"{harness.table(columns, lines)}\n\n{facts}\n\n`{result['command']}`"


def main(arguments: Sequence[str] | None = None) -> int:
    """Compile, add up, print and write."""
    options = parse(arguments)
    target = fp8_h200.read_target(options.target)
    fp8_h200.use_packages(options.packages)
    sys.path[:0] = [str(harness.ROOT), str(harness.ROOT / "plugins")]
    place = fp8_h200.gpu(target)
    places = ("target", "packages", "output", "top")
    result = {
        "benchmark": "h200_step",
        "command": f"python scripts/benchmarks/h200_step.py --target {options.target.name} "
        "--packages DIR",
        "machine": harness.machine_facts(),
        "options": {key: value for key, value in vars(options).items() if key not in places},
        "target": place.mesh.devices.flat[0].device_kind, "problems": [],
    }  # fmt: skip
    rows = [look(step, options, place) for step in options.steps]
    result["rows"] = [dataclasses.asdict(row) | {"moved": row.moved} for row in rows]
    return report.publish(result, section(result), options.output, failed=False)


if __name__ == "__main__":
    sys.exit(main())
