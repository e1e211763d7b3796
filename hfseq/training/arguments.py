"""The flags of every training script, read from the command line and from files."""

from __future__ import annotations

import argparse
import dataclasses
import json
import math
import os
import re
import shlex
import sys
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Annotated, Any, Literal, get_args

from hfseq import plugins
from hfseq.checkpoints import network
from hfseq.data.arguments import (
    OBJECTIVES,
    AllowedValues,
    CheckedArguments,
    DataArguments,
    NonNegativeInt,
    PositiveInt,
    TextArguments,
    convert_arguments,
    option,
)
from hfseq.errors import UsageError, did_you_mean, redact, redact_values
from hfseq.training import accelerator_flags

#: Flags of other programs that take, or ask for, a token of the Hub.
TOKEN_FLAGS = ("__token", "__hub_token", "__use_auth_token", "__push_to_hub_token")


class HelpFormatter(argparse.RawDescriptionHelpFormatter):
    """Flags in one spelling each, with the defaults that say something."""

    def __init__(self, prog: str, **kwargs: Any) -> None:
        super().__init__(prog, **{"max_help_position": 32} | kwargs)

    def _get_help_string(self, action: argparse.Action) -> str | None:
        default = action.default
        if default in (None, False, "", [], argparse.SUPPRESS) or action.nargs in (0, "?"):
            return action.help
        shown = " ".join(default) if isinstance(default, list) else str(default)
        return f"{action.help} (default: {shown})"

    def _format_action_invocation(self, action: argparse.Action) -> str:
        names = [name for name in action.option_strings if "-" not in name.lstrip("-")]
        flag = ", ".join(names or action.option_strings)
        if action.nargs in (0, "?"):
            return flag
        kind = getattr(action.type, "__name__", "str")
        flag += {"int": " N", "float": " X"}.get(kind, " VALUE")
        return f"{flag} [...]" if action.nargs == "+" else flag


def make_parser(parts: Iterable[Any], description: str | None = None) -> Any:
    """Return the ``HfArgumentParser`` of the dataclasses ``parts``."""
    from transformers import HfArgumentParser

    parser = HfArgumentParser(
        parts,
        description=description,
        formatter_class=HelpFormatter,
        usage="%(prog)s [flags]   (--help lists them)",
    )
    for action in parser._actions:
        # A word that is not allowed is refused by its dataclass, with all else that is wrong.
        action.choices = None
    return parser


def parse_flags(
    parts: Sequence[type], argv: Sequence[str], description: str | None = None
) -> tuple[Any, ...]:
    """Return an instance of each dataclass in ``parts``; mistakes end with exit code 2."""
    parser = make_parser(parts, description)
    for part in parts:
        parser.set_defaults(**getattr(part, "defaults", {}))
    try:
        *made, rest = parser.parse_args_into_dataclasses(list(argv), return_remaining_strings=True)
    except UsageError:
        raise
    except ValueError as error:
        raise UsageError(str(error)) from error
    if not rest:
        return tuple(made)
    known = [f"--{name}" for name in flag_names(parts)]
    flags = [word.partition("=")[0] for word in rest if word.startswith("--")]
    if not flags:
        raise UsageError(
            f"no flag takes {shlex.join(rest)}: values follow their flag, which begins with --"
        )
    raise UsageError(
        "unknown flag " + ", ".join(flag + did_you_mean(flag, known) for flag in flags)
    )


def reject_token_flags(words: Iterable[str]) -> None:
    """Refuse a token among the flags: everybody on the machine can read it in the process list.

    To be called before parsing, which would take ``--token`` for an abbreviation.

    Raises:
        UsageError: one of ``words`` is a flag of a token.
    """
    for word in words:
        flag = word.partition("=")[0].replace("-", "_")
        if flag in TOKEN_FLAGS:
            raise UsageError(
                f"--{flag[2:]}: tokens are no flags, for these stand in the process list and in "
                "logs; set HF_TOKEN, or log in once with `hf auth login`"
            )


def flag_names(parts: Iterable[type]) -> set[str]:
    """Return the names of all flags."""
    return {field.name for part in parts for field in dataclasses.fields(part)}


