"""Reports on runs: log, plots and model card. Does not import jax."""
