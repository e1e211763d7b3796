"""Vision encoder-decoders such as TrOCR (Li et al., 2021, https://arxiv.org/abs/2109.10282)."""

from __future__ import annotations

from hfseq import RegisterArchitecture, hookimpl

MODELING = "hfseq_plugins.vision_encoder_decoder.modeling"
CITATION = """\
@inproceedings{li2023trocr,
  title = {{TrOCR}: Transformer-based Optical Character Recognition with Pre-trained Models},
  author = {Li, Minghao and Lv, Tengchao and Chen, Jingye and Cui, Lei and Lu, Yijuan and
            Florencio, Dinei and Zhang, Cha and Li, Zhoujun and Wei, Furu},
  booktitle = {Proceedings of AAAI},
  year = {2023},
  url = {https://arxiv.org/abs/2109.10282}
}"""


@hookimpl
def register_architectures(register: RegisterArchitecture) -> None:
    """Registers the vision encoder-decoder that Transformers 4 had in Flax."""
    register(
        "vision-encoder-decoder",
        config="transformers:VisionEncoderDecoderConfig",
        heads={"ForVision2Seq": f"{MODELING}:FlaxVisionEncoderDecoderModel"},
        sharding="hfseq_plugins.encoder_decoder.sharding:RULES",
        card="An image encoder and a text decoder from two checkpoints.",
        citation=CITATION,
    )
