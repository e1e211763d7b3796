"""``hfseq plan``: what a training run needs and takes, without the devices it is for."""
