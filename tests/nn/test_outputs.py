"""Outputs are read by attribute, name and position, and pass through jax."""

from __future__ import annotations

import dataclasses

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from hfseq.nn import outputs


def output():
    return outputs.FlaxCausalLMOutputWithCrossAttentions(
        logits=jnp.ones(3), attentions=(jnp.zeros(2),)
    )


def test_fields_are_read_in_three_ways():
    given = output()
    assert given.logits is given["logits"] is given[0]
    assert given[1] is given.attentions and len(given[:2]) == 2


def test_fields_that_are_not_set_are_absent():
    given = output()
    assert given.keys() == ("logits", "attentions") and len(given) == len(given.to_tuple()) == 2
    assert list(given) == ["logits", "attentions"] and "hidden_states" not in given
    assert given.hidden_states is None and given.get("hidden_states", 7) == 7
    with pytest.raises(KeyError, match="hidden_states"):
        given["hidden_states"]
    with pytest.raises(IndexError):
        given[2]


def test_fields_can_be_set_and_replaced():
    given = output()
    given["past_key_values"] = {"a": 1}
    assert given.past_key_values == {"a": 1} and given[1] == {"a": 1}
    assert given.replace(logits=None).keys() == ("past_key_values", "attentions")
    with pytest.raises(KeyError, match="has no field 'logit'"):
        given["logit"] = 1


def test_outputs_pass_through_jit_with_their_type():
    given = jax.jit(lambda x: outputs.FlaxMaskedLMOutput(logits=x * 2))(jnp.ones(2))
    assert type(given) is outputs.FlaxMaskedLMOutput
    assert np.array_equal(given.logits, [2, 2]) and given.hidden_states is None


def test_leaves_are_named_in_key_paths():
    paths = [jax.tree_util.keystr(path) for path, _ in jax.tree.leaves_with_path(output())]
    assert paths == [".logits", ".attentions[0]"]


def every_class():
    found = [getattr(outputs, name) for name in dir(outputs) if name.startswith("Flax")]
    return [cls for cls in found if dataclasses.is_dataclass(cls)]


@pytest.mark.parametrize("cls", every_class())
def test_every_class_is_a_pytree_of_its_fields(cls):
    names = [field.name for field in dataclasses.fields(cls)]
    given = cls(**{name: jnp.full(2, i) for i, name in enumerate(names)})
    doubled = jax.tree.map(lambda leaf: leaf * 2, given)
    assert type(doubled) is cls and list(doubled.keys()) == names
    assert [int(value[0]) for value in doubled.to_tuple()] == [2 * i for i in range(len(names))]


def test_keys_are_those_of_pytorch():
    """v4's cross tests compared key tuples: the same names in the same order."""
    pytest.importorskip("torch")
    from transformers import modeling_outputs as torch_outputs

    for name in (
        *("MaskedLMOutput", "CausalLMOutputWithCrossAttentions", "QuestionAnsweringModelOutput"),
        *("BaseModelOutputWithPoolingAndCrossAttentions", "TokenClassifierOutput"),
        *("MultipleChoiceModelOutput", "NextSentencePredictorOutput", "SequenceClassifierOutput"),
    ):
        names = [field.name for field in dataclasses.fields(getattr(outputs, f"Flax{name}"))]
        expected = [field.name for field in dataclasses.fields(getattr(torch_outputs, name))]
        v4 = ["past_key_values" if field == "cache" else field for field in expected]  # since 5.24
        assert names == [field for field in v4 if field != "loss"], name
