"""Images: finding and decoding them, and images that cannot be read."""

from __future__ import annotations

import json
import tracemalloc
from pathlib import Path

import numpy as np
import pytest

from hfseq.data.arguments import ImageArguments
from hfseq.data.images import (
    ImageDecoder,
    MediaSource,
    UnreadableError,
    load_image_processor,
    load_images,
    open_image,
    output_shape,
    random_crops,
)
from hfseq.errors import DataError, UsageError
from tests.support.images import draw_digits, write_bad_images

Image = pytest.importorskip("PIL.Image")


@pytest.fixture(scope="module")
def digits(tmp_path_factory):
    return draw_digits(tmp_path_factory.mktemp("digits"), 3)


def photographs(folder):
    """Images of different sizes and modes, one rotated by EXIF, with Pillow's result."""
    random = np.random.default_rng(1)
    low = random.integers(0, 256, (6, 8, 3), np.uint8)
    smooth = Image.fromarray(low).resize((320, 240), Image.Resampling.BICUBIC)
    smooth.save(folder / "photo.jpg", quality=90)
    smooth.convert("L").save(folder / "grey.png")
    smooth.convert("RGBA").resize((97, 211)).save(folder / "tall.png")
    smooth.convert("P").save(folder / "palette.gif")
    smooth.convert("CMYK").save(folder / "print.jpg")
    smooth.resize((64, 64)).save(folder / "small.webp")
    turned = Image.Exif()
    turned[0x0112] = 6
    smooth.save(folder / "turned.jpg", exif=turned)
    return sorted(folder.iterdir())


SQUARE = {"height": 24, "width": 24}
PROCESSORS = {
    "ViTImageProcessorPil": {"size": {"height": 24, "width": 20}},
    "CLIPImageProcessorPil": {"size": {"shortest_edge": 24}, "crop_size": SQUARE},
    "BeitImageProcessorPil": {
        "size": {"height": 30, "width": 30},
        "do_center_crop": True,
        "crop_size": SQUARE,
    },
    "BitImageProcessorPil": {"size": {"shortest_edge": 28}, "crop_size": SQUARE},
    "ConvNextImageProcessorPil": {"size": {"shortest_edge": 24}},
}


@pytest.mark.parametrize("name", PROCESSORS)
def test_numbers_are_those_of_transformers_processors(name, tmp_path):
    import transformers
    from PIL import ImageOps

    processor = getattr(transformers, name)(**PROCESSORS[name])
    paths = photographs(tmp_path)
    decoded = ImageDecoder(processor, 0)([MediaSource(str(path)) for path in paths])
    assert decoded.reasons == [None] * len(paths) and decoded.pixel_values.dtype == np.float32
    for pixels, path in zip(decoded.pixel_values, paths, strict=True):
        with Image.open(path) as image:
            upright = ImageOps.exif_transpose(image).convert("RGB")
        expected = processor(upright, return_tensors="np")["pixel_values"][0]
        assert np.array_equal(pixels, expected), path.name
    assert output_shape(processor) == expected.shape


def test_image_processor_loads_with_pillow_only(tmp_path):
    import transformers

    transformers.BeitImageProcessorPil(size={"height": 30, "width": 30}).save_pretrained(tmp_path)
    created = load_image_processor(str(tmp_path), None)
    assert type(created).__name__ == "BeitImageProcessorPil" and output_shape(created) == (
        3,
        30,
        30,
    )
    assert output_shape(load_image_processor(str(tmp_path), 18)) == (3, 18, 18)
    assert output_shape(load_image_processor(None, None)) == (3, 224, 224)
    with pytest.raises(UsageError, match="has no image processor"):
        load_image_processor(str(tmp_path.parent), None)


# -- unreadable images
# ------------------------------------------------------------------------------------


@pytest.mark.parametrize("workers", [0, pytest.param(2, marks=pytest.mark.slow)])
def test_unreadable_images_are_skipped_with_the_reason(workers, tmp_path, digits):
    messages = write_bad_images(tmp_path)
    sources = [MediaSource(str(tmp_path / name)) for name in messages]
    sources += [MediaSource(str(digits / "0" / "0.png")), MediaSource(str(tmp_path / "absent.png"))]
    decoder = ImageDecoder(load_image_processor(None, 16), workers)
    decoded = decoder(sources)
    decoder.close()
    for reason, expected in zip(decoded.reasons, messages.values(), strict=False):
        assert expected in reason and "\n" not in reason
    assert decoded.reasons[-2] is None and "No such file" in decoded.reasons[-1]
    assert decoded.pixel_values[-2].any() and not decoded.pixel_values[:-2].any()


def test_gigapixel_image_is_rejected_without_memory(tmp_path):
    write_bad_images(tmp_path)
    tracemalloc.start()
    with pytest.raises(UnreadableError, match="40000 x 25000 pixels, more than 134217728"):
        open_image(MediaSource(str(tmp_path / "bomb.png")))
    assert tracemalloc.get_traced_memory()[1] < 10 << 20
    tracemalloc.stop()


class Dying:
    """An image processor that kills its process for a white image."""

    size, resample = {"height": 8, "width": 8}, 2

    def __call__(self, image, return_tensors, **options):
        import os

        if image.getpixel((0, 0)) == (255, 255, 255):
            os._exit(1)
        return {"pixel_values": np.ones((1, 3, 8, 8), np.float32)}


@pytest.mark.slow
def test_image_that_kills_its_worker_is_skipped(tmp_path):
    for number, colour in enumerate(("red", "white", "blue")):
        Image.new("RGB", (9, 9), colour).save(tmp_path / f"{number}.png")
    decoder = ImageDecoder(Dying(), 2)
    sources = [MediaSource(str(tmp_path / f"{number}.png")) for number in range(3)]
    for _ in range(2):
        decoded = decoder(sources)
        assert decoded.reasons == [None, "the process that decoded the image died", None]
    decoder.close()


