"""The flags of training commands, and parsers for the command line and for argument files."""

from __future__ import annotations

import argparse
import dataclasses
import math
import os
import re
import shlex
import sys
from collections.abc import Iterable, Iterator, Mapping, Sequence
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
    MixtureArguments,
    NonNegativeInt,
    PositiveInt,
    TextArguments,
    convert_arguments,
    option,
)
from hfseq.errors import (
    UsageError,
    did_you_mean,
    expand_home,
    first_line,
    parse_json,
    redact,
    redact_values,
)
from hfseq.training import accelerator_flags
from hfseq.training.derived_flags import DERIVED_FLAGS
from hfseq.training.flag_names import find_hint, resolve_flags
from hfseq.training.usage import ANY_OBJECTIVE, objective_name, usage

#: Directory with the argument files of published experiments. The path `configs/NAME.yaml` refers
#: to a file in this directory, regardless of the current directory.
CONFIGS = Path(__file__).parents[1] / "templates" / "configs"
#: Flags with which other programs accept an access token for the Hub, with underscores for dashes.
TOKEN_FLAGS = ("__token", "__hub_token", "__use_auth_token", "__push_to_hub_token")


class HelpFormatter(argparse.RawDescriptionHelpFormatter):
    """Help formatter that shows only one spelling of each flag.

    Defaults without information, such as `None` and empty lists, are omitted.
    """

    def __init__(self, prog: str, **kwargs: Any) -> None:
        super().__init__(prog, **{"max_help_position": 32} | kwargs)

    def _get_help_string(self, action: argparse.Action) -> str | None:
        default = action.default
        if default in (None, False, "", [], argparse.SUPPRESS) or action.nargs in (0, "?"):
            return action.help
        text = " ".join(default) if isinstance(default, list) else str(default)
        return f"{action.help} (default: {text})"

    def _format_action_invocation(self, action: argparse.Action) -> str:
        names = [name for name in action.option_strings if "-" not in name.lstrip("-")]
        flag = ", ".join(names or action.option_strings)
        if action.nargs in (0, "?"):
            return flag
        type_name = getattr(action.type, "__name__", "str")
        flag += {"int": " N", "float": " X"}.get(type_name, " VALUE")
        return f"{flag} [...]" if action.nargs == "+" else flag


def make_parser(
    dataclass_types: Iterable[Any], description: str | None = None, program: str | None = None
) -> Any:
    """Returns an `HfArgumentParser` for argument dataclasses.

    Args:
        dataclass_types: The dataclasses whose fields become flags.
        description: Description for `--help`.
        program: The command that precedes the flags, for `--help`. Default: the name of the script.
    """
    from transformers import HfArgumentParser

    parser = HfArgumentParser(
        dataclass_types,
        prog=program,
        description=description,
        formatter_class=HelpFormatter,
        usage="%(prog)s [flags]   (--help lists them)",
    )
    for action in parser._actions:
        # The dataclasses check the choices instead of argparse, so that one error message lists all
        # invalid values.
        action.choices = None
    return parser


def parse_flags(
    dataclass_types: Sequence[type],
    argv: Sequence[str],
    description: str | None = None,
    program: str | None = None,
) -> tuple[Any, ...]:
    """Parses flags into one instance of each dataclass.

    Args:
        dataclass_types: The dataclasses whose fields are the flags. A class can have an attribute
            `defaults`, which overrides the defaults of its own flags and of flags in other classes.
        argv: The flags.
        description: Description for `--help`.
        program: The command that precedes the flags, for `--help`. Default: the name of the script.

    Raises:
        UsageError: A flag is unknown or has an invalid value.
    """
    parser = make_parser(dataclass_types, description, program)
    for dataclass_type in dataclass_types:
        parser.set_defaults(**getattr(dataclass_type, "defaults", {}))
    words = resolve_flags(expand_home(argv), parser)
    try:
        *parsed, remaining = parser.parse_args_into_dataclasses(
            words, return_remaining_strings=True
        )
    except UsageError:
        raise
    except ValueError as error:
        raise UsageError(str(error)) from error
    if remaining:
        raise UsageError(
            f"unexpected positional argument {shlex.join(remaining)}: flags begin with --, and "
            "values follow their flag"
        )
    return tuple(parsed)


def reject_token_flags(words: Iterable[str]) -> None:
    """Rejects flags that pass an access token.

    A token in a flag would be visible to all users of the machine, in the list of processes. This
    function must be called before parsing, because argparse would accept `--token` as the
    abbreviation of another flag.

    Raises:
        UsageError: One of `words` is a flag for an access token.
    """
    for word in words:
        flag = word.partition("=")[0].replace("-", "_")
        if flag in TOKEN_FLAGS:
            raise UsageError(
                f"--{flag[2:]}: do not pass tokens as flags, because they are visible in the "
                "process list and in logs. Set HF_TOKEN, or log in once with `hf auth login`"
            )


def flag_names(dataclass_types: Iterable[type]) -> set[str]:
    """Returns the names of all flags of the given dataclasses."""
    return {
        field.name
        for dataclass_type in dataclass_types
        for field in dataclasses.fields(dataclass_type)
    }


