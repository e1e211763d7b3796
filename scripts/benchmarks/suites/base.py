"""What all suites share: options, cases, sizes of models, and the share of a machine's limit."""

from __future__ import annotations

import dataclasses
import shutil
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import harness

PROFILES = ("full", "quick", "tiny")
PEERS = ("torch", "torch_compile", "hfseq")
NAMES = {"torch": "PyTorch", "torch_compile": "torch.compile", "hfseq": "hfseq"}
BASELINE = NAMES["torch"]
PACKAGES = {
    "torch": ("torch", "transformers"),
    "torch_compile": ("torch", "transformers"),
    "hfseq": ("jax", "flax", "optax", "transformers", "safetensors", "pluggy"),
}

#: Changes to a configuration that make it small: for minutes on a CPU, and for tests.
_SMALL: dict[str, dict[str, dict[str, Any]]] = {
    "quick": {
        "encoder": {"hidden_size": 256, "num_attention_heads": 4, "intermediate_size": 1024},
        "gpt2": {"n_embd": 256, "n_head": 4},
        "t5": {"d_model": 256, "d_ff": 1024, "num_heads": 4},
        "two_sides": {"d_model": 256, "ffn_dim": 1024, "attention_heads": 4},
        "all": {"layers": 2, "vocab_size": 8000},
    },
    "tiny": {
        "encoder": {"hidden_size": 32, "num_attention_heads": 4, "intermediate_size": 64},
        "gpt2": {"n_embd": 32, "n_head": 4},
        "t5": {"d_model": 32, "d_ff": 64, "num_heads": 4, "d_kv": 8},
        "two_sides": {"d_model": 32, "ffn_dim": 64, "attention_heads": 4},
        "all": {"layers": 1, "vocab_size": 120},
    },
}
_KIND = {"roberta": "encoder", "bert": "encoder", "bart": "two_sides", "wmt": "two_sides"}


@dataclasses.dataclass(frozen=True)
class Options:
    """What ``run.py`` was asked for."""

    profile: str = "full"
    device: str = "cpu"
    peers: tuple[str, ...] = PEERS
    dtypes: tuple[str, ...] | None = None
    rounds: int | None = None
    threads: int = 1

    @property
    def tiny(self) -> bool:
        """Whether only the course of things matters, not a number."""
        return self.profile == "tiny"

    @property
    def gpu(self) -> bool:
        """Whether sizes are those of a GPU."""
        return self.device == "gpu"

    def choose(self, cpu: Any, gpu: Any, quick: Any, tiny: Any) -> Any:
        """Return the value for this profile and device."""
        return {"full": gpu if self.gpu else cpu, "quick": quick, "tiny": tiny}[self.profile]

    def size(self, model: str) -> dict[str, Any]:
        """Return the changes to a model's configuration: none in the full profile."""
        if self.profile == "full":
            return {}
        small = _SMALL[self.profile]
        kind = _KIND.get(model, model)
        changes = small[kind]
        if kind == "two_sides":
            sides = {k: v for k, v in changes.items() if k != "d_model"}
            changes = {"d_model": changes["d_model"]} | {
                f"{side}_{k}": v for side in ("encoder", "decoder") for k, v in sides.items()
            }
        return changes | small["all"]

    def types(self, default: tuple[str, ...]) -> tuple[str, ...]:
        """Return the types to measure: those asked for, else ``default``."""
        return self.dtypes or default


@dataclasses.dataclass(frozen=True)
class Case:
    """Contestants that step in turn, and what a step of them does.

    ``amount`` counts ``unit`` (tokens, say) in a step; ``weights`` is the model and size whose
    weights are written first and named to the contestants in ``settings["weights"]``.
    """

    name: str
    contestants: tuple[harness.Contestant, ...]
    amount: float
    unit: str = "tokens"
    dtype: str = "float32"
    rounds: int = 3
    warmup: int = 1
    settle: int = 0
    weights: tuple[str, dict[str, Any]] | None = None
    facts: dict[str, Any] = dataclasses.field(default_factory=dict)


def rivals(
    options: Options,
    factories: Mapping[str, str],
    settings: dict[str, Any],
    group: str,
    peers: tuple[str, ...] | None = None,
) -> tuple[harness.Contestant, ...]:
    """Return a contestant for each wanted peer that has a factory; PyTorch, if there, first.

    The factory of ``torch`` serves ``torch_compile``, too, with ``compiled=True``.
    """
    found = []
    for peer in peers or options.peers:
        factory = factories.get(peer.removesuffix("_compile"))
        if factory is None:
            continue
        compiled = peer.endswith("_compile")
        found.append(
            harness.Contestant(
                NAMES[peer], group, factory, settings | ({"compiled": True} if compiled else {}),
                PACKAGES[peer], programs=compilers(options) if compiled else (),
            )
        )  # fmt: skip
    return tuple(found)


def compilers(options: Options) -> tuple[str, ...]:
    """Return the programs that torch.compile starts: C++ on a CPU, C (for Triton) on a GPU."""
    return ("gcc",) if options.gpu else ("g++",)


def detect_device() -> str:
    """Tell ``gpu`` from ``cpu`` without loading any library."""
    nvidia = Path("/dev/nvidiactl").exists() or shutil.which("nvidia-smi") is not None
    return "gpu" if nvidia else "cpu"


def summary(row: harness.Row, case: Case, rows: list[harness.Row], limits: dict[str, float]) -> Any:
    """Return the numbers of a row, as JSON; what did not run has ``None``.

    FLOPs and bytes of a step are those that the row states, or another one of its case: what has to
    be done is the same for all.
    """
    first = next((other for other in rows if other.name == BASELINE and other.seconds), None)
    facts = {}
    for other in (*rows, row):
        facts |= {k: v for k, v in other.facts.items() if k in ("flops", "bytes")}
    median = row.median
    amount = case.amount or (row.values[-1].get("work", 0.0) if row.values else 0.0)
    return {
        "name": row.name, "case": case.name, "dtype": case.dtype, "unit": case.unit,
        "amount": amount, "status": row.status, "seconds": row.seconds,
        "median_seconds": median, "spread": row.spread, "start_seconds": row.start_seconds,
        "rate": amount / median if median and amount else None,
        "ratio": harness.ratio(row, first) if first else None,
        "limit": limit(facts, case.dtype, median, limits),
        "peak_memory_gb": row.peak_bytes / harness.GB or None,
        "values": [_numbers(value) for value in row.values[-len(row.seconds) or None :]],
        "facts": row.facts, "case_facts": case.facts,
    }  # fmt: skip


def limit(
    facts: Mapping[str, float], dtype: str, seconds: float | None, limits: Mapping[str, float]
) -> dict[str, Any] | None:
    """Return which limit binds and the share of it that was reached, if both are known.

    A step needs ``flops`` at the rate of a large product, and moves at least ``bytes`` at the rate
    of the triad; the longer of the two times is the least that the step could take.
    """
    pairs = {"compute": ("flops", dtype), "bandwidth": ("bytes", "bandwidth")}
    least = {
        name: facts[work] / limits[rate]
        for name, (work, rate) in pairs.items()
        if facts.get(work) and limits.get(rate)
    }
    if not least or not seconds:
        return None
    binding = max(least, key=lambda name: least[name])
    return {
        "binding": binding, "share": least[binding] / seconds,
        "least_seconds": least[binding], "of": {k: v / seconds for k, v in least.items()},
    }  # fmt: skip


def _numbers(values: Mapping[str, Any]) -> dict[str, float]:
    """Leave out what is no number (tokens of a generation)."""
    return {k: v for k, v in values.items() if isinstance(v, int | float)}
