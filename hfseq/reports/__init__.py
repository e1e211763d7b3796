"""What a run left, read and shown: its log, its plots, its card. Nothing here imports jax."""