def flags_from_file(path: Path, dataclass_types: Sequence[type]) -> list[str]:
    """Converts a YAML or JSON file of arguments to a list of flags.

    YAML values are read as text. For example, `no` remains a language code instead of becoming
    false, and `0123` remains a name instead of becoming a number.

    Args:
        path: The file. `.json` files are read as JSON, all others as YAML. If a path
            `configs/NAME.yaml` does not exist, the file is read from the directory `CONFIGS`.
        dataclass_types: The dataclasses whose fields the file may contain.

    Raises:
        UsageError: The file cannot be read, or it contains unknown arguments.
    """
    if path.parent.name == CONFIGS.name and not path.exists() and (CONFIGS / path.name).exists():
        path = CONFIGS / path.name
    try:
        text = path.read_text(encoding="utf-8")
        values = (
            parse_json(text, unique_keys=True)
            if path.suffix == ".json"
            else _load_yaml_as_text(text)
        )
    except OSError as error:
        included = [f"configs/{file.name}" for file in sorted(CONFIGS.glob("*.yaml"))]
        raise UsageError(
            f"cannot read the argument file {path}: {error.strerror} (hfseq includes "
            f"{', '.join(included)})"
        ) from error
    except Exception as error:
        raise UsageError(f"{path} is not valid {path.suffix[1:]}: {error}") from error
    if not isinstance(values, dict):
        raise UsageError(f"{path} must map argument names to values, e.g. learning_rate: 3.0e-4")
    return flags_from_values(values, dataclass_types, f"{path} has")


def _load_yaml_as_text(text: str) -> Any:
    """Loads YAML. All scalars except null become strings, and keys must be unique."""
    import yaml

    class TextLoader(yaml.SafeLoader):
        def construct_mapping(self, node: yaml.MappingNode, deep: bool = False) -> dict[Any, Any]:
            names = [key.value for key, _ in node.value]
            if duplicate := next((name for name in names if names.count(name) > 1), None):
                raise ValueError(f"duplicate key {duplicate!r}")
            return super().construct_mapping(node, deep)

        yaml_implicit_resolvers = {
            letter: [
                (tag, pattern) for tag, pattern in resolvers if tag.endswith((":null", ":merge"))
            ]
            for letter, resolvers in yaml.SafeLoader.yaml_implicit_resolvers.items()
        }

    return yaml.load(text, TextLoader)


def flags_from_values(
    values: Mapping[str, Any], dataclass_types: Sequence[type], prefix: str = "there are"
) -> list[str]:
    """Converts a mapping of flag names to values to a list of flags.

    Args:
        values: The values by flag name. `None` and empty lists are omitted. A dictionary becomes
            `key=value` pairs, which `config_overrides` expects.
        dataclass_types: The dataclasses whose fields are the allowed names.
        prefix: Beginning of the error message about unknown names.

    Raises:
        UsageError: A name is unknown, or it is a flag for an access token.
    """
    reject_token_flags(f"--{name}" for name in values)
    fields = {
        field.name: str(field.type)
        for dataclass_type in dataclass_types
        for field in dataclasses.fields(dataclass_type)
    }
    options = [f"--{name}" for name in fields]
    unknown = []
    for name, value in values.items():
        if name not in fields:
            hint = find_hint(str(name), "" if value is None else str(value), options)
            unknown.append(f"'{name}'" + (f": {hint}" if hint else did_you_mean(str(name), fields)))
    if unknown:
        raise UsageError(f"{prefix} unknown arguments: {'; '.join(unknown)}")
    flags: list[str] = []
    for name, value in values.items():
        if value in (None, []):
            continue
        if isinstance(value, dict):
            value = ",".join(f"{key}={item}" for key, item in value.items())
        if "bool" in fields[name] and value in ("on", "off"):  # spellings of booleans in YAML
            value = value == "on"
        # training_args.json contains the home directory as `~`, which no shell expands here.
        if isinstance(value, list):
            flags += [f"--{name}", *(os.path.expanduser(str(item)) for item in value)]
        else:  # a value may begin with "-"
            flags.append(f"--{name}={os.path.expanduser(str(value))}")
    return flags


#: The environment variables that replace each missing flag, in order of preference.
ENVIRONMENT_VARIABLES = {
    "coordinator_address": ("COORDINATOR_ADDRESS", "JAX_COORDINATOR_ADDRESS"),
    "num_processes": ("NUM_PROCESSES",),
    # Kubernetes sets this in the pods of an indexed Job or JobSet.
    "process_id": ("PROCESS_ID", "JOB_COMPLETION_INDEX"),
    "local_device_ids": ("LOCAL_DEVICE_IDS",),
}
#: The variables of torchrun, which are used if all of them are set.
TORCHRUN_VARIABLES = ("MASTER_ADDR", "MASTER_PORT", "WORLD_SIZE", "RANK", "LOCAL_RANK")


