"""Decoders with mixtures of experts."""

from __future__ import annotations

import json
import re

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from safetensors.numpy import load_file, save_file

from hfseq import plugins
from hfseq.errors import UsageError, WeightsError
from hfseq.modeling.lora import LoraConfig
from hfseq.nn import trees
from hfseq.testing import check_architecture
from hfseq_plugins.decoder.experts import RouterStatistics, load_balancing_loss
from tests.plugins.test_decoder_families import built, config
from tests.support import parallel, quantized
from tests.support.models import close, fewest_layers, ids
from tests.support.parity import compare_tokens
from tests.support.tiers import CHECKS, first, heads
from tests.support.torch_counterparts import torch_counterpart

FAMILIES = ("mixtral", "qwen2_moe", "qwen3_moe", "olmoe", "granitemoe", "gpt_oss")


def new(family, dtype=jnp.float32, peft_config=None, **changes):
    """Returns a language model without parameters."""
    model_class = plugins.load().architectures.get(family).load_head("ForCausalLM")
    options = {"dtype": dtype, "peft_config": peft_config}
    return model_class(config(family, **changes), _do_init=False, **options)


@pytest.mark.parametrize(
    ("family", "head", "checks"),
    first(
        [
            *((family, "ForCausalLM", CHECKS) for family in FAMILIES),
            # The names of decoders differ between the families.
            ("mixtral", "ForQuestionAnswering", ["torch_tree"]),
            *((family, head, None) for family in FAMILIES for head in heads(family)),
        ],
        *((family, "ForCausalLM", CHECKS) for family in FAMILIES),
        ("mixtral", "ForQuestionAnswering", ["torch_tree"]),
    ),
)
def test_battery(family, head, checks):
    model_config = config(family, num_labels=3, **(fewest_layers(family) if checks else {}))
    check_architecture(family, model_config, heads=[head], checks=checks)


VARIANTS = {
    "one choice": ("mixtral", {"num_experts_per_tok": 1, "sliding_window": None}),
    "all experts": ("mixtral", {"num_experts_per_tok": 5, "tie_word_embeddings": True}),
    "normalized weights": ("qwen2_moe", {"norm_topk_prob": True, "qkv_bias": False}),
    "plain weights": ("qwen3_moe", {"norm_topk_prob": False, "mlp_only_layers": [2]}),
    "no limits": ("olmoe", {"clip_qkv": None, "norm_topk_prob": True}),
    "tied granite": ("granitemoe", {"tie_word_embeddings": True, "attention_bias": False}),
    "gpt_oss that sees all": (
        "gpt_oss", {"layer_types": ["full_attention"] * 4, "attention_bias": False},
    ),
}  # fmt: skip


@pytest.mark.slow
@pytest.mark.parametrize("variant", VARIANTS)
def test_battery_of_a_switch(variant):
    family, changes = VARIANTS[variant]
    check_architecture(family, config(family, **changes), heads=["ForCausalLM"])


@pytest.mark.slow
@pytest.mark.parametrize("family", FAMILIES)
@pytest.mark.parametrize("padded", ["left", "none"])
def test_generated_tokens_are_pytorchs(family, padded, tmp_path):
    model = built(family)
    tokens, mask = np.maximum(ids(3, 9), 3), np.ones((3, 9), np.int32)
    if padded == "left":
        mask[0, :4], mask[1, :1] = 0, 0
        tokens = np.where(mask, tokens, 0)
    theirs = torch_counterpart(model, tmp_path)
    compare_tokens(model, theirs, tokens, mask, max_new_tokens=14, do_sample=False)


@pytest.mark.slow
@pytest.mark.parametrize("family", FAMILIES)
def test_padding_on_the_right_does_not_change_generated_tokens(family):
    model = built(family)
    tokens, lengths = np.maximum(ids(3, 9), 3), (9, 4, 1)
    mask = (np.arange(9) < np.array(lengths)[:, None]).astype(np.int32)
    together = model.generate(tokens, attention_mask=mask, max_new_tokens=12).sequences
    for row, length in enumerate(lengths):
        alone = model.generate(tokens[row : row + 1, :length], max_new_tokens=12).sequences
        assert np.array_equal(together[row, 9:], alone[0, length:])


# -- the auxiliary loss
# ------------------------------------------------------------------------------------


