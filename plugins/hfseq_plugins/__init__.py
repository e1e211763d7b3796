"""The architectures that ship with hfseq. Each package is a plugin, like those of third parties."""

import hfseq.modeling  # noqa: F401 (before flax, which it makes compatible with jax)

#: Packages that several families use, and that are not plugins.
SHARED = ("decoder", "rotary_bert")
