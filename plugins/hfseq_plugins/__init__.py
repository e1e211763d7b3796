"""The architectures that ship with hfseq. Each package is a plugin, like those of third parties."""

from hfseq.plugins.import_hooks import prepare_jax

#: Packages that several families use, and that are not plugins.
SHARED = ("decoder",)

prepare_jax()  # before the first import of flax
