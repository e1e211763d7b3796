"""Resolves the names of flags, with hints for flags from the guides in docs/references.md."""

from __future__ import annotations

import argparse
import re
import shlex
from collections.abc import Collection, Mapping, Sequence

from hfseq.errors import UsageError, did_you_mean

#: The hint for a flag is a text, a tuple of texts, or a mapping. Of a tuple, the first text that is
#: suitable for the command is used. A mapping contains a hint for each value of the flag, where ""
#: stands for all other values.
Hint = str | tuple[str, ...] | Mapping[str, str | tuple[str, ...]]

_SIZES = "omit it: the sizes are in the config.json of the model"
_TRANSLATION = "--source_lang en --target_lang es"


def _overrides(*names: str) -> tuple[str, ...]:
    values = ",".join(f"{name}={{VALUE}}" for name in names)
    return f"--config_overrides {values}", _SIZES


def _both_sides(name: str) -> tuple[str, ...]:
    return _overrides(f"encoder_{name}", f"decoder_{name}")


#: The hint for each flag of a guide. The keys are the flags without dashes and without the prefix
#: ``config.``. A word in braces in a hint stands for the value of the flag. A hint is only suitable
#: for a command that has all flags in the hint.
GUIDE_FLAGS: dict[str, Hint] = {
    # Flax: the WMT example
    "workdir": "--output_dir {DIR}",
    "config": "put a YAML or JSON file with flags before all flags, e.g. flags.yaml --output_dir o",
    "jax_backend_target": "omit it: jax finds the devices of a TPU VM; --device tpu requires them",
    "use_fp8": {"": "--precision fp8_delayed", "false": "omit it: --precision selects FP8"},
    "use_mixed_precision": {
        "": "--precision bfloat16",
        "false": "omit it: --precision selects bfloat16",
    },
    "per_device_batch_size": ("--per_device_train_batch_size {N}", "--batch_size {N}"),
    "num_train_steps": "--max_steps {N}",
    "num_eval_steps": "--max_eval_batches {N}",
    "num_predict_steps": "--max_generate_samples {N}",
    "eval_every_steps": "--eval_steps {N}",
    "checkpoint_every_steps": "--save_steps {N}",
    "save_checkpoints": "omit it: checkpoints are always saved, every --save_steps steps",
    "restore_checkpoints": "omit it: a run with the same --output_dir resumes",
    "dataset_name": "--dataset_name tfds:{NAME}",
    "eval_dataset_name": "--validation_file tfds:{NAME}#test",
    "eval_split": "--validation_file tfds:wmt14_translate/de-en#{SPLIT}",
    "emb_dim": _overrides("hidden_size"),
    "qkv_dim": _overrides("qkv_dim"),
    "mlp_dim": _overrides("intermediate_size"),
    "share_embeddings": _overrides("share_embeddings"),
    "logits_via_embedding": _overrides("logits_via_embedding"),
    "posemb_init": ("--config_overrides positions=learned", _SIZES),
    "dropout_rate": _overrides("dropout"),
    "attention_dropout_rate": _overrides("attention_dropout"),
    "max_eval_target_length": ("--max_target_length {N}", "--max_new_tokens {N}"),
    "max_predict_length": "--max_new_tokens {N}",
    "vocab_path": "--tokenizer_name {DIR}",
    "label_smoothing": "--label_smoothing_factor {X}",
    "beam_size": "--num_beams {N}",
    # Transformer Engine
    "fp8_recipe": {
        "": "--precision fp8_delayed, or --precision fp8_current",
        "delayedscaling": "--precision fp8_delayed",
        "float8currentscaling": "--precision fp8_current",
        "mxfp8blockscaling": "block scaling is not supported: use --precision fp8_current",
        "nvfp4blockscaling": "block scaling is not supported: use --precision fp8_current",
    },
    "dry_run": "--max_steps 1 --max_eval_samples 8",
    "lr": "--learning_rate {X}",
    "test_batch_size": "--per_device_eval_batch_size {N}",
    "max_seq_len": ("--max_seq_length {N}", "--max_source_length {N}", "--block_size {N}"),
    "enable_sp": "--sequence_parallel",
    "num_process": "--num_processes {N}",
    # Transformer-VQ
    "mode": {
        "": ("--do_train, --do_eval or --do_predict", "omit it: this command has no modes"),
        "train": "--do_train",
        "validation": "--do_eval --validation_file FILE, without --do_train",
        "test": "--do_predict --test_file FILE, without --do_train",
        "train_vocab": (
            "omit it: this command trains a tokenizer, see --algorithm",
            "hfseq tokenizer --model_type vq_transformer --output_dir DIR --train_file FILE",
        ),
    },
    "multihost": {
        "": "--distributed",
        "false": "omit it: --distributed connects several hosts",
    },
    "n_data_shard": "--mesh data={N}",
    "n_model_shard": "--mesh tensor={N}, or with both axes --mesh data=2,tensor={N}",
    "wb_enabled": {"": "--report_to wandb", "false": "omit it: --report_to wandb enables W&B"},
    "wb_run": "set the variable WANDB_RUN_ID={ID}, with --report_to wandb",
    "gpu_coord_addr": "--coordinator_address {HOST:PORT}",
    "gpu_n_process": "--num_processes {N}",
    "gpu_process_id": "--process_id {I}",
    "sequence_len": ("--block_size {N}", "--max_seq_length {N}"),
    "update_len": "--update_length {N}",
    "block_len": _overrides("block_size"),
    "mem_len": _overrides("window_size"),
    "n_code": _overrides("num_codes"),
    "head_type": _overrides("head_type"),
    "reduction": _overrides("reduction"),
    "attention_type": _overrides("attention_type"),
    "wd_lam": "--weight_decay {X} --weight_decay_mode absolute",
    # Translate AI
    "dataset_file": (
        f"--train_file {{FILE}} {_TRANSLATION}",
        "--train_file {FILE}",
        "--input_file {FILE}",
    ),
    "dataset_dir": (
        f"--train_file {{DIR}} {_TRANSLATION}",
        "--train_dir {DIR}",
        "--train_file {DIR}",
    ),
    "mixed_precision": {
        "": "--precision bfloat16",
        "bf16": "--precision bfloat16",
        "fp16": "--precision float16",
    },
    "epochs": "--num_train_epochs {N}",
    "batch_size": "--per_device_train_batch_size {N}",
    "num_layers": _overrides("num_hidden_layers"),
    "num_heads": _overrides("num_attention_heads"),
    "embed_dim": _overrides("hidden_size"),
    "d_model": _overrides("hidden_size"),
    "ffwd_dim": _overrides("intermediate_size"),
    "seq_len": ("--max_source_length {N}", "--block_size {N}", "--max_seq_length {N}"),
    "max_output_tokens": ("--max_target_length {N}", "--max_new_tokens {N}"),
    "eval_interval": "--eval_steps {N}",
    "eval_iters": "--max_eval_batches {N}",
    "checkpoint_interval": "--save_steps {N}",
    "save_checkpoint": "--output_dir DIR, a directory instead of a file",
    "load_checkpoint": "omit it: a run with the same --output_dir resumes",
    "tensorboard_dir": "omit it: TensorBoard files are in the folder runs of --output_dir",
    "wandb_project": "set the variable WANDB_PROJECT={NAME}, with --report_to wandb",
    "wandb_api_key": "set the variable WANDB_API_KEY, with --report_to wandb",
    "plot_learning_curves": "omit it: every run writes learning_curve.png to --output_dir",
    "estimate_mfu": "omit it: every run logs train_mfu; --peak_tflops sets the peak",
    "hardware_peak_tflops": "--peak_tflops {X}",
    "english_query": "put the text after MODEL: hfseq translate MODEL {TEXT}",
    "checkpoint_file": (
        "put the output directory of a run, MODEL, before the text: hfseq translate MODEL TEXT"
    ),
}