@dataclass
class ProcessArguments(CheckedArguments):
    """Flags for distributed training. They describe how the processes of a run find each other.

    If neither these flags nor their environment variables are set, a run has one process.
    """

    distributed: bool = option(
        False, "Detect the other processes from Slurm, Open MPI or a Kubernetes JobSet."
    )
    coordinator_address: str | None = option(
        None,
        "host:port on which process 0 listens, e.g. node1:1234. Default: COORDINATOR_ADDRESS "
        "from the environment, or the variables of torchrun.",
    )
    num_processes: PositiveInt | None = option(
        None,
        "Total number of processes, if it cannot be detected. Default: NUM_PROCESSES from the "
        "environment, or the variables of torchrun.",
    )
    process_id: Annotated[int, AllowedValues("0 or more (IDs start at 0)", minimum=0)] | None = (
        option(
            None,
            "Index of this process, starting at 0. Default: PROCESS_ID from the environment, or "
            "the variables of torchrun.",
        )
    )
    local_device_ids: str | None = option(
        None,
        "Accelerators of this machine that this process uses, e.g. 0 or 0,1. Default: "
        "LOCAL_DEVICE_IDS from the environment, the variables of torchrun, or all.",
    )
    coordinator_timeout: Annotated[int, AllowedValues("at least 1 second", minimum=1)] = option(
        300, "Seconds to wait at startup for the coordinator and the other processes."
    )
    heartbeat_timeout: Annotated[int, AllowedValues("at least 10 seconds", minimum=10)] = option(
        100, "Seconds without a heartbeat from a process after which the run ends with an error."
    )

    def problems(self) -> Iterator[str]:
        """Yields an error if `local_device_ids` is not a list of numbers."""
        ids = self.local_device_ids
        if ids is not None and not re.fullmatch(r"\d+(,\d+)*", ids):
            yield f"--local_device_ids {ids} must be numbers separated by commas, e.g. 0,1"

    @property
    def is_distributed(self) -> bool:
        """Whether the flags or the environment specify several processes."""
        values = (self.address, self.num_processes, self.process_id)
        return self.distributed or any(value is not None for value in values)

    @property
    def address(self) -> str | None:
        """The `host:port` of the coordinator, from the flag or the environment."""
        value, variable = self._flag_or_variable("coordinator_address")
        if value and not re.fullmatch(r".+:\d+", value):
            source = f"{variable} in the environment," if variable else "--coordinator_address"
            raise UsageError(
                f"{source} {value}: this is not an address of the form host:port, e.g. node1:1234"
            )
        return value or None

    @property
    def devices(self) -> list[int] | None:
        """The IDs of the local devices of this process, from the flag or the environment."""
        ids, variable = self._flag_or_variable("local_device_ids")
        if variable and not re.fullmatch(r"\d+(,\d+)*", ids or ""):
            raise UsageError(
                f"{variable} in the environment is '{ids}', but must be numbers separated by "
                "commas, e.g. 0,1"
            )
        return [int(part) for part in ids.split(",")] if ids else None

    def _flag_or_variable(self, flag: str) -> tuple[str | None, str | None]:
        """Returns the value of a flag or its environment variable, and the name of the variable.

        The name is `None` if the value comes from the flag.
        """
        if (value := getattr(self, flag)) is not None:
            return str(value), None
        variable = next(
            (name for name in ENVIRONMENT_VARIABLES[flag] if os.environ.get(name)), None
        )
        if variable is None:
            return torchrun_value(flag)
        return os.environ[variable], variable

    def get_number(self, flag: str) -> int | None:
        """Returns `num_processes` or `process_id`, from the flag or the environment."""
        value, variable = self._flag_or_variable(flag)
        if variable and value and not value.isdigit():
            raise UsageError(
                f"{variable} in the environment is '{value}', which is not a number: correct it, "
                f"or use --{flag}"
            )
        return None if value is None else int(value)


def torchrun_value(flag: str) -> tuple[str | None, str | None]:
    """Returns the value of a flag from the environment variables that torchrun sets.

    If torchrun itself listens on MASTER_PORT, the coordinator uses the next port.

    Returns:
        The value, and the name of the variable that it comes from. Both are `None` if torchrun did
        not start this process.
    """
    environment = os.environ
    if not all(environment.get(name) for name in TORCHRUN_VARIABLES):
        return None, None
    if flag == "coordinator_address":
        port = environment["MASTER_PORT"]
        if port.isdigit() and environment.get("TORCHELASTIC_USE_AGENT_STORE") == "True":
            port = str(int(port) + 1)
        return f"{environment['MASTER_ADDR']}:{port}", "MASTER_ADDR"
    variable = {"num_processes": "WORLD_SIZE", "process_id": "RANK"}.get(flag, "LOCAL_RANK")
    return environment[variable], variable


FloatType = Literal["float32", "bfloat16", "float16"]
FLOAT_TYPES: tuple[str, ...] = get_args(FloatType)


