"""The loop and what it stands on: flags, optimizers, sharding, checkpoints, tracking."""
