#!/usr/bin/env python
"""Make a model that writes about pictures, of an encoder and a decoder that were trained apart.

    python scripts/create_model_from_encoder_decoder_models.py --output_dir vit-gpt2 \\
        --encoder_model_name_or_path google/vit-base-patch16-224-in21k \\
        --decoder_model_name_or_path gpt2

Its folder has the image processor of the first and the tokenizer of the second, too. What attends
from the decoder to the pictures is new: train it with run_image_captioning_flax.py.
"""

from __future__ import annotations

import argparse
import sys
from pathlib import Path

from hfseq.errors import UsageError, run_command


def create(output: Path, encoder: str, decoder: str, seed: int) -> None:
    """Write model, image processor and tokenizer into ``output``."""
    from transformers import AutoTokenizer

    from hfseq import FlaxVisionEncoderDecoderModel
    from hfseq.data.images import load_image_processor
    from hfseq.modeling import auto

    if output.exists() and any(output.iterdir()):
        raise UsageError(f"--output_dir {output} is not empty: give another, nothing is replaced")
    processor = load_image_processor(encoder, None)
    tokenizer = auto.load(AutoTokenizer, decoder)
    model = FlaxVisionEncoderDecoderModel.from_encoder_decoder_pretrained(
        encoder, decoder, seed=seed
    )
    # GPT-2 has one special token, which begins, ends and fills up.
    words, config = model.config.decoder, model.config
    ends = (words.eos_token_id, tokenizer.eos_token_id, tokenizer.sep_token_id)
    config.eos_token_id = next((token for token in ends if token is not None), None)
    starts = (words.bos_token_id, tokenizer.bos_token_id, tokenizer.cls_token_id)
    starts = (
        words.decoder_start_token_id if hasattr(words, "decoder_start_token_id") else None,
        *starts,
    )
    config.decoder_start_token_id = next((token for token in starts if token is not None), None)
    pads = (words.pad_token_id, tokenizer.pad_token_id, config.eos_token_id)
    config.pad_token_id = next((token for token in pads if token is not None), None)
    if tokenizer.pad_token_id is None:
        tokenizer.pad_token = tokenizer.convert_ids_to_tokens(config.pad_token_id)
    for part in (model, processor, tokenizer):
        part.save_pretrained(output)


def main() -> int:
    """Read the flags."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    for name, text in (
        ("output_dir", "the folder to write"),
        ("encoder_model_name_or_path", "a directory or Hub name of an encoder of pictures"),
        ("decoder_model_name_or_path", "a directory or Hub name of a decoder of text"),
    ):
        parser.add_argument(f"--{name}", required=True, help=text)
    parser.add_argument("--seed", type=int, default=0, help="of the new weights (0)")
    given = parser.parse_args()

    def run() -> int:
        create(
            Path(given.output_dir),
            given.encoder_model_name_or_path,
            given.decoder_model_name_or_path,
            given.seed,
        )
        return 0

    return run_command(run)


if __name__ == "__main__":
    sys.exit(main())
