"""Outputs are read by attribute, name and index, and pass through jax."""

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


def test_fields_are_read_by_attribute_name_and_index():
    result = output()
    assert result.logits is result["logits"] is result[0]
    assert result[1] is result.attentions and len(result[:2]) == 2


def test_fields_that_are_not_set_are_absent():
    result = output()
    assert result.keys() == ("logits", "attentions") and len(result) == len(result.to_tuple()) == 2
    assert list(result) == ["logits", "attentions"] and "hidden_states" not in result
    assert result.hidden_states is None and result.get("hidden_states", 7) == 7
    with pytest.raises(KeyError, match="hidden_states"):
        result["hidden_states"]
    with pytest.raises(IndexError):
        result[2]


def test_fields_can_be_set_and_replaced():
    result = output()
    result["past_key_values"] = {"a": 1}
    assert result.past_key_values == {"a": 1} and result[1] == {"a": 1}
    assert result.replace(logits=None).keys() == ("past_key_values", "attentions")
    with pytest.raises(KeyError, match="has no field 'logit'"):
        result["logit"] = 1


def test_outputs_pass_through_jit_with_their_type():
    result = jax.jit(lambda x: outputs.FlaxMaskedLMOutput(logits=x * 2))(jnp.ones(2))
    assert type(result) is outputs.FlaxMaskedLMOutput
    assert np.array_equal(result.logits, [2, 2]) and result.hidden_states is None


def test_leaves_are_named_in_key_paths():
    paths = [jax.tree_util.keystr(path) for path, _ in jax.tree.leaves_with_path(output())]
    assert paths == [".logits", ".attentions[0]"]


def every_class():
    classes = [getattr(outputs, name) for name in dir(outputs) if name.startswith("Flax")]
    return [cls for cls in classes if dataclasses.is_dataclass(cls)]


@pytest.mark.parametrize("cls", every_class())
def test_every_class_is_a_pytree_of_its_fields(cls):
    names = [field.name for field in dataclasses.fields(cls)]
    result = cls(**{name: jnp.full(2, i) for i, name in enumerate(names)})
    doubled = jax.tree.map(lambda leaf: leaf * 2, result)
    assert type(doubled) is cls and list(doubled.keys()) == names
    assert [int(value[0]) for value in doubled.to_tuple()] == [2 * i for i in range(len(names))]


def test_keys_equal_pytorch():
    """Same names in the same order, as the tests of Transformers 4 required."""
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
