"""Pictures with labels: where they are, how they are decoded, and the rows of their numbers.

They are decoded and resized in processes of their own (:class:`Decoder`), each a picture at a time,
so memory is bounded by the workers and the batch. What cannot be read is left out, by name and
reason: it never ends a run.
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
from hfseq.data.tables import Label, Table, read_table
from hfseq.errors import DataError, UsageError, first_line

if TYPE_CHECKING:
    from PIL.Image import Image

    from hfseq.plugins import Plugins

logger = logging.getLogger(__name__)
#: Names of columns of pictures, and endings of their files.
IMAGE_COLUMNS = ("image", "image_path", "path", "file_name", "file", "img", "picture")
CAPTION_COLUMNS = ("caption", "captions", "text", "sentence", "description", "label")
IMAGE_EXTENSIONS = (
    *(".png", ".jpg", ".jpeg", ".jpe", ".webp", ".bmp", ".gif", ".tif", ".tiff", ".ppm", ".pgm"),
    *(".pnm", ".tga", ".ico", ".jp2", ".avif"),
)
#: Pixels of the largest picture that is decoded, where no flag says: half a gigabyte at most.
MAX_PIXELS = 1 << 27


class Crop(NamedTuple):
    """What is cut out of a picture, in shares of its sides, and whether it is turned around."""

    left: float
    top: float
    width: float
    height: float
    mirrored: bool


# -- decoding


def open_image(source: MediaSource, max_pixels: int = MAX_PIXELS) -> Image:
    """Decode a picture to RGB, upright; Unreadable for what is none, or not an ordinary one.

    Its size is read before its pixels are: one with more than ``most`` takes no memory.
    """
    from PIL import Image, ImageOps, UnidentifiedImageError

    Image.MAX_IMAGE_PIXELS = None  # the bound is ours, and an error
    try:
        with contextlib.ExitStack() as stack:
            stream: Any = io.BytesIO(source.data) if source.data is not None else None
            if stream is None:
                stream = stack.enter_context(files.open_binary(source.name))
            picture = stack.enter_context(Image.open(stream))
            width, height = picture.size
            if width * height > max_pixels:
                raise UnreadableError(f"{width} x {height} pixels, more than {max_pixels}")
            frames = getattr(picture, "n_frames", 1)
            if frames > 1:
                raise UnreadableError(f"{frames} frames: an animation or several pages")
            if picture.mode.startswith("I") or picture.mode == "F":
                raise UnreadableError(f"more than 8 bits a channel (mode {picture.mode})")
            upright = ImageOps.exif_transpose(picture)
            if "transparency" in upright.info and upright.mode == "P":
                upright = upright.convert("RGBA")
            return upright.convert("RGB")
    except UnreadableError:
        raise
    except UnidentifiedImageError:
        raise UnreadableError("it is no picture of a known kind") from None
    except MemoryError:
        raise UnreadableError("there is not enough memory to decode it") from None
    except Exception as error:  # Pillow's readers raise a dozen types on broken files
        told = first_line(error).replace(str(source.name), "it")
        raise UnreadableError(told or type(error).__name__) from error


def crop_and_resize(picture: Image, crop: Crop, size: tuple[int, int], resample: int) -> Image:
    """Cut ``crop`` out of a picture, resized to ``size`` (height, width)."""
    from PIL import Image

    width, height = picture.size
    left, top = crop.left * width, crop.top * height
    box = (
        left,
        top,
        min(left + crop.width * width, width),
        min(top + crop.height * height, height),
    )
    made = picture.resize((size[1], size[0]), resample, box=box)
    return made.transpose(Image.Transpose.FLIP_LEFT_RIGHT) if crop.mirrored else made


def random_crops(numbers: np.ndarray, sizes: Sequence[tuple[int, int]] | None = None) -> list[Crop]:
    """Draw a crop of 8 to 100 % of each picture, its sides 3:4 to 4:3, and a mirror in half.

    ``numbers`` are uniform in [0, 1), (pictures, 5). The shares are of the sides, as if pictures
    were squares: what is cut does not depend on a size that is known only where it is decoded.
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
    """A batch of pictures: float32 (pictures, channels, height, width), and why some are zero."""

    pixel_values: np.ndarray
    reasons: list[str | None]


_PROCESSOR: tuple[Any, int] | None = None


def _begin(processor: Any, most: int) -> None:
    """Keep what a worker needs for all pictures."""
    global _PROCESSOR  # noqa: PLW0603 a worker's only state
    _PROCESSOR = processor, most


