"""From a name to files, from files to tensors, and back. Nothing here imports jax."""
