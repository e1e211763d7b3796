"""Fused attention kernels for accelerators, one module per kernel.

Each module has a function that computes attention and a function `unsupported_reason(spec)`. The
latter returns why the kernel does not support a call, or `None` if it does, without importing a
kernel or accessing a device. `hfseq.nn.dispatch` selects the implementation.
"""
