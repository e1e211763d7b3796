"""The PyTorch version: the reference's golden numbers, its state, and training."""

from __future__ import annotations

import copy

import numpy as np
import pytest

torch = pytest.importorskip("torch")

from hfseq_plugins.vq_transformer.torch_files import modeling_vq_transformer as modeling
from tests.plugins.vq_transformer import torch_twins, vq_cases
from tests.plugins.vq_transformer.torch_twins import (
    ids,
    leaves,
    max_difference,
    run_in_steps,
    tiny_model,
)
from tests.support.tiers import first

HEADS = list(vq_cases.HEADS)


def golden_twin(golden, case):
    reference = golden.reference(case)
    return torch_twins.make_torch_model(reference.config, reference.params, reference.extra)


@pytest.mark.parametrize("case", vq_cases.CASES)
def test_twin_gives_the_logits_of_the_reference(golden, case):
    model, tokens = golden_twin(golden, case), torch.from_numpy(golden["common/inputs"]).long()
    main = case.startswith("main")
    for logits in (model(tokens).logits, run_in_steps(model, tokens)[0]):
        logits = logits.log_softmax(-1) if main else logits
        assert max_difference(logits, golden[f"{case}/{'logprobs' if main else 'logits'}"]) <= 2e-5


@pytest.mark.parametrize("case", vq_cases.CASES)
def test_twin_trains_as_the_reference_does(golden, case):
    model, main = golden_twin(golden, case).train(), case.startswith("main")
    batch = {name: torch.from_numpy(leaf).long() for name, leaf in golden.batch().items()}
    mask = batch["loss_mask"]
    output = model(batch["inputs"], code_mask=mask if main else None)
    nll = -output.logits.log_softmax(-1).gather(-1, batch["targets"][..., None])[..., 0]
    loss = (mask * nll).mean() + output.auxiliary_loss / mask.numel()
    assert loss.item() == pytest.approx(float(golden[f"{case}/loss_total"]), rel=1e-5)
    loss.backward()
    expected = golden.reference(case, "grads")
    actual = torch_twins.gradients(model)
    for name, leaf in torch_twins.to_state_dict(expected.params).items():
        assert max_difference(actual[name], leaf) <= 2e-5 * float(leaf.abs().max()) + 1e-8, name
    if main:  # the statistics of the other layout are wrong, see vq_golden.md
        old_statistics = torch_twins.to_state_dict({}, golden.reference(case).extra)
        model.update_codebooks()
        for name, step in torch_twins.to_state_dict({}, expected.extra).items():
            limit = 2e-5 * float(old_statistics[name].abs().max())
            assert max_difference(model.state_dict()[name], old_statistics[name] - step) <= limit, (
                name
            )


@pytest.mark.parametrize(
    ("head", "window", "block"),
    first(
        [
            (head, window, block)
            for head in HEADS
            for window, block in ((4, 4), (3, 5), (6, 2), (1, 7), (0, 3), (9, 64))
        ],
        *((head, 3, 5) for head in HEADS),
        ("shga", 0, 3),
    ),
)
def test_result_does_not_depend_on_block_or_window(head, window, block):
    tokens, sizes = ids(2, 23), {"window_size": window}
    expected, full_state = run_in_steps(tiny_model(head, **sizes, block_size=64), tokens, 23)
    for length in (1, 4, 23):
        logits, state = run_in_steps(tiny_model(head, **sizes, block_size=block), tokens, length)
        assert max_difference(logits, expected) <= 1e-5
        for ours, theirs in zip(leaves(state), leaves(full_state), strict=True):
            assert max_difference(ours, theirs) <= 1e-5


@pytest.mark.parametrize("changes", [{}, {"use_compressive_cache": False}, {"num_codes": 1}])
def test_quadratic_type_is_the_same_function(changes):
    tokens = ids(2, 23)
    expected = tiny_model("gqa", attention_type="vq_quadratic", **changes)(tokens).logits
    assert max_difference(tiny_model("gqa", **changes)(tokens).logits, expected) <= 1e-5


@pytest.mark.parametrize("head", ["shga", "gqa"])
@pytest.mark.parametrize("variant", ["vq", "full"])
def test_masked_tokens_do_not_change_outputs(head, variant):
    model, tokens = tiny_model(head, attention_type=variant), ids(1, 17)
    expected = model(tokens, use_cache=True)
    positions = torch.tensor(
        [[3 + i for i in range(17)], list(range(17)), [2 * i for i in range(17)]]
    )
    rows, mask = torch.full((3, 40), 5), torch.zeros(3, 40, dtype=torch.long)
    rows.scatter_(1, positions, tokens.expand(3, -1))
    mask.scatter_(1, positions, 1)
    actual = model(rows, attention_mask=mask, use_cache=True)
    for row in range(3):
        assert max_difference(actual.logits[row, positions[row]], expected.logits[0]) <= 1e-5
    # padding after a row repeats the output of its last token, for right-padded prompts
    assert max_difference(actual.logits[:, -1], expected.logits[:, -1].expand(3, -1)) <= 1e-5
    if variant == "vq":
        for ours, theirs in zip(
            leaves(actual.past_key_values), leaves(expected.past_key_values), strict=True
        ):
            assert max_difference(ours, theirs.expand_as(ours)) <= 1e-5


