"""``FlaxAutoModel*`` returns the classes that plugins register."""

from __future__ import annotations

import sys
from pathlib import Path

import numpy as np
import pytest

import hfseq
from hfseq import plugins
from hfseq.errors import CheckpointError, PluginError, UsageError
from tests.support import models, plugin_files, toy_plugin
from tests.support.plugin_files import ROOT
from tests.support.toy_plugin import TOY, remote_checkpoint, run, save_config

SMALL = {
    "vocab_size": 31,
    "hidden_size": 8,
    "num_hidden_layers": 1,
    "num_attention_heads": 2,
    "intermediate_size": 16,
    "max_position_embeddings": 16,
}
IDS = np.arange(2, 10).reshape(2, 4)
project, toy = plugin_files.project, toy_plugin.toy


# -- from_config and from_pretrained ---------------------------------------------------------------


def heads() -> list[tuple[str, str]]:
    entries = plugins.load().architectures.entries()
    pairs = [(entry.name, task) for entry in entries for task in entry.target.heads]
    return [(name, task) for name, task in pairs if task in plugins.TASKS]


ONE_PER_KIND = [
    ("bert", "ForMaskedLM"),
    ("gpt2", "ForCausalLM"),
    ("t5", "ForSeq2SeqLM"),
    ("vq_transformer", "ForCausalLM"),
]


@pytest.mark.parametrize("every", [False, pytest.param(True, marks=pytest.mark.slow)])
def test_from_config_returns_the_registered_class(every):
    for model_type, task in heads() if every else ONE_PER_KIND:
        spec = plugins.load().architectures.get(model_type)
        auto = getattr(hfseq, "FlaxAutoModel" + task.removeprefix("Model"))
        config = getattr(models, f"{model_type.replace('-', '_')}_config")()
        model = auto.from_config(config, _do_init=False)
        assert type(model) is spec.load_head(task), (model_type, task)


@pytest.mark.slow
def test_from_pretrained_loads_a_directory_with_overrides(project):
    from transformers import RobertaConfig

    model = hfseq.FlaxRobertaForMaskedLM(RobertaConfig(**SMALL), seed=3)
    model.save_pretrained(project / "model")
    loaded = hfseq.FlaxAutoModelForMaskedLM.from_pretrained("model", hidden_dropout_prob=0.25)
    assert type(loaded) is hfseq.FlaxRobertaForMaskedLM
    assert loaded.config.hidden_dropout_prob == 0.25
    np.testing.assert_array_equal(loaded(IDS).logits, model(IDS).logits)


def test_arguments_of_the_model_do_not_end_in_the_configuration(toy):
    import jax.numpy as jnp

    save_config(Path("model"), model_type="toy")
    model_options = {"dtype": jnp.bfloat16, "attn_implementation": "cudnn", "seed": 7, "other": 1}
    model = hfseq.FlaxAutoModelForMaskedLM.from_pretrained(
        "model", "positional", hidden_size=6, subfolder="", **model_options
    )
    received = {key: value for key, value in model.made.items() if key in model_options}
    assert received == model_options
    assert (model.made["name"], model.made["args"]) == ("model", ("positional",))
    assert model.config.hidden_size == 6
    assert not hasattr(model.config, "seed") and model.config.dtype is None


def test_a_configuration_object_is_used_as_it_is(toy):
    config = toy.ToyConfig(hidden_size=5)
    model = hfseq.FlaxAutoModelForMaskedLM.from_pretrained(
        save_config(Path("model"), model_type="toy"), config=config
    )
    assert model.config is config


def test_config_from_another_source_is_accepted(toy):
    save_config(Path("model"), model_type="toy")
    save_config(Path("other"), model_type="toy", hidden_size=9)
    model = hfseq.FlaxAutoModelForMaskedLM.from_pretrained("model", config="other")
    assert (model.config.hidden_size, model.made["name"]) == (9, "model")


@pytest.mark.parametrize("how", ["from_config", "from_pretrained"])
def test_an_architecture_without_a_class_for_the_task_is_a_value_error(how, project):
    from transformers import BertConfig, CTRLConfig

    config = CTRLConfig() if how == "from_config" else BertConfig()
    config.save_pretrained(project)
    auto = hfseq.FlaxAutoModelForSeq2SeqLM
    with pytest.raises(ValueError, match="Unrecognized configuration class .*ForSeq2SeqLM"):
        auto.from_config(config) if how == "from_config" else auto.from_pretrained(project)


