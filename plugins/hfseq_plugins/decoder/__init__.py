"""One implementation of all Llama-style decoders, with options for the different families."""