def test_one_hidden_token_changes_no_state():
    model, tokens = tiny_model("mha"), ids(2, 9)
    _, state = run_in_steps(model, tokens, 9)
    old_state = copy.deepcopy(state)
    with torch.no_grad():
        mask = torch.tensor([[0], [1]])
        output = model(tokens[:, :1], attention_mask=mask, past_key_values=state)
    new_state = output.past_key_values
    assert all(
        torch.equal(a[0], b[0]) for a, b in zip(leaves(new_state), leaves(old_state), strict=True)
    )
    assert new_state.position.tolist() == [9, 10]


@pytest.mark.parametrize("name", ["cache", "past_key_values"])
def test_both_names_of_the_state_are_understood(name):
    model, tokens = tiny_model("shga"), ids(2, 12)
    state_argument = {name: model(tokens[:, :6], use_cache=True).past_key_values}
    remainder = model(tokens[:, 6:], **state_argument)
    torch.testing.assert_close(remainder.logits, model(tokens).logits[:, 6:], atol=1e-5, rtol=1e-4)
    assert remainder[modeling.CACHE] is state_argument[name]


def test_state_carries_gradients_until_it_is_detached():
    model, tokens = tiny_model("shga").train(), ids(2, 12)
    first = model(tokens[:, :6], use_cache=True)
    second = model(tokens[:, 6:], past_key_values=first.past_key_values)
    (grad,) = torch.autograd.grad(second.logits.sum(), first.logits, allow_unused=True)
    assert grad is None  # through the state only
    state = second.past_key_values
    assert any(leaf.requires_grad for leaf in leaves(state))
    assert not any(leaf.requires_grad for leaf in leaves(state.detach()))


# -- training
# ----------------------------------------------------------------------------------------


def test_labels_give_the_mean_over_those_that_count():
    model, tokens = tiny_model("mqa"), ids(2, 11)
    labels = tokens.clone()
    labels[1, 5:] = -100
    output = model(tokens, labels=labels)
    nll = -output.logits[:, :-1].log_softmax(-1)
    nll = nll.gather(-1, tokens[:, 1:, None])[..., 0][labels[:, 1:] != -100]
    assert output.loss.item() == pytest.approx(nll.mean().item(), rel=1e-6)
    assert output.auxiliary_loss is None
    trained = model.train()(tokens, labels=labels)
    expected_loss = nll.mean() + trained.auxiliary_loss / nll.numel()
    assert trained.loss.item() == pytest.approx(expected_loss.item(), rel=1e-6)
    summed = model(tokens, labels=labels, num_items_in_batch=4 * nll.numel())
    assert 4 * summed.loss.item() == pytest.approx(trained.loss.item(), rel=1e-6)


@pytest.mark.parametrize("reentrant", [True, False])
@pytest.mark.parametrize("head", ["shga", "mha"])
def test_checkpointed_layers_have_the_same_gradients_and_count_once(head, reentrant):
    # with dropout, recomputed layers must draw the same masks
    rates = {"residual_dropout": 0.3, "layer_dropout": 0.3, "sinusoid_dropout": 0.2}
    plain, saving = (tiny_model(head, num_hidden_layers=2, **rates).train() for _ in range(2))
    saving.activation_checkpointing_enable({"use_reentrant": reentrant})
    if reentrant:
        saving.enable_input_require_grads()
    tokens, calls = ids(2, 11), []
    saving.model.layers[1].attention.q_proj.register_forward_hook(lambda *_: calls.append(1))
    for model in (plain, saving):
        torch.manual_seed(0)
        model(tokens, labels=tokens).loss.backward()
    assert len(calls) == 2
    expected, actual = torch_twins.gradients(plain), torch_twins.gradients(saving)
    assert all(max_difference(actual[name], leaf) <= 1e-6 for name, leaf in expected.items())
    assert all(np.abs(leaf).max() > 0 for leaf in expected.values())
    plain.update_codebooks()
    saving.update_codebooks()
    for name, leaf in plain.state_dict().items():
        assert torch.equal(leaf, saving.state_dict()[name]), name


def test_codebooks_move_once_for_all_passes_of_a_step():
    model, tokens = tiny_model("gqa").train(), ids(4, 9)
    other_model = copy.deepcopy(model)
    other_model(tokens)
    old_buffers = {name: leaf.clone() for name, leaf in model.named_buffers()}
    for rows in tokens.split(2):
        model(rows)
    assert all(torch.equal(leaf, old_buffers[name]) for name, leaf in model.named_buffers())
    for twin in (model, other_model):
        twin.update_codebooks()
        twin.update_codebooks()  # without new keys
    for name, leaf in model.named_buffers():
        assert not torch.equal(leaf, old_buffers[name])
        assert max_difference(leaf, dict(other_model.named_buffers())[name]) <= 1e-6


