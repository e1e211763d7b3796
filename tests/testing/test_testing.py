"""The checks pass a correct third-party architecture and find planted faults."""

from __future__ import annotations

from pathlib import Path
from types import SimpleNamespace

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from flax import nnx

from hfseq import nn, plugins, testing
from hfseq.errors import UsageError
from hfseq.nn import trees
from hfseq.testing import case, check_architecture, checks, fresh, torch
from tests.support.models import bert_config
from tests.support.recurrent import FlaxRecurrentForCausalLM, RecurrentConfig, RecurrentLM
from tests.support.tiers import first
from tests.support.windowed import FlaxWindowedLM, WindowedConfig

EXAMPLE = Path(__file__).resolve().parents[2] / "docs" / "examples" / "averaging_encoder.py"


@pytest.fixture
def registered(monkeypatch):
    """Returns a function that registers another architecture, a modified BERT."""

    def add(head, rules=None, task="ForTokenClassification"):
        class Config(type(bert_config())):
            model_type = "faulty"

        from hfseq_plugins.bert.modeling import FlaxBertForTokenClassification

        class FlaxBertForFaults(FlaxBertForTokenClassification):
            config_class, module_class = Config, head

            @classmethod
            def torch_class_name(cls):
                return "BertForTokenClassification"

        registry = plugins.load().architectures
        monkeypatch.setitem(registry._entries, "faulty", None)
        del registry._entries["faulty"]
        sharding = rules or plugins.load().architectures["bert"].target.sharding
        spec = plugins.ArchitectureSpec("faulty", Config, {task: FlaxBertForFaults}, sharding)
        registry.add("faulty", "tests", spec)
        small = bert_config(num_hidden_layers=1, num_labels=3).to_dict()
        return Config(**{**small, "model_type": "faulty"})

    yield add
    plugins.load().architectures._entries.pop("faulty", None)


def sabotage(change):
    """Returns BERT's token classifier with ``change(module, x, rngs)`` on the last hidden state."""
    from hfseq_plugins.bert.modeling import TokenClassification

    class Faulty(TokenClassification):
        def __init__(self, config, rngs):
            super().__init__(config, rngs)
            self.width = config.hidden_size

        def encode(self, *args, **kwargs):
            encoded = super().encode(*args, **kwargs)
            rngs = kwargs.get("rngs")
            return encoded.replace(last_hidden_state=change(self, encoded.last_hidden_state, rngs))

    return Faulty


def eager_only(module, x, rngs):
    return x if isinstance(x, jax.core.Tracer) else x + 1


FAULTS = {
    "shapes": (lambda m, x, r: x[1:], "7, 16, 3"),
    "eager": (eager_only, "eager against jit"),
    "gradients": (lambda m, x, r: jax.lax.stop_gradient(x), "bert/.*is zero: the parameter has no"),
    "torch_bfloat16": (
        lambda m, x, r: x * 1.5 if x.dtype == jnp.bfloat16 else x,
        "bfloat16 against float32",
    ),
    "padding": (lambda m, x, r: x + x.mean(1, keepdims=True), "padded on the right"),
    "packing": (lambda m, x, r: x + jnp.roll(x, 1, axis=1), "packed at"),
    "torch_parity": (
        lambda m, x, r: x * 1.001,
        r"differs from PyTorch's BertForTokenClassification[\s\S]*head differs[\s\S]*gradients",
    ),
    "gradient_checkpointing": (
        lambda m, x, r: x * (1 + (nn.stack.current_options().remat * 0.01)),
        "with gradient checkpointing",
    ),
    "scan_layers": (
        lambda m, x, r: x if isinstance(m.bert.encoder.layer, nn.Layers) else x * 1.01,
        r"scan against loop[\s\S]*the hidden states of all layers agree",
    ),
}


@pytest.mark.parametrize(
    "check", first(FAULTS, "gradients", "packing", "torch_parity", "scan_layers")
)
def test_battery_detects_injected_faults(registered, check):
    if check.startswith("torch"):
        pytest.importorskip("torch")
    change, message = FAULTS[check]
    config = registered(sabotage(change))
    with pytest.raises(AssertionError, match=rf"FlaxBertForFaults\.{check}: [\s\S]*{message}"):
        check_architecture("faulty", config, checks=[check])


