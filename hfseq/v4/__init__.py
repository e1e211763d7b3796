"""What programs for Transformers 4 import beside models."""