def flags_from_file(path: Path, known: set[str]) -> list[str]:
    """Turn a YAML or JSON file of arguments, whose names are ``known``, into flags."""
    try:
        text = path.read_text(encoding="utf-8")
        if path.suffix == ".json":
            values = json.loads(text)
        else:
            import yaml

            values = yaml.safe_load(text)
    except OSError as error:
        raise UsageError(f"cannot read the argument file {path}: {error.strerror}") from error
    except Exception as error:
        raise UsageError(f"{path} is not valid {path.suffix[1:]}: {error}") from error
    if not isinstance(values, dict):
        raise UsageError(f"{path} must map argument names to values, e.g. learning_rate: 3.0e-4")
    reject_token_flags(f"--{name}" for name in values)
    unknown = [f"'{name}'{did_you_mean(str(name), known)}" for name in values if name not in known]
    if unknown:
        raise UsageError(f"{path} has unknown arguments: {', '.join(unknown)}")
    flags: list[str] = []
    for name, value in values.items():
        if value not in (None, []):
            items = value if isinstance(value, list) else [value]
            # No shell has seen these, and every training_args.json writes the home folder as `~`.
            flags += [f"--{name}", *(os.path.expanduser(str(item)) for item in items)]
    return flags


#: What stands for a flag that is not given, first name first.
ENVIRONMENT_VARIABLES = {
    "coordinator_address": ("COORDINATOR_ADDRESS", "JAX_COORDINATOR_ADDRESS"),
    "num_processes": ("NUM_PROCESSES",),
    # An indexed Job or JobSet of Kubernetes numbers its pods itself.
    "process_id": ("PROCESS_ID", "JOB_COMPLETION_INDEX"),
}


@dataclass
class ProcessArguments(CheckedArguments):
    """How the processes of a run find each other; without any of these a run is one process."""

    distributed: bool = option(
        False, "One of several processes that Slurm, Open MPI or a Kubernetes JobSet started."
    )
    coordinator_address: str | None = option(
        None, "host:port on which process 0 listens, e.g. node1:1234 (or COORDINATOR_ADDRESS)."
    )
    num_processes: PositiveInt | None = option(
        None, "How many processes there are, where nothing detects it (or NUM_PROCESSES)."
    )
    process_id: Annotated[int, AllowedValues("0 or more, they count from 0", minimum=0)] | None = (
        option(None, "The number of this process, from 0 (or PROCESS_ID).")
    )
    local_device_ids: str | None = option(
        None, "Accelerators of this machine that are this process's, e.g. 0 or 0,1; by default all."
    )
    coordinator_timeout: Annotated[int, AllowedValues("at least 1 second", minimum=1)] = option(
        300, "Seconds to wait for the coordinator and for the other processes at the start."
    )
    heartbeat_timeout: Annotated[int, AllowedValues("at least 10 seconds", minimum=10)] = option(
        100, "Seconds after which a process that gives no sign of life has ended the run."
    )

    def problems(self) -> Iterator[str]:
        """Add devices that are no list of numbers."""
        ids = self.local_device_ids
        if ids is not None and not re.fullmatch(r"\d+(,\d+)*", ids):
            yield f"--local_device_ids {ids}: give numbers with commas between them, e.g. 0,1"

    @property
    def is_distributed(self) -> bool:
        """Whether flags, or an address in the environment, speak of more than one process."""
        given = (self.address, self.num_processes, self.process_id)
        return self.distributed or any(value is not None for value in given)

    @property
    def address(self) -> str | None:
        """The coordinator's host and port, from the flag or the environment."""
        value, variable = self._flag_or_variable("coordinator_address")
        if value and not re.fullmatch(r".+:\d+", value):
            source = f"{variable} in the environment," if variable else "--coordinator_address"
            raise UsageError(f"{source} {value}: give host:port, e.g. node1:1234")
        return value or None

    @property
    def devices(self) -> list[int] | None:
        """The local devices of this process, if that was said."""
        ids = self.local_device_ids
        return None if ids is None else [int(part) for part in ids.split(",")]

    def _flag_or_variable(self, flag: str) -> tuple[str | None, str | None]:
        """Return what a flag says, or the variable that stands for it, and that variable."""
        if (value := getattr(self, flag)) is not None:
            return str(value), None
        variable = next(
            (name for name in ENVIRONMENT_VARIABLES[flag] if os.environ.get(name)), None
        )
        return (os.environ[variable] if variable else None), variable

    def get_number(self, flag: str) -> int | None:
        """Return ``num_processes`` or ``process_id``, if that was said."""
        value, variable = self._flag_or_variable(flag)
        if variable and value and not value.isdigit():
            raise UsageError(
                f"{variable} in the environment is '{value}': give a number, or --{flag}"
            )
        return None if value is None else int(value)


