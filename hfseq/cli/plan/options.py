"""The flags of ``hfseq plan``; those of training have the names that they have there."""

from __future__ import annotations

import dataclasses
from collections.abc import Iterator
from dataclasses import MISSING, dataclass
from typing import Annotated, Any

from hfseq.data.arguments import Allowed, CheckedArguments, Count
from hfseq.errors import UsageError, nearest
from hfseq.training import described

OBJECTIVES = ("mlm", "clm", "span_mlm", "denoising", "translation", "rtd", "sop")

Positive = Annotated[float, Allowed("a positive number", above=0)]
PartOfAll = Annotated[float, Allowed("a share, above 0 and at most 1", above=0, maximum=1)]


def flag(group: str, metavar: str | None, text: str, default: Any = None) -> Any:
    """Return a dataclass field that is a flag of ``hfseq plan``; without metavar, a switch."""
    metadata = {"group": group, "metavar": metavar, "help": text}
    if default is list:
        return dataclasses.field(default_factory=list, metadata=metadata)
    return dataclasses.field(default=default, metadata=metadata)


@dataclass
class Options(CheckedArguments):
    """The flags of the command as plain values, so that another process can have them."""

    config: str = flag(
        "model", "MODEL", "a directory, a JSON file, a Hub name or a model type, e.g. gpt2", MISSING
    )
    devices: str = flag("devices", "NAME:N", "accelerator and how many: h200:64, v5e:4", MISSING)
    preset: str | None = flag("model", "NAME", "a size that the architecture names")
    config_overrides: str | None = flag("model", "A=1,B=2", "changes to the configuration")
    mesh: str | None = flag("devices", "MESH", "e.g. data=8,fsdp=8; default: all on data")
    memory_gb: Positive | None = flag("devices", "X", "memory of a device; default: its data sheet")
    memory_share: PartOfAll | None = flag(
        "devices", "X", "what jax may use of it; default: 0.75 on GPUs, its own"
    )
    peak_tflops: Positive | None = flag(
        "devices", "X", "peak of a device, 10^12 FLOP/s; default: its data sheet"
    )
    network_gbs: Positive | None = flag(
        "devices", "X", "GB/s that a device has between machines; default: a DGX's"
    )
    objective: str | None = flag("run", "NAME", "default: that of the model's script")
    length: Count | None = flag("run", "N", "tokens a row; default: as the script chooses")
    target_length: Count | None = flag("run", "N", "tokens of a target (translation)")
    per_device_train_batch_size: Count = flag("run", "N", "rows a data shard (8)", 8)
    global_batch_size: Count | None = flag("run", "N", "rows a step, instead")
    gradient_accumulation_steps: Count = flag("run", "N", "(1)", 1)
    optim: str = flag("run", "NAME", "optimizer (adamw)", "adamw")
    precision: str = flag("run", "NAME", "(bfloat16)", "bfloat16")
    param_dtype: str = flag("run", "TYPE", "(float32)", "float32")
    attn_implementation: str | None = flag("run", "NAME", "auto (default), a kernel, yours")
    gradient_checkpointing: bool = flag("run", None, "recompute layers in the backward pass", False)
    scan_layers: bool = flag("run", None, "scan the layers; compiles much faster", False)
    sequence_parallel: bool = flag("run", None, "split hidden states over tensor, too", False)
    training: list[str] = flag("run", "FLAG", "after --: other flags of the training script", list)
    mfu: PartOfAll = flag("answer", "X", "the MFU to expect (0.4)", 0.4)
    tokens: Positive | None = flag("answer", "X", "tokens to train on, e.g. 3e11: how many days")
    no_compile: bool = flag("answer", None, "rules and a trace only, in seconds", False)
    compile_timeout: Positive = flag("answer", "X", "seconds for compiling (1800)", 1800.0)
    plugin: list[str] = dataclasses.field(default_factory=list)

    def __post_init__(self) -> None:
        super().__post_init__()
        self.accelerator, self.count = described.parse(self.devices)

    def problems(self) -> Iterator[str]:
        """Add an objective that cannot be planned."""
        if self.objective and self.objective not in OBJECTIVES:
            yield (
                f"--objective {self.objective} cannot be planned"
                f"{nearest(self.objective, OBJECTIVES)} (there are {', '.join(OBJECTIVES)}; "
                "the layers of other objectives are those of one of them, the heads are smaller: "
                "plan clm for sft, translation for summarization, mlm for what reads a text)"
            )

    def flags(self, objective: str) -> list[str]:
        """Return the training script's flags: what was given, then what follows ``--``."""
        values: dict[str, Any] = {
            name: getattr(self, name)
            for name in (
                "per_device_train_batch_size",
                "gradient_accumulation_steps",
                "optim",
                "precision",
                "param_dtype",
                "global_batch_size",
                "attn_implementation",
            )
        }
        if objective == "translation":
            values["max_source_length"] = self.length
            values["max_target_length"] = self.target_length or self.length
        else:
            values["max_seq_length"] = self.length
            if self.target_length is not None:
                raise UsageError(
                    f"--target_length {self.target_length} is for translation; '{objective}' "
                    "derives it from --length"
                )
        switches = ("gradient_checkpointing", "scan_layers", "sequence_parallel")
        given = [f"--{name}={value}" for name, value in values.items() if value is not None]
        given += [f"--{name}" for name in switches if getattr(self, name)]
        return ["--output_dir=plan", "--do_train", *given, *self.training]
