"""The import paths of Transformers 4 after `import hfseq.v4`, and unmodified programs."""

from __future__ import annotations

import importlib
import logging
import os
import subprocess
import sys
from pathlib import Path

import pytest
import transformers

import hfseq
from hfseq.v4 import configurations, paths
from tests.support.models import bert_config

ROOT = Path(__file__).resolve().parent.parent

# Lines of maxdiffusion, diffusers, tt-forge-models, dalle-mini and Transformers 4's examples.
LINES = [
    "from transformers import CLIPTokenizer, FlaxCLIPTextModel, FlaxT5EncoderModel, AutoTokenizer",
    "from transformers import FlaxCLIPTextModel, FlaxCLIPTextPreTrainedModel",
    "from transformers import CLIPTokenizer, FlaxCLIPTextModel, CLIPTextConfig, "
    "FlaxCLIPTextModelWithProjection",
    "from transformers.models.clip.modeling_flax_clip import FlaxCLIPVisionModule",
    "from transformers.models.clip.modeling_flax_clip import FlaxCLIPTextModule",
    "from transformers.models.clip.modeling_flax_clip import FlaxCLIPVisionModel",
    "from transformers import CLIPConfig, FlaxPreTrainedModel",
    "from transformers import CLIPImageProcessor, CLIPTokenizer, FlaxCLIPTextModel",
    "from transformers import FlaxCLIPModel",
    "from transformers.models.bart.modeling_flax_bart import *; FlaxBartForConditionalGeneration",
    "from transformers.models.bart.modeling_flax_bart import shift_tokens_right, BartConfig",
    "from transformers.generation_flax_utils import FlaxSampleOutput",
    "from transformers import FLAX_MODEL_FOR_MASKED_LM_MAPPING, FlaxAutoModelForMaskedLM",
    "from transformers.utils import send_example_telemetry",
    "from transformers import modeling_flax_utils, modeling_flax_outputs",
    "from transformers.modeling_flax_utils import ACT2FN, FlaxPreTrainedModel",
    "from transformers.modeling_flax_outputs import FlaxBaseModelOutput, FlaxSeq2SeqLMOutput",
    "from transformers.modeling_flax_pytorch_utils import convert_pytorch_state_dict_to_flax",
    "from transformers import FlaxLogitsProcessorList, FlaxMinLengthLogitsProcessor",
    "from transformers.generation import FlaxLogitsProcessorList, FlaxGenerationMixin",
    "from transformers.generation.flax_utils import FlaxGreedySearchOutput",
    "from transformers.generation.flax_logits_process import FlaxTopKLogitsWarper",
    "from transformers.models.auto.modeling_flax_auto import FLAX_MODEL_MAPPING, FlaxAutoModel",
    "from transformers.models.auto import FlaxAutoModelForCausalLM",
    "from transformers.models.bert import FlaxBertModel, modeling_flax_bert",
    "from transformers import is_flax_available; assert is_flax_available()",
    "from transformers.utils import is_flax_available; assert is_flax_available()",
    "import transformers; transformers.modeling_flax_utils.FlaxPreTrainedModel",
    "from transformers import ViTFeatureExtractor as old; assert 'ViTImage' in old.__name__",
    "from transformers.models.clip import CLIPFeatureExtractor",
]


@pytest.mark.parametrize("line", LINES)
def test_imports_of_programs_work(line):
    exec(line, {})


def test_old_names_are_classes_of_hfseq():
    bert = importlib.import_module("transformers.models.bert.modeling_flax_bert")
    assert transformers.FlaxBertModel is hfseq.FlaxBertModel is bert.FlaxBertModel
    assert bert.FlaxBertForMaskedLMModule is hfseq.FlaxBertForMaskedLMModule
    assert bert.BertConfig is transformers.BertConfig
    assert transformers.modeling_flax_utils.FlaxPreTrainedModel is hfseq.FlaxPreTrainedModel
    assert "FlaxBertModule" in bert.__all__ and "FlaxBertModel" in dir(bert)
    assert not hasattr(bert, "__file__")


def test_imports_of_old_tests_work():
    from transformers.modeling_flax_utils import FLAX_WEIGHTS_INDEX_NAME
    from transformers.testing_utils import require_flax
    from transformers.utils import FLAX_WEIGHTS_NAME

    assert FLAX_WEIGHTS_NAME == "flax_model.msgpack"
    assert FLAX_WEIGHTS_INDEX_NAME == "flax_model.msgpack.index.json"
    assert require_flax(str) is str


