"""``FlaxAutoModel*``, and transformers' own Auto classes after ``import hfseq``."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path

import numpy as np
import pytest

import hfseq
from hfseq import plugins, transformers_hook
from hfseq.errors import CheckpointError, PluginError, UsageError

ROOT = Path(__file__).resolve().parent.parent
EXAMPLE = ROOT / "docs" / "examples" / "averaging_encoder.py"
SMALL = {
    "vocab_size": 31,
    "hidden_size": 8,
    "num_hidden_layers": 1,
    "num_attention_heads": 2,
    "intermediate_size": 16,
    "max_position_embeddings": 16,
}
IDS = np.arange(2, 10).reshape(2, 4)

# A plugin without jax: its model remembers how it was made.
TOY = """
from transformers import PreTrainedConfig

from hfseq import hookimpl


class ToyConfig(PreTrainedConfig):
    model_type = "toy"
    hidden_size: int = 4


class FlaxToyForMaskedLM:
    config_class = ToyConfig

    @classmethod
    def _from_config(cls, config, **kwargs):
        self = cls()
        self.config, self.made = config, kwargs
        return self

    @classmethod
    def from_pretrained(cls, name, *args, config=None, **kwargs):
        return cls._from_config(config, name=name, args=args, **kwargs)


@hookimpl
def register_architectures(register):
    register("toy", config=ToyConfig, heads={"ForMaskedLM": f"{__name__}:FlaxToyForMaskedLM"})
