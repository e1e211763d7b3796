"""The Auto classes of Transformers after ``import hfseq``."""

from __future__ import annotations

import subprocess
import sys
import textwrap
from pathlib import Path

import pytest

import hfseq
from hfseq.plugins import manager, transformers_hook
from tests.support import plugin_files, toy_plugin
from tests.support.toy_plugin import TOY, remote_checkpoint, run, save_config

SMALL = {
    "vocab_size": 31,
    "hidden_size": 8,
    "num_hidden_layers": 1,
    "num_attention_heads": 2,
    "intermediate_size": 16,
    "max_position_embeddings": 16,
}
project, toy = plugin_files.project, toy_plugin.toy


ORDERS = {
    "hfseq first": "import hfseq; from transformers import AutoConfig",
    "transformers first": "import transformers; import hfseq; from transformers import AutoConfig",
    "models first": (
        "from transformers.models.auto.modeling_auto import AutoModelForMaskedLM\n"
        "from transformers import AutoConfig; import hfseq"
    ),
    "configs first": "from transformers import AutoConfig; import hfseq",
    "explicitly": (
        "import hfseq; hfseq.register_auto_classes(); hfseq.register_auto_classes()\n"
        "from transformers import AutoConfig"
    ),
}
USE = """
from transformers.models.auto.modeling_auto import AutoModelForMaskedLM
config = AutoConfig.from_pretrained("model", hidden_size=7)
model = AutoModelForMaskedLM.from_pretrained("model")
made = AutoModelForMaskedLM.from_config(config)
print(type(config).__name__, type(model).__name__, made.config.hidden_size)
"""


@pytest.mark.slow
@pytest.mark.parametrize(
    "torch", ["", "import sys; sys.modules['torch'] = None\n"], ids=["", "no torch"]
)
@pytest.mark.parametrize("order", ORDERS.values(), ids=ORDERS)
def test_auto_classes_know_custom_types_in_any_import_order(order, torch, project):
    plugin_files.write_project_file(project, TOY)
    save_config(project / "model", model_type="toy")
    assert run(torch + order + USE, project).split() == ["ToyConfig", "FlaxToyForMaskedLM", "7"]


@pytest.mark.slow
def test_the_top_level_auto_model_returns_the_flax_class(project):
    pytest.importorskip("torch")
    plugin_files.write_project_file(project, TOY)
    save_config(project / "model", model_type="toy")
    code = (
        "import hfseq, transformers\n"
        "print(type(transformers.AutoModelForMaskedLM.from_pretrained('model')).__name__)"
    )
    assert run(code, project).split() == ["FlaxToyForMaskedLM"]


def test_stock_model_types_are_unchanged(toy):
    pytest.importorskip("torch")
    from transformers import AutoConfig, AutoModelForMaskedLM, BertConfig, BertForMaskedLM
    from transformers.models.auto.modeling_auto import MODEL_FOR_MASKED_LM_MAPPING

    assert AutoConfig.for_model("bert").__class__ is BertConfig
    assert type(AutoModelForMaskedLM.from_config(BertConfig(**SMALL))) is BertForMaskedLM
    assert BertConfig not in MODEL_FOR_MASKED_LM_MAPPING._extra_content
    assert toy.ToyConfig in MODEL_FOR_MASKED_LM_MAPPING._extra_content


def test_the_configurations_of_plugins_are_in_the_mapping_of_transformers(toy):
    from transformers import CONFIG_MAPPING, AutoConfig

    assert "toy" in CONFIG_MAPPING and "toy" in CONFIG_MAPPING.keys()
    assert CONFIG_MAPPING["toy"] is toy.ToyConfig
    assert dict(CONFIG_MAPPING._extra_content.items())["toy"] is toy.ToyConfig
    assert AutoConfig.for_model("toy", hidden_size=3).hidden_size == 3
    assert "nothing-like-it" not in CONFIG_MAPPING


def test_register_of_transformers_still_works(toy):
    from transformers import CONFIG_MAPPING, AutoConfig, PreTrainedConfig

    class OtherConfig(PreTrainedConfig):
        model_type = "other-toy"

    AutoConfig.register("other-toy", OtherConfig)
    assert CONFIG_MAPPING["other-toy"] is OtherConfig
    assert CONFIG_MAPPING._extra_content.pop("other-toy") is OtherConfig
    assert "other-toy" not in CONFIG_MAPPING


@pytest.mark.slow
def test_earlier_registrations_are_kept(project):
    code = (
        "from transformers import AutoConfig, PreTrainedConfig\n"
        "class MyConfig(PreTrainedConfig): model_type = 'mine'\n"
        "AutoConfig.register('mine', MyConfig)\n"
        "import hfseq\n"
        "print(type(AutoConfig.for_model('mine')).__name__)"
    )
    assert run(code, project).strip() == "MyConfig"


