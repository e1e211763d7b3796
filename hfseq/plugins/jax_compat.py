"""What lets one flax run on several jax versions."""

from __future__ import annotations

from importlib import metadata

#: Base classes and values that flax 0.12.8 takes from ``jax.experimental.hijax`` and jax 0.11
#: removed. Only flax's opt-in hijax variables, which hfseq does not use, ever call them.
HIJAX_NAMES = ("HiPrimitive", "MutableHiType", "AvalQDD", "AvalMutableQDD", "QDD")


def prepare_jax() -> None:
    """Let flax 0.12.8 import on jax 0.11 and later.

    Missing names become inert placeholder classes; where flax and jax fit nothing is touched. Once
    hfseq is imported, the first import of flax runs it (hfseq.plugins.transformers_hook).
    """
    if int(metadata.version("flax").split(".")[2]) >= 12:  # 0.12.12 uses none of the names
        return
    from jax.experimental import hijax

    for name in HIJAX_NAMES:
        if not hasattr(hijax, name):
            setattr(hijax, name, type(name, (), {"__module__": hijax.__name__}))
