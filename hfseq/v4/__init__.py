"""Compatibility with programs for Transformers 4, apart from the models.

`paths` redirects the old import paths to hfseq, and `python -m hfseq.v4` runs programs with them.
`pytorch_utils` is the former `modeling_flax_pytorch_utils`. `collators` and `sentencepiece` contain
classes that the example scripts of Transformers 4 defined. `hfseq` exports these names too.
"""
