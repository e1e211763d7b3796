"""Image datasets: finding images, and decoding them for batches.

Images are decoded and resized in worker processes (`ImageDecoder`). Each worker decodes one image
at a time, so memory use is bounded by the number of workers and the batch size. Images that cannot
be read are reported and skipped. They never stop a run.
"""

from __future__ import annotations

import contextlib
import io
import logging
import math
import multiprocessing
import os
from collections.abc import Iterable, Mapping, Sequence
from concurrent.futures import Future, ProcessPoolExecutor
from concurrent.futures.process import BrokenProcessPool
from dataclasses import dataclass, field, replace
from pathlib import Path, PurePosixPath
from typing import TYPE_CHECKING, Any, ClassVar, NamedTuple, Protocol, Self

import numpy as np

from hfseq.checkpoints.hub import check_directory
from hfseq.data import files
from hfseq.data.arguments import SPLITS, ImageArguments, ImageTextArguments
from hfseq.data.classification import LABEL_COLUMNS, Examples, LabeledSplits
from hfseq.data.sources import (
    MediaColumn,
    MediaSource,
    UnreadableError,
    cached_on_arguments,
    complete_splits,
    load_dataset_splits,
)
from hfseq.data.tables import Label, Table, classes_by_column, read_table
from hfseq.errors import DataError, UsageError, first_line, optional_import

if TYPE_CHECKING:
    from PIL.Image import Image

    from hfseq.plugins import Plugins

logger = logging.getLogger(__name__)
#: Common column names of images and captions, and file extensions.
IMAGE_COLUMNS = ("image", "image_path", "path", "file_name", "file", "img", "picture")
CAPTION_COLUMNS = ("caption", "captions", "text", "sentence", "description", "label")
IMAGE_EXTENSIONS = (
    *(".png", ".jpg", ".jpeg", ".jpe", ".webp", ".bmp", ".gif", ".tif", ".tiff", ".ppm", ".pgm"),
    *(".pnm", ".tga", ".ico", ".jp2", ".avif"),
)
#: Default limit of pixels per image. The decoded image has at most 512 MiB.
MAX_PIXELS = 1 << 27


class Crop(NamedTuple):
    """A crop of an image in fractions of its height and width, optionally flipped horizontally."""

    left: float
    top: float
    width: float
    height: float
    mirrored: bool


# -- decoding


def open_image(source: MediaSource, max_pixels: int = MAX_PIXELS) -> Image:
    """Decodes an image to RGB and applies its EXIF orientation.

    The size is checked before any pixel is decoded.

    Args:
        source: The image.
        max_pixels: Maximum number of pixels.

    Raises:
        UnreadableError: The file is not a valid image, is too large, is animated, or has more than
            8 bits per channel.
    """
    from PIL import Image, ImageOps, UnidentifiedImageError

    Image.MAX_IMAGE_PIXELS = None  # checked below, as an error
    try:
        with contextlib.ExitStack() as stack:
            image: Image.Image
            if isinstance(source.data, Image.Image):
                image = source.data
            else:
                stream: Any = io.BytesIO(source.data) if source.data is not None else None
                if stream is None:
                    stream = stack.enter_context(files.open_binary(source.name))
                image = stack.enter_context(Image.open(stream))
            width, height = image.size
            if width * height > max_pixels:
                raise UnreadableError(
                    f"the image has {width} x {height} pixels, more than {max_pixels}"
                )
            frames = getattr(image, "n_frames", 1)
            if frames > 1:
                raise UnreadableError(
                    f"the image has {frames} frames: animations and multi-page images are not "
                    "supported"
                )
            if image.mode.startswith("I") or image.mode == "F":
                raise UnreadableError(
                    f"the image has more than 8 bits per channel (mode {image.mode})"
                )
            upright = ImageOps.exif_transpose(image)
            if "transparency" in upright.info and upright.mode == "P":
                upright = upright.convert("RGBA")
            return upright.convert("RGB")
    except UnreadableError:
        raise
    except UnidentifiedImageError:
        raise UnreadableError("unsupported image format") from None
    except MemoryError:
        raise UnreadableError("not enough memory to decode it") from None
    except Exception as error:  # Pillow raises many types of exceptions for broken files
        message = first_line(error).replace(str(source.name), "it")
        raise UnreadableError(message or type(error).__name__) from error


