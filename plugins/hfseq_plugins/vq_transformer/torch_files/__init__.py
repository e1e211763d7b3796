"""The PyTorch VQ Transformer as it is shipped with checkpoints; hfseq itself never imports it."""
