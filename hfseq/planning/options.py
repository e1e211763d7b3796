"""What ``hfseq plan`` is asked for, and the flags of the training run that it means."""

from __future__ import annotations

import dataclasses
import re
from dataclasses import dataclass
from typing import Any

from hfseq import hardware
from hfseq.errors import UsageError, nearest

#: The script's objective for the heads of an architecture, the first that it has.
HEADS = {"ForMaskedLM": "mlm", "ForCausalLM": "clm", "ForSeq2SeqLM": "span_mlm"}
OBJECTIVES = ("mlm", "clm", "span_mlm", "denoising", "translation")


@dataclass
class Options:
    """The flags of the command as plain values, so that another process can have them."""

    config: str
    devices: str
    mesh: str | None = None
    config_overrides: str | None = None
    preset: str | None = None
    objective: str | None = None
    length: int | None = None
    target_length: int | None = None
    per_device_train_batch_size: int = 8
    global_batch_size: int | None = None
    gradient_accumulation_steps: int = 1
    optim: str = "adamw"
    precision: str = "bfloat16"
    param_dtype: str = "float32"
    gradient_checkpointing: bool = False
    scan_layers: bool = False
    sequence_parallel: bool = False
    attn_implementation: str | None = None
    mfu: float = 0.4
    tokens: float | None = None
    peak_tflops: float | None = None
    memory_gb: float | None = None
    memory_share: float | None = None
    network_gbs: float | None = None
    no_compile: bool = False
    compile_timeout: float = 1800.0
    plugin: list[str] = dataclasses.field(default_factory=list)
    training: list[str] = dataclasses.field(default_factory=list)

    def __post_init__(self) -> None:
        counts = ("length", "target_length", "per_device_train_batch_size", "global_batch_size",
                  "gradient_accumulation_steps")  # fmt: skip
        for name in counts:
            value = getattr(self, name)
            if value is not None and value < 1:
                raise UsageError(f"--{name} {value}: give a number of at least 1")
        for name in ("peak_tflops", "memory_gb", "network_gbs", "tokens", "compile_timeout"):
            value = getattr(self, name)
            if value is not None and not value > 0:
                raise UsageError(f"--{name} {value}: give a positive number")
        for name in ("mfu", "memory_share"):
            value = getattr(self, name)
            if value is not None and not 0 < value <= 1:
                raise UsageError(f"--{name} {value}: give a share, above 0 and at most 1")
        if self.objective and self.objective not in OBJECTIVES:
            raise UsageError(
                f"--objective {self.objective} cannot be planned"
                f"{nearest(self.objective, OBJECTIVES)} (there are {', '.join(OBJECTIVES)}; "
                "for classification plan mlm: the layers are the same, only the head is smaller)"
            )
        self.accelerator, self.count = parse_devices(self.devices)

    def plain(self) -> dict[str, Any]:
        """Return the values for :class:`Options` in another process."""
        return dataclasses.asdict(self)

    def flags(self, objective: str) -> list[str]:
        """Return the training script's flags: what was given, then what follows ``--``."""
        kept = ("per_device_train_batch_size", "gradient_accumulation_steps", "optim", "precision",
                "param_dtype", "global_batch_size", "attn_implementation")  # fmt: skip
        values: dict[str, Any] = {name: getattr(self, name) for name in kept}
        if self.length is not None:
            values["max_source_length" if objective == "translation" else "max_seq_length"] = (
                self.length
            )
        if objective == "translation":
            values["max_target_length"] = self.target_length or self.length
        elif self.target_length is not None:
            raise UsageError(
                f"--target_length {self.target_length} is for translation; '{objective}' derives "
                "it from --length"
            )
        switches = ("gradient_checkpointing", "scan_layers", "sequence_parallel")
        given = [f"--{name}={value}" for name, value in values.items() if value is not None]
        given += [f"--{name}" for name in switches if getattr(self, name)]
        return ["--output_dir=plan", "--do_train", *given, *self.training]


def parse_devices(text: str) -> tuple[hardware.Accelerator, int]:
    """Read ``h200:64``: an accelerator and how many; without a number, one.

    Raises:
        UsageError: the form is another, or no such accelerator is known.
    """
    name, colon, number = text.partition(":")
    if colon and not re.fullmatch(r"[1-9]\d*", number):
        raise UsageError(f"--devices {text}: give an accelerator and a number, e.g. h200:64")
    return hardware.named(name), int(number or 1)


__all__ = ["Options", "parse_devices"]
