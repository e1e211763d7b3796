"""The battery itself: it passes a sound architecture of a third party and finds planted faults."""

from __future__ import annotations

from pathlib import Path

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from flax import nnx

from hfseq import nn, plugins, testing
from hfseq.errors import UsageError
from hfseq.testing import case, check_architecture
from tests.support.models import bert_config

EXAMPLE = Path(__file__).resolve().parents[2] / "docs" / "examples" / "averaging_encoder.py"


@pytest.fixture
def registered(monkeypatch):
    """A function that makes plugins.load() know one more architecture, a changed BERT."""

    def add(head, rules=None):
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
        spec = plugins.ArchitectureSpec(
            "faulty", Config, {"ForTokenClassification": FlaxBertForFaults}, sharding
        )
        registry.add("faulty", "tests", spec)
        monkeypatch.setattr(testing, "_checks", only)
        small = bert_config(num_hidden_layers=1, num_labels=3).to_dict()
        return Config(**{**small, "model_type": "faulty"})

    wanted = []

    def only(torch, skip, checks=testing._checks):
        return [check for check in checks(torch, skip) if check.__name__ in wanted]

    add.wanted = wanted
    yield add
    plugins.load().architectures._entries.pop("faulty", None)


def sabotage(change):
    """BERT's token classifier with ``change(module, x)`` on the last hidden state."""
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
    "bfloat16": (
        lambda m, x, r: x * 1.5 if x.dtype == jnp.bfloat16 else x,
        "bfloat16 against float32",
    ),
    "padding": (lambda m, x, r: x + x.mean(1, keepdims=True), "padded on the right"),
    "packing": (lambda m, x, r: x + jnp.roll(x, 1, axis=1), "packed at"),
    "torch_parity": (
        lambda m, x, r: x * 1.001,
        r"differs from PyTorch's BertForTokenClassification[\s\S]*look at the head[\s\S]*gradients",
    ),
    "gradient_checkpointing": (
        lambda m, x, r: x * (1 + (nn.stack.current_options().remat * 0.01)),
        "with gradient checkpointing",
    ),
    "scan_layers": (
        lambda m, x, r: x if isinstance(m.bert.encoder.layer, nn.Layers) else x * 1.01,
        "scan against loop",
    ),
}


@pytest.mark.parametrize("check", FAULTS)
def test_planted_faults_are_found(registered, check):
    if check.startswith("torch"):
        pytest.importorskip("torch")
    change, message = FAULTS[check]
    config = registered(sabotage(change))
    registered.wanted.append(check)
    with pytest.raises(AssertionError, match=rf"FlaxBertForFaults\.{check}: [\s\S]*{message}"):
        check_architecture("faulty", config)


def test_a_parameter_that_pytorch_lacks_is_found(registered):
    pytest.importorskip("torch")
    from hfseq_plugins.bert.modeling import TokenClassification

    class Faulty(TokenClassification):
        def __init__(self, config, rngs):
            super().__init__(config, rngs)
            self.more = nnx.Param(jnp.ones(1))

    config = registered(Faulty)
    registered.wanted += ["torch_loads_it", "gradients"]
    with pytest.raises(AssertionError) as error:
        check_architecture("faulty", config)
    assert "2 of 2 checks failed" in str(error.value)
    assert "unexpected_keys" in str(error.value) and "more is zero" in str(error.value)


def test_rules_that_split_nothing_are_found(registered):
    from hfseq_plugins.bert.modeling import TokenClassification

    config = registered(TokenClassification, [(r".*", "replicated")])
    registered.wanted.append("devices")
    with pytest.raises(AssertionError, match="the sharding rules split no parameter"):
        check_architecture("faulty", config)


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
    assert why in ("transformers has no PyTorch class AveragingModel", "PyTorch is not installed")


def _current_rules(added):
    from hfseq.nn.sharding import TACTICS

    rules = added.architectures["averaging"].target.load_sharding()
    return all(tactic in TACTICS for _, tactic in rules if isinstance(tactic, str))


def test_checks_are_skipped_by_name_with_a_reason(registered):
    from hfseq_plugins.bert.modeling import TokenClassification

    config = registered(TokenClassification)
    registered.wanted += ["shapes", "eager"]
    report = check_architecture("faulty", config, skip={"eager": "because"})
    assert report.passed == ["FlaxBertForFaults.shapes"]
    assert report.skipped == {"FlaxBertForFaults.eager": "because"}


def test_unknown_names_are_refused():
    with pytest.raises(
        UsageError, match="no check 'scan'; did you mean 'scan_layers'|no check 'scan'"
    ):
        check_architecture("bert", bert_config(), heads=["Model"], skip={"scan": "x"})
    with pytest.raises(UsageError, match="unknown architecture 'brt'"):
        check_architecture("brt", bert_config())
    with pytest.raises(UsageError, match="has no 'ForMaskedL'"):
        check_architecture("bert", bert_config(), heads=["ForMaskedL"])


def test_errors_are_relative_to_the_larger_of_one_and_the_largest():
    assert case.error([0.0, 1e-3], [0.0, 0.0]) == pytest.approx(1e-3)
    assert case.error([1001.0], [1000.0]) == pytest.approx(1e-3)
    assert case.error([np.nan], [np.nan]) == float("inf")
    assert case.error([1.0], [1.0, 1.0]) == float("inf")
