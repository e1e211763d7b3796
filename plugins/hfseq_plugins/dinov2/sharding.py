"""How DINOv2 is split over devices: as ViT; both halves of SwiGLU are in one kernel, left whole."""

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