def crop_and_resize(image: Image, crop: Crop, size: tuple[int, int], resample: int) -> Image:
    """Crops an image and resizes the crop to `size` (height, width)."""
    from PIL import Image

    width, height = image.size
    left, top = crop.left * width, crop.top * height
    box = (
        left,
        top,
        min(left + crop.width * width, width),
        min(top + crop.height * height, height),
    )
    resized = image.resize((size[1], size[0]), resample, box=box)
    return resized.transpose(Image.Transpose.FLIP_LEFT_RIGHT) if crop.mirrored else resized


def random_crops(numbers: np.ndarray) -> list[Crop]:
    """Samples crops of 8% to 100% of each image's area, flipped horizontally with probability 0.5.

    The aspect ratio of a crop, relative to the aspect ratio of its image, is between 3:4 and 4:3.
    Crops are fractions of the image, because its size is unknown before decoding.

    Args:
        numbers: Random numbers, uniform in [0, 1), `(images, 5)`.
    """
    crops = []
    for area, ratio, left, top, mirror in np.asarray(numbers, np.float64).tolist():
        share = 0.08 + 0.92 * area
        stretch = math.exp((2 * ratio - 1) * math.log(4 / 3) / 2)
        width = min(1.0, math.sqrt(share) * stretch)
        height = min(1.0, share / width)
        crops.append(Crop(left * (1 - width), top * (1 - height), width, height, mirror < 0.5))
    return crops


@dataclass
class DecodedImages:
    """A batch of decoded images.

    Attributes:
        pixel_values: Model inputs, float32 `(images, channels, height, width)`. Zero for unreadable
            images.
        reasons: For each image, the reason why it cannot be read, or `None`.
    """

    pixel_values: np.ndarray
    reasons: list[str | None]


_PROCESSOR: tuple[Any, int] | None = None


def _init_worker(processor: Any, max_pixels: int) -> None:
    """Stores the processor and the pixel limit in a worker process."""
    global _PROCESSOR  # noqa: PLW0603 the only state of a worker
    _PROCESSOR = processor, max_pixels


def _preprocess_in_worker(
    source: MediaSource, crop: Crop | None, shape: tuple[int, int, int]
) -> np.ndarray | str:
    assert _PROCESSOR is not None
    processor, max_pixels = _PROCESSOR
    return preprocess_image(source, crop, processor, shape, max_pixels)


def preprocess_image(
    source: MediaSource,
    crop: Crop | None,
    processor: Any,
    shape: tuple[int, int, int],
    max_pixels: int,
) -> np.ndarray | str:
    """Decodes an image and converts it to model inputs.

    Returns:
        The inputs, float32 of shape `shape`, or the reason why the image cannot be used.
    """
    try:
        image = open_image(source, max_pixels)
        options: dict[str, Any] = {}
        if crop is not None:
            resample = getattr(processor, "resample", None)
            image = crop_and_resize(
                image, crop, shape[1:], 2 if resample is None else int(resample)
            )
            options = {"do_resize": False, "do_center_crop": False}
        pixels = np.asarray(processor(image, return_tensors="np", **options)["pixel_values"][0])
    except UnreadableError as error:
        return str(error)
    except Exception as error:  # unsupported by the processor, e.g. a single pixel
        return first_line(error) or type(error).__name__
    if pixels.shape != shape:
        return f"the image processor returns shape {pixels.shape} instead of {shape}"
    return pixels.astype(np.float32)