FloatType = Literal["float32", "bfloat16", "float16"]
FLOAT_TYPES: tuple[str, ...] = get_args(FloatType)


@dataclass
class ModelArguments(CheckedArguments):
    """Which model, configuration and tokenizer (v4's names and defaults)."""

    model_name_or_path: str | None = option(
        None,
        "Directory or Hub name of weights to start from; without it, training from scratch.",
    )
    model_type: str | None = option(
        None, "Architecture when training from scratch, e.g. bert or roberta; see `hfseq plugins`."
    )
    config_name: str | None = option(
        None, "Configuration, if not that of the model: directory or name."
    )
    preset: str | None = option(
        None, "A size that the architecture names, e.g. base or big, when training from scratch."
    )
    config_overrides: str | None = option(
        None, "Changes to the configuration, e.g. hidden_size=256,num_hidden_layers=6."
    )
    tokenizer_name: str | None = option(
        None, "Tokenizer, if not that of the model: directory or name."
    )
    cache_dir: str | None = option(None, "Where downloads from the Hub are kept.")
    model_revision: str = option("main", "Branch, tag or commit of the model on the Hub.")
    use_fast_tokenizer: bool = option(
        True, "Kept for old commands; tokenizers are always fast now."
    )
    dtype: (
        Annotated[
            FloatType, AllowedValues("float32, bfloat16 or float16, recipes have --precision")
        ]
        | None
    ) = option(
        None,
        "Type of computation: float32, bfloat16 or float16 (old name of --precision; beside an FP8 "
        "recipe, the type of all that is not in FP8: bfloat16 by default).",
    )
    precision: str | None = option(
        None,
        "Precision recipe: float32 (default), bfloat16, float16, fp8_delayed, fp8_current, or a "
        "plugin's; `hfseq plugins` lists them.",
    )
    precision_sites: str | None = option(
        None,
        "Where the recipe's products are used: regular expressions on the paths of Linears, "
        r"separated by commas. FP8 by default in the layers, (^|/)\d+/ .",
    )
    fp8_amax_history_length: int | None = option(
        None, "Steps whose largest value sets a scale of fp8_delayed (1024 by default)."
    )
    fp8_margin: int | None = option(
        None, "Binary orders of headroom above that value (0 by default)."
    )
    param_dtype: Literal["float32", "bfloat16"] = option(
        "float32", "Type of the parameters themselves: float32 or bfloat16."
    )
    trust_remote_code: bool = option(False, "Run model code that a Hub repository carries.")
    gradient_checkpointing: bool = option(
        False,
        "Recompute each layer in the backward pass: less memory (on CPUs: with --scan_layers), "
        "about a third more time.",
    )
    scan_layers: bool = option(
        False, "Stack the layers and scan them: compile time independent of depth."
    )
    attn_implementation: str | None = option(
        None, "Attention by name: auto (default), cudnn, flash, splash, explicit, xla, yours."
    )
    use_peft: bool = option(
        False, "Train low-rank adapters (LoRA) and nothing else; PEFT opens what is left."
    )
    lora_r: PositiveInt = option(16, "Rank of the adapters.")
    lora_alpha: Annotated[float, AllowedValues("above 0", above=0)] = option(
        32.0, "What adapters add is scaled by this over the rank."
    )
    lora_dropout: Annotated[float, AllowedValues("0 to below 1", minimum=0, below=1)] = option(
        0.05, "Probability of each input of an adapter to be dropped in training."
    )
    lora_target_modules: list[str] | None = option(
        None,
        "Layers that get an adapter: ends of paths in checkpoints (q_proj v_proj), or all-linear; "
        "by default those that PEFT takes for the architecture.",
    )
    lora_modules_to_save: list[str] | None = option(
        None, "What is trained and saved whole beside adapters; new heads are by themselves."
    )
    use_rslora: bool = option(
        False, "Scale by lora_alpha over the root of the rank (rank-stabilised LoRA)."
    )
    load_in_4bit: bool = option(
        False, "With --use_peft: keep the base's Linears in NF4, by 64 numbers (QLoRA)."
    )
    load_in_8bit: bool = option(
        False, "With --use_peft: keep the base's Linears in int8, by feature."
    )

    def problems(self) -> Iterator[str]:
        """Add two types that differ."""
        if self.dtype and self.precision in FLOAT_TYPES and self.dtype != self.precision:
            yield f"--dtype {self.dtype} and --precision {self.precision} disagree: give one"
        bits = [name for name in ("load_in_4bit", "load_in_8bit") if getattr(self, name)]
        if bits and not self.use_peft:
            yield f"--{bits[0]} stores a base that is not trained: give --use_peft"
        if len(bits) > 1:
            yield "--load_in_4bit and --load_in_8bit: give one"
        if bits and self.recipe not in FLOAT_TYPES:
            yield f"--{bits[0]} and --precision {self.recipe} both decide how products are made"

    @property
    def base_quantization(self) -> str | None:
        """The type in which the base of adapters is kept, where it is not its own."""
        return "nf4" if self.load_in_4bit else "int8" if self.load_in_8bit else None

    @property
    def recipe(self) -> str:
        """The name of the precision recipe."""
        return self.precision or self.dtype or "float32"

    @property
    def recipe_compute_dtype(self) -> str | None:
        """The type of computation, where a recipe of another name leaves it open."""
        return self.dtype if self.recipe not in FLOAT_TYPES else None

    @property
    def sites(self) -> tuple[str, ...]:
        """The regular expressions of ``precision_sites``; none means the recipe's own."""
        return tuple(filter(None, (self.precision_sites or "").split(",")))


