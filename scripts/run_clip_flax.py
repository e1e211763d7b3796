#!/usr/bin/env python
r"""Train an encoder of pictures and one of texts on pictures with captions, as CLIP was.

A table with a column of files, relative to it, and one of captions or lists of them:

    python scripts/run_clip_flax.py --output_dir my-pairs --model_name_or_path vit-bert \
        --train_file coco/train.jsonl --validation_file coco/validation.jsonl \
        --image_column image_path --caption_column captions --max_seq_length 96 \
        --per_device_train_batch_size 64 --learning_rate 5e-5 --num_train_epochs 20

With --vision_model_name_or_path and --text_model_name_or_path in place of --model_name_or_path, as
in version 4's run_hybrid_clip.py, the two are put together first, in a folder beside the output.

The loss is over the global batch, across all devices. Run the same command again and a run that was
stopped goes on where its last checkpoint is.
"""

import argparse
import sys
from collections.abc import Sequence
from pathlib import Path

from hfseq.errors import UsageError
from hfseq.training import script


def put_together(given: Sequence[str]) -> list[str]:
    """Return the flags with the folder of a pair in place of its checkpoints, if they are given.

    The folder is beside the output directory, and made if it is not there.
    """
    parser = argparse.ArgumentParser(add_help=False, allow_abbrev=False)
    names = ("vision_model_name_or_path", "text_model_name_or_path")
    for name in (*names, "output_dir"):
        parser.add_argument(f"--{name}", f"--{name.replace('_', '-')}", dest=name)
    found, rest = parser.parse_known_args(given)
    vision, text = (getattr(found, name) for name in names)
    if vision is None and text is None:
        return list(given)
    if None in (vision, text, found.output_dir) or "--model_name_or_path" in " ".join(rest):
        raise UsageError(
            f"--{names[0]} and --{names[1]} go together, with --output_dir and without "
            "--model_name_or_path"
        )
    folder = Path(f"{found.output_dir.rstrip('/')}-start")
    if not (folder / "tokenizer_config.json").exists():
        from transformers import AutoImageProcessor, AutoTokenizer

        from hfseq import FlaxVisionTextDualEncoderModel

        pair = FlaxVisionTextDualEncoderModel.from_vision_text_pretrained(vision, text)
        pair.save_pretrained(folder)
        AutoImageProcessor.from_pretrained(vision).save_pretrained(folder)
        AutoTokenizer.from_pretrained(text).save_pretrained(folder)  # last: then all is there
    return ["--output_dir", found.output_dir, "--model_name_or_path", str(folder), *rest]


if __name__ == "__main__":
    made: list[list[str]] = []
    status = script.run(lambda: made.append(put_together(sys.argv[1:])))
    sys.exit(status or script.train("image_text", __doc__, made[0]))
