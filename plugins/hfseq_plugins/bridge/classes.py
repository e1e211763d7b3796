"""The Flax classes of the bridge by name, such as ``FlaxDetrForObjectDetection``.

The classes are created when they are first used: ``Flax`` followed by the name of a PyTorch class
of Transformers. Since a class can be found by its name, models of these classes can be pickled.
"""

from __future__ import annotations

from hfseq_plugins.bridge.model import bridged_class


def __getattr__(name: str) -> type:
    if not name.startswith("Flax"):
        raise AttributeError(f"module '{__name__}' has no attribute '{name}'")
    return bridged_class(name.removeprefix("Flax"))
