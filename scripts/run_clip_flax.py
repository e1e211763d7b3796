#!/usr/bin/env python
r"""Train an image encoder and a text encoder on images with captions, like CLIP.

The data are a table with a column of image paths, relative to the table, and a column of captions
or lists of captions:

    python scripts/run_clip_flax.py --output_dir my-pairs --model_name_or_path vit-bert \
        --train_file coco/train.jsonl --validation_file coco/validation.jsonl \
        --image_column image_path --caption_column captions --max_seq_length 96 \
        --per_device_train_batch_size 64 --learning_rate 5e-5 --num_train_epochs 20

With --vision_model_name_or_path and --text_model_name_or_path in place of --model_name_or_path, as
in run_hybrid_clip.py of Transformers 4, the script combines the two models first, in a directory
next to the output directory.

The loss compares the global batch across all devices. To continue a stopped run from its last
checkpoint, run the same command again.
"""

import argparse
import sys
from collections.abc import Sequence
from pathlib import Path

from hfseq.errors import UsageError
from hfseq.training import script


def combine_checkpoints(argv: Sequence[str]) -> list[str]:
    """Combine the two checkpoints, if given, and return flags that name the result.

    The combined model is saved in a directory next to the output directory, unless it exists.

    Raises:
        UsageError: Only one of the two checkpoints is given, or `--model_name_or_path` as well.
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
            f"use --{names[0]} and --{names[1]} together, with --output_dir and without "
            "--model_name_or_path"
        )
    folder = Path(f"{flags.output_dir.rstrip('/')}-start")
    if not (folder / "tokenizer_config.json").exists():
        from transformers import AutoImageProcessor, AutoTokenizer

        from hfseq import FlaxVisionTextDualEncoderModel

        pair = FlaxVisionTextDualEncoderModel.from_vision_text_pretrained(vision, text)
        pair.save_pretrained(folder)
        AutoImageProcessor.from_pretrained(vision).save_pretrained(folder)
        AutoTokenizer.from_pretrained(text).save_pretrained(folder)  # last: marks it as complete
    return ["--output_dir", flags.output_dir, "--model_name_or_path", str(folder), *other_flags]


if __name__ == "__main__":
    argv: list[str] = []
    status = script.run(lambda: argv.extend(combine_checkpoints(sys.argv[1:])))
    sys.exit(status or script.train("image_text", __doc__, argv))