def _numbers(
    source: MediaSource, crop: Crop | None, shape: tuple[int, int, int]
) -> np.ndarray | str:
    assert _PROCESSOR is not None
    processor, most = _PROCESSOR
    return preprocess_image(source, crop, processor, shape, most)


def preprocess_image(
    source: MediaSource,
    crop: Crop | None,
    processor: Any,
    shape: tuple[int, int, int],
    max_pixels: int,
) -> np.ndarray | str:
    """Return what a model reads of a picture, float32 ``shape``, or why there is nothing."""
    try:
        picture = open_image(source, max_pixels)
        options: dict[str, Any] = {}
        if crop is not None:
            resample = getattr(processor, "resample", None)
            picture = crop_and_resize(
                picture, crop, shape[1:], 2 if resample is None else int(resample)
            )
            options = {"do_resize": False, "do_center_crop": False}
        pixels = np.asarray(processor(picture, return_tensors="np", **options)["pixel_values"][0])
    except UnreadableError as error:
        return str(error)
    except Exception as error:  # a picture that the processor cannot take, of one pixel say
        return first_line(error) or type(error).__name__
    if pixels.shape != shape:
        return f"the image processor makes {pixels.shape} of it, not {shape}"
    return pixels.astype(np.float32)


class ImageDecoder:
    """Pictures in, numbers out: by ``workers`` processes, or in this one without any.

    ``processor`` is an image processor of Transformers (Pillow's kind), whose numbers these are.
    Each worker holds one picture at a time; a worker that dies of one leaves that one out.
    """

    def __init__(self, processor: Any, num_workers: int, max_pixels: int = MAX_PIXELS):
        self.processor, self.workers, self.most = processor, num_workers, max_pixels
        self.shape = output_shape(processor)
        self._pool: ProcessPoolExecutor | None = None

    def __call__(
        self, sources: Sequence[MediaSource], crops: Sequence[Crop] | None = None
    ) -> DecodedImages:
        """Decode pictures, of which ``crops`` are cut out where they are given."""
        chosen: Sequence[Crop | None] = crops or [None] * len(sources)
        pairs = list(zip(sources, chosen, strict=True))
        found: list[np.ndarray | str]
        if not self.workers:
            found = [
                preprocess_image(*pair, self.processor, self.shape, self.most) for pair in pairs
            ]
        else:
            try:
                pending = [self._submit(*pair) for pair in pairs]
                found = [future.result() for future in pending]
            except BrokenProcessPool:  # somebody's decoder died: one at a time, to see whose
                self.close()
                found = [self._alone(*pair) for pair in pairs]
        pixels = np.zeros((len(sources), *self.shape), np.float32)
        reasons: list[str | None] = []
        for row, made in enumerate(found):
            reasons.append(made if isinstance(made, str) else None)
            if not isinstance(made, str):
                pixels[row] = made
        return DecodedImages(pixels, reasons)

    def _alone(self, source: MediaSource, crop: Crop | None) -> np.ndarray | str:
        try:
            return self._submit(source, crop).result()
        except BrokenProcessPool:
            self.close()
            return "the process that decoded it died"

    def _submit(self, source: MediaSource, crop: Crop | None) -> Future[np.ndarray | str]:
        if self._pool is None:
            self._pool = ProcessPoolExecutor(
                self.workers,
                multiprocessing.get_context("spawn"),
                _begin,
                (self.processor, self.most),
            )
        return self._pool.submit(_numbers, source, crop, self.shape)

    def close(self) -> None:
        """End the workers; the next call begins others."""
        if self._pool is not None:
            self._pool.shutdown(wait=False, cancel_futures=True)
            self._pool = None


class ImageModel(Protocol):
    """A model that reads pictures, or not."""

    any_image_size: ClassVar[bool]

    def image_shape(self) -> tuple[int, int, int] | None:
        """Channels, height and width of what it reads."""
        ...


def check_image_shape(model: ImageModel, decoder: ImageDecoder) -> None:
    """Refuse a model that cannot read what a decoder's processor makes."""
    wanted, made = model.image_shape(), decoder.shape
    if wanted is None or wanted == made or (model.any_image_size and wanted[0] == made[0]):
        return
    if wanted[0] != made[0]:
        raise UsageError(
            f"the model reads {wanted[0]} channels and pictures have {made[0]}: give a "
            f"configuration with num_channels={made[0]}"
        )
    raise UsageError(
        f"the model reads pictures of {wanted} (channels, height, width), and "
        f"{type(decoder.processor).__name__} makes {made}: give --image_size {wanted[1]}"
    )