def test_load_balancing_loss_pools_layers_before_the_product():
    random = np.random.default_rng(0)
    probabilities = random.dirichlet(np.ones(4), size=(3, 20))  # (layers, tokens, experts)
    choices = (probabilities >= np.sort(probabilities)[..., 2:3]).astype(np.float64)
    real = np.arange(20) < 15
    statistics = [
        RouterStatistics(jnp.asarray(p[real].sum(0)), jnp.asarray(c[real].sum(0)), jnp.float32(15))
        for p, c in zip(probabilities, choices, strict=True)
    ]
    frequency, mean = choices[:, real].mean((0, 1)), probabilities[:, real].mean((0, 1))
    expected = 4 * (frequency * mean).sum()
    assert float(load_balancing_loss(statistics)) == pytest.approx(expected, rel=1e-5)


def test_auxiliary_loss_counts_tokens_and_ignores_padding():
    model, tokens = built("mixtral", num_hidden_layers=1), np.maximum(ids(2, 8), 3)
    loss = jax.jit(lambda tokens, **masks: model(tokens, **masks).auxiliary_loss)
    alone = loss(tokens[:1, :5])
    padded = np.concatenate([tokens[:1, :5], np.zeros((1, 3), np.int32)], 1)
    mask = (np.arange(8) < 5)[None].astype(np.int32)
    assert close(loss(padded, attention_mask=mask), alone)
    segments = np.where(np.arange(8) < 5, 1, 0)[None].astype(np.int32)
    assert close(loss(padded, segment_ids=segments), alone)


def test_without_router_logits_there_is_no_auxiliary_loss():
    names: list[str] = []
    for value in (True, False):
        model = new("mixtral", output_router_logits=value, num_hidden_layers=1)
        jax.eval_shape(
            lambda params, model=model: names.extend(model(ids(1, 6), params=params).keys()),
            model.abstract_params,
        )
    assert names.count("auxiliary_loss") == 1 and names.count("logits") == 2


# -- gradients
# ------------------------------------------------------------------------------------


def dense_mixture(x, router, gate_up, down, choices, normalize):
    """Returns the outputs of a mixture of experts in float64, which computes every expert."""
    scores = x @ router
    probabilities = np.exp(scores - scores.max(-1, keepdims=True))
    probabilities /= probabilities.sum(-1, keepdims=True)
    order = np.argsort(-probabilities, axis=-1)[:, :choices]
    weights = np.zeros_like(probabilities)
    np.put_along_axis(weights, order, np.take_along_axis(probabilities, order, -1), -1)
    if normalize:
        weights /= weights.sum(-1, keepdims=True)
    gate, up = np.split(np.einsum("th,eih->tei", x, gate_up), 2, axis=-1)
    inner = gate / (1 + np.exp(-gate)) * up
    return np.einsum("te,tei,ehi->th", weights, inner, down)


@pytest.mark.parametrize("normalize", [True, False])
def test_gradients_equal_a_dense_reference_in_float64(normalize):
    """Central differences of the reference along random directions."""
    from flax import nnx

    from hfseq_plugins.decoder.experts import SparseBlock

    options = {"norm_topk_prob": normalize, "hidden_act": "silu", "output_router_logits": False}
    block = SparseBlock(config("olmoe", **options), nnx.Rngs(0))
    graph, state = nnx.split(block)
    random = np.random.default_rng(0)
    state = jax.tree.map(lambda leaf: random.normal(size=leaf.shape) * 0.5, state)
    x, factors = random.normal(size=(14, 32)), random.normal(size=(14, 32))

    def loss(x, state):
        output, _ = nnx.merge(graph, state)(x[None], None, None)
        return (output[0] * factors).sum()

    single = jax.tree.map(jnp.float32, (x, state))
    gradients = jax.jit(jax.grad(loss, argnums=(0, 1)))(*single)
    flat = {
        path[-2 if path[-1] == "kernel" else -1]: leaf.get_value()
        for path, leaf in nnx.to_flat_state(state)
    }
    flat_gradients = {
        path[-2 if path[-1] == "kernel" else -1]: leaf.get_value()
        for path, leaf in nnx.to_flat_state(gradients[1])
    }
    arguments = {
        "x": x,
        "router": flat["gate"],
        "gate_up": flat["gate_up_proj"],
        "down": flat["down_proj"],
    }
    ours = {
        "x": gradients[0],
        "router": flat_gradients["gate"],
        "gate_up": flat_gradients["gate_up_proj"],
        "down": flat_gradients["down_proj"],
    }
    for name, value in arguments.items():
        for seed in range(3):
            direction = np.random.default_rng(seed).normal(size=value.shape)
            sums = [
                (
                    dense_mixture(
                        **arguments | {name: value + sign * 1e-5 * direction},
                        choices=2,
                        normalize=normalize,
                    )
                    * factors
                ).sum()
                for sign in (1, -1)
            ]
            expected = (sums[0] - sums[1]) / 2e-5
            scale = np.sqrt((np.asarray(ours[name], np.float64) ** 2).sum())
            product = (np.asarray(ours[name], np.float64) * direction).sum()
            assert abs(product - expected) <= 1e-4 * scale, name