"""


@pytest.fixture(autouse=True)
def project(tmp_path, monkeypatch):
    """An empty working directory and plugins discovered anew."""
    monkeypatch.chdir(tmp_path)
    plugins.unload()
    yield tmp_path
    plugins.unload()
    sys.modules.pop("hfseqfile", None)


@pytest.fixture
def toy(project):
    """The toy plugin as ``hfseqfile.py``; returns its module."""
    (project / "hfseqfile.py").write_text(TOY)
    plugins.load()
    return sys.modules["hfseqfile"]


def save_config(folder: Path, **content) -> Path:
    folder.mkdir(exist_ok=True)
    (folder / "config.json").write_text(json.dumps(content))
    return folder


def run(code: str, folder: Path) -> str:
    """Run ``code`` in a fresh interpreter in ``folder`` and return what it prints."""
    command = [sys.executable, "-c", code]
    environment = {**os.environ, "PYTHONPATH": str(ROOT)}
    done = subprocess.run(command, capture_output=True, text=True, cwd=folder, env=environment)
    assert done.returncode == 0, done.stderr
    return done.stdout


# -- from_config and from_pretrained ---------------------------------------------------------------


def heads() -> list[tuple[str, str]]:
    entries = plugins.load().architectures.entries()
    return [(entry.name, task) for entry in entries for task in entry.target.heads]


@pytest.mark.parametrize(("model_type", "task"), heads())
def test_from_config_returns_the_class_that_the_plugin_names(model_type, task):
    spec = plugins.load().architectures.get(model_type)
    auto = getattr(hfseq, "FlaxAutoModel" + task.removeprefix("Model"))
    model = auto.from_config(spec.load_config()(**SMALL), _do_init=False)
    assert type(model) is spec.load_head(task)


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
    given = {"dtype": jnp.bfloat16, "attn_implementation": "cudnn", "seed": 7, "other": 1}
    model = hfseq.FlaxAutoModelForMaskedLM.from_pretrained(
        "model", "positional", hidden_size=6, subfolder="", **given
    )
    made = {key: value for key, value in model.made.items() if key in given}
    assert made == given
    assert (model.made["name"], model.made["args"]) == ("model", ("positional",))
    assert model.config.hidden_size == 6
    assert not hasattr(model.config, "seed") and model.config.dtype is None


def test_a_configuration_object_is_used_as_it_is(toy):
    config = toy.ToyConfig(hidden_size=5)
    model = hfseq.FlaxAutoModelForMaskedLM.from_pretrained(
        save_config(Path("model"), model_type="toy"), config=config
    )
    assert model.config is config


def test_a_configuration_from_elsewhere_may_be_named(toy):
    save_config(Path("model"), model_type="toy")
    save_config(Path("other"), model_type="toy", hidden_size=9)
    model = hfseq.FlaxAutoModelForMaskedLM.from_pretrained("model", config="other")
    assert (model.config.hidden_size, model.made["name"]) == (9, "model")


@pytest.mark.parametrize("how", ["from_config", "from_pretrained"])
def test_an_architecture_without_a_class_for_the_task_is_a_value_error(how, project):
    from transformers import BertConfig, T5Config

    config = T5Config() if how == "from_config" else BertConfig()
    config.save_pretrained(project)
    auto = hfseq.FlaxAutoModelForSeq2SeqLM
    with pytest.raises(ValueError, match="Unrecognized configuration class .*ForSeq2SeqLM"):
        auto.from_config(config) if how == "from_config" else auto.from_pretrained(project)


def test_the_error_lists_what_is_known_and_what_is_broken(project, caplog):
    from transformers import T5Config

    (project / "hfseqfile.py").write_text("import no_such_module_here")
    pattern = "model type is 't5'; known are: bert, roberta; not loaded: .*no_such_module_here"
    with pytest.raises(UsageError, match=pattern):
        hfseq.FlaxAutoModelForMaskedLM.from_config(T5Config())


@pytest.mark.parametrize("name", ["./nowhere", "/nowhere/at/all", "a/b/c", "~/no-such-directory"])
def test_a_directory_that_is_not_there_is_called_so(name):
    with pytest.raises(CheckpointError, match="there is no directory '.*'.*on the Hub"):
        hfseq.FlaxAutoModel.from_pretrained(name)


def test_the_auto_classes_cannot_be_instantiated():
    with pytest.raises(OSError, match="from_pretrained"):
        hfseq.FlaxAutoModel()


def test_a_head_that_does_not_import_names_plugin_and_target(project):
    text = TOY.replace('f"{__name__}:FlaxToyForMaskedLM"', '"no_such_module_here:FlaxToy"')
    (project / "hfseqfile.py").write_text(text)
    plugins.load()
    config = sys.modules["hfseqfile"].ToyConfig()
    with pytest.raises(PluginError, match="'hfseqfile': 'no_such_module_here:FlaxToy' cannot be"):
        hfseq.FlaxAutoModelForMaskedLM.from_config(config)


# -- native architectures stored as a stock twin ---------------------------------------------------


def test_the_native_architecture_named_in_the_configuration_is_loaded(toy):
    native = {"model_type": "toy", "hidden_size": 12, "pre_norm": True}
    save_config(Path("model"), model_type="bert", vocab_size=77, hfseq=native)
    model = hfseq.FlaxAutoModelForMaskedLM.from_pretrained("model", other=1)
    assert type(model.config) is toy.ToyConfig
    assert (model.config.hidden_size, model.config.vocab_size) == (12, 77)
    assert model.config.pre_norm and model.made["other"] == 1
    from transformers import AutoConfig, BertConfig

    assert type(AutoConfig.from_pretrained("model")) is BertConfig


def test_a_native_architecture_that_nobody_has_is_an_error():
    save_config(Path("model"), model_type="bert", hfseq={"model_type": "robberta"})
    with pytest.raises(UsageError, match="model/config.json.*'robberta'.*did you mean 'roberta'"):
        hfseq.FlaxAutoModelForMaskedLM.from_pretrained("model")


@pytest.mark.parametrize("native", ["toy", {"type": "toy"}])
def test_a_malformed_native_key_is_an_error(native):
    save_config(Path("model"), model_type="bert", hfseq=native)
    with pytest.raises(CheckpointError, match="without a model_type"):
        hfseq.FlaxAutoModelForMaskedLM.from_pretrained("model")


# -- mappings and register -------------------------------------------------------------------------


def test_the_mappings_are_dicts_from_configuration_to_model_class():
    from transformers import BertConfig, RobertaConfig, T5Config

    mapping = hfseq.FLAX_MODEL_FOR_MASKED_LM_MAPPING
    assert {BertConfig, RobertaConfig} <= set(mapping.keys())
    assert mapping[RobertaConfig] is hfseq.FlaxRobertaForMaskedLM
    assert dict(mapping)[BertConfig] is hfseq.FlaxBertForMaskedLM
    assert T5Config not in mapping and mapping.get(T5Config) is None
    assert len(mapping) == len(list(mapping))
    assert sorted(key.model_type for key in mapping) == ["bert", "roberta"]
    with pytest.raises(KeyError):
        mapping[T5Config]


def test_asking_whether_a_mapping_has_a_configuration_imports_no_model():
    code = (
        "import hfseq, sys; from transformers import BertConfig\n"
        "assert BertConfig in hfseq.FLAX_MODEL_MAPPING\n"
        "print('hfseq_plugins.bert.modeling' in sys.modules, 'jax' in sys.modules)"
    )
    assert run(code, ROOT).strip() == "False False"


def test_register_adds_a_class_for_this_process(monkeypatch):
    from transformers import T5Config

    class FlaxMine:
        config_class = T5Config

        @classmethod
        def _from_config(cls, config):
            return cls()

    mapping = hfseq.FLAX_MODEL_MAPPING
    monkeypatch.setattr(mapping, "_registered", {})
    hfseq.FlaxAutoModel.register(T5Config, FlaxMine)
    assert type(hfseq.FlaxAutoModel.from_config(T5Config())) is FlaxMine
    assert T5Config in mapping.keys()
    with pytest.raises(ValueError, match="T5Config already has a class for Model"):
        hfseq.FlaxAutoModel.register(T5Config, FlaxMine)
    hfseq.FlaxAutoModel.register(T5Config, FlaxMine, exist_ok=True)


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

REMOTE = """
from transformers import PreTrainedConfig


