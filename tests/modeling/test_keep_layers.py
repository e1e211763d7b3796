"""Models with some layers of another model."""

from __future__ import annotations

import numpy as np
import pytest

import hfseq
from hfseq.cli.convert import convert
from hfseq.errors import UsageError
from hfseq.modeling.layers import keep_layers
from hfseq.nn import trees
from tests.support.models import llama_config


def test_a_student_has_the_chosen_layers_of_its_teacher(tmp_path):
    teacher = hfseq.FlaxLlamaForCausalLM(llama_config(num_hidden_layers=4))
    teacher.save_pretrained(tmp_path / "teacher")
    convert(str(tmp_path / "teacher"), tmp_path / "student", keep_layers="3,0")
    student = hfseq.FlaxAutoModelForCausalLM.from_pretrained(tmp_path / "student")
    assert student.config.num_hidden_layers == 2
    student_params, teacher_params = trees.flatten(student.params), trees.flatten(teacher.params)
    for path, leaf in student_params.items():
        old = tuple({"0": "3", "1": "0"}.get(part, part) for part in path)
        np.testing.assert_array_equal(leaf, teacher_params[old])
    # With all layers, nothing changes.
    same = keep_layers(teacher, range(4))
    ids = np.arange(3, 12)[None]
    np.testing.assert_array_equal(same(ids).logits, teacher(ids).logits)


def test_encoder_and_decoder_have_separate_layers():
    from transformers import T5Config

    sizes = {"d_model": 16, "d_kv": 4, "d_ff": 32, "num_heads": 4, "vocab_size": 40}
    config = T5Config(num_layers=3, num_decoder_layers=2, decoder_start_token_id=0, **sizes)
    teacher = hfseq.FlaxT5ForConditionalGeneration(config)
    student = keep_layers(teacher, [2], [1])
    assert (student.config.num_layers, student.config.num_decoder_layers) == (1, 1)
    student_params, teacher_params = trees.flatten(student.params), trees.flatten(teacher.params)
    for side, number in (("encoder", "2"), ("decoder", "1")):
        tail = ("layer", "0", "SelfAttention", "q", "kernel")
        np.testing.assert_array_equal(
            student_params[side, "block", "0", *tail], teacher_params[side, "block", number, *tail]
        )
    bias = next(path for path in student_params if "relative_attention_bias" in path)
    np.testing.assert_array_equal(student_params[bias], teacher_params[bias])


@pytest.mark.parametrize(
    ("flags", "message"),
    [
        ({"keep_layers": "0,9"}, "--keep_layers 0,9: the model has the layers 0 to 1"),
        ({"keep_layers": "a"}, "--keep_layers a: use numbers"),
        ({"keep_decoder_layers": "0"}, "--keep_decoder_layers: 'llama' has no separate decoder"),
    ],
)
def test_layers_that_do_not_exist_are_refused(flags, message, tmp_path):
    hfseq.FlaxLlamaForCausalLM(llama_config()).save_pretrained(tmp_path / "model")
    with pytest.raises(UsageError, match=message):
        convert(str(tmp_path / "model"), tmp_path / "student", **flags)
    assert not (tmp_path / "student").exists()
