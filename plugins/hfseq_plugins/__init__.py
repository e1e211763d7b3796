"""The architectures that come with hfseq, one folder each; plugins like anybody's."""