@pytest.mark.filterwarnings("default")
def test_handlers_of_the_old_logger_receive_loading_messages(tmp_path):
    from transformers.testing_utils import CaptureLogger

    importlib.import_module("transformers.modeling_flax_utils")
    model = hfseq.FlaxBertForSequenceClassification(bert_config())
    model.save_pretrained(tmp_path)
    with CaptureLogger(logging.getLogger("transformers.modeling_flax_utils")) as captured:
        hfseq.FlaxAutoModelForSequenceClassification.from_pretrained(
            tmp_path, num_labels=42, ignore_mismatched_sizes=True
        )
    assert "newly initialized because the shapes did not match" in captured.out


def test_every_family_has_its_old_module():
    for name, family in paths.flax_classes().items():
        module = f"transformers.models.{family}.modeling_flax_{family}"
        if hasattr(transformers, name):
            assert getattr(importlib.import_module(module), name) is getattr(hfseq, name)


@pytest.fixture
def without_bert(monkeypatch):
    """Simulates an hfseq without FlaxBertModel and without the modules of BERT."""

    original = hfseq.__getattr__

    def resolve(name):
        if name.startswith("FlaxBert"):
            raise AttributeError(f"no {name}")
        return original(name)

    monkeypatch.setattr(hfseq, "__getattr__", resolve)
    monkeypatch.setattr(paths, "_hfseq_modules", lambda name: [])


@pytest.mark.parametrize(
    ("line", "message"),
    [
        ("from transformers import FlaxBertModel", "FlaxBertModel is a class of Transformers 4"),
        (
            "from transformers.models.bert import FlaxBertModel",
            "hfseq .* does not have yet. docs/flax_classes.md",
        ),
        ("from transformers import FlaxBertNonsense", "no equivalent of 'FlaxBertNonsense'"),
        (
            "from transformers.models.electra import modeling_flax_electra",
            "is a module of Transformers 4 that hfseq .* does not have yet",
        ),
        (
            "import transformers.models.electra.modeling_flax_electra",
            "is a module of Transformers 4 that hfseq .* does not have yet",
        ),
        (
            "from transformers.modeling_flax_utils import overwrite_call_docstrings",
            "no equivalent of 'overwrite_call_docstrings' of 'transformers.modeling_flax_utils'",
        ),
    ],
)
def test_missing_names_raise_an_import_error_with_the_reason(
    line, message, without_bert, monkeypatch
):
    electra = importlib.import_module("transformers.models.electra")
    monkeypatch.delitem(sys.modules, "transformers.models.electra.modeling_flax_electra", False)
    monkeypatch.delattr(electra, "modeling_flax_electra", False)
    with pytest.raises(ImportError, match=message):
        exec(line, {})
    assert not hasattr(transformers, "FlaxBertModel")
    with pytest.raises(AttributeError, match="does not have yet"):
        _ = transformers.FlaxBertModel


def test_an_unknown_name_suggests_a_similar_one():
    with pytest.raises(ImportError, match="did you mean 'FlaxBertModel'"):
        exec("from transformers import FlaxBretModel", {})
    with pytest.raises(ModuleNotFoundError, match="No module named"):
        exec("import transformers.models.zamba.modeling_flax_zamba", {})
    with pytest.raises(ImportError, match="NNX layers of `hfseq_plugins.bert.modeling`"):
        exec("from transformers.models.bert.modeling_flax_bert import FlaxBertLayer", {})
    with pytest.raises(AttributeError, match="has no attribute BertFeatureExtractor"):
        _ = transformers.BertFeatureExtractor


#: The configurations of the parts of each configuration with a restored class method.
PARTS = {
    "BarkConfig": "BarkSemanticConfig BarkCoarseConfig BarkFineConfig EncodecConfig",
    "Blip2Config": "Blip2VisionConfig Blip2QFormerConfig OPTConfig",
    "ClvpConfig": "ClvpEncoderConfig ClvpEncoderConfig ClvpDecoderConfig",
    "DFineConfig": "ResNetConfig",
    "DetrConfig": "ResNetConfig",
    "FlavaConfig": "FlavaImageConfig FlavaTextConfig FlavaMultimodalConfig "
    "FlavaImageCodebookConfig",
    "InstructBlipConfig": "InstructBlipVisionConfig InstructBlipQFormerConfig OPTConfig",
    "InstructBlipVideoConfig": "InstructBlipVideoVisionConfig InstructBlipVideoQFormerConfig "
    "OPTConfig",
    "Mask2FormerConfig": "SwinConfig",
    "MaskFormerConfig": "SwinConfig DetrConfig",
    "MusicgenConfig": "T5Config EncodecConfig MusicgenDecoderConfig",
    "MusicgenMelodyConfig": "T5Config EncodecConfig MusicgenMelodyDecoderConfig",
    "ParakeetCTCConfig": "ParakeetEncoderConfig",
    "RTDetrConfig": "ResNetConfig",
    "RTDetrV2Config": "ResNetConfig",
    "TvpConfig": "ResNetConfig",
}