#: Hints that differ for encoder-decoder models.
_ENCODER_DECODER: dict[str, Hint] = {
    "num_layers": _both_sides("layers"),
    "num_heads": _both_sides("attention_heads"),
    "emb_dim": _overrides("d_model"),
    "embed_dim": _overrides("d_model"),
    "d_model": _overrides("d_model"),
    "ffwd_dim": _both_sides("ffn_dim"),
    "mlp_dim": _both_sides("ffn_dim"),
    "max_seq_len": ("--max_source_length {N}",),
}
_FLAG = re.compile(r"--[a-z]\w*")


def resolve_flags(words: Sequence[str], parser: argparse.ArgumentParser) -> list[str]:
    """Spells out the flags of a command line as its parser does.

    Unique abbreviations are replaced by the full flag. In flags, `-` and `_` are equivalent.

    Args:
        words: The words of the command line.
        parser: The parser of the command.

    Returns:
        The words, in which each flag has a spelling that the parser defines. They are unchanged if
        they ask for help.

    Raises:
        UsageError: Flags are unknown or ambiguous. The message lists all of them.
    """
    options = parser._option_string_actions
    spellings = {id(action): option for option, action in reversed(options.items())}
    resolved, problems = list(words), list[str]()
    if {"-h", "--help"} & set(words):
        return resolved
    for position, word in enumerate(words):
        if word == "--":
            break
        name, equals, value = word.partition("=")
        if not name.startswith("--") or name in options:
            continue
        matches = _matches(name, parser)
        following = words[position + 1] if position + 1 < len(words) else ""
        value = value if equals or following.startswith("--") else following
        hint = find_hint(name, value, options)
        is_equal = len(matches) == 1 and len(matches[0]) == len(name)
        if is_equal or len(matches) == 1 and (not hint or matches[0] in _FLAG.findall(hint)):
            resolved[position] = matches[0] + word[len(name) :]
        elif hint is not None:
            problems.append(f"unknown flag {name}" + (f": {hint}" if hint else ""))
        elif matches:
            problems.append(f"ambiguous flag {name}: use one of {', '.join(matches)}")
        elif " " not in word:  # otherwise it is a text that begins with dashes
            setting = name.removeprefix("--config.").lstrip("-").replace("-", "_")
            guess = did_you_mean(setting, spellings.values())
            if not guess and name.startswith("--config.") and "--config_overrides" in options:
                guess = f": --config_overrides {setting}=VALUE sets a value of config.json"
            problems.append(f"unknown flag {name}{guess}")
    if problems:
        raise UsageError("\n  ".join(problems))
    return resolved


