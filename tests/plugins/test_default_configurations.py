"""Models of the default sizes have the names and shapes of PyTorch's, without allocating them."""

from __future__ import annotations

import pytest

from hfseq import plugins
from hfseq.checkpoints.weights import torch_axes
from hfseq.nn import trees
from tests.plugins.test_decoder_families import FAMILIES as DECODERS
from tests.plugins.test_moe_families import FAMILIES as EXPERTS
from tests.support.tiers import heads

NAMES = (
    *DECODERS,
    *EXPERTS,
    *("m2m_100", "umt5", "dinov3_vit", "hubert", "wavlm", "mamba2", "falcon_mamba"),
    *("siglip", "siglip_text_model", "siglip_vision_model"),
    *("siglip2", "siglip2_text_model", "siglip2_vision_model"),
)
#: Options without which PyTorch's classes cannot be created from the default configuration.
REQUIRED = {"ministral": {"head_dim": 128}}


@pytest.mark.slow
@pytest.mark.parametrize("name", NAMES)
def test_default_configuration_has_pytorchs_names_and_shapes(name):
    torch = pytest.importorskip("torch")
    import transformers

    spec = plugins.load().architectures.get(name)
    for head in heads(name):
        config = spec.load_config()(**REQUIRED.get(name, {}))
        model = spec.load_head(head)(config, _do_init=False)
        with torch.device("meta"):
            theirs = getattr(transformers, model.torch_class_name())(config)
        names = model.file_map
        expected = {
            names.resolve_name(torch_name): tuple(value.shape)
            for torch_name, value in theirs.named_parameters()
            if torch_name not in names.aliases
        }
        actual = {}
        for path, leaf in trees.flatten(model.abstract_params).items():
            axes = torch_axes(path, len(leaf.shape)) or range(len(leaf.shape))
            sizes = dict(zip(axes, leaf.shape, strict=True))
            actual[names.torch_name(path)] = tuple(sizes[axis] for axis in sorted(sizes))
        assert actual == expected, head