Strategy = Annotated[Literal["no", "steps", "epoch"], AllowedValues("one of no, steps, epoch")]
WeightDecayMode = Annotated[
    Literal["decoupled", "absolute"], AllowedValues("one of decoupled, absolute")
]
StateReset = Annotated[Literal["sequence", "never"], AllowedValues("one of sequence, never")]
OnNonFinite = Annotated[Literal["stop", "skip"], AllowedValues("one of stop, skip")]
DeviceName = Annotated[
    Literal["cpu", "gpu", "cuda", "tpu"], AllowedValues("one of cpu, gpu, cuda, tpu, or nothing")
]
Schedule = Literal["linear", "cosine", "inverse_sqrt", "constant", "constant_with_warmup", "noam"]
NonNegativeFloat = Annotated[float, AllowedValues("0 or more", minimum=0)]
Fraction = Annotated[float, AllowedValues("0 to 1", minimum=0, maximum=1)]


@dataclass
class TrainingArguments(CheckedArguments):
    """How to train (v4's names and defaults, and those of today's Trainer where v4 had none)."""

    output_dir: str = option(
        "", "Where model, checkpoints and logs go: a directory or an fsspec URL."
    )
    overwrite_output_dir: bool = option(
        False, "Start anew: old checkpoints and logs are moved aside. Without it a run is resumed."
    )
    do_train: bool = option(False, "Train. Without any --do_… the run trains and evaluates.")
    do_eval: bool = option(False, "Evaluate at the end (and during training, see --eval_strategy).")
    do_predict: bool = option(
        False,
        "At the end judge the test split: its loss (clm), what is written (translations, "
        "summaries, captions) or predicted (classes, tags, answers, similarities).",
    )
    per_device_train_batch_size: PositiveInt = option(8, "Rows a data shard per micro-batch.")
    per_device_eval_batch_size: PositiveInt = option(8, "Rows a data shard in evaluation.")
    gradient_accumulation_steps: PositiveInt = option(
        1, "Micro-batches a step; exact, whatever their number."
    )
    global_batch_size: PositiveInt | None = option(
        None, "Rows a step over all devices, instead of per_device x data shards x accumulation."
    )
    update_length: PositiveInt | None = option(
        None,
        "Tokens of a row per optimizer step (truncated back-propagation): a row is trained in "
        "windows of so many tokens, and the model's state is carried from one to the next.",
    )
    state_reset: StateReset = option(
        "sequence",
        "With --update_length, where the state starts fresh: sequence (with each row) or never "
        "(each row of the batch reads on through the text).",
    )
    learning_rate: NonNegativeFloat = option(5e-5, "Peak learning rate.")
    lr_scheduler_type: Schedule = option(
        "linear",
        "linear, cosine, inverse_sqrt, constant, constant_with_warmup, or noam: learning_rate x "
        "d_model^-0.5 x min(step^-0.5, step x warmup_steps^-1.5).",
    )
    warmup_steps: NonNegativeInt = option(0, "Steps of linear warm-up.")
    warmup_ratio: Fraction = option(
        0.0, "Warm-up as a share of all steps, where warmup_steps is 0."
    )
    lr_end_ratio: Fraction = option(
        0.0, "Share of the peak at which linear and cosine schedules end, e.g. 0.1."
    )
    lr_constant_steps: NonNegativeInt = option(
        0, "Last steps of the run, with the learning rate at which the decay ended."
    )
    optim: str = option("adamw", "Optimizer by name; `hfseq plugins` lists them.")
    adafactor: bool = option(False, "The same as --optim adafactor.")
    weight_decay: NonNegativeFloat = option(0.0, "Weight decay; biases and norms are exempt.")
    weight_decay_mode: WeightDecayMode = option(
        "decoupled",
        "decoupled: times the learning rate; absolute: parameters are multiplied by "
        "1 - weight_decay each step, whatever the learning rate.",
    )
    adam_beta1: float = option(0.9, "First beta.")
    adam_beta2: float = option(0.999, "Second beta.")
    adam_epsilon: float = option(1e-8, "Epsilon.")
    max_grad_norm: Annotated[float, AllowedValues("0 (no clipping) or more", minimum=0)] = option(
        0.0, "Clip gradients to this global norm; 0 does not clip."
    )
    no_decay: list[str] = option(
        [], "Further parameters without weight decay, as regular expressions on paths."
    )
    freeze: list[str] = option(
        [], "Parameters that are not trained, as regular expressions on paths."
    )
    num_train_epochs: float = option(3.0, "Epochs; fractions count.")
    max_steps: int = option(-1, "Optimizer steps; overrides num_train_epochs if positive.")
    logging_steps: PositiveInt = option(500, "Log every so many steps.")
    logging_first_step: bool = option(True, "Log the first step too.")
    eval_strategy: Strategy | None = option(
        None,
        "When to evaluate during training: no, steps or epoch; steps where eval_steps is given.",
    )
    eval_steps: PositiveInt | None = option(None, "Evaluate every so many steps.")
    max_eval_batches: PositiveInt | None = option(
        None, "During training evaluate on the first so many batches only; at the end on all."
    )
    save_strategy: Strategy = option("steps", "When to save: no (only at the end), steps or epoch.")
    save_steps: PositiveInt = option(500, "Save every so many steps.")
    save_total_limit: PositiveInt | None = option(2, "Checkpoints to keep, the best one besides.")
    metric_for_best_model: str = option("eval_loss", "The metric that makes a checkpoint the best.")
    greater_is_better: bool | None = option(None, "Whether more is better; guessed from the name.")
    load_best_model_at_end: bool = option(
        False, "Leave the best checkpoint's weights, not the last's."
    )
    average_checkpoints: PositiveInt | None = option(
        None, "At the end leave the mean of the last so many checkpoints' weights."
    )
    resume_from_checkpoint: str | None = option(
        None, "Checkpoint or output directory to go on from; by default the newest in output_dir."
    )
    seed: int = option(42, "Seed of initialisation, data order, masks and dropout.")
    device: DeviceName | None = option(
        None, "cpu, gpu (cuda) or tpu; asked for and absent is an error."
    )
    mesh: str | None = option(
        None, "Layout, e.g. data=2,fsdp=4 (axes data, fsdp, tensor, sequence)."
    )
    sequence_parallel: bool = option(
        False, "Split hidden states between the blocks by length over tensor, too: less memory."
    )
    inspect_sharding: bool = option(
        False, "Before the first step print what lies where and what the devices exchange."
    )
    on_non_finite: OnNonFinite = option(
        "stop", "On a NaN or infinite loss: stop, or skip the step."
    )
    report_to: list[str] = option(
        ["tensorboard", "jsonl"], "tensorboard, wandb, jsonl, a plugin's tracker; all or none."
    )
    log_histograms: PositiveInt | None = option(
        None, "Report histograms of weights and gradients every so many steps."
    )
    run_name: str | None = option(None, "Name of the run where trackers show one.")
    disable_tqdm: bool = option(False, "No progress bar, even on a terminal.")
    profile: str | None = option(
        None, "Write a jax profile of steps 10 to 15, for example, as 10-15; under output_dir."
    )
    peak_tflops: Annotated[float, AllowedValues("a positive number", above=0)] | None = option(
        None,
        "What MFU is a share of, in 10^12 FLOP/s a device (on CPUs, a process); by default of the "
        "data sheet, where the device is a known one, else measured.",
    )
    compilation_cache_dir: str | None = option(
        None, "Persistent compilation cache; by default ~/.cache/hfseq/xla, 'none' turns it off."
    )
    accelerator_flags: str = option(
        "none",
        "XLA's flags for the accelerators: recommended (for several of them; tried first), none, "
        "or flags in quotes.",
    )
    sigterm_exit_code: int = option(
        0, "Exit code after SIGTERM; 143 makes schedulers such as Kubernetes start the job again."
    )
    push_to_hub: bool = option(False, "Upload model, logs, card and plots, in the background.")
    hub_model_id: str | None = option(None, "Repository; by default the name of output_dir.")
    hub_private_repo: bool = option(False, "Make the repository private.")
    hub_strategy: Literal["every_save", "end", "checkpoint"] = option(
        "every_save",
        "What is pushed when: every_save, end (once, at the end of training), or checkpoint (every "
        "save, and with it the newest training checkpoint, to go on from elsewhere).",
    )
    hub_timeout: Annotated[float, AllowedValues("a positive number", above=0)] = option(
        network.DEFAULT_STALL_TIMEOUT,
        "Seconds without a byte moving after which the Hub, or a remote output_dir, hangs: a "
        "finished run ends then and says what is missing.",
    )
    card_license: str | None = option(None, "Licence of the model, for its card: apache-2.0 ….")
    card_language: list[str] | None = option(
        None, "Languages of the model, for its card: codes such as nb or en."
    )
    card_samples: NonNegativeInt = option(3, "Sample outputs in the card; 0 for none.")
    plugin: list[str] = option([], "Plugin files to load, e.g. my_model.py.")
    debug: bool = option(False, "Show tracebacks of errors.")

    def __post_init__(self) -> None:
        if self.adafactor:
            self.optim = "adafactor"
        if not (self.do_train or self.do_eval or self.do_predict):
            self.do_train = self.do_eval = True
        if self.eval_strategy is None:
            self.eval_strategy = "steps" if self.eval_steps else "no"
        if self.profile:
            parse_profile_steps(self.profile)
        super().__post_init__()

    def problems(self) -> Iterator[str]:
        """Add what is missing, and flags that exclude or need each other."""
        if not self.output_dir:
            yield "--output_dir is required"
        if problem := accelerator_flags.find_problem(self.accelerator_flags):
            yield problem
        if self.average_checkpoints and self.load_best_model_at_end:
            yield "--average_checkpoints and --load_best_model_at_end exclude each other: give one"
        if (self.average_checkpoints or 0) > (self.save_total_limit or math.inf):
            yield (
                f"--average_checkpoints {self.average_checkpoints} needs as many checkpoints: "
                f"--save_total_limit {self.save_total_limit} keeps fewer"
            )
        if self.max_steps <= 0 and not self.num_train_epochs > 0:
            yield f"--num_train_epochs {self.num_train_epochs}: give a positive number"
        if self.lr_end_ratio and self.lr_scheduler_type not in ("linear", "cosine"):
            yield (
                f"--lr_end_ratio {self.lr_end_ratio} is for linear and cosine: "
                f"--lr_scheduler_type {self.lr_scheduler_type} has no end, drop one of the two"
            )
        if self.lr_constant_steps and self.lr_scheduler_type == "noam":
            yield f"--lr_constant_steps {self.lr_constant_steps}: noam never ends, use inverse_sqrt"
        if self.state_reset != "sequence" and not self.update_length:
            yield (
                f"--state_reset {self.state_reset} needs --update_length: without it every row is "
                "trained in one step"
            )
        if self.weight_decay_mode == "absolute" and self.weight_decay >= 1:
            yield (
                f"--weight_decay {self.weight_decay} with --weight_decay_mode absolute leaves "
                "nothing of the parameters: give less than 1"
            )
        if self.eval_strategy == "steps" and not self.eval_steps:
            yield "--eval_strategy steps needs --eval_steps N"