# -- devices
# ------------------------------------------------------------------------------------

EXPERT_MESHES = ("expert=8", "data=2,expert=4", "fsdp=2,expert=2,tensor=2")


@pytest.mark.parametrize(
    ("family", "mesh"),
    first(
        [
            *((family, mesh) for family in FAMILIES for mesh in EXPERT_MESHES),
            ("mixtral", "expert=2,tensor=2,sequence=2"),
        ],
        ("granitemoe", "fsdp=2,expert=2,tensor=2"),
    ),
)
def test_expert_axis_gives_the_numbers_of_one_device(family, mesh):
    ours, theirs = (parallel.run(family, "ForCausalLM", layout) for layout in (mesh, None))
    assert ours[0] == pytest.approx(theirs[0], rel=1e-5)
    for (path, a), b in zip(
        jax.tree.flatten_with_path(ours[1])[0], jax.tree.leaves(theirs[1]), strict=True
    ):
        assert np.abs(a - b).max() <= 1e-5 * max(1, np.abs(b).max()), jax.tree_util.keystr(path)


def test_routers_compute_in_float32():
    half = new("mixtral", num_hidden_layers=1, dtype=jnp.bfloat16)
    program = str(jax.make_jaxpr(lambda p: half(ids(1, 6), params=p).logits)(half.abstract_params))
    assert re.search(r"f32\[1,6,5\] = dot_general", program)
    assert not re.search(r"bf16\[1,6,5\]", program)


# -- checkpoints
# ------------------------------------------------------------------------------------

#: The tensor of all experts' first projections, and one of the tensors that it consists of.
LAYOUTS = {
    "mixtral": (
        "model.layers.0.mlp.experts.gate_up_proj",
        "model.layers.0.block_sparse_moe.experts.1.w3.weight",
    ),
    "qwen3_moe": (
        "model.layers.1.mlp.experts.gate_up_proj",
        "model.layers.1.mlp.experts.1.up_proj.weight",
    ),
    "granitemoe": (
        "model.layers.0.block_sparse_moe.experts.gate_up_proj",
        "model.layers.0.block_sparse_moe.input_linear.weight",
    ),
}


def saved(model, folder):
    """Saves a model. Returns its tensors, and a function that replaces them."""
    model.save_pretrained(folder)

    def write(tensors):
        save_file(tensors, folder / "model.safetensors", metadata={"format": "pt"})

    return load_file(folder / "model.safetensors"), write


@pytest.mark.parametrize("family", LAYOUTS)
def test_both_layouts_of_files_are_read(family, tmp_path):
    pytest.importorskip("torch")
    model = built(family)
    joined_name, stored = LAYOUTS[family]
    theirs = torch_counterpart(model, tmp_path / "ours")
    theirs.save_pretrained(tmp_path / "joined", save_original_format=False)
    theirs.save_pretrained(tmp_path / "original")
    names = load_file(tmp_path / "joined" / "model.safetensors").keys()
    assert joined_name in names and stored not in names
    originals = load_file(tmp_path / "original" / "model.safetensors")
    tensors, _ = saved(model, tmp_path / "saved")
    assert stored in tensors and tensors.keys() == originals.keys()
    assert all(np.array_equal(tensors[name], originals[name]) for name in tensors)
    for folder in ("joined", "original"):
        again = type(model).from_pretrained(tmp_path / folder)
        for path, leaf in trees.flatten(again.params).items():
            assert np.array_equal(leaf, trees.flatten(model.params)[path]), path


def join(tensors, prefix):
    parts = [
        [tensors[f"{prefix}.experts.{number}.{name}.weight"] for name in ("w1", "w3")]
        for number in range(5)
    ]
    tensors["model.layers.0.mlp.experts.gate_up_proj"] = np.array(
        [np.concatenate(pair) for pair in parts]
    )