def _matches(name: str, parser: argparse.ArgumentParser) -> list[str]:
    """Returns the flags that ``name`` can stand for, in one spelling each."""
    key, options = name.replace("-", "_"), parser._option_string_actions
    equal = [option for option in options if option.replace("-", "_") == key]
    if equal or not parser.allow_abbrev:
        return equal[:1]
    first = {
        id(action): option
        for option, action in reversed(options.items())
        if option.replace("-", "_").startswith(key)
    }
    return list(first.values())[::-1]


def find_hint(name: str, value: str, options: Collection[str]) -> str | None:
    """Returns a hint about the hfseq flag that replaces a flag from one of the guides.

    Args:
        name: The flag, with or without dashes.
        value: The value of the flag, or an empty string.
        options: The flags of the command, with dashes.

    Returns:
        The hint. An empty string means that the command has no flag that replaces this flag, and
        `None` means that no guide has this flag.
    """
    key = name.lstrip("-").replace("-", "_")
    setting = key.removeprefix("config.")
    guide_flags = GUIDE_FLAGS | (_ENCODER_DECODER if "--max_target_length" in options else {})
    hint = guide_flags.get(setting)
    if hint is None:
        known = key != setting and f"--{setting}" in options
        return f"use {_fill(f'--{setting} {{VALUE}}', value)}" if known else None
    if isinstance(hint, Mapping):
        hint = hint.get(value.lower()) or hint[""]
    for text in (hint,) if isinstance(hint, str) else hint:
        if all(flag in options for flag in _FLAG.findall(text)):
            text = _fill(text, value)
            return f"use {text}" if text.startswith(("--", "hfseq")) else text
    return ""


def _fill(text: str, value: str) -> str:
    """Replaces words in braces with the value, if there is one."""
    return re.sub(r"\{([\w:]+)\}", lambda match: shlex.quote(value) if value else match[1], text)
