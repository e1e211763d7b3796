"""Every parameter of every architecture with tensor=2: half of it per device, or a reason."""

from __future__ import annotations

import math
import re

import jax
import pytest

from hfseq import plugins
from hfseq.nn import trees
from hfseq.nn.sharding import make_mesh
from hfseq.training import setup
from tests.support import parallel
from tests.support.tiers import first

#: Parameters that are replicated over the tensor axis, and the reason.
WHOLE = {
    # Norms, and biases that are added after the sum over devices: vectors.
    r"(norm(_[a-z]+|alization|[12])?|LayerNorm|ln(_\w+)?)/(scale|bias|weight)$": "norms",
    r"(output/dense|attention/output|c_proj|out_proj|fc2|o_proj|down_proj)/bias$": "row biases",
    r"(fc_out|out_lin|output_dense|lin2|(self_)?attention/dense|ffn_output|dense_4h_to_h)/bias$": (
        "row biases of other names"
    ),
    r"rel_embeddings/embedding$": "relative positions",
    r"attn/o/bias$": "row biases of MPNet",
    r"bottleneck/((input|attention)/)?dense/(kernel|bias)$": "bottlenecks",
    r"(embedding_transformation|embed_proj)/(kernel|bias)$": "from the width of the tables",
    r"(embeddings_project|embedding_hidden_mapping_in|project_(in|out))/(kernel|bias)$": (
        "from the width of the tables to that of the layers"
    ),
    r"(position|t(oken|ask)_type)_embeddings/embedding$|wpe/|embed_positions/": "positions, types",
    r"position_embeddings?(/embedding)?$|(class_embedding|cls_token)$": "image positions",
    r"(mask_token|masked_spec_embed|lambda_?[12])$": "a vector for all positions",
    r"patch_embeddings?(/projection)?/(kernel|bias)$": "patches, which come in once",
    r"(register_tokens|/probe|logit_bias)$": "vectors",
    r"head/attention/in_proj_(weight|bias)$|text_model/head/(kernel|bias)$": "pooling of a row",
    # Experts are split by the axis `expert`. Every token passes all rows of a router.
    r"(gate|router/layer|router)/(kernel|bias|weight)$": "routers",
    r"experts/down_proj_bias$": "row biases of experts",
    r"(q|k)_(layer)?norm/norms/\d+/scale$|attn/dense/bias$": "norms of heads, row biases",
    # Audio and its codes: the input layers, and products of one vector per frame.
    r"(conv|conv1|conv2|projection|projector)/(kernel|bias|weight_[gv])$": "audio",
    r"(project_(hid|q)|weight_proj)/(kernel|bias)$|codevectors$|layer_weights$": "audio codes",
    r"(text|visual)_projection/kernel$|logit_scale$": "one vector of a row",
    # Heads on a token or a row: small, with few classes.
    r"(pooler|transform|lm_head|classifier|classification_head)(/dense)?/(kernel|bias)$": "heads",
    r"(_?predictions/dense|summary|vocab_transform|pre_classifier)/(kernel|bias)$": "other heads",
    r"(classifier|qa_outputs|seq_relationship|out_proj|score)/(kernel|bias)$": "few classes",
    r"(dense_prediction|regression)/(kernel|bias)$": "one class",
    r"^(head/)?dense/(kernel|bias)$": "a token or a row before its classes",
    r"lambda_(q|k)[12]$|head_norm/scale$": "a vector for each head",
    r"gru_rel_pos_\w+(/(kernel|bias))?$|rel_attn_embed/embedding$": "gates of position biases",
    # One key head of the VQ Transformer: its values are split, keys and codes are not.
    r"attention(_2)?/((q|k|r)_proj/kernel|content_bias|position_bias|position_scale)$": "one head",
}
# Head parameters of vocabulary size are always split.
NEVER_WHOLE = re.compile(r"(lm_head|decoder)/kernel$|(word_embeddings|wte|shared|embed_tokens)/")
#: Convolutional and recurrent networks, whose layers are only split by `fsdp`.
ONLY_FSDP = {"regnet", "resnet", "falcon_mamba", "mamba2"}
NAMES = sorted(set(plugins.load().architectures) - ONLY_FSDP)
CASES = [(name, task) for name in NAMES for task in plugins.load().architectures.get(name).heads]
EVERY_CHANGE = ("bert", "gpt2", "llama", "t5", "vit", "whisper")


@pytest.fixture(scope="module")
def mesh():
    return make_mesh("tensor=2", jax.devices()[:2])


@pytest.mark.parametrize(
    ("name", "task"), first(CASES, *((name, parallel.main_head(name)) for name in EVERY_CHANGE))
)
def test_every_parameter_is_split_over_two_devices(name, task, mesh):
    model = parallel.make_model(name, task)
    layout = setup.shard_model(model, mesh)
    shapes = {path: leaf.shape for path, leaf in trees.flatten(model.abstract_params).items()}
    split = replicated = local = 0
    for path, leaf_sharding in layout.shardings(shapes).items():
        size, mine = math.prod(shapes[path]), math.prod(leaf_sharding.shard_shape(shapes[path]))
        place_name = trees.join(path)
        has_reason = any(re.search(pattern, place_name) for pattern in WHOLE)
        if mine == size and has_reason and not NEVER_WHOLE.search(place_name):
            replicated += size
            continue
        assert abs(mine / size - 1 / 2) < 1e-4, f"{place_name} {shapes[path]}: {leaf_sharding.spec}"
        split, local = split + size, local + mine
    assert abs(local - split / 2) <= 1e-4 * split / 2
    assert split > replicated, "most of the model is whole"


@pytest.mark.parametrize("name", first(NAMES, *EVERY_CHANGE))
def test_scanned_layers_are_split_alike(name, mesh):
    task = parallel.main_head(name)
    kinds = getattr(parallel.make_model(name, task).config, "layer_types", None) or []
    # A pattern of different layers is scanned where it repeats.
    repeated = {"layer_types": 3 * kinds, "num_hidden_layers": 3 * len(kinds)}
    deeper = repeated if len(set(kinds)) > 1 else {}
    apart, stacked = (
        setup.shard_model(model, mesh).axes(
            {path: leaf.shape for path, leaf in trees.flatten(model.abstract_params).items()}
        )
        for model in (
            parallel.make_model(name, task, config=deeper),
            parallel.make_model(name, task, config=deeper, scan_layers=True),
        )
    )
    for path, axes in stacked.items():
        single = {axes_of for other, axes_of in apart.items() if _without_numbers(other) == path}
        assert single in ({axes}, set()) or path in apart, path


def _without_numbers(path: trees.Path) -> trees.Path:
    return tuple(part for part in path if not part.isdigit())