@dataclass
class ModelArguments(CheckedArguments):
    """Flags for the model, configuration and tokenizer, named as in the Transformers 4 scripts."""

    model_name_or_path: str | None = option(
        None,
        "Local directory or Hub ID of the pretrained model. Without it, a model is trained from "
        "scratch.",
    )
    model_type: str | None = option(
        None,
        "Architecture to train from scratch, e.g. bert or roberta. `hfseq plugins` lists all "
        "architectures.",
    )
    config_name: str | None = option(
        None,
        "Local directory or Hub ID of the configuration, if it differs from model_name_or_path.",
    )
    preset: str | None = option(
        None, "Predefined size of the architecture for training from scratch, e.g. base or big."
    )
    config_overrides: str | None = option(
        None,
        "Comma-separated changes to the configuration, e.g. hidden_size=256,num_hidden_layers=6.",
    )
    tokenizer_name: str | None = option(
        None, "Local directory or Hub ID of the tokenizer, if it differs from model_name_or_path."
    )
    cache_dir: str | None = option(None, "Directory for files downloaded from the Hub.")
    model_revision: str = option("main", "Branch, tag or commit of the model on the Hub.")
    use_fast_tokenizer: bool = option(
        True, "Accepted for compatibility and ignored: tokenizers are always fast."
    )
    dtype: (
        Annotated[
            FloatType, AllowedValues("float32, bfloat16 or float16 (use --precision for recipes)")
        ]
        | None
    ) = option(
        None,
        "Computation dtype: float32, bfloat16 or float16. --precision with one of these values has "
        "the same effect. With an FP8 recipe, this flag sets the dtype of all operations that are "
        "not in FP8 (bfloat16 by default).",
    )
    precision: str | None = option(
        None,
        "Precision recipe: float32 (default), bfloat16, float16, fp8_delayed, fp8_current, or a "
        "recipe of a plugin. `hfseq plugins` lists all recipes.",
    )
    precision_sites: str | None = option(
        None,
        "Comma-separated regular expressions for the paths of the Linear layers that use the "
        r"precision recipe. For FP8 recipes, the default is (^|/)\d+/ , which matches all Linear "
        "layers inside of transformer layers.",
    )
    fp8_amax_history_length: int | None = option(
        None,
        "Length of the history of the recipe fp8_delayed in steps (1024 by default). The scale of "
        "an array is computed from its largest absolute value (amax) in this history.",
    )
    fp8_margin: int | None = option(
        None,
        "Headroom of FP8 scales: a scale leaves room for values up to 2^fp8_margin times the "
        "largest absolute value (0 by default).",
    )
    param_dtype: Literal["float32", "bfloat16"] = option(
        "float32", "Dtype of the parameters: float32 or bfloat16."
    )
    trust_remote_code: bool = option(
        False, "Allow code from the Hub repository of the model to run."
    )
    gradient_checkpointing: bool = option(
        False,
        "Recompute the activations of each layer in the backward pass. This saves memory (on CPUs "
        "only with --scan_layers), but a step takes about a third longer.",
    )
    bridge: bool = option(
        False,
        "Run the PyTorch code of Transformers in JAX (docs/bridge.md). This supports architectures "
        "and tasks that hfseq has no model class for. It requires the extra bridge.",
    )
    scan_layers: bool = option(
        False,
        "Stack the layers and run them with a scan, so that compile time does not depend on depth.",
    )
    attn_implementation: str | None = option(
        None,
        "Attention implementation: auto (default), cudnn, flash, splash, explicit, xla, or an "
        "implementation of a plugin.",
    )
    use_peft: bool = option(
        False, "Train only LoRA adapters. The result can be loaded with the peft package."
    )
    lora_r: PositiveInt = option(16, "LoRA rank.")
    lora_alpha: Annotated[float, AllowedValues("above 0", above=0)] = option(
        32.0, "LoRA alpha. The output of an adapter is scaled by lora_alpha / lora_r."
    )
    lora_dropout: Annotated[float, AllowedValues("0 to below 1", minimum=0, below=1)] = option(
        0.05, "Dropout probability of the inputs of the adapters."
    )
    lora_target_modules: list[str] | None = option(
        None,
        "Modules that get an adapter: suffixes of module names in PyTorch checkpoints, e.g. q_proj "
        "v_proj, or all-linear. Default: the modules that PEFT uses for the architecture.",
    )
    lora_target_parameters: list[str] | None = option(
        None,
        "Kernels of experts that get adapters: suffixes of parameter names in PyTorch, e.g. "
        "mlp.experts.gate_up_proj mlp.experts.down_proj. Requires --lora_dropout 0.",
    )
    lora_modules_to_save: list[str] | None = option(
        None,
        "Modules that are trained in full, without an adapter, and saved together with the "
        "adapters. Newly initialized heads are always included.",
    )
    use_rslora: bool = option(
        False, "Scale the output of an adapter by lora_alpha / sqrt(lora_r) (rank-stabilized LoRA)."
    )
    load_in_4bit: bool = option(
        False,
        "Store the Linear weights of the base model in NF4, in blocks of 64 values (QLoRA). "
        "Requires --use_peft.",
    )
    load_in_8bit: bool = option(
        False,
        "Store the Linear weights of the base model in int8, with one scale per output feature. "
        "Requires --use_peft.",
    )

    def problems(self) -> Iterator[str]:
        """Yields errors for dtype and quantization flags that contradict each other."""
        if self.dtype and self.precision in FLOAT_TYPES and self.dtype != self.precision:
            yield f"--dtype {self.dtype} and --precision {self.precision} disagree: use only one"
        bits = [name for name in ("load_in_4bit", "load_in_8bit") if getattr(self, name)]
        if bits and not self.use_peft:
            yield (
                f"--{bits[0]} quantizes the base model, so only adapters can be trained: add "
                "--use_peft"
            )
        if len(bits) > 1:
            yield "--load_in_4bit and --load_in_8bit are mutually exclusive: use only one"
        if bits and self.recipe not in FLOAT_TYPES:
            yield f"--{bits[0]} cannot be combined with --precision {self.recipe}: drop one of them"

    @property
    def base_quantization(self) -> str | None:
        """Quantization of the LoRA base model: "nf4", "int8", or `None` for no quantization."""
        return "nf4" if self.load_in_4bit else "int8" if self.load_in_8bit else None

    @property
    def recipe(self) -> str:
        """The name of the precision recipe."""
        return self.precision or self.dtype or "float32"

    @property
    def recipe_compute_dtype(self) -> str | None:
        """The value of `--dtype` if the recipe is not a dtype itself, as for FP8 recipes."""
        return self.dtype if self.recipe not in FLOAT_TYPES else None

    @property
    def sites(self) -> tuple[str, ...]:
        """The regular expressions in `precision_sites`. Empty for the default of the recipe."""
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
Schedule = Literal[
    "linear",
    "cosine",
    "inverse_sqrt",
    "constant",
    "constant_with_warmup",
    "warmup_stable_decay",
    "noam",
]
NonNegativeFloat = Annotated[float, AllowedValues("0 or more", minimum=0)]
Fraction = Annotated[float, AllowedValues("0 to 1", minimum=0, maximum=1)]


