"""BERT with rotary positions. NomicBERT, GTE and Jina embeddings v3 share this implementation."""
