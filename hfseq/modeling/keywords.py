"""Keyword arguments that PyTorch programs pass to ``from_pretrained``.

Each argument is supported, translated to an argument of hfseq, or rejected with an error that says
what to use instead.
"""

from __future__ import annotations

import logging
from collections.abc import Mapping
from typing import Any

from hfseq.errors import UsageError

logger = logging.getLogger("hfseq.modeling")

#: Maps attention implementations of PyTorch to attention implementations of hfseq.
ATTENTION_NAMES = {
    "sdpa": "auto",
    "flash_attention_2": "auto",
    "flash_attention_3": "auto",
    "flex_attention": "auto",
}

#: Values of ``device_map`` that can be ignored, because JAX places the model automatically.
DEFAULT_DEVICE_MAPS = (None, "auto", "cpu", "balanced", "sequential")

_QUANTIZATION = (
    "hfseq computes in int8 or FP8 with precision= (docs/precision.md), and trains adapters on a "
    "quantized base with --load_in_4bit and --load_in_8bit of the scripts (docs/adapters.md)"
)
_MESH = "use mesh=, a jax.sharding.Mesh, to distribute the model over devices"

#: Keyword arguments that are rejected, and what to do instead.
REFUSED = {
    "load_in_8bit": _QUANTIZATION,
    "load_in_4bit": _QUANTIZATION,
    "quantization_config": _QUANTIZATION,
    "variant": "pass the file itself, for example DIR/model.fp16.safetensors with config=DIR",
    "target_lang": "load a checkpoint that was saved for this language, or load the adapter of "
    "the language in PyTorch and save the model",
    "key_mapping": "set weight_synonyms in the model class (docs/model_class.md)",
    "tp_plan": _MESH,
    "tp_size": _MESH,
    "device_mesh": _MESH,
    "max_memory": _MESH,
    "offload_folder": _MESH,
    "offload_state_dict": _MESH,
    "offload_buffers": _MESH,
    "from_tf": "TensorFlow checkpoints are not supported; convert them with Transformers 4 first",
    "state_dict": "load the model without it, and set model.params",
}


def translate_keywords(keywords: Mapping[str, Any]) -> dict[str, Any]:
    """Translates keyword arguments of PyTorch's ``from_pretrained`` to those of hfseq.

    ``device_map`` is dropped with a warning. ``torch_dtype`` becomes ``dtype``. The name of a
    PyTorch attention implementation is replaced by the name of an hfseq implementation.

    Args:
        keywords: The keyword arguments of ``from_pretrained``.

    Raises:
        UsageError: An argument has no counterpart in hfseq. The message says what to use instead.
    """
    translated = dict(keywords)
    for name, advice in REFUSED.items():
        value = translated.pop(name, None)
        if value is not None and value is not False:
            raise UsageError(f"from_pretrained: {name}={value!r:.60} is not supported; {advice}")
    device_map = translated.pop("device_map", None)
    if device_map not in DEFAULT_DEVICE_MAPS:
        raise UsageError(
            f"from_pretrained: device_map={device_map!r:.60} is not supported; {_MESH}, or "
            'jax.default_device(jax.devices("cpu")[0]) to choose a device'
        )
    if device_map is not None:
        logger.warning(
            "device_map=%r has no effect: JAX puts the model on its default device. %s",
            device_map,
            _MESH,
        )
    translated.pop("weights_only", None)
    torch_dtype = translated.pop("torch_dtype", None)
    if torch_dtype is not None:
        translated.setdefault("dtype", torch_dtype)
    attention = translated.get("attn_implementation")
    if isinstance(attention, str) and attention in ATTENTION_NAMES:
        translated["attn_implementation"] = ATTENTION_NAMES[attention]
    return translated
