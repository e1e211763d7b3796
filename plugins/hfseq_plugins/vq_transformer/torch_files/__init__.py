"""The PyTorch VQ Transformer, which is saved with checkpoints. hfseq itself does not import it."""
