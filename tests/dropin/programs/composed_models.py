"""Models that are composed from the configurations and checkpoints of two models."""

import sys
from pathlib import Path

import numpy as np
from transformers import (
    BertConfig,
    CLIPConfig,
    CLIPTextConfig,
    CLIPVisionConfig,
    EncoderDecoderConfig,
    FlaxCLIPModel,
    FlaxEncoderDecoderModel,
    FlaxSpeechEncoderDecoderModel,
    FlaxVisionEncoderDecoderModel,
    FlaxVisionTextDualEncoderModel,
    GPT2Config,
    SpeechEncoderDecoderConfig,
    VisionEncoderDecoderConfig,
    VisionTextDualEncoderConfig,
    ViTConfig,
    ViTFeatureExtractor,
    Wav2Vec2Config,
)


def main(folder, output):
    folder = Path(folder)
    bert = BertConfig.from_pretrained(folder / "bert")
    gpt2 = GPT2Config.from_pretrained(folder / "gpt2")
    vit = ViTConfig.from_pretrained(folder / "vit")
    wav2vec2 = Wav2Vec2Config.from_pretrained(folder / "wav2vec2")
    clip = CLIPConfig.from_pretrained(folder / "clip")
    text, vision = (
        kind.from_dict(part.to_dict())
        for kind, part in [
            (CLIPTextConfig, clip.text_config),
            (CLIPVisionConfig, clip.vision_config),
        ]
    )
    models = {
        "clip": FlaxCLIPModel(CLIPConfig.from_text_vision_configs(text, vision, projection_dim=8)),
        "dual": FlaxVisionTextDualEncoderModel(
            VisionTextDualEncoderConfig.from_vision_text_configs(vit, bert, projection_dim=8)
        ),
        "text": FlaxEncoderDecoderModel(
            EncoderDecoderConfig.from_encoder_decoder_configs(bert, gpt2)
        ),
        "images": FlaxVisionEncoderDecoderModel(
            VisionEncoderDecoderConfig.from_encoder_decoder_configs(vit, gpt2)
        ),
        "speech": FlaxSpeechEncoderDecoderModel(
            SpeechEncoderDecoderConfig.from_encoder_decoder_configs(wav2vec2, gpt2)
        ),
    }
    assert gpt2.is_decoder and gpt2.add_cross_attention
    extractor = ViTFeatureExtractor.from_pretrained(folder / "vit")
    generator = np.random.default_rng(0)
    image = generator.integers(0, 255, (12, 12, 3), dtype=np.uint8)
    pixels = np.asarray(extractor(images=image, return_tensors="jax").pixel_values)
    ids = generator.integers(3, 24, (1, 6))
    audio = generator.normal(size=(1, 180)).astype(np.float32)
    both = {"input_ids": ids, "pixel_values": pixels}
    inputs = {
        "clip": both,
        "dual": both,
        "text": {"input_ids": ids, "decoder_input_ids": ids},
        "images": {"pixel_values": pixels, "decoder_input_ids": ids},
        "speech": {"inputs": audio, "decoder_input_ids": ids},
    }
    results = {}
    for name, model in models.items():
        outputs = model(**inputs[name])
        results[name] = outputs.logits_per_image if inputs[name] is both else outputs.logits
        model.save_pretrained(folder / f"composed-{name}")
    np.savez(output, pixels=pixels, ids=ids, audio=audio, **results)


if __name__ == "__main__":
    main(*sys.argv[1:])
