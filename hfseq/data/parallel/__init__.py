"""Parallel text: pairs of a source and a target sentence from wherever they are kept."""

from hfseq.data.parallel.loading import PairSplits, load_pairs

__all__ = ["PairSplits", "load_pairs"]