def find_images(names: Iterable[str | os.PathLike[str]]) -> list[str]:
    """Return the files that ``names`` name: themselves, and all pictures below folders, by name.

    **Raises:** DataError for a name that is nothing, and for folders without pictures.
    """
    return files.find_files(names, IMAGE_EXTENSIONS, "pictures")


def num_decode_workers(arguments: ImageArguments) -> int:
    """Return how many processes decode: as the flag says, else one a CPU, eight at most."""
    given = arguments.decode_workers
    return min(os.cpu_count() or 1, 8) if given is None else given


def output_shape(processor: Any) -> tuple[int, int, int]:
    """Return channels, height and width of what a processor makes; they must not depend on it."""
    from PIL import Image

    shapes = {
        tuple(processor(Image.new("RGB", size), return_tensors="np")["pixel_values"].shape[1:])
        for size in ((64, 48), (48, 64))
    }
    if len(shapes) > 1:
        raise UsageError(
            f"{type(processor).__name__} makes pictures of different sizes ({shapes}), which make "
            "no batch: give --image_size"
        )
    return next(iter(shapes))


def load_image_processor(name: str | None, image_size: int | None, **options: Any) -> Any:
    """Return the image processor of a checkpoint, by Pillow alone, or a plain one without any.

    ``image_size`` replaces its size; without a checkpoint it is 224, v4's.
    """
    try:
        import PIL  # noqa: F401
    except ImportError as error:
        raise UsageError("pictures need Pillow: pip install 'hfseq[vision]'") from error
    from transformers import AutoImageProcessor, ViTImageProcessorPil

    size = image_size or 224
    if name is None:
        return ViTImageProcessorPil(size={"height": size, "width": size})
    try:
        made = AutoImageProcessor.from_pretrained(name, backend="pil", **options)
    except Exception as error:  # an OSError without a file, a ValueError of an unknown kind
        raise UsageError(
            f"'{name}' has no image processor ({first_line(error)}): give a directory with a "
            "preprocessor_config.json"
        ) from error
    if image_size:
        square = {"height": size, "width": size}
        kept = dict(made.size)
        made.size = {"shortest_edge": size} if "shortest_edge" in kept else square
        if getattr(made, "crop_size", None):
            made.crop_size = square
    return made


# -- where pictures are


@dataclass
class ImageDataset(Examples):
    """The pictures of a split: ``first`` are their names, ``sources`` where they are.

    ``captions`` are theirs, where they have some instead of labels.
    """

    sources: Sequence[MediaSource] = field(default_factory=list)
    captions: Sequence[str] = ()

    def select(self, rows: np.ndarray) -> Self:
        """Return some of the pictures, by ascending row."""
        return replace(
            super().select(rows),
            sources=SourceSubset(self.sources, np.asarray(rows)),
            captions=[self.captions[row] for row in rows] if self.captions else (),
        )


class SourceSubset(Sequence[MediaSource]):
    """Some of a sequence, by number; nothing is read before it is asked for."""

    def __init__(self, whole: Sequence[MediaSource], rows: np.ndarray):
        self.whole, self.rows = whole, rows

    def __len__(self) -> int:
        return len(self.rows)

    def __getitem__(self, index: Any) -> Any:
        return self.whole[int(self.rows[index])]


@cached_on_arguments
def load_images(arguments: ImageArguments, plugins: Plugins | None = None) -> LabeledSplits:
    """Load what the flags name; loading it again gives the same object.

    A folder has a folder for each class; a table has a column of files, relative to itself, and one
    of labels; a dataset has a column of pictures. Nothing is decoded here.
    """
    read: dict[str, ImageDataset] = {}
    if arguments.dataset_name:
        for split, dataset in load_dataset_splits(arguments, plugins, SPLITS).items():
            origin = f"--dataset_name {arguments.dataset_name}, split {split}"
            read[split] = images_from_dataset(dataset, origin, arguments)
    for split in SPLITS:
        folder, tables = (getattr(arguments, f"{split}_{kind}") for kind in ("dir", "file"))
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
    """Read a folder with a folder for each class; of a test split pictures may lie beside them."""
    if not files.is_directory(folder, flag):
        raise DataError(f"{flag} {folder} is no folder: give one with a folder for each class")
    found = [
        name for name in files.list_files(folder, flag) if name.lower().endswith(IMAGE_EXTENSIONS)
    ]
    base = folder.rstrip("/")
    names, labels, sources = [], [], []
    for name in found:
        # The folder may be written in another way than in the names of its files.
        below = name.startswith(f"{base}/")
        inside = name[len(base) + 1 :] if below else os.path.relpath(name, base)
        inside = inside.replace(os.sep, "/")
        parts = PurePosixPath(inside).parts
        if any(part.startswith(".") for part in parts):
            continue
        label = parts[0] if len(parts) > 1 else None
        if label is None and split != "test":
            raise DataError(
                f"{flag} {name} lies in no folder of a class: put it into one, "
                f"{PurePosixPath(folder) / 'CLASS' / PurePosixPath(inside).name}"
            )
        names.append(inside)
        labels.append(label)
        sources.append(MediaSource(name))
    if not names:
        raise DataError(
            f"{flag} {folder} holds no pictures ({', '.join(IMAGE_EXTENSIONS[:5])} …) in folders of classes"
        )
    table = Table({"image": list(names)}, f"{flag} {folder}")
    return ImageDataset(names, None, list(labels), [(0, table)], {}, None, sources)


