"""The architectures that ship with hfseq. Each package is a plugin, like those of third parties."""

#: Packages that several families use, and that are not plugins.
SHARED = ("decoder", "rotary_bert")

# This import makes flax compatible with jax, so it precedes every import of flax. It may load the
# plugins, which requires that `SHARED` is defined.
import hfseq.modeling  # noqa: E402, F401