def test_auto_tokenizer_gives_the_fast_tokenizer_of_a_custom_type(toy):
    from tokenizers import Tokenizer
    from tokenizers.models import WordLevel
    from tokenizers.pre_tokenizers import Whitespace
    from transformers import AutoTokenizer, PreTrainedTokenizerFast

    words = Tokenizer(WordLevel({"<unk>": 0, "<mask>": 1, "bread": 2}, unk_token="<unk>"))
    words.pre_tokenizer = Whitespace()
    tokenizer = PreTrainedTokenizerFast(tokenizer_object=words, mask_token="<mask>")
    tokenizer.save_pretrained("model")
    toy.ToyConfig().save_pretrained("model")
    loaded = AutoTokenizer.from_pretrained("model")
    assert isinstance(loaded, PreTrainedTokenizerFast)
    assert loaded("bread <mask>")["input_ids"] == [2, 1] and loaded.mask_token_id == 1


def test_stand_in_behaves_like_the_flax_class(toy):
    from transformers.models.auto.modeling_auto import MODEL_FOR_MASKED_LM_MAPPING

    stand_in = MODEL_FOR_MASKED_LM_MAPPING[toy.ToyConfig]
    assert stand_in.__name__ == "FlaxToyForMaskedLM"
    assert stand_in.config_class is toy.ToyConfig
    assert isinstance(stand_in(), toy.FlaxToyForMaskedLM) and isinstance(stand_in(), stand_in)
    assert MODEL_FOR_MASKED_LM_MAPPING[toy.ToyConfig] is stand_in


def test_trusted_code_of_a_checkpoint_comes_before_the_plugin(toy):
    from transformers.models.auto.modeling_auto import AutoModelForMaskedLM

    folder = remote_checkpoint(Path("remote_three"), "AutoModelForMaskedLM", model_type="toy")
    trusted = AutoModelForMaskedLM.from_pretrained(folder, trust_remote_code=True)
    assert type(trusted).__name__ == "FlaxRemote"
    assert type(AutoModelForMaskedLM.from_pretrained(folder)) is toy.FlaxToyForMaskedLM


@pytest.mark.slow
def test_a_broken_plugin_does_not_break_transformers(project):
    plugin_files.write_project_file(project, "import no_such_module_here")
    save_config(project / "model", model_type="bert")
    code = (
        "import hfseq; from transformers import AutoConfig\n"
        "print(type(AutoConfig.from_pretrained('model')).__name__)"
    )
    assert run(code, project).strip() == "BertConfig"


def test_plugins_that_cannot_be_loaded_at_all_are_a_warning(monkeypatch, caplog):
    monkeypatch.setattr(manager, "load", lambda: 1 / 0)
    transformers_hook.register_auto_classes()
    assert "hfseq's plugins cannot be loaded: division by zero" in caplog.text


@pytest.mark.slow
def test_import_hook_removes_itself_from_modules(project):
    code = (
        "import hfseq; from transformers.models.auto import configuration_auto as module\n"
        "import inspect; assert 'AutoConfig' in inspect.getsource(module)\n"
        "print(type(module.__loader__).__name__, type(module.__spec__.loader).__name__)"
    )
    assert run(code, project).split() == ["SourceFileLoader"] * 2


def test_install_is_idempotent():
    hfseq.register_auto_classes()
    finders_before = list(sys.meta_path)
    transformers_hook.install()
    hfseq.register_auto_classes()
    assert sys.meta_path == finders_before


@pytest.mark.parametrize(
    "first", ["hfseq.v4", pytest.param("transformers", marks=pytest.mark.slow)]
)
def test_tokenizers_decode_arrays_of_jax_as_in_version_4(first, tmp_path):
    from hfseq.data.tokenizers import train_tokenizer

    train_tokenizer(["a word and another"], "gpt2", vocab_size=270, output_dir=tmp_path)
    program = f"""
        import {first}
        from transformers import AutoTokenizer
        import hfseq.v4
        import jax.numpy as jnp
        words = AutoTokenizer.from_pretrained({str(tmp_path)!r})
        ids = words(["a word", "another"], padding=False)["input_ids"]
        rows = jnp.array([ids[0][:2], ids[1][:2]])
        texts = [words.decode(row) for row in rows.tolist()]
        assert words.batch_decode(rows) == texts, words.batch_decode(rows)
        assert words.batch_decode(list(rows)) == texts and words.decode(rows[0]) == texts[0]
    """
    process = subprocess.run(
        [sys.executable, "-c", textwrap.dedent(program)],
        capture_output=True,
        text=True,
        check=False,
    )
    assert process.returncode == 0, process.stderr
