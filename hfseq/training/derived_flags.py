"""Flags that some objectives derive from other flags, before the flags are parsed."""

from __future__ import annotations

import argparse
from collections.abc import Callable, Sequence
from pathlib import Path

from hfseq import plugins
from hfseq.checkpoints.hub import check_directory
from hfseq.errors import UsageError

DATA_FLAGS = ("--dataset_name", "--train_file", "--validation_file", "--test_file")
# Flags of the translation demonstration, which runs if no flag specifies data. Flags on the command
# line take precedence.
DEMONSTRATION = (
    *("--source_lang", "en", "--target_lang", "de", "--vocab_size", "1000"),
    *("--do_train", "--do_eval", "--do_predict", "--preset", "tiny"),
    *("--config_overrides", "dropout=0.0,attention_dropout=0.0"),
    *("--max_source_length", "64", "--max_target_length", "64"),
    *("--per_device_train_batch_size", "16", "--max_steps", "600", "--optim", "muon"),
    *("--learning_rate", "5e-3", "--warmup_steps", "50", "--logging_steps", "25"),
    *("--eval_steps", "100", "--save_steps", "100", "--max_generate_samples", "200"),
)


def with_demonstration(argv: Sequence[str]) -> list[str]:
    """Returns `argv`, preceded by the flags of the demonstration if `argv` specifies no data.

    `argv` is also returned unchanged if it is empty, begins with a file of flags, or contains
    `--help`.
    """
    names = {word.partition("=")[0].replace("-", "_") for word in argv}
    names_data = any(name.replace("-", "_") in names for name in DATA_FLAGS)
    from_file = bool(argv) and argv[0].endswith((".yaml", ".yml", ".json"))
    asks_for_help = bool({"_h", "__help"} & names)
    if names_data or from_file or asks_for_help or not argv:
        return list(argv)
    return [*DEMONSTRATION, *argv]


def combine_checkpoints(argv: Sequence[str]) -> list[str]:
    """Combines an image encoder and a text encoder into one model, if the flags specify them.

    The combined model is saved in the directory `<output_dir>-start`, unless it already exists.

    Returns:
        `argv`, with `--model_name_or_path` and the directory of the combined model in place of the
        flags for the encoders.

    Raises:
        UsageError: Only one of the two encoders is specified, `--output_dir` is missing, or
            `--model_name_or_path` is specified as well.
        CheckpointError: An encoder is a path that does not exist.
    """
    parser = argparse.ArgumentParser(add_help=False, allow_abbrev=False)
    names = ("vision_model_name_or_path", "text_model_name_or_path")
    for name in (*names, "output_dir"):
        parser.add_argument(f"--{name}", f"--{name.replace('_', '-')}", dest=name)
    flags, other_flags = parser.parse_known_args(argv)
    vision, text = (getattr(flags, name) for name in names)
    if vision is None and text is None:
        return list(argv)
    if None in (vision, text, flags.output_dir) or "--model_name_or_path" in " ".join(other_flags):
        raise UsageError(
            f"--{names[0]} and --{names[1]} combine two models into a new one: set both flags and "
            "--output_dir, and do not set --model_name_or_path"
        )
    for name in (vision, text):
        check_directory(name)
    folder = Path(f"{flags.output_dir.rstrip('/')}-start")
    if not (folder / "tokenizer_config.json").exists():
        from transformers import AutoImageProcessor, AutoTokenizer

        model_class = (
            plugins.load().architectures.get("vision-text-dual-encoder").load_head("Model")
        )
        pair = model_class.from_vision_text_pretrained(vision, text)
        pair.save_pretrained(folder)
        AutoImageProcessor.from_pretrained(vision).save_pretrained(folder)
        # The tokenizer is saved last. Its files mark the folder as complete.
        AutoTokenizer.from_pretrained(text).save_pretrained(folder)
    return ["--output_dir", flags.output_dir, "--model_name_or_path", str(folder), *other_flags]


#: For each objective with derived flags, a function that turns the flags of the command line into
#: the flags to parse.
DERIVED_FLAGS: dict[str, Callable[[Sequence[str]], list[str]]] = {
    "translation": with_demonstration,
    "image_text": combine_checkpoints,
}