@pytest.mark.parametrize(
    ("change", "message"),
    [
        (
            lambda t, p: t.pop(f"{p}.experts.3.w1.weight"),
            r"lacks 1 tensors.*layers\.0\.block_sparse_moe\.experts\.3\.w1\.weight",
        ),
        (
            lambda t, p: [t.pop(name) for name in list(t) if f"{p}.experts." in name],
            r"lacks 15 tensors.*experts\.0\.w\d\.weight",
        ),
        (
            lambda t, p: t.update({f"{p}.gate.weight": np.zeros((7, 32), np.float32)}),
            r"block_sparse_moe\.gate\.weight: \(7, 32\) in the file, \(5, 32\)",
        ),
        (join, r"both layouts(.|\n)*mlp\.experts\.gate_up_proj and .*experts\.0\.w1\.weight"),
    ],
    ids=["an expert missing", "all experts missing", "router width", "mixed layouts"],
)
def test_broken_files_are_refused(change, message, tmp_path):
    model = built("mixtral", num_hidden_layers=1)
    tensors, write = saved(model, tmp_path)
    change(tensors, "model.layers.0.block_sparse_moe")
    write(tensors)
    with pytest.raises(WeightsError, match=message):
        type(model).from_pretrained(tmp_path)


def test_files_of_all_experts_with_another_shape_are_refused(tmp_path):
    model = built("mixtral", num_hidden_layers=1)
    tensors, write = saved(model, tmp_path)
    join(tensors, "model.layers.0.block_sparse_moe")
    experts = tensors["model.layers.0.mlp.experts.gate_up_proj"]
    tensors = {name: t for name, t in tensors.items() if not re.search(r"\.w[13]\.", name)}
    tensors["model.layers.0.mlp.experts.gate_up_proj"] = experts[:, :, 1:]
    write(tensors)
    message = r"mlp\.experts\.gate_up_proj: \(5, 96, 31\) in the file, \(5, 96, 32\)"
    with pytest.raises(WeightsError, match=message):
        type(model).from_pretrained(tmp_path)


@pytest.fixture
def mxfp4(tmp_path):
    """A gpt-oss with MXFP4 experts: its model before, its directory and the experts' values."""
    sizes = {"hidden_size": 32, "intermediate_size": 32, "num_hidden_layers": 1}
    model = built("gpt_oss", **sizes, layer_types=["full_attention"])
    folder = tmp_path / "mxfp4"
    tensors, write = saved(model, folder)
    rng, values = np.random.default_rng(0), {}
    for name in ("gate_up_proj", "down_proj"):
        stored_name = f"model.layers.0.mlp.experts.{name}"
        experts, inputs, outputs = tensors.pop(stored_name).shape
        parts, value = quantized.mxfp4_experts((experts, outputs, inputs), rng)
        tensors |= {f"{stored_name}{part}": array for part, array in parts.items()}
        values["model", "layers", "0", "mlp", "experts", name] = value
    write(tensors)
    stored = json.loads((folder / "config.json").read_text())
    stored["quantization_config"] = {
        "quant_method": "mxfp4",
        "modules_to_not_convert": ["model.layers.*.self_attn", "model.layers.*.mlp.router"],
    }
    (folder / "config.json").write_text(json.dumps(stored))
    return model, folder, values


def test_mxfp4_experts_of_gpt_oss_are_read(mxfp4, tmp_path):
    """The experts are dequantized, and the saved model has no quantization settings."""
    model, folder, values = mxfp4
    again = type(model).from_pretrained(folder)
    for path, value in values.items():
        np.testing.assert_array_equal(trees.flatten(again.params)[path], value)
    again.save_pretrained(tmp_path / "plain")
    assert "quantization_config" not in json.loads((tmp_path / "plain/config.json").read_text())
    names = load_file(tmp_path / "plain" / "model.safetensors")
    experts = "model.layers.0.mlp.experts.gate_up_proj"
    assert experts in names and f"{experts}_blocks" not in names


@pytest.mark.slow
def test_logits_of_mxfp4_experts_equal_those_of_the_independent_dequantization(mxfp4, tmp_path):
    model, folder, values = mxfp4
    logits = type(model).from_pretrained(folder)(ids(2, 12)).logits
    original = trees.flatten(model.params)
    changed = trees.unflatten(original | {path: jnp.asarray(v) for path, v in values.items()})
    model.params = changed
    torch, theirs = pytest.importorskip("torch"), torch_counterpart(model, tmp_path / "plain")
    assert close(logits, model(ids(2, 12)).logits, 1e-6)
    expected = theirs(torch.from_numpy(ids(2, 12)).long()).logits
    assert close(logits, expected.detach())
    assert not close(model(ids(2, 12), params=trees.unflatten(original)).logits, logits)