@dataclass
class TrainingArguments(CheckedArguments):
    """Flags for training.

    Names and defaults are those of the Transformers 4 scripts. Flags that these scripts do not have
    are named as in the current `Trainer`.
    """

    output_dir: str = option("", "Directory or fsspec URL for the model, checkpoints and logs.")
    overwrite_output_dir: bool = option(
        False,
        "Start a new run, and move existing checkpoints and logs in output_dir aside. Without this "
        "flag, the run in output_dir is resumed.",
    )
    do_train: bool = option(False, "Train. Without any --do_ flag, the run trains and evaluates.")
    do_eval: bool = option(
        False, "Evaluate at the end of the run. See --eval_strategy for evaluation during training."
    )
    do_predict: bool = option(
        False,
        "At the end, apply the model to the test split. Depending on the objective, this computes "
        "the loss (clm), generates texts (translations, summaries, captions), or makes predictions "
        "(classes, tags, answers, similarities).",
    )
    per_device_train_batch_size: PositiveInt = option(
        8, "Micro-batch size per data-parallel shard."
    )
    per_device_eval_batch_size: PositiveInt = option(
        8, "Evaluation batch size per data-parallel shard."
    )
    gradient_accumulation_steps: PositiveInt = option(
        1,
        "Number of micro-batches per optimizer step. The result does not depend on this number as "
        "long as the global batch size is the same.",
    )
    global_batch_size: PositiveInt | None = option(
        None,
        "Rows per optimizer step on all devices. Default: per_device_train_batch_size x "
        "data-parallel shards x gradient_accumulation_steps.",
    )
    update_length: PositiveInt | None = option(
        None,
        "Number of tokens of each row per optimizer step (truncated back-propagation). Rows are "
        "trained in windows of this length, and the model's state is carried from one window to "
        "the next.",
    )
    state_reset: StateReset = option(
        "sequence",
        "When to reset the state that --update_length carries between windows: sequence (at the "
        "start of each row) or never (each row of the batch reads a continuous stream of text).",
    )
    learning_rate: NonNegativeFloat = option(5e-5, "Peak learning rate.")
    lr_scheduler_type: Schedule = option(
        "linear",
        "Learning rate schedule: linear, cosine, inverse_sqrt, constant, constant_with_warmup, "
        "warmup_stable_decay (constant until the last --lr_decay_steps), or noam (learning_rate x "
        "d_model^-0.5 x min(step^-0.5, step x warmup_steps^-1.5)).",
    )
    warmup_steps: NonNegativeInt = option(0, "Number of linear warmup steps.")
    warmup_ratio: Fraction = option(
        0.0, "Warmup as a fraction of all steps. Used if warmup_steps is 0."
    )
    lr_decay_steps: PositiveInt | None = option(
        None, "Number of steps at the end of the run in which warmup_stable_decay decays."
    )
    lr_decay_type: Literal["linear", "cosine", "1-sqrt"] = option(
        "linear", "Form of the decay of warmup_stable_decay."
    )
    lr_end_ratio: Fraction = option(
        0.0,
        "Final learning rate of the schedules linear, cosine and warmup_stable_decay as a fraction "
        "of the peak, e.g. 0.1.",
    )
    lr_constant_steps: NonNegativeInt = option(
        0,
        "Number of steps at the end of the run with a constant learning rate. The decay ends "
        "before these steps, which use the final learning rate of the decay.",
    )
    optim: str = option("adamw", "Name of the optimizer. `hfseq plugins` lists all optimizers.")
    adafactor: bool = option(False, "Same as --optim adafactor.")
    weight_decay: NonNegativeFloat = option(
        0.0, "Weight decay. Biases and normalization layers are exempt."
    )
    weight_decay_mode: WeightDecayMode = option(
        "decoupled",
        "How weight decay is applied: decoupled (it is multiplied by the learning rate) or "
        "absolute (each step multiplies the parameters by 1 - weight_decay, regardless of the "
        "learning rate).",
    )
    adam_beta1: float = option(0.9, "Beta1 of Adam and related optimizers.")
    adam_beta2: float = option(0.999, "Beta2 of Adam and related optimizers.")
    adam_epsilon: float = option(1e-8, "Epsilon of Adam and related optimizers.")
    max_grad_norm: Annotated[float, AllowedValues("0 (no clipping) or more", minimum=0)] = option(
        0.0, "Maximum global gradient norm for clipping. 0 disables clipping."
    )
    no_decay: list[str] = option(
        [], "Regular expressions for the paths of additional parameters without weight decay."
    )
    freeze: list[str] = option(
        [], "Regular expressions for the paths of parameters that are not trained."
    )
    num_train_epochs: float = option(3.0, "Number of training epochs, which may be fractional.")
    max_steps: int = option(
        -1, "Number of optimizer steps. If positive, overrides num_train_epochs."
    )
    logging_steps: PositiveInt = option(500, "Number of steps between two logs.")
    logging_first_step: bool = option(True, "Also log the first step.")
    eval_strategy: Strategy | None = option(
        None,
        "When to evaluate during training: no, steps or epoch. Default: steps if eval_steps is "
        "given, otherwise no.",
    )
    eval_steps: PositiveInt | None = option(
        None,
        "Number of steps between two evaluations. Default: logging_steps, as in Transformers.",
    )
    max_eval_batches: PositiveInt | None = option(
        None,
        "Maximum number of batches for evaluations during training. The evaluation at the end "
        "uses all batches.",
    )
    save_strategy: Strategy = option(
        "steps", "When to save checkpoints: no (only at the end), steps or epoch."
    )
    save_steps: PositiveInt = option(500, "Number of steps between two checkpoints.")
    save_total_limit: PositiveInt | None = option(
        2, "Number of checkpoints to keep, in addition to the best one."
    )
    metric_for_best_model: str = option("eval_loss", "Metric that selects the best checkpoint.")
    greater_is_better: bool | None = option(
        None,
        "Whether a larger metric_for_best_model is better. Default: inferred from the name of "
        "the metric.",
    )
    load_best_model_at_end: bool = option(
        False,
        "At the end, save the weights with the best evaluation result instead of the last weights. "
        "A checkpoint is also saved after each evaluation with the best result so far.",
    )
    average_checkpoints: PositiveInt | None = option(
        None, "At the end, save the average of the weights of the last N checkpoints."
    )
    resume_from_checkpoint: str | None = option(
        None,
        "Checkpoint or output directory to resume from. Default: the latest checkpoint in "
        "output_dir.",
    )
    seed: int = option(42, "Random seed for initialization, data order, masking and dropout.")
    device: DeviceName | None = option(
        None,
        "Required device type: cpu, gpu (or cuda) or tpu. The run fails if it is not available.",
    )
    mesh: str | None = option(
        None, "Device mesh, e.g. data=2,fsdp=4. Axes: data, fsdp, expert, tensor, sequence."
    )
    sequence_parallel: bool = option(
        False,
        "Also shard the hidden states between layers over the mesh axis tensor, along their "
        "length. This saves memory.",
    )
    inspect_sharding: bool = option(
        False,
        "Before the first step, print how arrays are sharded and which collectives a step runs.",
    )
    on_non_finite: OnNonFinite = option(
        "stop", "How to handle a NaN or infinite loss: stop the run, or skip the step."
    )
    report_to: list[str] = option(
        ["tensorboard", "jsonl"],
        "Trackers that record the metrics: tensorboard, wandb, jsonl, trackers of plugins, all "
        "(every tracker whose package is installed), or none.",
    )
    log_histograms: PositiveInt | None = option(
        None,
        "Number of steps between two histograms of weights and gradients. Default: no histograms.",
    )
    run_name: str | None = option(None, "Name of the run in trackers.")
    disable_tqdm: bool = option(False, "Disable the progress bar.")
    json: bool = option(
        False,
        "At the end, print the output directory, the number of steps and the metrics as a JSON "
        "object on standard output. All other output goes to standard error.",
    )
    profile: str | None = option(
        None,
        "First and last step to profile with the JAX profiler, e.g. 10-15. The profile is saved "
        "in output_dir.",
    )
    peak_tflops: Annotated[float, AllowedValues("a positive number", above=0)] | None = option(
        None,
        "Peak TFLOP/s per device (on CPUs, per process) for computing the model FLOPs utilization "
        "(MFU). Default: the value in the data sheet of a known device, otherwise a "
        "measurement.",
    )
    compilation_cache_dir: str | None = option(
        None,
        "Directory of the persistent compilation cache, or none to disable it. Default: "
        "~/.cache/hfseq/xla.",
    )
    accelerator_flags: str = option(
        "none",
        "XLA flags for accelerators: recommended (a set of flags for several devices), none, or "
        "your own flags in quotes. They are tested before use.",
    )
    sigterm_exit_code: int = option(
        0, "Exit code after SIGTERM. With 143, schedulers such as Kubernetes restart the job."
    )
    push_to_hub: bool = option(
        False, "Upload the model, logs, model card and plots to the Hub in the background."
    )
    hub_model_id: str | None = option(
        None, "Repository on the Hub. Default: the name of output_dir."
    )
    hub_private_repo: bool = option(False, "Create the repository as private.")
    hub_strategy: Literal["every_save", "end", "checkpoint"] = option(
        "every_save",
        "When to push: every_save, end (once, at the end of training), or checkpoint (at every "
        "save, including the latest training checkpoint, so that another machine can resume).",
    )
    hub_timeout: Annotated[float, AllowedValues("a positive number", above=0)] = option(
        network.DEFAULT_STALL_TIMEOUT,
        "Seconds without transferred data after which an upload to the Hub or to a remote "
        "output_dir counts as stalled. A finished run then exits, and reports the missing "
        "uploads.",
    )
    card_license: str | None = option(
        None, "License of the model for the model card, e.g. apache-2.0."
    )
    card_language: list[str] | None = option(
        None, "Codes of the model's languages for the model card, e.g. nb or en."
    )
    card_samples: NonNegativeInt = option(
        3, "Number of sample outputs in the model card. 0 disables them."
    )
    plugin: list[str] = option([], "Plugin files to load, e.g. my_model.py.")
    debug: bool = option(False, "Show tracebacks of errors.")

    def __post_init__(self) -> None:
        if self.adafactor:
            self.optim = "adafactor"
        if not (self.do_train or self.do_eval or self.do_predict):
            self.do_train = self.do_eval = True
        if self.eval_strategy is None:
            self.eval_strategy = "steps" if self.eval_steps else "no"
        if self.eval_strategy == "steps" and self.eval_steps is None:
            self.eval_steps = self.logging_steps
        if self.profile:
            parse_profile_steps(self.profile)
        super().__post_init__()

    def problems(self) -> Iterator[str]:
        """Yields errors for missing flags, and for flags that exclude or require each other."""
        if not self.output_dir:
            yield "--output_dir is required"
        if problem := accelerator_flags.find_problem(self.accelerator_flags):
            yield problem
        if self.push_to_hub and (name_problem := _repository_problem(self)):
            yield name_problem
        if self.average_checkpoints and self.load_best_model_at_end:
            yield (
                "--average_checkpoints and --load_best_model_at_end are mutually exclusive: use "
                "only one of them"
            )
        if (self.average_checkpoints or 0) > (self.save_total_limit or math.inf):
            yield (
                f"--average_checkpoints {self.average_checkpoints} exceeds --save_total_limit "
                f"{self.save_total_limit}: keep at least as many checkpoints as are averaged"
            )
        if self.max_steps <= 0 and not self.num_train_epochs > 0:
            yield f"--num_train_epochs {self.num_train_epochs} must be positive"
        is_stable = self.lr_scheduler_type == "warmup_stable_decay"
        if (
            self.lr_end_ratio
            and self.lr_scheduler_type not in ("linear", "cosine")
            and not is_stable
        ):
            yield (
                f"--lr_end_ratio {self.lr_end_ratio} only applies to linear and cosine schedules "
                f"and to warmup_stable_decay, not to --lr_scheduler_type {self.lr_scheduler_type}: "
                "drop one of the two flags"
            )
        if is_stable != (self.lr_decay_steps is not None):
            yield (
                "--lr_scheduler_type warmup_stable_decay requires --lr_decay_steps N, the length "
                "of its decay"
                if is_stable
                else f"--lr_decay_steps {self.lr_decay_steps} requires --lr_scheduler_type "
                "warmup_stable_decay"
            )
        free = ("constant", "constant_with_warmup")
        if self.optim.startswith("schedule_free") and self.lr_scheduler_type not in free:
            yield (
                f"--optim {self.optim} replaces the decay of the learning rate: use "
                "--lr_scheduler_type constant_with_warmup or constant, not "
                f"{self.lr_scheduler_type}"
            )
        if "8bit" in self.optim:
            yield (
                f"--optim {self.optim}: optax has no optimizer with 8-bit states. To save memory, "
                "use adafactor or lion, or shard the states over devices with --mesh fsdp=N"
            )
        if self.lr_constant_steps and self.lr_scheduler_type == "noam":
            yield (
                f"--lr_constant_steps {self.lr_constant_steps}: the decay of --lr_scheduler_type "
                "noam does not end before the end of the run. Use inverse_sqrt"
            )
        if self.state_reset != "sequence" and not self.update_length:
            yield (
                f"--state_reset {self.state_reset} (instead of sequence) requires --update_length, "
                "because each row is otherwise trained in one step"
            )
        if self.weight_decay_mode == "absolute" and self.weight_decay >= 1:
            yield (
                f"--weight_decay {self.weight_decay} with --weight_decay_mode absolute sets all "
                "parameters to zero or flips their sign: use less than 1"
            )


