"""Sharding rules of ResNet. Convolution kernels are only sharded over the `fsdp` axis."""

RULES = [
    (r"convolution/kernel$", "channels"),
    (r"attention/[02]/kernel$", "channels"),
    (r"attention/[02]/bias$", "vector"),
    (r"classifier/1/kernel$", "row_table"),
    (r"classifier/1/bias$", "replicated"),
    (r"normalization/(scale|bias)$", "vector"),
]
