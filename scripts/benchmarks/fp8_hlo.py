"""What a compiled step is made of: each kernel of XLA's optimised HLO and its kind.

A matrix product is an FP8 one only if both of its operands are of an FP8 type where it is computed;
one whose operands were rounded to FP8 and widened again (emulated) is counted with the others.
"""

from __future__ import annotations

import collections
import dataclasses
import math
import re
from collections.abc import Iterator

FP8_PRODUCT = "FP8 products"
PRODUCT = "other products"
ATTENTION = "fused attention"
QUANTISATION = "FP8 casts, maxima, scales"
OPTIMIZER = "optimizer, norm, state"
COLLECTIVE = "collectives"
COPY = "copies"
REST = "element-wise and sums"
KINDS = (FP8_PRODUCT, PRODUCT, ATTENTION, QUANTISATION, REST, OPTIMIZER, COLLECTIVE, COPY)

_HEADER = re.compile(r"^(ENTRY )?%?([\w.\-]+) \(.*\{\s*$")
_LINE = re.compile(r"^\s+(?:ROOT )?%?([\w.\-]+) = (.+?) ([a-z][\w\-]*)\((.*)$")
_NAME = re.compile(r"%([\w.\-]+)")
_CALLED = re.compile(
    r"\b(?:calls|to_apply|body|condition|true_computation|false_computation)=%?([\w.\-]+)"
)
_BRANCHES = re.compile(r"branch_computations=\{([^}]*)\}")
_OP_NAME = re.compile(r'op_name="([^"]*)"')
_SIZES = re.compile(r"\b[a-z]+\d*\w*\[([\d,]*)\]")
_ARRAYS = re.compile(r"\b(pred|[a-z]+\d+\w*)\[([\d,]*)\]")
_TARGET = re.compile(r'custom_call_target="([^"]*)"')
# What costs nothing, and what only holds others.
_FREE = {
    *("parameter", "constant", "bitcast", "get-tuple-element", "tuple", "after-all"),
    *("partition-id", "replica-id", "opt-barrier", "domain", "add-dependency"),
}
_HOLDERS = {"while", "conditional", "call"}
_COLLECTIVES = ("all-reduce", "all-gather", "reduce-scatter", "all-to-all", "collective-permute")
_MOVES = {"copy", "transpose", "copy-start", "slice", "dynamic-slice", "concatenate", "pad"}


@dataclasses.dataclass(frozen=True)
class Instruction:
    """A line of a computation: ``shape`` is its result as written, ``rest`` what follows ``(``."""

    name: str
    shape: str
    opcode: str
    rest: str

    @property
    def called(self) -> list[str]:
        """Names of the computations that it runs."""
        branches = _BRANCHES.search(self.rest)
        return _CALLED.findall(self.rest) + (_NAME.findall(branches[1]) if branches else [])

    @property
    def op_name(self) -> str:
        """Where it comes from, in jax's terms (``jit(step)/jvp()/dot_general``)."""
        found = _OP_NAME.search(self.rest)
        return found[1] if found else ""