def _repository_problem(training: TrainingArguments) -> str | None:
    """Returns an error message if the Hub does not allow the name of the repository."""
    from huggingface_hub.errors import HFValidationError
    from huggingface_hub.utils import validate_repo_id

    name = training.hub_model_id or Path(training.output_dir.rstrip("/")).name
    try:
        validate_repo_id(name)
    except HFValidationError as error:
        flag = "--hub_model_id" if training.hub_model_id else f"--output_dir {training.output_dir}"
        return (
            f"{flag}: the Hub does not allow the repository name '{name}' "
            f"({first_line(error).rstrip('.')}): set --hub_model_id USER/NAME"
        )
    return None


def parse_profile_steps(text: str) -> tuple[int, int]:
    """Parses the first and last step of `--profile`.

    Raises:
        UsageError: The value does not have the form `first-last`, counted from 1.
    """
    first, _, last = text.partition("-")
    if not (first.isdecimal() and last.isdecimal() and 1 <= int(first) <= int(last)):
        raise UsageError(
            f"--profile {text} does not have the form first-last, e.g. 10-15. Steps are counted "
            "from 1"
        )
    return int(first), int(last)


ARGUMENT_CLASSES = (ModelArguments, DataArguments, TrainingArguments, ProcessArguments)


@dataclass
class Arguments:
    """All arguments of a run.

    Attributes:
        model: Flags for the model, configuration and tokenizer.
        data: Flags for the data, of the class that belongs to the objective.
        training: Flags for training.
        command: The command line without access tokens, for the model card.
        processes: Flags for distributed training.
    """

    model: ModelArguments
    data: TextArguments
    training: TrainingArguments
    command: str
    processes: ProcessArguments = dataclasses.field(default_factory=ProcessArguments)

    def as_dict(self) -> dict[str, Any]:
        """Returns all values except those of the process flags, for logs and model cards.

        Access tokens are removed. The result is the same in all processes.
        """
        merged: dict[str, Any] = {}
        for part in (self.model, self.data, self.training):
            merged |= dataclasses.asdict(part)
        return redact_values(merged)