@pytest.mark.parametrize("task", ["ForVision2Seq", "ForSpeechSeq2Seq"])
def test_a_task_names_the_architectures_that_have_it(task):
    from transformers import ViTConfig

    auto = getattr(hfseq, f"FlaxAutoModel{task}")
    with pytest.raises(ValueError, match=f"FlaxAutoModel{task}.*'vit'.* Known types: "):
        auto.from_config(ViTConfig())


def test_audio_classification_has_a_mapping_but_no_auto_class():
    from transformers import WhisperConfig

    model_class = hfseq.FLAX_MODEL_FOR_AUDIO_CLASSIFICATION_MAPPING[WhisperConfig]
    assert model_class is hfseq.FlaxWhisperForAudioClassification


def test_renamed_auto_class_of_a_task():
    from transformers.models.auto import modeling_auto

    name = plugins.registry.torch_auto_class_name("ForVision2Seq")
    assert name == "AutoModelForImageTextToText" and hasattr(modeling_auto, name)


def test_error_lists_known_types_and_broken_plugins(project, caplog):
    from transformers import CTRLConfig

    plugin_files.write_project_file(project, "import no_such_module_here")
    pattern = (
        "model type is 'ctrl'. Known types: .*bart, bert,.*fp8_encoder,.*megatron-bert,.*roberta.*"
        "; not loaded: .*no_such_module_here"
    )
    with pytest.raises(UsageError, match=pattern):
        hfseq.FlaxAutoModelForMaskedLM.from_config(CTRLConfig())


@pytest.mark.parametrize("name", ["./nowhere", "/nowhere/at/all", "a/b/c", "~/no-such-directory"])
def test_missing_directory_error_says_so(name):
    with pytest.raises(CheckpointError, match="directory '.*' does not exist.*on the Hub"):
        hfseq.FlaxAutoModel.from_pretrained(name)


def test_the_auto_classes_cannot_be_instantiated():
    with pytest.raises(OSError, match="from_pretrained"):
        hfseq.FlaxAutoModel()


def test_a_head_that_does_not_import_names_plugin_and_target(project):
    text = TOY.replace('f"{__name__}:FlaxToyForMaskedLM"', '"no_such_module_here:FlaxToy"')
    plugin_files.write_project_file(project, text)
    plugins.load()
    config = sys.modules["hfseqfile"].ToyConfig()
    with pytest.raises(PluginError, match="'hfseqfile': 'no_such_module_here:FlaxToy' cannot be"):
        hfseq.FlaxAutoModelForMaskedLM.from_config(config)


# -- native architectures stored as a stock one ----------------------------------------------------


def test_the_native_architecture_named_in_the_configuration_is_loaded(toy):
    native = {"model_type": "toy", "hidden_size": 12, "pre_norm": True}
    save_config(Path("model"), model_type="bert", vocab_size=77, hfseq=native)
    model = hfseq.FlaxAutoModelForMaskedLM.from_pretrained("model", other=1)
    assert type(model.config) is toy.ToyConfig
    assert (model.config.hidden_size, model.config.vocab_size) == (12, 77)
    assert model.config.pre_norm and model.made["other"] == 1
    from transformers import AutoConfig, BertConfig

    assert type(AutoConfig.from_pretrained("model")) is BertConfig


def test_unknown_native_architecture_is_an_error():
    save_config(Path("model"), model_type="bert", hfseq={"model_type": "robberta"})
    with pytest.raises(UsageError, match="model/config.json.*'robberta'.*did you mean 'roberta'"):
        hfseq.FlaxAutoModelForMaskedLM.from_pretrained("model")


@pytest.mark.parametrize("native", ["toy", {"type": "toy"}])
def test_a_malformed_native_key_is_an_error(native):
    save_config(Path("model"), model_type="bert", hfseq=native)
    with pytest.raises(CheckpointError, match="model/config.json.*'hfseq'.*no model_type"):
        hfseq.FlaxAutoModelForMaskedLM.from_pretrained("model")


# -- mappings and register -------------------------------------------------------------------------