class Module:
    """The computations of a compiled program, read from ``compiled.as_text()``."""

    def __init__(self, text: str):
        self.computations: dict[str, dict[str, Instruction]] = {}
        self.entry = ""
        self.quantises = "f8e" in text
        current: dict[str, Instruction] = {}
        for line in text.splitlines():
            if header := _HEADER.match(line):
                current = self.computations.setdefault(header[2], {})
                self.entry = header[2] if header[1] else self.entry
            elif found := _LINE.match(line):
                current[found[1]] = Instruction(*found.groups())
        if not self.entry:
            raise ValueError("no ENTRY computation: this is not the text of a compiled program")

    def kinds(self) -> dict[str, str]:
        """Return the kind of every kernel by its name, as profiles call it."""
        return {
            kernel.name: self.kind(kernel, place) for place, kernel in self._kernels(self.entry)
        }

    def traffic(self) -> list[tuple[Instruction, str, int]]:
        """Return each kernel, its kind, and the bytes of its operands and results.

        That is what it moves if it reads and writes everything once, a loop's body counted once.
        """
        found = []
        for place, kernel in self._kernels(self.entry):
            known = self.computations[place]
            operands = {name for name in _NAME.findall(kernel.rest) if name in known}
            shapes = [kernel.shape, *(known[name].shape for name in operands)]
            size = sum(bytes_of(shape) for shape in shapes)
            found.append((kernel, self.kind(kernel, place), size))
        return found

    def _kernels(self, name: str) -> Iterator[tuple[str, Instruction]]:
        for instruction in self.computations[name].values():
            if instruction.opcode in _HOLDERS:
                for inner in instruction.called:
                    yield from self._kernels(inner)
            elif instruction.opcode not in _FREE and not instruction.opcode.endswith("-done"):
                yield name, instruction

    def kind(self, kernel: Instruction, place: str) -> str:
        """Return the kind of ``kernel``, which stands in the computation ``place``."""
        if kernel.opcode.startswith(_COLLECTIVES):
            return COLLECTIVE
        if target := _TARGET.search(kernel.rest):
            if "matmul" in target[1] or "gemm" in target[1]:
                return self._product(kernel, place)
            if "fmha" in target[1]:
                return ATTENTION
        inside = self._inside(kernel)
        for where, instruction in inside:
            if instruction.opcode == "dot":
                return self._product(instruction, where)
        if kernel.opcode == "dot":
            return self._product(kernel, place)
        if self.quantises and self._quantises(kernel, inside):
            return QUANTISATION
        if {kernel.opcode, *(i.opcode for _, i in inside)} <= _MOVES | _FREE | {"fusion"}:
            return COPY
        return REST if "jvp" in kernel.op_name else OPTIMIZER

    def _inside(self, kernel: Instruction) -> list[tuple[str, Instruction]]:
        """Return what a fusion holds, fusions in it included."""
        found = []
        for name in kernel.called if kernel.opcode in ("fusion", "async-start") else []:
            for instruction in self.computations.get(name, {}).values():
                found += [(name, instruction), *self._inside(instruction)]
        return found

    def _product(self, product: Instruction, place: str) -> str:
        """Tell an FP8 product by the types of its two operands."""
        known = self.computations[place]
        operands = [known[name] for name in _NAME.findall(product.rest)[:2] if name in known]
        fp8 = [bool(re.match(r"\(?f8e", operand.shape)) for operand in operands]
        return FP8_PRODUCT if len(fp8) == 2 and all(fp8) else PRODUCT

    def _quantises(self, kernel: Instruction, inside: list[tuple[str, Instruction]]) -> bool:
        """Tell whether FP8 is made or widened here, or what scales it is found."""
        shapes = [kernel.shape, *(instruction.shape for _, instruction in inside)]
        if "_roll" in kernel.op_name or any("f8e" in shape for shape in shapes):
            return True
        small = all(size in ("", "1") for size in _SIZES.findall(kernel.shape))
        reduced = [i for _, i in inside if i.opcode == "reduce"]
        steps = {
            step.opcode
            for instruction in reduced
            for name in instruction.called
            for step in self.computations.get(name, {}).values()
        }
        absolute = any(instruction.opcode == "abs" for _, instruction in inside)
        if "maximum" in steps and (absolute or small):
            return True
        return small and not reduced and "jvp" in kernel.op_name


def bytes_of(shape: str) -> int:
    """Return the bytes of a shape as HLO writes it, those of all parts of a tuple."""
    total = 0
    for kind, sizes in _ARRAYS.findall(shape):
        bits = int(re.sub(r"^[a-z]+(\d+).*|pred", r"\1", kind) or 8)
        total += math.prod(map(int, filter(None, sizes.split(",")))) * bits // 8
    return total


def count_kinds(text: str) -> dict[str, int]:
    """Return how many kernels of each kind a compiled program has, in the order of ``KINDS``."""
    found = collections.Counter(Module(text).kinds().values())
    return {kind: found[kind] for kind in KINDS if found[kind]}
