"""The functions and names of Transformers 4.57's Flax modules, after `import hfseq.v4`."""

from __future__ import annotations

import importlib
import inspect
import json

import jax
import numpy as np
import pytest

import hfseq
import hfseq.v4  # noqa: F401
from tests.dropin.v4_functions import CASES, NAMES, RESULTS, module_name, run
from tests.support.models import bert_config, close, t5_config

RECORDED = json.loads(RESULTS.read_text(encoding="utf-8"))


@pytest.mark.slow
def test_functions_have_the_results_of_transformers_4():
    for (family, name, arguments), expected in zip(CASES, RECORDED, strict=True):
        function = getattr(importlib.import_module(module_name(family)), name)
        result = json.loads(json.dumps(run(function, arguments)))
        assert jax.tree.structure(result) == jax.tree.structure(expected), (family, name)
        for ours, theirs in zip(jax.tree.leaves(result), jax.tree.leaves(expected), strict=True):
            assert ours == theirs or close(ours, theirs, 1e-6), (family, name)


@pytest.mark.slow
def test_all_names_are_available_except_layers_and_states_of_generation():
    kinds: dict[tuple[str, str], str] = {}
    for line in NAMES.read_text(encoding="utf-8").splitlines():
        module, kind, names = line.split("\t")
        kinds |= {(module, name): kind for name in names.split()}
    tested = {(module_name(family), name) for family, name, _ in CASES}
    for (module, name), kind in kinds.items():
        try:
            exec(f"from {module} import {name}", {})
        except ImportError as error:
            assert kind == "class" and name not in hfseq.v4.paths.flax_classes(), (module, name)
            assert not name.endswith(("ModelOutput", "Module", "PreTrainedModel")), (module, name)
            family = module.rpartition("_flax_")[2]
            replacements = (f"the NNX layers of `hfseq_plugins.{family}", "Use `")
            assert any(text in str(error) for text in replacements), str(error)
        else:
            documented = name.endswith("_docstring") or "docstring" in name
            loads_files = "pytorch" in module or "_in_" in name
            if kind == "function" and not documented and not loads_files:
                assert (module, name) in tested, (module, name)


def test_constants_of_old_modules():
    auto = importlib.import_module("transformers.models.auto.modeling_flax_auto")
    assert auto.FLAX_MODEL_MAPPING_NAMES["bert"] == "FlaxBertModel"
    assert auto.FLAX_MODEL_FOR_CAUSAL_LM_MAPPING_NAMES["gpt2"] == "FlaxGPT2LMHeadModel"
    bert = importlib.import_module("transformers.models.bert.modeling_flax_bert")
    assert bert.BERT_INPUTS_DOCSTRING.format("batch_size, sequence_length") == ""
    assert bert.logger.name == "transformers.models.bert.modeling_flax_bert"
    bert.logger.warning_once  # noqa: B018  # a method of Transformers' loggers
    with pytest.raises(ImportError, match="no equivalent of 'create_sinusoidal_positions'"):
        exec(f"from {bert.__name__} import create_sinusoidal_positions", {})


def test_docstrings_of_subclasses_can_be_replaced():
    utilities = importlib.import_module("transformers.modeling_flax_utils")

    class FlaxOwnBert(hfseq.FlaxBertModel):
        """A model of a user."""

    documentation = hfseq.FlaxBertModel.__call__.__doc__
    utilities.overwrite_call_docstring(FlaxOwnBert, "My words.")
    utilities.append_call_sample_docstring(FlaxOwnBert, "checkpoint", object, "BertConfig")
    utilities.append_replace_return_docstrings(FlaxOwnBert, output_type=dict, config_class="C")
    assert FlaxOwnBert.__call__.__doc__ == "My words."
    assert hfseq.FlaxBertModel.__call__.__doc__ == documentation != "My words."
    assert inspect.signature(FlaxOwnBert.__call__) == inspect.signature(
        hfseq.FlaxBertModel.__call__
    )


def test_programs_with_linen_modules_do_not_run():
    from flax import linen

    class Tokenizer(linen.Module):
        def setup(self):
            self.model = hfseq.FlaxT5EncoderModel(t5_config(), _do_init=False).module

        def __call__(self, ids):
            return self.model(input_ids=ids)

    class FlaxOwnModel(hfseq.FlaxPreTrainedModel):
        """A model with a Linen module, as in Transformers 4."""

        def __init__(self, config, input_shape=(1, 1), **options):
            super().__init__(config, linen.Dense(4), input_shape=input_shape, **options)

    with pytest.raises(TypeError, match="'FlaxT5EncoderModule' object is not callable"):
        Tokenizer().init(jax.random.PRNGKey(0), np.ones((1, 4), np.int32))
    with pytest.raises(TypeError, match="multiple values for argument 'input_shape'"):
        FlaxOwnModel(bert_config())
    for line in [
        "from transformers.models.bart.modeling_flax_bart import FlaxBartEncoderLayer",
        "from transformers.models.wav2vec2.modeling_flax_wav2vec2 import FlaxWav2Vec2Attention",
    ]:
        with pytest.raises(ImportError, match="use the NNX layers of `hfseq_plugins"):
            exec(line, {})
    model = hfseq.FlaxT5EncoderModel(t5_config(), _do_init=False)
    assert not hasattr(model, "eval") and not hasattr(model, "requires_grad_")


def test_shards_of_pytorch_become_parameters(tmp_path):
    torch = pytest.importorskip("torch")
    utilities = importlib.import_module("transformers.modeling_flax_pytorch_utils")
    model = hfseq.FlaxBertModel(bert_config())
    model.save_pretrained(tmp_path)
    from safetensors.torch import load_file

    tensors = list(load_file(tmp_path / "model.safetensors").items())
    paths = [tmp_path / f"part-{number}.bin" for number in range(2)]
    for number, path in enumerate(paths):
        torch.save(dict(tensors[number::2]), path)
    params = utilities.convert_pytorch_sharded_state_dict_to_flax(paths, model)
    jax.tree.map(np.testing.assert_array_equal, params, model.params)
