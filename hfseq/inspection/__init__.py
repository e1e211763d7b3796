"""What a checkpoint holds and what is wrong with it, from the headers of its files alone."""