def test_the_mappings_are_dicts_from_configuration_to_model_class():
    from transformers import BertConfig, CTRLConfig, RobertaConfig

    mapping = hfseq.FLAX_MODEL_FOR_MASKED_LM_MAPPING
    assert {BertConfig, RobertaConfig} <= set(mapping.keys())
    assert mapping[RobertaConfig] is hfseq.FlaxRobertaForMaskedLM
    assert dict(mapping)[BertConfig] is hfseq.FlaxBertForMaskedLM
    assert CTRLConfig not in mapping and mapping.get(CTRLConfig) is None
    assert len(mapping) == len(list(mapping))
    assert {"bart", "bert", "fp8_encoder", "megatron-bert", "roberta"} <= {
        key.model_type for key in mapping
    }
    with pytest.raises(KeyError):
        mapping[CTRLConfig]


def test_asking_whether_a_mapping_has_a_configuration_imports_no_model():
    code = (
        "import hfseq, sys; from transformers import BertConfig\n"
        "assert BertConfig in hfseq.FLAX_MODEL_MAPPING\n"
        "print('hfseq_plugins.bert.modeling' in sys.modules, 'jax' in sys.modules)"
    )
    assert run(code, ROOT).strip() == "False False"


def test_register_adds_a_class_for_this_process(monkeypatch):
    from transformers import CTRLConfig

    class FlaxMine:
        config_class = CTRLConfig

        @classmethod
        def _from_config(cls, config):
            return cls()

    mapping = hfseq.FLAX_MODEL_MAPPING
    monkeypatch.setattr(mapping, "_registered", {})
    hfseq.FlaxAutoModel.register(CTRLConfig, FlaxMine)
    assert type(hfseq.FlaxAutoModel.from_config(CTRLConfig())) is FlaxMine
    assert CTRLConfig in mapping.keys() and len(mapping) == len(list(mapping))
    with pytest.raises(ValueError, match="CTRLConfig already has a class for Model"):
        hfseq.FlaxAutoModel.register(CTRLConfig, FlaxMine)
    hfseq.FlaxAutoModel.register(CTRLConfig, FlaxMine, exist_ok=True)


def test_a_class_of_a_plugin_cannot_be_replaced_by_accident():
    from transformers import BertConfig

    with pytest.raises(ValueError, match="already has a class"):
        hfseq.FlaxAutoModel.register(BertConfig, hfseq.FlaxBertForMaskedLM)


def test_plugins_loaded_later_count(project):
    assert "toy" not in [key.model_type for key in hfseq.FLAX_MODEL_FOR_MASKED_LM_MAPPING]
    (project / "late.py").write_text(TOY)
    plugins.load(["late.py"])
    config = plugins.load().architectures.get("toy").load_config()
    assert config in hfseq.FLAX_MODEL_FOR_MASKED_LM_MAPPING
    del sys.modules["late"]


# -- trust_remote_code -----------------------------------------------------------------------------


def test_code_of_a_checkpoint_is_loaded_when_trusted(project, monkeypatch):
    monkeypatch.setattr(hfseq.FLAX_MODEL_FOR_MASKED_LM_MAPPING, "_registered", {})
    folder = remote_checkpoint(project / "remote_one", "FlaxAutoModelForMaskedLM")
    auto = hfseq.FlaxAutoModelForMaskedLM
    model = auto.from_pretrained(folder, trust_remote_code=True)
    assert type(model).__name__ == "FlaxRemote" and model.config.hidden_size == 6


def test_code_of_a_checkpoint_is_not_loaded_otherwise(project):
    folder = remote_checkpoint(project / "remote_two", "FlaxAutoModelForMaskedLM")
    with pytest.raises(ValueError, match="trust_remote_code"):
        hfseq.FlaxAutoModelForMaskedLM.from_pretrained(folder, trust_remote_code=False)


def test_trusting_one_checkpoint_of_a_stock_type_trusts_no_other(monkeypatch):
    from transformers import CTRLConfig

    remote = type("FlaxRemote", (), {"__module__": "transformers_modules.x.modeling_x"})
    monkeypatch.setattr(hfseq.FLAX_MODEL_MAPPING, "_registered", {})
    hfseq.FlaxAutoModel.register(CTRLConfig, remote, exist_ok=True)
    assert CTRLConfig not in hfseq.FLAX_MODEL_MAPPING
