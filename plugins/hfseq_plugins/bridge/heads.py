"""Finds PyTorch classes of Transformers by model type and task, without importing PyTorch."""

from __future__ import annotations

import importlib
import importlib.metadata
import importlib.util
import re
from typing import Any

from hfseq.errors import UsageError, did_you_mean

#: The bridge is tested with versions of PyTorch from the first of these up to, but not including,
#: the second.
TORCH_VERSIONS = ((2, 13), (2, 14))
#: Tasks whose names differ between Transformers 5 (keys) and hfseq (values).
RENAMED_TASKS = {"ForImageTextToText": "ForVision2Seq"}
#: The module in which the Flax classes of the bridge are looked up.
CLASSES = "hfseq_plugins.bridge.classes"


def describe_architecture(model_type: str, task: str) -> dict[str, Any]:
    """Describes how the bridge runs a model type. The hook ``fallback_architecture`` returns this.

    Args:
        model_type: The model type of a Transformers configuration.
        task: The task for which a model class is needed, such as ``"ForObjectDetection"``.

    Raises:
        UsageError: Transformers does not have the model type or has no class of the model type for
            the task, or the bridge is not tested with the installed version of PyTorch.
    """
    import transformers
    from transformers.models.auto.configuration_auto import CONFIG_MAPPING_NAMES

    if model_type not in CONFIG_MAPPING_NAMES:
        raise UsageError(
            f"the bridge runs the architectures of Transformers, but Transformers "
            f"{transformers.__version__} has no model type '{model_type}'"
            f"{did_you_mean(model_type, CONFIG_MAPPING_NAMES)}"
        )
    heads = torch_heads(model_type)
    if task not in heads:
        raise UsageError(
            f"Transformers has no PyTorch class {task} for the model type '{model_type}'. The "
            f"bridge supports these tasks: {', '.join(heads) or 'none'}"
        )
    check_torch_version()
    return {
        "config": f"transformers:{CONFIG_MAPPING_NAMES[model_type]}",
        "heads": {name: f"{CLASSES}:Flax{class_name}" for name, class_name in heads.items()},
        "card": f"`{model_type}` of Transformers, computed in JAX by hfseq's bridge.",
    }


def torch_heads(model_type: str) -> dict[str, str]:
    """Returns the name of the PyTorch class of a model type for each task that it supports."""
    # The package `transformers.models.auto` hides this module where PyTorch is not installed.
    modeling_auto = importlib.import_module("transformers.models.auto.modeling_auto")
    heads = {}
    for name, auto_class in vars(modeling_auto).items():
        # This mapping contains the names of the classes. Looking up the classes themselves would
        # import PyTorch.
        mapping = getattr(getattr(auto_class, "_model_mapping", None), "_model_mapping", {})
        class_names = mapping.get(model_type) if name.startswith("AutoModel") else None
        if class_names is not None:
            task = name.removeprefix("AutoModel") or "Model"
            class_name = class_names if isinstance(class_names, str) else class_names[0]
            heads[RENAMED_TASKS.get(task, task)] = class_name
    return heads


def check_torch_version() -> None:
    """Raises a UsageError if an untested version of PyTorch is installed.

    If PyTorch is not installed, no error is raised, because the bridge can run exported programs.
    """
    if importlib.util.find_spec("torch") is None:
        return
    version = importlib.metadata.version("torch")
    numbers = tuple(int(number) for number in re.findall(r"\d+", version)[:2])
    lowest, limit = TORCH_VERSIONS
    if not lowest <= numbers < limit:
        raise UsageError(
            f"the bridge is tested with torch >={'.'.join(map(str, lowest))},"
            f"<{'.'.join(map(str, limit))}, but torch {version} is installed: pip install "
            "'hfseq[bridge]'"
        )