def images_from_tables(
    patterns: list[str], flag: str, split: str, arguments: ImageArguments
) -> ImageDataset:
    """Read tables with a column of files and one of labels."""
    names: list[str] = []
    labels: list[Label] = []
    sources: list[MediaSource] = []
    captions: list[str] = []
    origins: list[tuple[int, Table]] = []
    for file in files.expand_patterns(patterns, flag):
        table: Table = read_table(file, flag, arguments)
        column = table.column("image_column", arguments.image_column, IMAGE_COLUMNS)
        own = str(PurePosixPath(file).parent) if "://" in file else str(Path(file).parent)
        base = (getattr(arguments, "data_dir", None) or own).rstrip("/")
        found = table.texts(column)
        if isinstance(arguments, ImageTextArguments):
            rows, texts = read_captions(table, table.columns, arguments)
            captions += texts
        else:
            label = choose_label_column(table, arguments, labelled=split != "test")
            labels += table.labels(label, None) if label else [None] * len(table)
            rows = list(range(len(table)))
        origins.append((len(names), table))
        for name in (found[row] for row in rows):
            whole = name if "://" in name or os.path.isabs(name) else f"{base}/{name}"
            names.append(name)
            sources.append(MediaSource(whole))
    labels = labels or [None] * len(names)
    return ImageDataset(names, None, labels, origins, {}, None, sources, captions)


def read_captions(
    table: Table, columns: Mapping[str, Sequence[Any]], arguments: ImageTextArguments
) -> tuple[list[int], list[str]]:
    """Return a row for each caption, and the captions; a cell is one or a list of them."""
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
    """Read a ``datasets.Dataset`` with a column of pictures, which stays as it is stored."""
    import datasets

    features: Mapping[str, Any] = dataset.features or {}
    pictures = [n for n, kind in features.items() if isinstance(kind, datasets.Image)]
    chosen = arguments.image_column or next(iter(pictures), None)
    header = Table({name: [] for name in dataset.column_names}, origin)
    column = header.column("image_column", chosen, IMAGE_COLUMNS)
    sources: Sequence[MediaSource] = MediaColumn(dataset, column, origin)
    if isinstance(arguments, ImageTextArguments):
        whole = {n: dataset[n] for n in dataset.column_names if n != column}
        rows, texts = read_captions(header, whole, arguments)
        names, chosen_rows = [f"{origin} {row}" for row in rows], np.asarray(rows)
        labels: list[Label] = [None] * len(rows)
        return ImageDataset(
            names, None, labels, [(0, header)], {}, None, SourceSubset(sources, chosen_rows), texts
        )
    label = choose_label_column(header, arguments, labelled="split test" not in origin)
    classes = tuple(getattr(features.get(label or ""), "names", None) or ())
    cells = list(dataset[label]) if label else [None] * len(dataset)
    table = Table({"label": cells}, origin, classes=classes)
    names = [f"{origin} {row}" for row in range(len(dataset))]
    return ImageDataset(names, None, table.labels("label", None), [(0, table)], {}, None, sources)


def choose_label_column(table: Table, arguments: ImageArguments, labelled: bool) -> str | None:
    """Return the column of labels, or nothing where there need be none."""
    asked = arguments.label_column
    if asked is None and not labelled and not set(LABEL_COLUMNS) & set(table.columns):
        return None
    return table.column("label_column", asked, LABEL_COLUMNS)
