"""The architectures that ship with hfseq, one package each, registered like third-party plugins."""

from hfseq.plugins.import_hooks import prepare_jax

prepare_jax()  # before the first import of flax