def with_data_arguments(objective: str, arguments: Arguments) -> Arguments:
    """Returns the arguments with the data flags of an objective.

    For an objective of a plugin, the arguments are returned unchanged.
    """
    if objective not in OBJECTIVES:
        return arguments
    data = convert_arguments(arguments.data, OBJECTIVES[objective])
    return dataclasses.replace(arguments, data=data)


def data_class_of(objective: str) -> type[TextArguments]:
    """Returns the class of the data flags of a registered objective."""
    if objective in OBJECTIVES:
        return OBJECTIVES[objective]
    return plugins.load().objectives.get(objective).data_arguments


def check_objective(objective: str, plugin_files: Iterable[str] = (), flag: str = "") -> None:
    """Raises `UsageError` if no objective of this name is registered.

    Args:
        objective: The name.
        plugin_files: Plugin files to load first.
        flag: The flag that contains the name, for the message.
    """
    if objective in OBJECTIVES:
        return
    registered = plugins.load(extra=plugin_files).objectives
    if objective not in registered:
        raise UsageError(f"{flag}{registered.unknown_message(objective)}")


def parse(
    argv: Sequence[str] | None = None,
    description: str | None = None,
    objective: str = "mlm",
    command: str | None = None,
) -> Arguments:
    """Parses the flags of a training command.

    The first argument can be a YAML or JSON file with values for flags. Flags override the file.

    Args:
        argv: The flags. Default: the command line.
        description: Description for `--help`.
        objective: Name of the objective, which determines the data flags and their defaults. For an
            objective of a plugin, `data_arguments` of its class is used.
        command: The command before the flags, for the model card. Default: the script.

    Raises:
        UsageError: A flag is unknown, or values are invalid.
    """
    classes = (ModelArguments, data_class_of(objective), TrainingArguments, ProcessArguments)
    command_line = list(sys.argv[1:] if argv is None else argv)
    program = command
    if command_line and command_line[0].endswith((".yaml", ".yml", ".json")):
        # Messages about invalid values begin with the command and the name of the file.
        program = f"{command or Path(sys.argv[0]).name} {command_line[0]}"
        file_flags = flags_from_file(Path(command_line[0]), classes)
        if split_dataset_names(command_line[1:])[0]:
            file_flags = split_dataset_names(file_flags)[1]
        command_line = file_flags + command_line[1:]
    reject_token_flags(command_line)
    flags = combine_dataset_names(command_line, classes[1])
    model, data, training, processes = parse_flags(classes, flags, description, program)
    words = shlex.split(command) if command else ["python", Path(sys.argv[0]).name]
    return Arguments(model, data, training, redact(shlex.join([*words, *command_line])), processes)


