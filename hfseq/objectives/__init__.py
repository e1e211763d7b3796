"""Training objectives, one per module. An objective defines batches, loss and metrics."""