class ImageDecoder:
    """Decodes images with worker processes.

    A worker that dies is replaced, and the image that it decoded is reported as unreadable.

    Args:
        processor: An image processor of Transformers (Pillow backend).
        num_workers: Number of processes. With 0 the calling process decodes.
        max_pixels: Images with more pixels are not decoded.
    """

    def __init__(self, processor: Any, num_workers: int, max_pixels: int = MAX_PIXELS):
        self.processor, self.num_workers, self.max_pixels = processor, num_workers, max_pixels
        self.shape = output_shape(processor)
        self._pool: ProcessPoolExecutor | None = None

    def __call__(
        self, sources: Sequence[MediaSource], crops: Sequence[Crop] | None = None
    ) -> DecodedImages:
        """Decodes images, and crops each of them if `crops` are given."""
        crop_list: Sequence[Crop | None] = crops or [None] * len(sources)
        pairs = list(zip(sources, crop_list, strict=True))
        results: list[np.ndarray | str]
        if not self.num_workers:
            results = [
                preprocess_image(*pair, self.processor, self.shape, self.max_pixels)
                for pair in pairs
            ]
        else:
            try:
                pending = [self._submit(*pair) for pair in pairs]
                results = [future.result() for future in pending]
            except BrokenProcessPool:  # a worker died: retry one by one to find the image
                self.close()
                results = [self._decode_alone(*pair) for pair in pairs]
        pixels = np.zeros((len(sources), *self.shape), np.float32)
        reasons: list[str | None] = []
        for row, decoded in enumerate(results):
            reasons.append(decoded if isinstance(decoded, str) else None)
            if not isinstance(decoded, str):
                pixels[row] = decoded
        return DecodedImages(pixels, reasons)

    def _decode_alone(self, source: MediaSource, crop: Crop | None) -> np.ndarray | str:
        try:
            return self._submit(source, crop).result()
        except BrokenProcessPool:
            self.close()
            return "the process that decoded the image died"

    def _submit(self, source: MediaSource, crop: Crop | None) -> Future[np.ndarray | str]:
        if self._pool is None:
            self._pool = ProcessPoolExecutor(
                self.num_workers,
                multiprocessing.get_context("spawn"),
                _init_worker,
                (self.processor, self.max_pixels),
            )
        return self._pool.submit(_preprocess_in_worker, source, crop, self.shape)

    def close(self) -> None:
        """Stops the workers. The next call starts new ones."""
        if self._pool is not None:
            self._pool.shutdown(wait=False, cancel_futures=True)
            self._pool = None


class ImageModel(Protocol):
    """Interface of a model that may have image inputs.

    Attributes:
        any_image_size: Whether the model supports images of any height and width.
    """

    any_image_size: ClassVar[bool]

    def image_shape(self) -> tuple[int, int, int] | None:
        """Returns channels, height and width of image inputs, or `None` if there are none."""
        ...


Decoder = ImageDecoder  # former name, used by external measurement programs


def check_image_shape(model: ImageModel, decoder: ImageDecoder) -> None:
    """Raises a `UsageError` if a model does not support the images of a decoder."""
    model_shape, decoded_shape = model.image_shape(), decoder.shape
    if (
        model_shape is None
        or model_shape == decoded_shape
        or (model.any_image_size and model_shape[0] == decoded_shape[0])
    ):
        return
    if model_shape[0] != decoded_shape[0]:
        raise UsageError(
            f"the model requires {model_shape[0]} channels, but images have {decoded_shape[0]}: "
            f"use a configuration with num_channels={decoded_shape[0]}"
        )
    raise UsageError(
        f"the model requires images of shape {model_shape} (channels, height, width), but "
        f"{type(decoder.processor).__name__} returns {decoded_shape}: use --image_size "
        f"{model_shape[1]}"
    )


def find_images(names: Iterable[str | os.PathLike[str]]) -> list[str]:
    """Returns the image files in a list of files and directories.

    The paths of files are returned unchanged. Directories are searched recursively, and the files
    found in them are sorted by name.

    Raises:
        DataError: A path does not exist, or a directory contains no images.
    """
    return files.find_files(names, IMAGE_EXTENSIONS, "images")


def num_decode_workers(arguments: ImageArguments) -> int:
    """Returns the number of decoding processes: by default one per CPU, at most 8."""
    workers = arguments.decode_workers
    return min(os.cpu_count() or 1, 8) if workers is None else workers


def output_shape(processor: Any) -> tuple[int, int, int]:
    """Returns channels, height and width of a processor's outputs.

    Raises:
        UsageError: The shape depends on the image.
    """
    from PIL import Image

    shapes = {
        tuple(processor(Image.new("RGB", size), return_tensors="np")["pixel_values"].shape[1:])
        for size in ((64, 48), (48, 64))
    }
    if len(shapes) > 1:
        raise UsageError(
            f"{type(processor).__name__} returns images of different sizes ({shapes}), which "
            "cannot be batched: use --image_size"
        )
    return next(iter(shapes))


