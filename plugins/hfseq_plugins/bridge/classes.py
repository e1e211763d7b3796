"""The Flax classes of the bridge by name, such as ``FlaxDetrForObjectDetection``.

The name of a class is ``Flax`` followed by the name of a PyTorch class of Transformers. A class is
created when this module is first asked for its name. Models can be pickled because unpickling finds
their class here. If PyTorch is not installed, the classes run the programs that
`hfseq bridge export` wrote.
"""

from __future__ import annotations

import importlib.util


def __getattr__(name: str) -> type:
    if not name.startswith("Flax"):
        raise AttributeError(f"module '{__name__}' has no attribute '{name}'")
    if importlib.util.find_spec("torch") is None:
        from hfseq_plugins.bridge.exported import exported_class

        return exported_class(name.removeprefix("Flax"))
    from hfseq_plugins.bridge.model import bridged_class

    return bridged_class(name.removeprefix("Flax"))
