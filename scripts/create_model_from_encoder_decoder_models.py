#!/usr/bin/env python
"""Create a captioning model from a pretrained image encoder and a pretrained text decoder.

    python scripts/create_model_from_encoder_decoder_models.py --output_dir vit-gpt2 \\
        --encoder_model_name_or_path google/vit-base-patch16-224-in21k \\
        --decoder_model_name_or_path gpt2

The output directory also contains the image processor of the encoder and the tokenizer of the
decoder. The cross-attention weights are randomly initialized; train the model with
run_image_captioning_flax.py.
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
        raise UsageError(f"--output_dir {output} is not empty; use an empty directory")
    processor = load_image_processor(encoder, None)
    tokenizer = auto.load(AutoTokenizer, decoder)
    model = FlaxVisionEncoderDecoderModel.from_encoder_decoder_pretrained(
        encoder, decoder, seed=seed
    )
    # GPT-2 has one special token, used as start, end and padding token.
    decoder_config, config = model.config.decoder, model.config
    eos_candidates = (decoder_config.eos_token_id, tokenizer.eos_token_id, tokenizer.sep_token_id)
    config.eos_token_id = next((token for token in eos_candidates if token is not None), None)
    start_candidates = (decoder_config.bos_token_id, tokenizer.bos_token_id, tokenizer.cls_token_id)
    start_candidates = (
        decoder_config.decoder_start_token_id
        if hasattr(decoder_config, "decoder_start_token_id")
        else None,
        *start_candidates,
    )
    config.decoder_start_token_id = next(
        (token for token in start_candidates if token is not None), None
    )
    pad_candidates = (decoder_config.pad_token_id, tokenizer.pad_token_id, config.eos_token_id)
    config.pad_token_id = next((token for token in pad_candidates if token is not None), None)
    if tokenizer.pad_token_id is None:
        tokenizer.pad_token = tokenizer.convert_ids_to_tokens(config.pad_token_id)
    for part in (model, processor, tokenizer):
        part.save_pretrained(output)


def main() -> int:
    """Parse the flags and create the model."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    for name, text in (
        ("output_dir", "directory to write to"),
        ("encoder_model_name_or_path", "directory or Hub name of an image encoder"),
        ("decoder_model_name_or_path", "directory or Hub name of a text decoder"),
    ):
        parser.add_argument(f"--{name}", required=True, help=text)
    parser.add_argument("--seed", type=int, default=0, help="seed of the new weights (default: 0)")
    arguments = parser.parse_args()

    def run() -> int:
        create(
            Path(arguments.output_dir),
            arguments.encoder_model_name_or_path,
            arguments.decoder_model_name_or_path,
            arguments.seed,
        )
        return 0

    return run_command(run)


if __name__ == "__main__":
    sys.exit(main())