def load_image_processor(name: str | None, image_size: int | None, **options: Any) -> Any:
    """Loads the image processor of a checkpoint with the Pillow backend, or creates a default one.

    Args:
        name: Directory or Hub name of the checkpoint, or `None` for a plain ViT processor.
        image_size: Replaces the size of the processor. Without a checkpoint the default is 224.
        **options: Options of `from_pretrained`.

    Raises:
        UsageError: Pillow is not installed, or the checkpoint has no image processor.
    """
    with optional_import("an image processor", "PIL", "hfseq[vision]"):
        import PIL.Image  # noqa: F401
    from transformers import AutoImageProcessor, ViTImageProcessorPil

    size = image_size or 224
    if name is None:
        return ViTImageProcessorPil(size={"height": size, "width": size})
    check_directory(name)
    try:
        processor = AutoImageProcessor.from_pretrained(name, backend="pil", **options)
    except Exception as error:  # e.g. OSError without a file, ValueError for an unknown type
        raise UsageError(
            f"'{name}' has no image processor ({first_line(error)}): use a directory with a "
            "preprocessor_config.json"
        ) from error
    if image_size:
        square = {"height": size, "width": size}
        current_size = dict(processor.size)
        processor.size = {"shortest_edge": size} if "shortest_edge" in current_size else square
        if getattr(processor, "crop_size", None):
            processor.crop_size = square
    return processor


# -- datasets


@dataclass
class ImageDataset(Examples):
    """The images of a split.

    Attributes:
        first: Names of the images, for messages.
        sources: Location or content of each image.
        captions: The caption of each image, for data with captions instead of labels.
    """

    sources: Sequence[MediaSource] = field(default_factory=list)
    captions: Sequence[str] = ()

    def select(self, rows: np.ndarray) -> Self:
        """Returns the images with the given row indices (ascending)."""
        return replace(
            super().select(rows),
            sources=SourceSubset(self.sources, np.asarray(rows)),
            captions=[self.captions[row] for row in rows] if self.captions else (),
        )


class SourceSubset(Sequence[MediaSource]):
    """The items of a sequence with the indices `rows`. Each item is read when it is accessed."""

    def __init__(self, sources: Sequence[MediaSource], rows: np.ndarray):
        self.sources, self.rows = sources, rows

    def __len__(self) -> int:
        return len(self.rows)

    def __getitem__(self, index: Any) -> Any:
        return self.sources[int(self.rows[index])]


@cached_on_arguments
def load_images(arguments: ImageArguments, plugins: Plugins | None = None) -> LabeledSplits:
    """Loads the images that the flags specify, without decoding them.

    Supported sources are directories with one subdirectory per class, tables with a label column
    and a column of image files (relative to the table), and datasets with an image column. Repeated
    calls with the same `arguments` object return the same result.

    Raises:
        UsageError: The flags specify no data.
        DataError: The data cannot be read or contains no images.
    """
    read: dict[str, ImageDataset] = {}
    if arguments.dataset_name:
        for split, dataset in load_dataset_splits(arguments, plugins, SPLITS).items():
            origin = f"--dataset_name {arguments.dataset_name}, split {split}"
            read[split] = images_from_dataset(dataset, origin, arguments)
    for split in SPLITS:
        folder, tables = (getattr(arguments, f"{split}_{ending}") for ending in ("dir", "file"))
        if folder:
            read[split] = images_from_folder(folder, f"--{split}_dir", split)
        elif tables:
            read[split] = images_from_tables(tables, f"--{split}_file", split, arguments)
    if not read:
        raise UsageError("no data: give --train_dir, --train_file or --dataset_name")
    splits = LabeledSplits(read, None)
    complete_splits(splits, arguments)
    return splits


def images_from_folder(folder: str, flag: str, split: str) -> ImageDataset:
    """Reads a directory with one subdirectory per class.

    Test images, which have no labels, can be directly in the directory.
    """
    if not files.is_directory(folder, flag):
        raise DataError(
            f"{flag} {folder} is not a directory: specify one with a subdirectory for each class"
        )
    paths = [
        name for name in files.list_files(folder, flag) if name.lower().endswith(IMAGE_EXTENSIONS)
    ]
    base = folder.rstrip("/")
    names, labels, sources = [], [], []
    for name in paths:
        # The directory may be spelled differently in the file names (e.g. `./images`).
        below = name.startswith(f"{base}/")
        inside = name[len(base) + 1 :] if below else os.path.relpath(name, base)
        inside = inside.replace(os.sep, "/")
        parts = PurePosixPath(inside).parts
        if any(part.startswith(".") for part in parts):
            continue
        label = parts[0] if len(parts) > 1 else None
        if label is None and split != "test":
            raise DataError(
                f"{flag} {name} is not in the subdirectory of a class: move it into one, e.g. "
                f"{PurePosixPath(folder) / 'CLASS' / PurePosixPath(inside).name}"
            )
        names.append(inside)
        labels.append(label)
        sources.append(MediaSource(name))
    if not names:
        raise DataError(
            f"{flag} {folder} contains no images ({', '.join(IMAGE_EXTENSIONS[:5])} …) in class "
            "subdirectories"
        )
    table = Table({"image": list(names)}, f"{flag} {folder}")
    return ImageDataset(names, None, list(labels), [(0, table)], sources=sources)


