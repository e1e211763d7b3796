"""The architectures that ship with hfseq, one package each, registered like third-party plugins."""