# -- adapters
# ------------------------------------------------------------------------------------

EXPERTS = ["experts.gate_up_proj", "experts.down_proj"]


@pytest.mark.filterwarnings("ignore:`is_gradient_checkpointing`:FutureWarning")
@pytest.mark.parametrize(
    ("family", "parameters", "layers"),
    first(
        [
            *((family, EXPERTS, "one") for family in ("olmoe", "gpt_oss")),
            *((family, EXPERTS, "all") for family in FAMILIES),
            *(("mixtral", [name], "all") for name in EXPERTS),
        ],
        *((family, EXPERTS, "one") for family in ("olmoe", "gpt_oss")),
    ),
)
def test_adapters_of_experts_are_those_of_peft(family, parameters, layers, tmp_path):
    """Both libraries read the other's adapter, and compute the same logits."""
    torch, peft = pytest.importorskip("torch"), pytest.importorskip("peft")
    # Every second layer of Qwen3-MoE has experts, so only a multiple of two can be scanned.
    model = built(family, num_hidden_layers=1 if layers == "one" else 4)
    theirs = torch_counterpart(model, tmp_path / "base")
    settings = {"r": 3, "lora_alpha": 5, "target_parameters": parameters}
    torch.manual_seed(0)
    adapted = peft.get_peft_model(theirs, peft.LoraConfig(**settings, target_modules=["q_proj"]))
    with torch.no_grad():
        for name, parameter in adapted.named_parameters():
            if "lora_B" in name:
                parameter.normal_(std=0.1)
    adapted.save_pretrained(tmp_path / "theirs")
    tokens = np.maximum(ids(2, 12), 3)
    inputs = {"input_ids": torch.from_numpy(tokens).long()}
    expected = adapted.eval()(**inputs).logits.detach().numpy()
    with adapted.disable_adapter():
        assert not close(adapted(**inputs).logits.detach(), expected)
    ours = type(model).from_pretrained(tmp_path / "theirs")
    assert close(jax.jit(ours)(tokens).logits, expected)
    ours.save_pretrained(tmp_path / "ours")
    stored = [
        load_file(tmp_path / name / "adapter_model.safetensors") for name in ("ours", "theirs")
    ]
    assert stored[0].keys() == stored[1].keys()
    assert all(np.array_equal(stored[0][name], stored[1][name]) for name in stored[1])
    assert close(jax.jit(ours.merge_adapter())(tokens).logits, expected)
    if layers == "all":
        scanned = type(model).from_pretrained(tmp_path / "theirs", scan_layers=True)
        assert close(scanned(tokens).logits, expected)


@pytest.mark.parametrize(
    ("settings", "message"),
    [
        ({"target_parameters": ["mlp.experts.up_proj"]}, r"up_proj.*mlp\.experts\.gate_up_proj"),
        ({"target_parameters": EXPERTS, "lora_dropout": 0.1}, "lora_dropout=0.1"),
        ({"target_modules": ["gate"]}, "target_modules gate"),
    ],
)
def test_adapters_that_experts_do_not_have_are_refused(settings, message):
    with pytest.raises(UsageError, match=message):
        new("mixtral", peft_config=LoraConfig(**settings))


# -- bad input
# ------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("family", "changes", "message"),
    [
        ("mixtral", {"num_experts_per_tok": 6}, "num_experts_per_tok=6.*number of experts, 5"),
        ("qwen2_moe", {"num_experts_per_tok": 0}, "num_experts_per_tok=0"),
        ("gpt_oss", {"sliding_window": None}, "sliding_window=None"),
    ],
)
def test_unsupported_configurations_are_refused(family, changes, message):
    with pytest.raises(UsageError, match=message):
        new(family, **changes)


def test_expert_axis_must_divide_the_experts():
    from hfseq.nn.sharding import make_mesh
    from hfseq.training import setup

    model = new("mixtral")
    mesh = make_mesh("data=2,expert=4")
    with pytest.raises(UsageError, match=r"experts/gate_up_proj: dimension 0 of size 5.*expert=4"):
        shapes = {p: leaf.shape for p, leaf in trees.flatten(model.abstract_params).items()}
        setup.shard_model(model, mesh, False).shardings(shapes)