def test_layers_are_dropped_per_row():
    model, tokens = tiny_model("shga", layer_dropout=0.5).train(), ids(1, 5).repeat(64, 1)
    torch.manual_seed(0)
    states = model(tokens, output_hidden_states=True).hidden_states
    # two blocks that are kept or dropped give at most four different rows
    assert len(torch.unique(states[-1].detach().round(decimals=4), dim=0)) == 4


def test_a_few_steps_of_adam_lower_the_loss():
    model, tokens = tiny_model("shga").train(), ids(4, 24)
    optimizer = torch.optim.Adam(model.parameters(), 1e-2)
    losses = []
    for _ in range(12):
        loss = model(tokens, labels=tokens).loss
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        model.update_codebooks()
        losses.append(loss.item())
    assert losses[-1] < 0.7 * losses[0] and np.isfinite(losses).all()


# -- dtypes, sizes and invalid inputs
# ----------------------------------------------------------------------------------------


@pytest.mark.parametrize("head", first(HEADS, "shga"))
def test_bfloat16_is_close_and_keeps_codebooks_in_float32(head):
    model, tokens = tiny_model(head), ids(2, 19)
    expected = model(tokens).logits
    narrow = model.to(torch.bfloat16)
    books = [leaf for name, leaf in narrow.named_buffers() if "codebook" in name]
    assert books and all(leaf.dtype == torch.float32 for leaf in books)
    for logits in (narrow(tokens).logits, run_in_steps(narrow, tokens)[0]):
        assert torch.isfinite(logits).all()
        # codes of keys between two rows may flip, so a few positions may differ by more
        assert (logits - expected).abs().median() <= 0.1 * expected.abs().median()


def test_autocast_keeps_codes_in_float32():
    model, tokens = tiny_model("mha").train(), ids(2, 9)
    with torch.autocast("cpu", torch.bfloat16):
        output = model(tokens, labels=tokens)
    output.loss.backward()
    assert torch.isfinite(output.logits).all()
    assert all(leaf.grad is not None for leaf in model.parameters())


def test_fresh_weights_are_those_of_the_paper():
    config = vq_cases.config("mha", hidden_size=128, head_dim=32, num_codes=64, vocab_size=500)
    config = torch_twins.VQTransformerConfig.from_dict(config.to_dict())
    model = torch_twins.modeling.VQTransformerForCausalLM(config)
    spreads = {name: leaf.std(correction=0).item() for name, leaf in model.state_dict().items()}
    assert spreads["model.embed_tokens.weight"] == pytest.approx(1, rel=0.05)
    assert spreads["model.layers.0.mlp.down_proj.weight"] == pytest.approx(512**-0.5, rel=0.05)
    assert spreads["model.layers.0.attention.codebook.sums"] == pytest.approx(1 / 16, rel=0.05)
    assert spreads["model.layers.0.attention.content_bias"] == 0
    assert (model.model.layers[0].attention.codebook.counts == 1).all()


@pytest.mark.parametrize("present", [0, 1])
def test_unused_codes_and_short_texts_are_finite(present):
    model = tiny_model("shga", window_size=8).train()
    for module in model.modules():
        if hasattr(module, "counts"):
            module.counts.fill_(present)
            module.sums.fill_(present)
    output = model(ids(2, 3), labels=ids(2, 3))
    output.loss.backward()
    assert all(torch.isfinite(leaf.grad).all() for leaf in model.parameters())


def test_state_of_other_rows_or_another_model_is_refused():
    model, tokens = tiny_model("shga"), ids(2, 5)
    state = model(tokens).past_key_values
    with pytest.raises(ValueError, match="state of 2 rows, but the input has 3"):
        model(ids(3, 1), past_key_values=state)
    with pytest.raises(ValueError, match="another model.*this model has"):
        tiny_model("shga", window_size=5)(tokens, past_key_values=state)
    with pytest.raises(ValueError, match="is a tuple, but .*VQTransformerState"):
        model(tokens, past_key_values=(1,))
    with pytest.raises(ValueError, match="cannot be cropped"):
        state.crop(-1)
    with pytest.raises(ValueError, match="attention_type='full' has no state"):
        tiny_model("shga", attention_type="full")(tokens, past_key_values=state)
    with pytest.raises(ValueError, match=r"attention_mask .*\(2, 4\) instead of \(2, 5\)"):
        model(tokens, attention_mask=torch.ones(2, 4))
    with pytest.raises(ValueError, match="either input_ids or inputs_embeds"):
        model()