# -- crops
# ------------------------------------------------------------------------------------


def test_crops_are_inside_the_image_and_half_are_mirrored(digits):
    numbers = np.random.default_rng(0).random((2000, 5))
    crops = random_crops(numbers)
    shares = np.array([crop.width * crop.height for crop in crops])
    assert all(crop.left >= 0 and crop.left + crop.width <= 1 + 1e-9 for crop in crops)
    assert all(crop.top >= 0 and crop.top + crop.height <= 1 + 1e-9 for crop in crops)
    assert 0.07 < shares.min() < 0.1 and shares.max() <= 1 and abs(shares.mean() - 0.54) < 0.05
    assert 0.45 < np.mean([crop.mirrored for crop in crops]) < 0.55
    decoder = ImageDecoder(load_image_processor(None, 16), 0)
    source = MediaSource(str(digits / "2" / "0.png"))
    item, two = decoder([source, source], crops[:2]).pixel_values
    assert np.array_equal(item, decoder([source], crops[:1]).pixel_values[0])
    assert not np.array_equal(item, two)


# -- datasets
# ------------------------------------------------------------------------------------


def arguments(**inputs):
    return ImageArguments(**{"validation_split_percentage": 0, **inputs})


def test_a_folder_has_a_folder_for_each_class(digits, tmp_path):
    pictures = load_images(arguments(train_dir=str(digits)))["train"]
    assert len(pictures) == 12 and pictures.labels == [c for c in "0123" for _ in range(3)]
    assert pictures.first[0] == "0/0.png" and pictures.sources[0].name.endswith("0/0.png")
    split = load_images(arguments(train_dir=str(digits), validation_split_percentage=25))
    assert len(split["validation"]) == 3 and len(split["train"]) == 9
    received = {*split["validation"].first} & {*split["train"].first}
    assert not received and split["validation"].sources[0].name.endswith(
        split["validation"].first[0]
    )
    few = load_images(arguments(train_dir=str(digits), max_train_samples=2))["train"]
    assert [source.name for source in few.sources] == [s.name for s in pictures.sources][:2]
    flat = digits / "0"
    assert load_images(arguments(test_dir=str(flat)))["test"].labels == [None] * 3
    with pytest.raises(DataError, match="is not in the subdirectory of a class: move it into one"):
        load_images(arguments(train_dir=str(flat)))
    with pytest.raises(DataError, match="contains no images"):
        load_images(arguments(train_dir=str(tmp_path)))
    with pytest.raises(DataError, match="is not a directory"):
        load_images(arguments(train_dir=str(flat / "0.png")))


def test_tables_have_files_relative_to_themselves(digits):
    (digits / "train.csv").write_text("path,label\n0/0.png,zero\n1/0.png,one\n2/1.png,zero\n")
    rows = [{"img": "3/0.png", "is": 1}, {"img": str(digits / "0" / "1.png"), "is": 0}]
    (digits / "more.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    actual = load_images(arguments(train_file=[str(digits / "train.csv")]))["train"]
    assert actual.labels == ["zero", "one", "zero"]
    assert actual.sources[2].name == f"{digits}/2/1.png" and "line 4" in actual.place(2)
    flag_values = {"image_column": "img", "label_column": "is"}
    actual = load_images(arguments(train_file=[str(digits / "more.jsonl")], **flag_values))["train"]
    assert actual.labels == ["1", "0"] and actual.sources[1].name == rows[1]["img"]
    with pytest.raises(DataError, match="no column 'file', only path, label.*--image_column"):
        load_images(arguments(train_file=[str(digits / "train.csv")], image_column="file"))
    with pytest.raises(DataError, match="no column 'label', only img, is.*--label_column"):
        load_images(arguments(train_file=[str(digits / "more.jsonl")]))
    for name in ("train.csv", "more.jsonl"):
        (digits / name).unlink()


def test_datasets_are_read_without_their_decoder(digits, tmp_path):
    datasets = pytest.importorskip("datasets")
    (tmp_path / "broken.png").write_text("nothing")
    paths = [str(digits / name / "0.png") for name in "012"] + [str(tmp_path / "broken.png")]
    features = datasets.Features(
        {"image": datasets.Image(), "label": datasets.ClassLabel(names=["a", "b", "c"])}
    )
    created = datasets.Dataset.from_dict({"image": paths, "label": [0, 1, 2, 1]}, features=features)
    stored = created.cast_column("image", datasets.Image(decode=False))
    packed = stored.map(
        lambda row: {"image": row["image"] | {"bytes": Path(row["image"]["path"]).read_bytes()}}
    )
    for case, data in (("paths", created), ("bytes", packed.cast(features))):
        folder = tmp_path / case
        datasets.DatasetDict({"train": data}).save_to_disk(folder)
        actual = load_images(arguments(dataset_name=str(folder)))["train"]
        assert (actual.labels, actual.classes) == (["a", "b", "c", "b"], ("a", "b", "c"))
        decoded = ImageDecoder(load_image_processor(None, 16), 0)([*actual.sources])
        assert [reason is None for reason in decoded.reasons] == [True, True, True, False]


def test_conflicting_flags_are_rejected():
    with pytest.raises(UsageError, match="--train_dir and --train_file are mutually exclusive"):
        ImageArguments(train_dir="a", train_file=["b"])
    with pytest.raises(UsageError, match="apply to plain text only, but here every image"):
        ImageArguments(train_dir="a", streaming=True)
    with pytest.raises(UsageError, match="no data: give --train_dir"):
        load_images(ImageArguments())
