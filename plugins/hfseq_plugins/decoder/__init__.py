"""The implementation of all Llama-style decoders, with options for each model family."""
