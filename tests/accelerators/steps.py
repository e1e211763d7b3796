"""Training steps of small models, compiled for described devices, and what is read of them."""

from __future__ import annotations

import collections
import dataclasses
import functools
import json
import math
import re
import sys
from pathlib import Path
from typing import Any

import tests.support.environment  # noqa: F401  # before anything imports jax, run as a script too

import jax  # isort: skip
import pytest

from hfseq.cli.plan.options import OBJECTIVES, Options
from hfseq.training import aot, collectives
from tests.accelerators.families import FAMILIES, LENGTH, PROGRAMS, run_of

WIDTH = 256
TABLE = Path(__file__).with_name("collectives.json")
#: Bytes that a step has beside its arguments, by family and program.
TEMPORARY = Path(__file__).with_name("temporary.json")


@dataclasses.dataclass(frozen=True)
class Step:
    """A compiled training step, as text and numbers; bytes are those of a device.

    ``tiled`` are those of state and inputs in a TPU's tiles.
    """

    text: str
    arguments: int
    alias: int
    temporary: int
    state: int
    inputs: int
    tiled: int
    exchanged: list[list]
    lengths: tuple[int, ...]

    def calls(self, *targets: str) -> int:
        """How often kernels are called whose custom call, or name, begins so."""
        names = re.findall(r'custom_call_target="([^"]+)"', self.text)
        if any("tpu_custom_call" in name for name in names):
            names = re.findall(r'kernel_name = "(\w+)"|"(splash_mh\w+)"', self.text)
            names = [first or second for first, second in names]
        return sum(name in targets for name in names)

    @property
    def squares(self) -> collections.Counter:
        """Results with two axes of a length, or of two of them, in fusions too."""
        shapes = re.findall(r"\w+\[[\d,]+\]", self.text)
        sizes = {shape: map(int, re.findall(r"\d+", shape.split("[")[1])) for shape in set(shapes)}
        wide = {s for s, axes in sizes.items() if sum(axis in self.lengths for axis in axes) > 1}
        return collections.Counter(shape for shape in shapes if shape in wide)

    @property
    def float32_products(self) -> list[str]:
        """Products of two float32 arrays, of a size that matters."""
        program = list(collectives.instructions(self.text))
        shapes = {(one.computation, one.name): one.shape for one in program}
        found = []
        for one in program:
            if one.opcode not in ("dot", "convolution"):
                continue
            names = re.findall(r"%([\w.\-]+)", one.attributes.split(")")[0])
            given = [shapes.get((one.computation, name), "") for name in names[:2]]
            sizes = [math.prod(map(int, re.findall(r"\d+", s.split("{")[0][4:]))) for s in given]
            if all(s.startswith("f32[") for s in given) and min(sizes) >= WIDTH * WIDTH:
                found.append(f"{one.shape} of {given}: {one.op_name}")
        return found


@functools.cache
def compiled(
    family: str,
    target: str = "h200",
    mesh: str | None = None,
    count: int = 1,
    *,
    dropout: float = 0.1,
    attention: str | None = None,
    remat: bool = False,
) -> Step:
    """The training loop's own step of rows packed with up to eight documents."""
    if reason := aot.unavailable_reason(aot.parse(target)[0].name):
        pytest.skip(reason)
    spec, devices = FAMILIES[family], aot.describe(aot.parse(target)[0].name, count)
    dropped = f"{spec.dropout}={dropout}" if spec.dropout else ""
    options = Options(
        config=family.split(",")[0],
        devices=f"{target}:{count}",
        mesh=mesh,
        length=LENGTH,
        per_device_train_batch_size=2,
        precision="bfloat16",
        objective=spec.objective if spec.objective in OBJECTIVES else None,
        config_overrides=",".join(filter(None, (spec.sizes, dropped))),
        attn_implementation=attention,
        gradient_checkpointing=remat,
    )
    run, batch = run_of(family, devices, options)
    state = run.abstract_state()
    program = aot.compile_for(
        devices[0], run.step_function(), state, run.frozen, batch, fast_compile=True
    )
    memory, text = program.memory_analysis(), program.as_text() or ""
    groups: dict[tuple, list] = {}
    for one in collectives.find_collectives(text, run.mesh):
        key = (one.op, "x".join(one.axes))
        group = groups.setdefault(key, [*key, 0, 0])
        group[2] += one.times
        group[3] += one.size * one.times

    def local(tree: Any, tile: tuple[int, int] = (1, 1)) -> int:
        total = 0
        for leaf in jax.tree.leaves(tree):
            *rest, rows, width = (1, 1, *leaf.sharding.shard_shape(leaf.shape))
            tiles = -(-rows // tile[0]) * -(-width // tile[1])
            total += math.prod(rest) * tiles * math.prod(tile) * leaf.dtype.itemsize
        return total

    return Step(
        text,
        memory.argument_size_in_bytes,
        memory.alias_size_in_bytes,
        memory.temp_size_in_bytes,
        local(state),
        local(batch),
        local((state, batch), (8, 128)),
        sorted(groups.values()),
        spec.lengths,
    )


#: Programs over several devices, whose exchange the table has.
MESHES = {
    "roberta on h200, data=8": ("roberta", "h200", "data=8", 8, 0.1),
    "t5 on h200, data=8": ("t5", "h200", "data=8", 8, 0.1),
    "roberta on h200, fsdp=8": ("roberta", "h200", "fsdp=8", 8, 0.1),
    "roberta on v5e, data=2,tensor=2": ("roberta", "v5e", "data=2,tensor=2", 4, 0.0),
    "roberta on v6e, fsdp=4": ("roberta", "v6e", "fsdp=4", 4, 0.0),
}


def exchange(name: str) -> Step:
    family, target, mesh, count, dropout = MESHES[name]
    return compiled(family, target, mesh, count, dropout=dropout)


def step_of(family: str, program: str) -> Step:
    """Compile one of the programs that every family is compiled to."""
    target, dropout = PROGRAMS[program]
    return compiled(family, target, dropout=dropout)


def write(path: Path, table: dict[str, Any]) -> None:
    """Write a table, a line for each entry."""
    lines = [f"  {json.dumps(name)}: {json.dumps(entry)}" for name, entry in table.items()]
    path.write_text("{\n" + ",\n".join(lines) + "\n}\n", encoding="utf-8")


if __name__ == "__main__":  # python -m tests.accelerators.steps [FAMILY ...]
    families = sys.argv[1:]
    if not families:
        write(TABLE, {name: exchange(name).exchanged for name in MESHES})
    rows = json.loads(TEMPORARY.read_text(encoding="utf-8"))
    for family in families or FAMILIES:
        rows[family] = {program: step_of(family, program).temporary for program in PROGRAMS}
        print(family, rows[family], flush=True)
        write(TEMPORARY, {name: rows[name] for name in FAMILIES if name in rows})
