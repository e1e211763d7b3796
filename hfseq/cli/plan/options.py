"""The flags of ``hfseq plan``; those of training have the names that they have there."""

from __future__ import annotations

import dataclasses
from collections.abc import Iterator
from dataclasses import MISSING, dataclass
from typing import Annotated, Any

from hfseq.data.arguments import AllowedValues, CheckedArguments, PositiveInt
from hfseq.errors import UsageError, did_you_mean
from hfseq.training import aot

OBJECTIVES = ("mlm", "clm", "span_mlm", "denoising", "translation", "rtd", "sop")

Positive = Annotated[float, AllowedValues("a positive number", above=0)]
Fraction = Annotated[float, AllowedValues("a share, above 0 and at most 1", above=0, maximum=1)]


def option_field(group: str, metavar: str | None, text: str, default: Any = None) -> Any:
    """Return a dataclass field that is a flag of ``hfseq plan``; without metavar, a switch."""
    metadata = {"group": group, "metavar": metavar, "help": text}
    if default is list:
        return dataclasses.field(default_factory=list, metadata=metadata)
    return dataclasses.field(default=default, metadata=metadata)


@dataclass
class Options(CheckedArguments):
    """The flags of the command as plain values, so that another process can have them."""

    config: str = option_field(
        "model", "MODEL", "a directory, a JSON file, a Hub name or a model type, e.g. gpt2", MISSING
    )
    devices: str = option_field(
        "devices", "NAME:N", "accelerator and how many: h200:64, v5e:4", MISSING
    )
    preset: str | None = option_field("model", "NAME", "a size that the architecture names")
    config_overrides: str | None = option_field("model", "A=1,B=2", "changes to the configuration")
    mesh: str | None = option_field("devices", "MESH", "e.g. data=8,fsdp=8; default: all on data")
    memory_gb: Positive | None = option_field(
        "devices", "X", "memory of a device; default: its data sheet"
    )
    memory_share: Fraction | None = option_field(
        "devices", "X", "what jax may use of it; default: 0.75 on GPUs, its own"
    )
    peak_tflops: Positive | None = option_field(
        "devices", "X", "peak of a device, 10^12 FLOP/s; default: its data sheet"
    )
    network_gbs: Positive | None = option_field(
        "devices", "X", "GB/s that a device has between machines; default: a DGX's"
    )
    objective: str | None = option_field("run", "NAME", "default: that of the model's script")
    length: PositiveInt | None = option_field(
        "run", "N", "tokens a row; default: as the script chooses"
    )
    target_length: PositiveInt | None = option_field("run", "N", "tokens of a target (translation)")
    per_device_train_batch_size: PositiveInt = option_field("run", "N", "rows a data shard (8)", 8)
    global_batch_size: PositiveInt | None = option_field("run", "N", "rows a step, instead")
    gradient_accumulation_steps: PositiveInt = option_field("run", "N", "(1)", 1)
    optim: str = option_field("run", "NAME", "optimizer (adamw)", "adamw")
    precision: str = option_field("run", "NAME", "(bfloat16)", "bfloat16")
    param_dtype: str = option_field("run", "TYPE", "(float32)", "float32")
    attn_implementation: str | None = option_field("run", "NAME", "auto (default), a kernel, yours")
    gradient_checkpointing: bool = option_field(
        "run", None, "recompute layers in the backward pass", False
    )
    scan_layers: bool = option_field("run", None, "scan the layers; compiles much faster", False)
    sequence_parallel: bool = option_field(
        "run", None, "split hidden states over tensor, too", False
    )
    training: list[str] = option_field(
        "run", "FLAG", "after --: other flags of the training script", list
    )
    mfu: Fraction = option_field("answer", "X", "the MFU to expect (0.4)", 0.4)
    tokens: Positive | None = option_field(
        "answer", "X", "tokens to train on, e.g. 3e11: how many days"
    )
    no_compile: bool = option_field("answer", None, "rules and a trace only, in seconds", False)
    compile_timeout: Positive = option_field("answer", "X", "seconds for compiling (1800)", 1800.0)
    plugin: list[str] = dataclasses.field(default_factory=list)

    def __post_init__(self) -> None:
        super().__post_init__()
        self.accelerator, self.count = aot.parse(self.devices)

    def problems(self) -> Iterator[str]:
        """Add an objective that cannot be planned."""
        if self.objective and self.objective not in OBJECTIVES:
            yield (
                f"--objective {self.objective} cannot be planned"
                f"{did_you_mean(self.objective, OBJECTIVES)} (there are {', '.join(OBJECTIVES)}; "
                "the layers of other objectives are those of one of them, the heads are smaller: "
                "plan clm for sft, translation for summarization, mlm for what reads a text)"
            )

    def script_flags(self, objective: str) -> list[str]:
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
