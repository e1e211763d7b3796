"""Selects some layers of a model, to create a student for distillation."""

from __future__ import annotations

import copy
from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING, Any

from hfseq.errors import UsageError
from hfseq.nn import trees

if TYPE_CHECKING:
    from hfseq.modeling.pretrained import FlaxPreTrainedModel

#: The attributes of configurations that contain the numbers of encoder and of decoder layers.
ENCODER_LAYERS = ("encoder_layers", "num_layers")
DECODER_LAYERS = ("decoder_layers", "num_decoder_layers")


def keep_layers(
    model: FlaxPreTrainedModel,
    layers: Sequence[int] | None,
    decoder_layers: Sequence[int] | None = None,
) -> FlaxPreTrainedModel:
    """Returns a copy of a model with only some of its layers. All other parameters are the same.

    Args:
        model: The model, with parameters and without scanned layers.
        layers: The numbers of the layers to keep, in the order of the new model. For
            encoder-decoder models, these are layers of the encoder. Default: all.
        decoder_layers: The layers of the decoder to keep. Default: all.

    Raises:
        UsageError: A layer does not exist, or the configuration does not contain the number of
            layers.
    """
    config = copy.deepcopy(model.config)
    is_pair = bool(getattr(config, "is_encoder_decoder", False))
    if decoder_layers is not None and not is_pair:
        raise UsageError(
            f"--keep_decoder_layers: '{config.model_type}' has no separate decoder: use "
            "--keep_layers"
        )
    layers_by_side: dict[str, Sequence[int]] = {}
    sides = (
        ("encoder", "keep_layers", ENCODER_LAYERS if is_pair else ("num_hidden_layers",), layers),
        ("decoder", "keep_decoder_layers", DECODER_LAYERS, decoder_layers),
    )
    for side, flag, names, numbers in sides:
        if numbers is None:
            continue
        name = next((name for name in names if hasattr(config, name)), None)
        if name is None:
            raise UsageError(
                f"--{flag}: the configuration of '{config.model_type}' has no {' or '.join(names)}"
            )
        count = getattr(config, name)
        wrong = [number for number in numbers if not 0 <= number < count]
        if wrong or not numbers:
            raise UsageError(
                f"--{flag} {','.join(map(str, numbers))}: the model has the layers 0 to {count - 1}"
            )
        layers_by_side[side if is_pair else ""] = numbers
        _select(config, name, count, numbers)
    student = type(model)(
        config, _do_init=False, seed=model.seed, precision=model.precision,
        **model.checkpoint_arguments
    )  # fmt: skip
    source = trees.flatten(model.params)
    params: dict[trees.Path, Any] = {}
    for path in trees.flatten(student.abstract_params):
        params[path] = _source_of(path, layers_by_side, source)
    student._is_initialized, student._params = True, trees.unflatten(params)
    student.generation_config = copy.deepcopy(model.generation_config)
    return student


def _select(config: Any, name: str, count: int, numbers: Sequence[int]) -> None:
    """Sets the number of layers, and selects the entries of lists with one entry per layer."""
    for key, value in list(vars(config).items()):
        if isinstance(value, list) and len(value) == count and key.strip("_") != "id2label":
            setattr(config, key, [value[number] for number in numbers])
    setattr(config, name, len(numbers))


def _source_of(
    path: trees.Path, layers_by_side: Mapping[str, Sequence[int]], source: Mapping[trees.Path, Any]
) -> Any:
    """Returns the parameter of the original model for a path of the new model."""
    position = next((number for number, part in enumerate(path) if part.isdigit()), None)
    # Lists in heads come after other parts, such as `classifier/0`.
    side = "decoder" if "decoder" in path[:position] else "encoder"
    numbers = layers_by_side.get(side, layers_by_side.get(""))
    if position is None or numbers is None or int(path[position]) >= len(numbers):
        return source[path]
    old = (*path[:position], str(numbers[int(path[position])]), *path[position + 1 :])
    # The first layer may own parameters that all layers use, such as T5's position biases.
    return source[old] if old in source else source[path]
