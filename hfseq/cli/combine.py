"""`hfseq combine`: creates a captioning model from an image encoder and a text decoder."""

from __future__ import annotations

import argparse
from pathlib import Path

from hfseq import plugins
from hfseq.cli.text import add_json, print_json
from hfseq.errors import UsageError


def create(output: Path, encoder: str, decoder: str, seed: int) -> None:
    """Writes model, image processor and tokenizer into ``output``."""
    from transformers import AutoTokenizer

    from hfseq.data.images import load_image_processor
    from hfseq.modeling import auto

    if output.exists() and any(output.iterdir()):
        raise UsageError(f"--output_dir {output} is not empty; use an empty directory")
    processor = load_image_processor(encoder, None)
    tokenizer = auto.load(AutoTokenizer, decoder)
    spec = plugins.load().architectures.get("vision-encoder-decoder")
    model_class = spec.load_head("ForVision2Seq")
    model = model_class.from_encoder_decoder_pretrained(encoder, decoder, seed=seed)
    # GPT-2 has one special token, used as start, end and padding token.
    decoder_config, config = model.config.decoder, model.config
    eos_candidates = (decoder_config.eos_token_id, tokenizer.eos_token_id, tokenizer.sep_token_id)
    config.eos_token_id = next((token for token in eos_candidates if token is not None), None)
    start_candidates = (
        getattr(decoder_config, "decoder_start_token_id", None),
        decoder_config.bos_token_id,
        tokenizer.bos_token_id,
        tokenizer.cls_token_id,
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


def add_combine(parser: argparse.ArgumentParser) -> None:
    """Adds the flags of ``hfseq combine``."""
    for name, text in (
        ("output_dir", "Directory to write to, which must be empty."),
        ("encoder_model_name_or_path", "Directory or Hub name of an image encoder."),
        ("decoder_model_name_or_path", "Directory or Hub name of a text decoder."),
    ):
        parser.add_argument(f"--{name}", required=True, help=text)
    parser.add_argument("--seed", type=int, default=0, help="Seed of the new weights. Default: 0.")
    add_json(parser)


def run_combine(arguments: argparse.Namespace) -> int:
    """Creates the model.

    The cross-attention weights are randomly initialized: train the model on captions.
    """
    plugins.load(extra=arguments.plugin)
    create(
        Path(arguments.output_dir),
        arguments.encoder_model_name_or_path,
        arguments.decoder_model_name_or_path,
        arguments.seed,
    )
    if arguments.json:
        print_json({"directory": arguments.output_dir})
    return 0