def split_dataset_names(words: Sequence[str]) -> tuple[list[str], list[str]]:
    """Separates the values of `--dataset_name` from all other flags.

    Several values can follow one flag, or the flag can be repeated.
    """
    names: list[str] = []
    remaining: list[str] = []
    is_value = False
    for word in words:
        flag, equals, value = word.partition("=")
        if flag.replace("-", "_") == "__dataset_name":
            names += [value] if equals else []
            is_value = not equals
        elif is_value and not word.startswith("--"):
            names.append(word)
        else:
            is_value = False
            remaining.append(word)
    return names, remaining


def combine_dataset_names(words: Sequence[str], data_class: type[TextArguments]) -> list[str]:
    """Replaces `--dataset_name` by `--dataset_names` if it has several values.

    Args:
        words: The flags.
        data_class: The class of the data flags.

    Raises:
        UsageError: There are several values, but the objective trains on one dataset.
    """
    names, remaining = split_dataset_names(words)
    if len(names) < 2:
        return list(words)
    if not issubclass(data_class, MixtureArguments):
        raise UsageError(
            f"--dataset_name has the values {', '.join(names)}, but this objective trains on one "
            "dataset"
        )
    return [*remaining, "--dataset_names", *names]


def parse_values(values: Mapping[str, Any], objective: str) -> Arguments:
    """Parses flags that are given as a mapping instead of a command line.

    Args:
        values: The values by flag name, as for ``hfseq train OBJECTIVE``.
        objective: Name of the objective.

    Raises:
        UsageError: A name is unknown, or values are invalid.
    """
    classes = (ModelArguments, data_class_of(objective), TrainingArguments, ProcessArguments)
    flags = flags_from_values(values, classes)
    return parse(flags, objective=objective, command=f"hfseq train {objective}")


def parse_with_objective(
    argv: Sequence[str] | None = None, objective: str | None = None, program: str | None = None
) -> tuple[str, Arguments]:
    """Loads the plugins of `--plugin`, and parses the flags of an objective.

    Args:
        argv: The flags. Default: the command line.
        objective: The objective. Default: the flag `--objective NAME`.
        program: The command before the objective, for messages and the model card. Default: the
            name of the script.

    Returns:
        The name of the objective and the arguments.

    Raises:
        UsageError: No objective is given, it is not registered, or flags are invalid.
    """
    command_line = list(sys.argv[1:] if argv is None else argv)
    flag = ""
    if objective is None:
        parser = argparse.ArgumentParser(add_help=False, allow_abbrev=False)
        parser.add_argument("--objective")
        parsed, command_line = parser.parse_known_args(command_line)
        objective, flag = parsed.objective, "--objective"
    name = None if objective is None else objective_name(objective)
    if name not in OBJECTIVES:
        parser = argparse.ArgumentParser(add_help=False, allow_abbrev=False)
        parser.add_argument("--plugin", nargs="+", default=[])
        files = parser.parse_known_args(command_line)[0].plugin
        if name is not None:
            check_objective(name, files, f"{flag}: " if flag else "")
        elif not {"-h", "--help"} & set(command_line):
            names = ", ".join(plugins.load(extra=files).objectives)
            raise UsageError(f"no objective: add --objective NAME, one of {names}")
    name = name or "mlm"
    command_line = DERIVED_FLAGS.get(name, list)(command_line)
    script = f"python scripts/{Path(sys.argv[0]).name}"
    if flag:
        description = ANY_OBJECTIVE
        command = None
    else:
        command = f"{program} {objective}" if program else None
        description = usage(name, command or script)
    arguments = parse(command_line, description, name, command)
    if flag:
        text = f"{arguments.command} --objective {shlex.quote(name)}"
        arguments = dataclasses.replace(arguments, command=text)
    return name, arguments