@pytest.mark.slow
def test_class_methods_of_configurations_are_restored():
    restored = [row for rows in configurations.MODULES.values() for row in rows]
    assert {name for name, _, _ in restored} == {*PARTS, "PreTrainedConfig"}
    for name, method, fields in restored[2:]:
        parts = [getattr(transformers, part)() for part in PARTS[name].split()]
        config = getattr(getattr(transformers, name), method)(*parts)
        for field, part in zip(fields.split(), parts, strict=True):
            assert getattr(config, field).to_dict() == part.to_dict(), (name, field)


def test_a_clip_configuration_is_built_from_those_of_its_parts():
    text = transformers.CLIPTextConfig(hidden_size=32)
    vision = transformers.CLIPVisionConfig(hidden_size=48)
    config = transformers.CLIPConfig.from_text_vision_configs(text, vision, projection_dim=8)
    assert (config.text_config.hidden_size, config.vision_config.hidden_size) == (32, 48)
    assert config.projection_dim == 8
    same = transformers.CLIPConfig.from_text_vision_configs(vision_config=vision, text_config=text)
    assert same.vision_config.to_dict() == vision.to_dict()
    owl = transformers.OwlViTConfig.from_text_vision_configs({"hidden_size": 16}, {})
    assert owl.text_config.hidden_size == 16
    with pytest.raises(TypeError, match="missing a required argument: 'vision_config'"):
        transformers.CLIPConfig.from_text_vision_configs(text)


def test_tokenizers_and_extractors_return_jax_arrays():
    import jax
    import numpy as np

    batch = transformers.BatchEncoding({"input_ids": [[3, 4]]}, tensor_type="jax")
    assert isinstance(batch["input_ids"], jax.Array) and batch["input_ids"].dtype == "int32"
    extractor = transformers.Wav2Vec2FeatureExtractor()
    features = extractor(np.zeros(90), sampling_rate=16_000, return_tensors="jax")
    assert isinstance(features["input_values"], jax.Array)
    names = transformers.BatchFeature({"input_ids": [[3]], "names": ["a"]}, tensor_type="jax")
    assert names["names"] == ["a"] and isinstance(names["input_ids"], jax.Array)
    with pytest.raises(ValueError, match="jaxx is not a valid TensorType"):
        transformers.BatchEncoding({"input_ids": [[3, 4]]}, tensor_type="jaxx")
    with pytest.raises(ValueError, match="the rows of input_ids have different lengths"):
        transformers.BatchEncoding({"input_ids": [[3, 4], [5]]}, tensor_type="jax")


def test_models_are_attributes_of_nnx_modules():
    from flax import nnx

    class Classifier(nnx.Module):
        def __init__(self):
            self.encoder = hfseq.FlaxBertModel(bert_config(), _do_init=False)

    assert Classifier().encoder.config.model_type == "bert"


def test_install_is_idempotent():
    finders = list(sys.meta_path)
    paths.install()
    assert sys.meta_path == finders
    lazy = type(transformers).__getattr__
    assert lazy.__wrapped__ and not hasattr(lazy.__wrapped__, "__wrapped__")
    with pytest.raises(AttributeError, match="module transformers has no attribute nothing"):
        _ = transformers.nothing


def python(folder: Path, *arguments: str) -> subprocess.CompletedProcess:
    environment = {**os.environ, "PYTHONPATH": os.pathsep.join((str(ROOT), str(ROOT / "plugins")))}
    return subprocess.run(
        [sys.executable, *arguments], cwd=folder, env=environment, capture_output=True, text=True
    )


