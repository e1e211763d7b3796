"""Image captioning and classification, in Python and on the command line."""

from __future__ import annotations

import json

import jax
import numpy as np
import pytest

from hfseq.cli import main
from hfseq.errors import UsageError
from tests.support.images import write_bad_images
from tests.support.models import vit_config
from tests.support.stored_runs import STORED

pytest.importorskip("PIL")
DATA = STORED / "data"


@pytest.fixture(scope="module")
def classifier(tmp_path_factory):
    """A small ViT with its image processor."""
    from transformers import ViTImageProcessorPil

    from hfseq import FlaxViTForImageClassification

    folder = tmp_path_factory.mktemp("classifier")
    config = vit_config(num_labels=3)
    size = config.image_size
    size = size if isinstance(size, int) else size[0]
    FlaxViTForImageClassification(config, seed=3).save_pretrained(folder)
    ViTImageProcessorPil(size={"height": size, "width": size}).save_pretrained(folder)
    return folder


def test_classes_match_the_model_and_broken_files_are_reported(classifier, tmp_path, capsys):
    write_bad_images(tmp_path / "bad")
    good = DATA / "pictures" / "dark"
    code = main(
        [
            "classify",
            str(classifier),
            str(good),
            str(tmp_path / "bad"),
            "--json",
            "--top_k",
            "2",
            "--batch_size",
            "3",
        ]
    )
    captured = capsys.readouterr()
    actual = [json.loads(line) for line in captured.out.splitlines()]
    assert code == 1 and len(actual) == 8 + 6 and "6 of 14 images" in captured.err
    message = {item["file"].rsplit("/", 1)[1]: item.get("error") for item in actual}
    assert "more than 8 bits" in message["deep.png"] and "3 frames" in message["moving.gif"]
    from PIL import Image
    from transformers import AutoImageProcessor

    from hfseq import FlaxViTForImageClassification

    model = FlaxViTForImageClassification.from_pretrained(classifier)
    processor = AutoImageProcessor.from_pretrained(classifier, backend="pil")
    pixels = processor(Image.open(good / "3.png"), return_tensors="np")["pixel_values"]
    logits = np.asarray(jax.jit(model)(pixels).logits[0], np.float64)
    shares = np.exp(logits - logits.max())
    shares /= shares.sum()
    labels = next(item for item in actual if item["file"].endswith("dark/3.png"))["labels"]
    assert [item["label"] for item in labels] == [f"LABEL_{n}" for n in np.argsort(-shares)[:2]]
    assert labels[0]["score"] == pytest.approx(shares.max(), abs=1e-5)


def test_captions_are_those_that_the_model_generates(capsys, tmp_path):
    image = DATA / "pictures" / "light" / "2.png"
    command = ["caption", str(DATA / "writer"), str(image), "--max_new_tokens", "5"]
    assert main(command) == 0
    visible = capsys.readouterr().out.removesuffix("\n")
    assert main([*command, "--json", "--output_file", str(tmp_path / "captions")]) == 0
    assert capsys.readouterr().out == ""
    assert json.loads((tmp_path / "captions").read_text())["generated_text"] == visible
    from PIL import Image
    from transformers import AutoImageProcessor, AutoTokenizer

    from hfseq import FlaxVisionEncoderDecoderModel

    model = FlaxVisionEncoderDecoderModel.from_pretrained(DATA / "writer")
    processor = AutoImageProcessor.from_pretrained(DATA / "writer", backend="pil")
    pixels = processor(Image.open(image).convert("RGB"), return_tensors="np")["pixel_values"]
    ids = np.asarray(model.generate(pixels, max_new_tokens=5).sequences[0]).tolist()
    words = AutoTokenizer.from_pretrained(DATA / "writer")
    assert visible == str(words.decode(ids, skip_special_tokens=True)).strip()


@pytest.mark.parametrize(
    ("words", "message"),
    [
        (["caption", "MODEL", "nowhere.png"], "'nowhere.png'"),
        (["classify", "CLASSES", "IMAGE", "--top_k", "0"], "--top_k 0"),
        (
            ["caption", "MODEL", "IMAGE", "--batch_size", "0"],
            "--batch_size 0 must be at least 1",
        ),
        (["caption", "CLASSES", "IMAGE"], "vit"),
    ],
)
def test_wrong_usage_is_one_line(words, message, classifier, capsys):
    positions = {
        "MODEL": DATA / "writer",
        "CLASSES": classifier,
        "IMAGE": DATA / "pictures" / "light" / "2.png",
    }
    assert main([str(positions.get(word, word)) for word in words]) in (1, 2)
    captured = capsys.readouterr()
    assert message in captured.err and len(captured.err.strip().splitlines()) == 1


def test_a_processor_of_another_size_is_refused(classifier):
    from transformers import ViTImageProcessorPil

    from hfseq import FlaxViTForImageClassification
    from hfseq.pipelines.images import ImageClassification

    model = FlaxViTForImageClassification.from_pretrained(classifier)
    with pytest.raises(UsageError, match="the model requires images of"):
        processor = ViTImageProcessorPil(size={"height": 8, "width": 16})
        ImageClassification(model, image_processor=processor)
