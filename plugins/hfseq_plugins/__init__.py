"""The architectures that ship with hfseq. Each package is a plugin, like those of third parties."""

#: Packages that several families use, and that are not plugins.
SHARED = ("decoder", "rotary_bert")

# Before flax, which this makes compatible with jax. It may load the plugins, which reads `SHARED`.
import hfseq.modeling  # noqa: E402, F401