def test_parameter_that_pytorch_lacks_is_detected(registered):
    pytest.importorskip("torch")
    from hfseq_plugins.bert.modeling import TokenClassification

    class Faulty(TokenClassification):
        def __init__(self, config, rngs):
            super().__init__(config, rngs)
            self.more = nnx.Param(jnp.ones(1))

    config = registered(Faulty)
    with pytest.raises(AssertionError) as error:
        check_architecture("faulty", config, checks=["torch_loads_it", "gradients"])
    assert "2 of 2 checks failed" in str(error.value)
    assert "unexpected_keys" in str(error.value) and "more is zero" in str(error.value)


@pytest.mark.parametrize(
    ("table", "message"),
    [("", "rows of 41 tokens are not finite: .*position_table"), ("places", None)],
)
def test_rows_beyond_the_positions_are_detected(registered, monkeypatch, table, message):
    from hfseq_plugins.bert.modeling import FlaxBertPreTrainedModel, TokenClassification

    config = registered(TokenClassification)
    config.places = 50  # more positions than the table has
    monkeypatch.setattr(FlaxBertPreTrainedModel, "position_table", table)
    message = message or "rows of 50 tokens are not finite"
    with pytest.raises(AssertionError, match=message):
        check_architecture("faulty", config, checks=["long_rows"])


def test_unused_sharding_rules_are_detected(registered):
    from hfseq_plugins.bert.modeling import TokenClassification

    config = registered(TokenClassification, [(r".*", "replicated")])
    with pytest.raises(AssertionError, match="the sharding rules split no parameter"):
        check_architecture("faulty", config, checks=["devices"])


@pytest.mark.slow
def test_third_party_example_passes():
    added = plugins.load([EXAMPLE])
    config = added.architectures["averaging"].target.load_config()
    rules_of_another_kind = {"devices": "the example's rules are written for another layout"}
    skip = {} if _current_rules(added) else rules_of_another_kind
    report = check_architecture(
        "averaging",
        config(vocab_size=64, hidden_size=32, num_hidden_layers=2, max_position_embeddings=20),
        skip=skip,
    )
    assert "FlaxAveragingForMaskedLM.packing" in report.passed
    why = report.skipped["FlaxAveragingModel.torch_parity"]
    assert why == "transformers has no PyTorch class AveragingModel"


def _current_rules(added):
    from hfseq.nn.sharding import TACTICS

    rules = added.architectures["averaging"].target.load_sharding()
    return all(tactic in TACTICS for _, tactic in rules if isinstance(tactic, str))


def test_checks_are_skipped_by_name_with_a_reason(registered):
    from hfseq_plugins.bert.modeling import TokenClassification

    config = registered(TokenClassification)
    selected = ["shapes", "eager"]
    report = check_architecture("faulty", config, checks=selected, skip={"eager": "because"})
    assert report.passed == ["FlaxBertForFaults.shapes"]
    assert report.skipped == {"FlaxBertForFaults.eager": "because"}


class Wrapper(nnx.Module):
    """A model whose call passes all arguments on, like OPT's."""

    def __init__(self, config, rngs):
        from hfseq_plugins.bert.modeling import TokenClassification

        self.bert = TokenClassification(config, rngs)

    def __call__(self, *args, **kwargs):
        return self.bert(*args, **kwargs)


class Narrow(Wrapper):
    def __call__(self, input_ids, attention_mask=None, *, rngs=None):
        return self.bert(input_ids, attention_mask, rngs=rngs)


def test_packing_is_checked_behind_wrappers(registered):
    report = check_architecture("faulty", registered(Wrapper, task="Model"), checks=["packing"])
    assert report.passed == ["FlaxBertForFaults.packing"]


def test_several_configurations_are_reported_separately(registered):
    config = registered(sabotage(FAULTS["padding"][0]))
    wide = type(config)(**{**config.to_dict(), "intermediate_size": 40})
    report = check_architecture("faulty", [config, wide], checks=["shapes"])
    assert report.passed == ["FlaxBertForFaults[0].shapes", "FlaxBertForFaults[1].shapes"]
    with pytest.raises(AssertionError, match=r"2 of 2 checks[\s\S]*Faults\[wide\]\.padding: "):
        check_architecture("faulty", {"plain": config, "wide": wide}, checks=["padding"])