@pytest.mark.slow
@pytest.mark.parametrize(
    "order",
    [
        "import hfseq.v4, transformers",
        "import transformers, hfseq.v4",
        "from transformers.models.bert import BertConfig; import hfseq.v4; import transformers",
    ],
)
def test_the_order_of_imports_does_not_matter(order, tmp_path):
    code = (
        f"{order}\n"
        "from transformers import FlaxBertModel, is_flax_available\n"
        "from transformers.models.bert import FlaxBertModel as same\n"
        "from transformers.utils import is_flax_available\n"
        "print(same is FlaxBertModel is transformers.FlaxBertModel)"
    )
    process = python(tmp_path, "-W", "error", "-c", code)
    assert process.stdout == "True\n", process.stderr


@pytest.mark.slow
def test_a_second_import_of_transformers_has_the_names_too(tmp_path):
    # transformers imports itself again if an image processor needs a missing package
    code = (
        "import hfseq.v4, sys, transformers\n"
        "from transformers.utils.import_utils import direct_transformers_import\n"
        "direct_transformers_import(transformers.__path__[0])\n"
        "assert sys.modules['transformers'] is not transformers\n"
        "from transformers import FlaxBertModel; print(FlaxBertModel.__name__)"
    )
    process = python(tmp_path, "-c", code)
    assert process.stdout == "FlaxBertModel\n", process.stderr


@pytest.mark.slow
def test_transformers_is_unchanged_without_hfseq(tmp_path):
    process = python(tmp_path, "-c", "from transformers import FlaxBertModel")
    assert process.returncode == 1 and "cannot import name" in process.stderr


@pytest.mark.slow
def test_importing_transformers_after_hfseq_does_not_import_jax(tmp_path):
    code = "import hfseq.v4, transformers, sys; transformers.BertConfig; print(*sys.modules)"
    loaded = set(python(tmp_path, "-c", code).stdout.split())
    assert not {"jax", "flax", "hfseq.modeling.base"} & loaded


PROGRAM = """
import pickle, sys
import transformers

class Thing: pass

pickle.dumps(Thing())
print(sys.argv, __name__, __file__, __spec__, sys.path[0])

def fail():
    return 1 / 0

how = sys.argv[1]
if how == "exit":
    sys.exit(7)
if how == "interrupt":
    raise KeyboardInterrupt
if how == "crash":
    fail()
"""


@pytest.mark.slow
@pytest.mark.parametrize("how", ["end", "exit", "interrupt", "crash"])
def test_a_program_runs_as_python_runs_it(how, tmp_path):
    (tmp_path / "folder").mkdir()
    (tmp_path / "folder" / "program.py").write_text(PROGRAM)
    mine = python(tmp_path, "-m", "hfseq.v4", "folder/program.py", how, "--flag")
    plain = python(tmp_path, "folder/program.py", how, "--flag")
    assert (mine.stdout, mine.stderr) == (plain.stdout, plain.stderr)
    assert mine.returncode == plain.returncode


@pytest.mark.slow
def test_a_program_for_version_4_runs_unmodified_and_as_a_module(tmp_path):
    (tmp_path / "program.py").write_text(
        "import sys\n"
        "from transformers import BertConfig, FlaxBertModel\n"
        "config = BertConfig(vocab_size=9, hidden_size=4, num_hidden_layers=1,\n"
        "    num_attention_heads=1, intermediate_size=4)\n"
        "print(FlaxBertModel(config)([[1, 2]]).last_hidden_state.shape, sys.argv[1:])\n"
    )
    for how in (["program.py"], ["-m", "program"]):
        process = python(tmp_path, "-m", "hfseq.v4", *how, "--flag")
        assert process.stdout == "(1, 2, 4) ['--flag']\n", process.stderr


@pytest.mark.slow
def test_a_missing_program_is_an_error(tmp_path):
    (tmp_path / "wrong.py").write_text("a b\n")
    plain = python(tmp_path, "wrong.py")
    assert python(tmp_path, "-m", "hfseq.v4", "wrong.py").stderr == plain.stderr
    for arguments in ([], ["nowhere.py"]):
        process = python(tmp_path, "-m", "hfseq.v4", *arguments)
        assert process.returncode == 2 and "usage: python -m hfseq.v4" in process.stderr
    process = python(tmp_path, "-m", "hfseq.v4", "-m", "nowhere")
    assert process.returncode == 1 and "No module named nowhere" in process.stderr
    assert "usage" in python(tmp_path, "-m", "hfseq.v4", "--help").stdout