def images_from_tables(
    patterns: list[str], flag: str, split: str, arguments: ImageArguments
) -> ImageDataset:
    """Reads tables with a column of files and a column of labels or captions."""
    names: list[str] = []
    labels: list[Label] = []
    sources: list[MediaSource] = []
    captions: list[str] = []
    origins: list[tuple[int, Table]] = []
    for file in files.expand_patterns(patterns, flag):
        table: Table = read_table(file, flag, arguments)
        column = table.column("image_column", arguments.image_column, IMAGE_COLUMNS)
        table_directory = (
            str(PurePosixPath(file).parent) if "://" in file else str(Path(file).parent)
        )
        base = (getattr(arguments, "data_dir", None) or table_directory).rstrip("/")
        cells = table.texts(column)
        if isinstance(arguments, ImageTextArguments):
            rows, texts = read_captions(table, table.columns, arguments)
            captions += texts
        else:
            label = choose_label_column(table, arguments, require_labels=split != "test")
            labels += table.labels(label, None) if label else [None] * len(table)
            rows = list(range(len(table)))
        origins.append((len(names), table))
        for name in (cells[row] for row in rows):
            full_path = name if "://" in name or os.path.isabs(name) else f"{base}/{name}"
            names.append(name)
            sources.append(MediaSource(full_path))
    labels = labels or [None] * len(names)
    return ImageDataset(names, None, labels, origins, sources=sources, captions=captions)


def read_captions(
    table: Table, columns: Mapping[str, Sequence[Any]], arguments: ImageTextArguments
) -> tuple[list[int], list[str]]:
    """Returns the row index of each caption, and the captions.

    A cell contains one caption or a list of them.
    """
    column = table.column("caption_column", arguments.caption_column, CAPTION_COLUMNS)
    rows: list[int] = []
    texts: list[str] = []
    for row, cell in enumerate(columns[column]):
        listed = [cell] if isinstance(cell, str) else list(cell or ())
        if not listed or not all(isinstance(text, str) and text.strip() for text in listed):
            raise DataError(f"{table.place(row)} has no caption in the column '{column}'")
        rows += [row] * len(listed)
        texts += listed
    return rows, texts


def images_from_dataset(dataset: Any, origin: str, arguments: ImageArguments) -> ImageDataset:
    """Reads a `datasets.Dataset` with an image column, without decoding the images."""
    import datasets

    features: Mapping[str, Any] = dataset.features or {}
    image_columns = [n for n, feature in features.items() if isinstance(feature, datasets.Image)]
    requested = arguments.image_column or next(iter(image_columns), None)
    header = Table({name: [] for name in dataset.column_names}, origin)
    column = header.column("image_column", requested, IMAGE_COLUMNS)
    sources: Sequence[MediaSource] = MediaColumn(dataset, column, origin)
    if isinstance(arguments, ImageTextArguments):
        other_columns = {n: dataset[n] for n in dataset.column_names if n != column}
        rows, texts = read_captions(header, other_columns, arguments)
        names, chosen_rows = [f"{origin} {row}" for row in rows], np.asarray(rows)
        labels: list[Label] = [None] * len(rows)
        return ImageDataset(
            names,
            None,
            labels,
            [(0, header)],
            sources=SourceSubset(sources, chosen_rows),
            captions=texts,
        )
    label = choose_label_column(header, arguments, require_labels="split test" not in origin)
    classes = classes_by_column(features).get(label or "", ())
    cells = list(dataset[label]) if label else [None] * len(dataset)
    table = Table({"label": cells}, origin, classes={"label": classes} if classes else {})
    names = [f"{origin} {row}" for row in range(len(dataset))]
    labels = table.labels("label", None)
    return ImageDataset(names, None, labels, [(0, table)], classes=classes, sources=sources)


def choose_label_column(
    table: Table, arguments: ImageArguments, require_labels: bool
) -> str | None:
    """Returns the label column, or `None` if labels are optional and missing."""
    requested = arguments.label_column
    if requested is None and not require_labels and not set(LABEL_COLUMNS) & set(table.columns):
        return None
    return table.column("label_column", requested, LABEL_COLUMNS)
