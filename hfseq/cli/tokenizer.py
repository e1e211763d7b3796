"""`hfseq tokenizer`: trains a tokenizer for a model family."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from hfseq import plugins
from hfseq.checkpoints.config import (
    apply_overrides,
    check_directory,
    parse_overrides,
    write_config,
)
from hfseq.cli.text import print_json
from hfseq.data.arguments import CheckedArguments, DataArguments, PositiveInt, option
from hfseq.errors import CheckpointError, UsageError, run_command
from hfseq.training.arguments import parse_flags

BATCH = 1000

DESCRIPTION = r"""Train a tokenizer for a model family on your own text.

    hfseq tokenizer --train_file corpus.jsonl --model_type roberta --vocab_size 50265 \
        --output_dir norwegian-roberta-base --config_name roberta

With --config_name, a matching model configuration is saved as well. Pass the directory as
--tokenizer_name and --config_name to hfseq train.

A byte vocabulary needs no text:

    hfseq tokenizer --model_type vq_transformer --vocabulary bytes --output_dir bytes
"""


@dataclass
class TokenizerArguments(CheckedArguments):
    """Flags of ``hfseq tokenizer``: the tokenizer to train, and where to save it."""

    model_type: str = field(
        metadata={
            "help": "roberta, bart, gpt2, bert, t5, marian, vq_transformer, xlm-roberta, mt5, "
            "mbart, blenderbot, xglm …, or a family that a plugin registers."
        }
    )
    output_dir: str = field(metadata={"help": "Directory to save the tokenizer (and config) in."})
    algorithm: str | None = option(
        None,
        "bpe (byte-level), unigram, wordpiece, or bytes (the 256 bytes and the special tokens, "
        "without training). Default: the algorithm of the family.",
    )
    vocabulary: str | None = option(None, "Alias of --algorithm.")
    vocab_size: PositiveInt = option(32_000, "Size of the vocabulary, including special tokens.")
    min_frequency: int = option(
        2, "Minimum frequency of a pair or word in the vocabulary (bpe, wordpiece)."
    )
    lowercase: bool = option(False, "Convert the text to lower case.")
    normalizer: str | None = option(None, "Unicode normalization: nfc, nfkc, nfd or nfkd.")
    model_max_length: PositiveInt | None = option(
        None, "Maximum input length in tokens. Default: the maximum of the family."
    )
    config_name: str | None = option(
        None,
        "Also write config.json, with the values of this Hub name, directory or model type.",
    )
    config_overrides: str | None = option(
        None, "Values for config.json, e.g. hidden_size=256,num_hidden_layers=6."
    )
    plugin: list[str] = option([], "Plugin files to load, e.g. my_model.py.")
    overwrite: bool = option(False, "Replace an existing tokenizer.")
    json: bool = option(False, "Print JSON.")
    debug: bool = option(False, "Show the traceback of an error.")

    def __post_init__(self) -> None:
        super().__post_init__()
        self.algorithm = self.vocabulary or self.algorithm

    def problems(self) -> Iterator[str]:
        """Yields a problem if `--algorithm` and its alias `--vocabulary` have different values."""
        if self.vocabulary and self.algorithm not in (None, self.vocabulary):
            yield (
                f"--vocabulary {self.vocabulary} and --algorithm {self.algorithm} disagree: use "
                "only one of them"
            )


def train(arguments: TokenizerArguments, data: DataArguments) -> None:
    """Trains and saves the tokenizer, and a configuration if the flags name one.

    Raises:
        UsageError: Flags are missing or wrong, or the output directory has a tokenizer.
    """
    from hfseq.data.tokenizers import train_tokenizer

    output = Path(arguments.output_dir)
    if (output / "tokenizer.json").exists() and not arguments.overwrite:
        raise UsageError(
            f"--output_dir {output} already has a tokenizer; add --overwrite to replace it"
        )
    plugins.load(extra=arguments.plugin)
    if arguments.config_name:
        try:
            check_directory(arguments.config_name)
        except CheckpointError as error:
            raise UsageError(f"--config_name {arguments.config_name}: {error}") from error
    overrides = parse_overrides(arguments.config_overrides)
    tokenizer = train_tokenizer(
        [] if arguments.algorithm == "bytes" else training_texts(data),
        arguments.model_type,
        arguments.algorithm,
        arguments.vocab_size,
        output,
        min_frequency=arguments.min_frequency,
        lowercase=arguments.lowercase,
        normalizer=arguments.normalizer,
        model_max_length=arguments.model_max_length,
    )
    result: dict[str, Any] = {"directory": str(output), "tokens": len(tokenizer)}
    lines = [f"{output}: {len(tokenizer)} tokens"]
    if len(tokenizer) < arguments.vocab_size and arguments.algorithm != "bytes":
        lines.append(f"(the text is too small for the requested {arguments.vocab_size} tokens)")
    if arguments.config_name or overrides:
        config = make_config(arguments.config_name or arguments.model_type, tokenizer, overrides)
        write_config(config, output)
        result["model_type"] = config.model_type
        path = output / "config.json"
        lines.append(f"{path}: {config.model_type}, vocab_size {config.vocab_size}")
    if arguments.json:
        print_json(result)
    else:
        print("\n".join(lines))


def training_texts(data: DataArguments) -> Iterator[list[str]]:
    """Loads the training text and yields lists of documents."""
    from hfseq.data.sources import load_splits

    data.validation_split_percentage = 0
    splits = load_splits(data, plugins.load())
    if "train" not in splits:
        raise UsageError("no training text: use --train_file or a dataset with a train split")
    return texts(splits["train"], splits.text_column)


def texts(dataset: Any, column: str) -> Iterator[list[str]]:
    """Yields lists of documents. A text that is not divided into documents is yielded in pieces."""
    if hasattr(dataset, "pieces"):
        yield from ([piece] for piece in dataset.pieces())
        return
    for batch in dataset.select_columns([column]).iter(BATCH):
        yield [text for text in batch[column] if text]


def make_config(name: str, tokenizer: Any, overrides: dict[str, Any]) -> Any:
    """Returns the configuration ``name`` with the tokenizer's IDs and ``overrides``."""
    from transformers import CONFIG_MAPPING, AutoConfig

    plugins.register_auto_classes()  # includes model types of plugins
    try:
        config = (
            CONFIG_MAPPING[name]() if name in CONFIG_MAPPING else AutoConfig.from_pretrained(name)
        )
    except (OSError, ValueError) as error:
        raise UsageError(
            f"--config_name {name} is not a model type, directory or Hub model: {error}"
        ) from error
    values: dict[str, Any] = {"vocab_size": len(tokenizer)}
    for role in ("pad", "bos", "eos"):
        values[f"{role}_token_id"] = getattr(tokenizer, f"{role}_token_id")
    if config.is_encoder_decoder:
        starts = {"bart": "eos", "blenderbot": "bos", "blenderbot-small": "bos"}
        role = starts.get(config.model_type, "pad")
        values["decoder_start_token_id"] = getattr(tokenizer, f"{role}_token_id")
    if getattr(config, "forced_eos_token_id", None) is not None:
        values["forced_eos_token_id"] = tokenizer.eos_token_id
    for key, value in values.items():
        setattr(config, key, value)
    apply_overrides(config, overrides)
    return config


def parse(
    argv: Sequence[str], program: str = "hfseq tokenizer"
) -> tuple[TokenizerArguments, DataArguments]:
    """Parses the flags."""
    description = DESCRIPTION.replace("hfseq tokenizer", program)
    tokenizer, data = parse_flags((TokenizerArguments, DataArguments), argv, description, program)
    return tokenizer, data


def main(
    argv: Sequence[str],
    plugin_files: Sequence[str] = (),
    debug: bool = False,
    program: str = "hfseq tokenizer",
) -> int:
    """Runs the command and returns its exit code.

    Args:
        argv: The flags.
        plugin_files: Plugin files that were named before the command.
        debug: Whether to show the tracebacks of errors.
        program: The command, for ``--help``.
    """

    def run() -> None:
        arguments, data = parse(argv, program)
        arguments.plugin = [*plugin_files, *arguments.plugin]
        train(arguments, data)

    return run_command(run, debug=debug or "--debug" in argv)