def parse_profile_steps(text: str) -> tuple[int, int]:
    """Read the first and the last step of ``--profile``."""
    first, _, last = text.partition("-")
    if not (first.isdecimal() and last.isdecimal() and 1 <= int(first) <= int(last)):
        raise UsageError(f"--profile {text}: give first-last, counted from 1, e.g. 10-15")
    return int(first), int(last)


ARGUMENT_CLASSES = (ModelArguments, DataArguments, TrainingArguments, ProcessArguments)


@dataclass
class Arguments:
    """Everything a run was asked for."""

    model: ModelArguments
    data: TextArguments
    training: TrainingArguments
    command: str
    processes: ProcessArguments = dataclasses.field(default_factory=ProcessArguments)

    def as_dict(self) -> dict[str, Any]:
        """Return all values for logs and cards: without secrets, and alike in all processes."""
        merged: dict[str, Any] = {}
        for part in (self.model, self.data, self.training):
            merged |= dataclasses.asdict(part)
        return redact_values(merged)


def with_data_arguments(objective: str, arguments: Arguments) -> Arguments:
    """Return the arguments with the data flags of ``objective``, where hfseq has it."""
    if objective not in OBJECTIVES:
        return arguments
    data = convert_arguments(arguments.data, OBJECTIVES[objective])
    return dataclasses.replace(arguments, data=data)


