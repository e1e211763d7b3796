"""Training objectives, one file each: what a batch is, what the loss is, what is measured."""
