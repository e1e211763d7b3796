"""Configurations that strangers wrote: read without surprises, refused where they are absurd."""

from __future__ import annotations

import contextlib
import math
import re
from collections.abc import Iterator, Mapping
from typing import Any

from hfseq.errors import ConfigError, HfseqError, WeightsError
from hfseq.weights import Tensor

LARGEST = 2**31  # no size of a model is a number that int32 does not hold
DEEPEST = 2048  # layers; the deepest published transformers have 1,000
SHALLOW = 256  # layers that take no noticeable time to lay out, whatever a file holds of them
ROOM = 2**20  # numbers of a table of places, whatever a file holds
AFRESH = 2**24  # numbers that may be initialised beside those of a file, whatever it holds
_SIZES = re.compile(
    r"layers?$|heads$|_size$|_dim$|positions$|position_embeddings$|buckets$|^d_|^n_|^num_"
)
_LAYERS = re.compile(r"(^|_)layers?$")


@contextlib.contextmanager
def reading(place: str) -> Iterator[None]:
    """Turn what the body raises at a configuration that it cannot read into a ConfigError.

    Configuration classes of transformers check little, so anything may be raised; errors of hfseq,
    absent packages and an absent file keep their type.
    """
    try:
        yield
    except (HfseqError, ImportError):
        raise
    except OSError as error:
        if type(error) is not OSError:
            raise
        raise _unreadable(place, error) from error  # how transformers calls invalid JSON
    except Exception as error:
        raise _unreadable(place, error) from error


def _unreadable(place: str, error: Exception) -> ConfigError:
    return ConfigError(f"cannot read the configuration of {place}: {_reason(error)}")


def _reason(error: Exception) -> str:
    return (" ".join(str(error).split()) or type(error).__name__)[:600]


@contextlib.contextmanager
def building(place: str) -> Iterator[None]:
    """Turn what a model class raises at sizes that make no model into a ConfigError.

    Errors of hfseq, and of arguments that the class does not know, keep their type.
    """
    try:
        yield
    except (HfseqError, ImportError):
        raise
    except Exception as error:
        if isinstance(error, TypeError) and "argument" in str(error):
            raise
        raise ConfigError(
            f"the configuration of {place} describes no model: {_reason(error)}"
        ) from error


def check_mapping(stored: Any, place: str) -> None:
    """Refuse a configuration that is no JSON object, or would replace attributes of its class."""
    if not isinstance(stored, Mapping):
        raise ConfigError(f"cannot read the configuration of {place}: it is no JSON object")
    strange = [name for name in stored if not isinstance(name, str) or name.startswith("__")]
    if strange:
        raise ConfigError(
            f"the configuration of {place} has the name {strange[0]!r:.80}: remove it"
        )


def refuse_code(auto_map: Any, place: str) -> None:
    """Say which code of a checkpoint would run if it were trusted, and how to trust it."""
    named = auto_map.items() if isinstance(auto_map, Mapping) else ()
    listing = ", ".join(
        f"{name} from {str(target).rpartition('.')[0] or target}.py ({target})"
        for name, target in named
    )
    raise ConfigError(
        f"{place} is a model of its own code, which is not run unless you trust it: {listing}. "
        "Read that code; then pass trust_remote_code=True (--trust_remote_code)"
    )


def check_numbers(config: Any, place: str) -> None:
    """Refuse a configuration with numbers that no model has.

    Those are what is not finite, sizes below 0, anything that int32 does not hold, and more than
    ``DEEPEST`` layers. **Raises:** :class:`~hfseq.errors.ConfigError` that names them all.
    """
    problems = []
    for name, value in vars(config).items():
        if isinstance(value, bool) or not isinstance(value, int | float):
            continue
        size = _SIZES.search(name)
        most = DEEPEST if _LAYERS.search(name) else LARGEST - 1
        if isinstance(value, float) and not math.isfinite(value):
            problems.append(f"{name} is {value}")
        elif isinstance(value, int) and abs(value) > most:
            problems.append(f"{name} is {value:.3g}, at most {most} is possible")
        elif size and value < 0:
            problems.append(f"{name} is {value}, a size")
    if problems:
        raise ConfigError(
            f"the configuration of {place} describes no model: {'; '.join(problems[:6])}"
        )


def check_against_file(config: Any, tensors: Mapping[str, Tensor], place: str) -> None:
    """Refuse a configuration of a model that is out of all proportion to its file.

    Laying out layers and computing tables of places takes time and memory by the configuration
    alone, before a tensor is found missing.
    """
    layers = max((v for n, v in vars(config).items() if _LAYERS.search(n) and _whole(v)), default=0)
    if layers > max(SHALLOW, len(tensors)):
        raise WeightsError(
            f"the configuration beside {place} has {layers} layers, and the file {len(tensors)} "
            "tensors: they do not belong together"
        )
    places = getattr(config, "max_position_embeddings", 0)
    width = getattr(config, "hidden_size", 0)
    held = sum(math.prod(tensor.shape) for tensor in tensors.values())
    if _whole(places) and _whole(width) and places * width > max(ROOM, 4 * held):
        raise WeightsError(
            f"the configuration beside {place} has {places} places of {width} numbers, and the "
            f"file holds {held} numbers in all: they do not belong together"
        )


def _whole(value: Any) -> bool:
    return isinstance(value, int) and not isinstance(value, bool)


__all__ = [
    "building",
    "refuse_code",
    "check_against_file",
    "check_mapping",
    "check_numbers",
    "reading",
]