def parse(
    argv: Sequence[str] | None = None, description: str | None = None, objective: str = "mlm"
) -> Arguments:
    """Read the flags: a YAML or JSON file first if one is given, then what overrides it.

    The flags of the data, and their defaults, are those of ``objective``: of a plugin's, its class
    says which (``data_arguments``).
    """
    data_part = OBJECTIVES.get(objective)
    if data_part is None:
        data_part = plugins.load().objectives.get(objective).data_arguments
    parts = (ModelArguments, data_part, TrainingArguments, ProcessArguments)
    given = list(sys.argv[1:] if argv is None else argv)
    if given and given[0].endswith((".yaml", ".yml", ".json")):
        given = flags_from_file(Path(given[0]), flag_names(parts)) + given[1:]
    reject_token_flags(given)
    model, data, training, processes = parse_flags(parts, given, description)
    command = redact(shlex.join(["python", Path(sys.argv[0]).name, *given]))
    return Arguments(model, data, training, command, processes)


def parse_with_objective(
    argv: Sequence[str] | None = None, description: str | None = None
) -> tuple[str, Arguments]:
    """Read ``--objective NAME``, load the plugins of ``--plugin``, and read the flags of that one.

    Raises:
        UsageError: no objective is named, or none of this name is registered.
    """
    given = list(sys.argv[1:] if argv is None else argv)
    parser = argparse.ArgumentParser(add_help=False, allow_abbrev=False)
    parser.add_argument("--plugin", nargs="+", default=[])
    registered = plugins.load(extra=parser.parse_known_args(given)[0].plugin).objectives
    parser = argparse.ArgumentParser(add_help=False, allow_abbrev=False)
    parser.add_argument("--objective")
    chosen, rest = parser.parse_known_args(given)
    if chosen.objective is None and not {"-h", "--help"} & set(rest):
        raise UsageError(f"no objective: give --objective NAME, one of {', '.join(registered)}")
    if chosen.objective is not None and chosen.objective not in registered:
        raise UsageError(f"--objective: {registered.unknown_message(chosen.objective)}")
    objective = chosen.objective or "mlm"
    arguments = parse(rest, description, objective)
    command = f"{arguments.command} --objective {shlex.quote(objective)}"
    return objective, dataclasses.replace(arguments, command=command)