def test_skipped_checks_are_not_reported_as_passed(registered, monkeypatch):
    config = registered(Narrow)
    with pytest.raises(
        AssertionError,
        match=r"packing did not run on any .*\n0 checks.*\n.*does not accept segm",
    ):
        check_architecture("faulty", config, checks=["packing"])
    with pytest.raises(AssertionError, match="no check ran on any head"):
        check_architecture("faulty", config, heads=[])
    monkeypatch.setattr(jax, "device_count", lambda: 1)
    all_checks = (*checks.CHECKS, *torch.CHECKS, *fresh.CHECKS)
    other_names = {c.__name__ for c in all_checks} - {"shapes", "devices"}
    with pytest.warns(testing.NotRunWarning, match="NOT RUN FlaxBertForFaults.devices: fewer"):
        report = check_architecture("faulty", config, skip=dict.fromkeys(other_names, "slow"))
    assert list(report.not_run) == ["FlaxBertForFaults.devices"]
    assert "1 checks passed" in str(report) and "skipped FlaxBertForFaults.eager: slow" in str(
        report
    )


def test_a_model_that_generates_needs_a_cache(registered):
    from hfseq.generation import CausalGeneration

    config = registered(Narrow)
    entry = plugins.load().architectures["faulty"].target
    cls = entry.heads["ForTokenClassification"]
    with pytest.raises(
        AssertionError, match=r"cached_decoding did not run on any head[\s\S]*no cach"
    ):
        check_architecture("faulty", config, checks=["cached_decoding"])
    entry.heads["ForTokenClassification"] = type(cls.__name__, (CausalGeneration, cls), {})
    with pytest.raises(
        AssertionError, match=r"1 of 1[\s\S]*the model generates, but .*has no cache"
    ):
        check_architecture("faulty", config, checks=["cached_decoding"])


def test_a_head_that_reads_several_sequences_a_row_needs_no_cache():
    config = bert_config(num_hidden_layers=1)
    with pytest.raises(AssertionError, match="skipped .*FlaxBertForMultipleChoice has no cache"):
        check_architecture(
            "bert", config, heads=["ForMultipleChoice"], checks=["cached_decoding"], torch=False
        )


def test_names_and_shapes_are_compared_where_templates_exist(registered):
    pytest.importorskip("torch")
    from hfseq_plugins.bert.modeling import TokenClassification

    class Renamed(TokenClassification):
        def __init__(self, config, rngs):
            super().__init__(config, rngs)
            self.labels, self.classifier = self.classifier, nnx.data(None)

        def __call__(self, *args, **kwargs):
            self.classifier = self.labels
            output = super().__call__(*args, **kwargs)
            self.classifier = nnx.data(None)
            return output

    config = registered(Renamed)
    cls = plugins.load().architectures["faulty"].target.heads["ForTokenClassification"]
    cls.weight_templates = {"labels": "classifier"}
    report = check_architecture("faulty", config, checks=["torch_tree"])
    assert report.passed == ["FlaxBertForFaults.torch_tree"]


def test_unknown_names_are_refused():
    with pytest.raises(
        UsageError, match="no check 'scan'; did you mean 'scan_layers'|no check 'scan'"
    ):
        check_architecture("bert", bert_config(), heads=["Model"], skip={"scan": "x"})
    with pytest.raises(UsageError, match="no check 'scan'"):
        check_architecture("bert", bert_config(), heads=["Model"], checks=["scan"])
    with pytest.raises(UsageError, match="unknown architecture 'brt'"):
        check_architecture("brt", bert_config())
    with pytest.raises(UsageError, match="has no 'ForMaskedL'"):
        check_architecture("bert", bert_config(), heads=["ForMaskedL"])


def test_errors_are_relative_to_the_larger_of_one_and_the_largest():
    assert case.relative_error([0.0, 1e-3], [0.0, 0.0]) == pytest.approx(1e-3)
    assert case.relative_error([1001.0], [1000.0]) == pytest.approx(1e-3)
    assert case.relative_error([np.nan], [np.nan]) == float("inf")
    assert case.relative_error([1.0], [1.0, 1.0]) == float("inf")


def test_the_scan_check_names_the_first_layer_that_differs():
    model = FlaxWindowedLM(WindowedConfig(windows=(99, 99, 99)), seed=1)
    scanned = FlaxWindowedLM(model.config, scan_layers=True, _do_init=False)
    path = ("layers", "1", "output", "kernel")  # of the two layers after the first
    params = FlaxWindowedLM(model.config, seed=1, scan_layers=True).params
    leaf = trees.flatten(params)[path]
    changed = {**trees.flatten(params), path: leaf.at[1].add(1)}
    scanned._params, scanned._is_initialized = trees.unflatten(changed), True
    ids = np.ones((2, 3), int)
    tried = SimpleNamespace(
        inputs={"input_ids": ids}, model=model, params=model.params, variant=lambda **_: model
    )
    expected = "hidden_states: the output of layer 2 is the first to differ"
    assert checks._first_different_layer(tried, scanned) == expected


