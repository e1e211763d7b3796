"""What programs for Transformers 4 import beside models.

``paths`` has the old names lead here, and ``python -m hfseq.v4`` runs programs with them.
``pytorch_utils`` (``modeling_flax_pytorch_utils`` there), and the classes that v4's example scripts
defined: ``collators`` and ``sentencepiece``. Their names come from ``hfseq`` itself, too.
"""
