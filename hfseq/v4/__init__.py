"""Compatibility with programs for Transformers 4. Importing this package activates it.

The module `paths` redirects the import paths of Transformers 4 to hfseq. Import this package before
the first import from such a path:

    import hfseq.v4
    from transformers import FlaxBertModel

`python -m hfseq.v4 program.py` runs a program that does not import this package.
"""

from hfseq.v4.paths import install as install

install()