def registered_decoder(monkeypatch, name, model_class):
    """Registers one more decoder for the duration of a test."""
    registry = plugins.load().architectures
    spec = plugins.ArchitectureSpec(
        name, model_class.config_class, {"ForCausalLM": model_class}, [(r".*", "replicated")]
    )
    monkeypatch.setattr(registry, "_entries", dict(registry._entries))
    registry.add(name, "tests", spec)


def test_generation_checks_a_recurrent_state_with_padded_prompts(monkeypatch):
    config = RecurrentConfig(eos_token_id=None)
    registered_decoder(monkeypatch, "recurrent", FlaxRecurrentForCausalLM)
    report = check_architecture("recurrent", config, checks=["generation"])
    assert report.passed == ["FlaxRecurrentForCausalLM.generation"]

    class Unmasked(RecurrentLM):
        def __call__(self, input_ids, attention_mask=None, *, rngs=None):
            return super().__call__(input_ids, None, rngs=rngs)

    monkeypatch.setattr(FlaxRecurrentForCausalLM, "module_class", Unmasked)
    with pytest.raises(AssertionError, match=r"generate\(\) continues a prompt that is"):
        check_architecture("recurrent", config, checks=["generation"])


def test_generation_that_crashes_is_a_failure(monkeypatch):
    from hfseq.generation import CausalGeneration

    class FlaxPositions(CausalGeneration, FlaxRecurrentForCausalLM):
        """Passes position_ids, which the call does not accept."""

    registered_decoder(monkeypatch, "positions", FlaxPositions)
    with pytest.raises(AssertionError, match=r"generation: [\s\S]*position_ids"):
        check_architecture("positions", RecurrentConfig(), checks=["generation"])


def test_a_float32_auxiliary_loss_passes(monkeypatch):
    pytest.importorskip("torch")
    from hfseq.nn import outputs as out
    from hfseq_plugins.decoder.modeling import CausalLM
    from hfseq_plugins.llama.modeling import FlaxLlamaForCausalLM
    from tests.support.models import llama_config

    class Penalized(CausalLM):
        def __call__(self, *args, **kwargs):
            logits = super().__call__(*args, **kwargs).logits
            penalty = (logits.astype(jnp.float32) ** 2).mean(-1).sum() * 1e-3
            return out.FlaxCausalLMOutputWithPast(logits=logits, auxiliary_loss=penalty)

    class FlaxLlamaForPenalty(FlaxLlamaForCausalLM):
        module_class = Penalized

        @classmethod
        def torch_class_name(cls):
            return "LlamaForCausalLM"

    registered_decoder(monkeypatch, "penalized", FlaxLlamaForPenalty)
    selected = ["bfloat16", "torch_parity"]
    config = llama_config(num_hidden_layers=1)
    assert len(check_architecture("penalized", config, checks=selected).passed) == 2


@pytest.mark.parametrize(("loss", "count"), [(0.5 * 0.01 * 30, 0), (0.5 * 0.01, 1)])
def test_auxiliary_losses_are_sums_of_pytorchs_mean(loss, count):
    class Reference:
        def forward(self, input_ids=None, output_router_logits=None):
            raise NotImplementedError

        def __call__(self, **inputs):
            assert inputs["output_router_logits"]
            return SimpleNamespace(aux_loss=reference.tensor(0.5))

    reference = pytest.importorskip("torch")
    tested = SimpleNamespace(
        inputs={"attention_mask": np.ones((3, 10), np.int32)},
        config=SimpleNamespace(router_aux_loss_coef=0.01),
        tolerance=1e-5,
    )
    assert len(torch._auxiliary_difference(tested, Reference(), loss)) == count


def test_layers_that_cannot_be_scanned_are_skipped(monkeypatch):
    from tests.support.windowed import FlaxWindowedLM, WindowedConfig

    registered_decoder(monkeypatch, "windowed", FlaxWindowedLM)
    config = WindowedConfig(windows=(1, 2, 3))
    with pytest.raises(AssertionError, match="skipped .*scan_layers: .*no two layers"):
        check_architecture("windowed", config, checks=["scan_layers"])


def test_each_check_is_logged_with_its_duration(registered, caplog):
    from hfseq_plugins.bert.modeling import TokenClassification

    caplog.set_level("INFO", "hfseq")
    check_architecture("faulty", registered(TokenClassification), checks=["shapes"])
    assert "FlaxBertForFaults.shapes passed in" in caplog.text
