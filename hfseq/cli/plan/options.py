"""The flags of ``hfseq plan``."""

from __future__ import annotations

import dataclasses
from collections.abc import Iterator
from dataclasses import MISSING, dataclass
from typing import Annotated, Any

from hfseq.data.arguments import AllowedValues, CheckedArguments, PositiveFloat, PositiveInt
from hfseq.errors import UsageError, did_you_mean
from hfseq.training import aot

OBJECTIVES = (
    *("mlm", "clm", "span_mlm", "denoising", "translation", "rtd", "sop"),
    *("dpo", "kto", "orpo", "cpo", "reward"),
)

PositiveFraction = Annotated[
    float, AllowedValues("a fraction above 0 and at most 1", above=0, maximum=1)
]


def option_field(group: str, metavar: str | None, text: str, default: Any = None) -> Any:
    """Returns a dataclass field that becomes a flag of ``hfseq plan``.

    Args:
        group: The argument group in the help.
        metavar: Placeholder of the value in the help, or `None` for a switch.
        text: The help text.
        default: The default value, `list` for an empty list, or `MISSING` for a required flag.
    """
    metadata = {"group": group, "metavar": metavar, "help": text}
    if default is list:
        return dataclasses.field(default_factory=list, metadata=metadata)
    return dataclasses.field(default=default, metadata=metadata)


@dataclass
class Options(CheckedArguments):
    """The flags of ``hfseq plan`` as plain values, which can be sent to another process.

    Flags that also exist in the training scripts have the same names.

    Attributes:
        accelerator: The accelerator in ``devices``.
        count: The number of devices in ``devices``.
        plugin: Plugin files to load.
    """

    config: str = option_field(
        "model", "MODEL", "Directory, JSON file, Hub name or model type such as gpt2.", MISSING
    )
    devices: str = option_field(
        "devices", "NAME:N", "Accelerator and number of devices, e.g. h200:64 or v5e:4.", MISSING
    )
    preset: str | None = option_field(
        "model", "NAME", "Named size of the architecture. Requires that MODEL is a model type."
    )
    config_overrides: str | None = option_field(
        "model", "A=1,B=2", "Comma-separated changes to the configuration."
    )
    mesh: str | None = option_field(
        "devices", "MESH", "Mesh, e.g. data=8,fsdp=8. Default: all devices on the data axis."
    )
    memory_gb: PositiveFloat | None = option_field(
        "devices", "X", "Memory per device in GB. Default: the value in the data sheet."
    )
    memory_share: PositiveFraction | None = option_field(
        "devices",
        "X",
        "Fraction of the memory that JAX may use. Default: JAX's default, which is 0.75 on GPUs.",
    )
    peak_tflops: PositiveFloat | None = option_field(
        "devices", "X", "Peak TFLOP/s per device. Default: the value in the data sheet."
    )
    network_gbs: PositiveFloat | None = option_field(
        "devices", "X", "Network bandwidth per device in GB/s. Default: the bandwidth of a DGX."
    )
    objective: str | None = option_field(
        "run", "NAME", "Training objective. Default: the objective of the model's training script."
    )
    length: PositiveInt | None = option_field(
        "run", "N", "Tokens per row. Default: the training script's default."
    )
    target_length: PositiveInt | None = option_field(
        "run", "N", "Tokens per target, for translation. Default: --length."
    )
    per_device_train_batch_size: PositiveInt = option_field(
        "run", "N", "Micro-batch size per data-parallel shard. Default: 8.", 8
    )
    global_batch_size: PositiveInt | None = option_field(
        "run", "N", "Rows per step; replaces --per_device_train_batch_size."
    )
    gradient_accumulation_steps: PositiveInt = option_field(
        "run", "N", "Micro-batches per step. Default: 1.", 1
    )
    optim: str = option_field("run", "NAME", "Optimizer. Default: adamw.", "adamw")
    precision: str = option_field(
        "run", "NAME", "Precision of the computation. Default: bfloat16.", "bfloat16"
    )
    param_dtype: str = option_field(
        "run", "TYPE", "Data type of the parameters. Default: float32.", "float32"
    )
    attn_implementation: str | None = option_field(
        "run", "NAME", "Attention implementation of hfseq or of a plugin. Default: auto."
    )
    gradient_checkpointing: bool = option_field(
        "run", None, "Recompute layers in the backward pass.", False
    )
    scan_layers: bool = option_field(
        "run", None, "Scan over the layers, which shortens compilation.", False
    )
    sequence_parallel: bool = option_field(
        "run", None, "Split hidden states by length over the tensor axis too.", False
    )
    training: list[str] = option_field(
        "run", "FLAG", "Other flags of the training script, after --.", list
    )
    mfu: PositiveFraction = option_field(
        "answer", "X", "Expected model FLOPs utilization (MFU). Default: 0.4.", 0.4
    )
    tokens: PositiveFloat | None = option_field(
        "answer", "X", "Number of training tokens, e.g. 3e11, to estimate the days of training."
    )
    no_compile: bool = option_field(
        "answer", None, "Only use the sharding rules and a trace, which takes seconds.", False
    )
    compile_timeout: PositiveFloat = option_field(
        "answer", "X", "Time limit for compilation in seconds. Default: 1800.", 1800.0
    )
    plugin: list[str] = dataclasses.field(default_factory=list)

    def __post_init__(self) -> None:
        super().__post_init__()
        self.accelerator, self.count = aot.parse(self.devices)

    def problems(self) -> Iterator[str]:
        """Yields a message if the objective cannot be planned."""
        if self.objective and self.objective not in OBJECTIVES:
            yield (
                f"--objective {self.objective} cannot be planned"
                f"{did_you_mean(self.objective, OBJECTIVES)} (supported: {', '.join(OBJECTIVES)}). "
                "Other objectives train the same layers as one of these, with a smaller head: "
                "plan clm for sft, translation for summarization, mlm for text classification"
            )

    def script_flags(self, objective: str) -> list[str]:
        """Returns the flags of the training script.

        The flags of ``hfseq plan`` come first, followed by the flags that the user passed after
        ``--``.

        Args:
            objective: The training objective, which determines the names of the length flags.

        Raises:
            UsageError: ``--target_length`` is set, but the objective is not translation.
        """
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
                    f"--target_length {self.target_length} is only for translation. The objective "
                    f"'{objective}' derives it from --length: remove this flag"
                )
        switches = ("gradient_checkpointing", "scan_layers", "sequence_parallel")
        flags = [f"--{name}={value}" for name, value in values.items() if value is not None]
        flags += [f"--{name}" for name in switches if getattr(self, name)]
        return ["--output_dir=plan", "--do_train", *flags, *self.training]
