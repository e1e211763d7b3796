"""Compatibility with programs for Transformers 4. Importing this package activates it.

`paths` redirects the old import paths to hfseq, and `python -m hfseq.v4` runs programs with them.
Import it before the first old name:

    import hfseq.v4
    from transformers import FlaxBertModel
"""

from hfseq.v4.paths import install as install

install()
