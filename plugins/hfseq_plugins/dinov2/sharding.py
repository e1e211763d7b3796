"""Sharding rules of DINOv2: the rules of ViT, and rules for feed-forward blocks and layer scale.

The two input projections of SwiGLU are stored in one kernel, whose columns are not split.
"""

from hfseq_plugins.vit.sharding import RULES as VIT

RULES = [
    (r"mlp/fc1/kernel$", "column"),
    (r"mlp/fc1/bias$", "column_bias"),
    (r"mlp/fc2/kernel$", "row"),
    (r"mlp/weights_(in|out)/kernel$", "table"),
    (r"mlp/(fc2|weights_in|weights_out)/bias$", "vector"),
    (r"norm[12]/(scale|bias)$|lambda1$", "vector"),
    (r"mask_token$", "replicated"),
    *VIT,
]
