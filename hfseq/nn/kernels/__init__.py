"""Fused attention for accelerators, a kernel a file; :mod:`hfseq.nn.dispatch` says when each serves.

Each has ``refuses(facts)``, which returns why it cannot serve or None, imports no kernel and looks
at no device; and a function that attends.
"""