class RemoteConfig(PreTrainedConfig):
    model_type = "{model_type}"
    hidden_size: int = 4


class FlaxRemote:
    config_class = RemoteConfig

    @classmethod
    def register_for_auto_class(cls, auto_class): ...

    @classmethod
    def from_pretrained(cls, name, *args, config=None, **kwargs):
        self = cls()
        self.config = config
        return self

    _from_config = from_pretrained
"""


def remote_checkpoint(folder: Path, auto: str, model_type: str = "remote") -> Path:
    modules = {"AutoConfig": "modeling_x.RemoteConfig", auto: "modeling_x.FlaxRemote"}
    save_config(folder, model_type=model_type, hidden_size=6, auto_map=modules)
    (folder / "modeling_x.py").write_text(REMOTE.replace("{model_type}", model_type))
    return folder


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
    from transformers import T5Config

    remote = type("FlaxRemote", (), {"__module__": "transformers_modules.x.modeling_x"})
    monkeypatch.setattr(hfseq.FLAX_MODEL_MAPPING, "_registered", {})
    hfseq.FlaxAutoModel.register(T5Config, remote, exist_ok=True)
    assert T5Config not in hfseq.FLAX_MODEL_MAPPING


# -- transformers' own Auto classes ----------------------------------------------------------------


def test_transformers_has_the_private_names_that_are_used():
    from transformers.models.auto import auto_factory, configuration_auto
    from transformers.models.auto.modeling_auto import MODEL_MAPPING
    from transformers.utils.hub import resolve_revision

    assert callable(resolve_revision)
    assert callable(auto_factory._BaseAutoModelClass.from_pretrained)
    assert isinstance(configuration_auto.CONFIG_MAPPING._mapping, dict)
    for mapping in (configuration_auto.CONFIG_MAPPING, MODEL_MAPPING):
        assert hasattr(mapping, "_extra_content")


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


@pytest.mark.parametrize(
    "torch", ["", "import sys; sys.modules['torch'] = None\n"], ids=["", "no torch"]
)
@pytest.mark.parametrize("order", ORDERS.values(), ids=ORDERS)
def test_transformers_knows_custom_types_whatever_is_imported_first(order, torch, project):
    (project / "hfseqfile.py").write_text(TOY)
    save_config(project / "model", model_type="toy")
    assert run(torch + order + USE, project).split() == ["ToyConfig", "FlaxToyForMaskedLM", "7"]


def test_the_top_level_auto_model_returns_the_flax_class(project):
    pytest.importorskip("torch")
    (project / "hfseqfile.py").write_text(TOY)
    save_config(project / "model", model_type="toy")
    code = (
        "import hfseq, transformers\n"
        "print(type(transformers.AutoModelForMaskedLM.from_pretrained('model')).__name__)"
    )
    assert run(code, project).split() == ["FlaxToyForMaskedLM"]


def test_stock_model_types_stay_untouched(toy):
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


def test_what_was_registered_before_stays_registered(project):
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


def test_the_stand_in_behaves_as_the_class_it_stands_for(toy):
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


def test_importing_transformers_after_hfseq_loads_no_plugin(project):
    (project / "hfseqfile.py").write_text("print('loaded')")
    code = (
        "import hfseq; from transformers import AutoConfig\n"
        "import transformers.models.auto.modeling_auto"
    )
    assert run(code, project) == ""


def test_a_broken_plugin_does_not_break_transformers(project):
    (project / "hfseqfile.py").write_text("import no_such_module_here")
    save_config(project / "model", model_type="bert")
    code = (
        "import hfseq; from transformers import AutoConfig\n"
        "print(type(AutoConfig.from_pretrained('model')).__name__)"
    )
    assert run(code, project).strip() == "BertConfig"


def test_plugins_that_cannot_be_loaded_at_all_are_a_warning(monkeypatch, caplog):
    monkeypatch.setattr(plugins, "load", lambda: 1 / 0)
    assert transformers_hook._custom({}) == {}
    assert "hfseq's plugins cannot be loaded: division by zero" in caplog.text


def test_the_hook_leaves_no_trace_in_the_modules(project):
    code = (
        "import hfseq; from transformers.models.auto import configuration_auto as module\n"
        "import inspect; assert 'AutoConfig' in inspect.getsource(module)\n"
        "print(type(module.__loader__).__name__, type(module.__spec__.loader).__name__)"
    )
    assert run(code, project).split() == ["SourceFileLoader"] * 2


def test_install_is_idempotent():
    before = list(sys.meta_path)
    transformers_hook.install()
    hfseq.register_auto_classes()
    assert sys.meta_path == before
    assert sum(isinstance(f, transformers_hook._Finder) for f in before) == 1


# -- the documented example ------------------------------------------------------------------------


def test_the_example_is_one_file_of_under_a_hundred_lines():
    assert len(EXAMPLE.read_text(encoding="utf-8").splitlines()) < 100


def test_the_example_works_as_hfseqfile(project):
    (project / "hfseqfile.py").write_text(EXAMPLE.read_text(encoding="utf-8"))
    from transformers import AutoConfig
    from transformers.models.auto.modeling_auto import AutoModelForMaskedLM

    small = {"vocab_size": 31, "hidden_size": 8, "num_hidden_layers": 1}
    config = AutoConfig.for_model("averaging", **small, max_position_embeddings=16)
    model = hfseq.FlaxAutoModelForMaskedLM.from_config(config)
    model.save_pretrained("model")
    for auto in (hfseq.FlaxAutoModelForMaskedLM, AutoModelForMaskedLM):
        loaded = auto.from_pretrained("model")
        assert type(loaded) is hfseq.FlaxAveragingForMaskedLM
        np.testing.assert_array_equal(loaded(IDS).logits, model(IDS).logits)


def test_the_example_passes_the_battery():
    from hfseq.testing import check_architecture

    spec = plugins.load([EXAMPLE]).architectures.get("averaging")
    config = spec.load_config()(
        vocab_size=64, hidden_size=16, num_hidden_layers=2, max_position_embeddings=32
    )
    assert check_architecture("averaging", config).passed
