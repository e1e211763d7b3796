"""Fused attention kernels for accelerators, one module per kernel.

Each module has a function that computes attention and a function `unsupported_reason(spec)`, which
returns why the kernel does not support a call or `None`. The latter imports no kernel and accesses
no device. `hfseq.nn.dispatch` selects the implementation.
"""
