"""BERT with rotary positions, the shared implementation of NomicBERT, GTE and Jina embeddings."""
