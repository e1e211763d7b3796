"""The import paths of Transformers 4 after ``import hfseq``, and programs that run as they are."""

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
from hfseq.v4 import paths
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
]


@pytest.mark.parametrize("line", LINES)
def test_an_import_of_a_program_works(line):
    exec(line, {})


def test_the_old_names_are_hfseqs_classes():
    bert = importlib.import_module("transformers.models.bert.modeling_flax_bert")
    assert transformers.FlaxBertModel is hfseq.FlaxBertModel is bert.FlaxBertModel
    assert bert.FlaxBertForMaskedLMModule is hfseq.FlaxBertForMaskedLMModule
    assert bert.BertConfig is transformers.BertConfig
    assert transformers.modeling_flax_utils.FlaxPreTrainedModel is hfseq.FlaxPreTrainedModel
    assert "FlaxBertModule" in bert.__all__ and "FlaxBertModel" in dir(bert)
    assert not hasattr(bert, "__file__")


def test_what_old_tests_import_is_there():
    from transformers.modeling_flax_utils import FLAX_WEIGHTS_INDEX_NAME
    from transformers.testing_utils import require_flax
    from transformers.utils import FLAX_WEIGHTS_NAME

    assert FLAX_WEIGHTS_NAME == "flax_model.msgpack"
    assert FLAX_WEIGHTS_INDEX_NAME == "flax_model.msgpack.index.json"
    assert require_flax(str) is str


@pytest.mark.filterwarnings("default")
def test_who_listens_to_the_old_logger_hears_what_loading_says(tmp_path):
    from transformers.testing_utils import CaptureLogger

    importlib.import_module("transformers.modeling_flax_utils")
    model = hfseq.FlaxBertForSequenceClassification(bert_config())
    model.save_pretrained(tmp_path)
    with CaptureLogger(logging.getLogger("transformers.modeling_flax_utils")) as heard:
        hfseq.FlaxAutoModelForSequenceClassification.from_pretrained(
            tmp_path, num_labels=42, ignore_mismatched_sizes=True
        )
    assert "newly initialized because the shapes did not match" in heard.out


def test_every_family_that_is_here_has_its_module():
    for name, family in paths.flax_classes().items():
        place = f"transformers.models.{family}.modeling_flax_{family}"
        if hasattr(transformers, name):
            assert getattr(importlib.import_module(place), name) is getattr(hfseq, name)


@pytest.fixture
def without_bert(monkeypatch):
    """hfseq as if it had no FlaxBertModel and no module of BERT."""

    def resolve(name):
        if name.startswith("FlaxBert"):
            raise AttributeError(f"no {name}")
        return getattr(hfseq, name)

    monkeypatch.setattr(paths, "_resolve", resolve)
    monkeypatch.setattr(paths, "_homes", lambda name: [])


@pytest.mark.parametrize(
    ("line", "message"),
    [
        ("from transformers import FlaxBertModel", "FlaxBertModel is a class of Transformers 4"),
        (
            "from transformers.models.bert import FlaxBertModel",
            "hfseq .* does not have yet; docs/flax_classes.md",
        ),
        ("from transformers import FlaxBertNonsense", "nothing for 'FlaxBertNonsense'"),
        (
            "from transformers.models.electra import modeling_flax_electra",
            "is a module of Transformers 4 that hfseq .* does not have yet",
        ),
        (
            "import transformers.models.electra.modeling_flax_electra",
            "is a module of Transformers 4 that hfseq .* does not have yet",
        ),
        (
            "from transformers.modeling_flax_utils import overwrite_call_docstring",
            "nothing for 'overwrite_call_docstring' of 'transformers.modeling_flax_utils'",
        ),
    ],
)
def test_what_is_not_here_is_an_import_error_that_says_so(line, message, without_bert, monkeypatch):
    electra = importlib.import_module("transformers.models.electra")
    monkeypatch.delitem(sys.modules, "transformers.models.electra.modeling_flax_electra", False)
    monkeypatch.delattr(electra, "modeling_flax_electra", False)
    with pytest.raises(ImportError, match=message):
        exec(line, {})
    assert not hasattr(transformers, "FlaxBertModel")
    with pytest.raises(AttributeError, match="does not have yet"):
        _ = transformers.FlaxBertModel


def test_an_unknown_name_is_met_with_the_nearest():
    with pytest.raises(ImportError, match="did you mean 'FlaxBertModel'"):
        exec("from transformers import FlaxBretModel", {})
    with pytest.raises(ModuleNotFoundError, match="No module named"):
        exec("import transformers.models.zamba.modeling_flax_zamba", {})


def test_install_is_idempotent():
    before = list(sys.meta_path)
    paths.install(hfseq.__getattr__)
    assert sys.meta_path == before
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
        "import hfseq, transformers",
        "import transformers, hfseq",
        "from transformers.models.bert import BertConfig; import hfseq; import transformers",
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
    done = python(tmp_path, "-W", "error", "-c", code)
    assert done.stdout == "True\n", done.stderr


@pytest.mark.slow
def test_a_second_transformers_has_the_names_too(tmp_path):
    # transformers imports itself anew where an image processor needs what is not installed
    code = (
        "import hfseq, sys, transformers\n"
        "from transformers.utils.import_utils import direct_transformers_import\n"
        "direct_transformers_import(transformers.__path__[0])\n"
        "assert sys.modules['transformers'] is not transformers\n"
        "from transformers import FlaxBertModel; print(FlaxBertModel.__name__)"
    )
    done = python(tmp_path, "-c", code)
    assert done.stdout == "FlaxBertModel\n", done.stderr


@pytest.mark.slow
def test_nothing_is_touched_where_hfseq_is_not_imported(tmp_path):
    done = python(tmp_path, "-c", "from transformers import FlaxBertModel")
    assert done.returncode == 1 and "cannot import name" in done.stderr


@pytest.mark.slow
def test_importing_transformers_after_hfseq_loads_no_plugin_and_no_jax(tmp_path):
    code = "import hfseq, transformers, sys; transformers.BertConfig; print(*sys.modules)"
    loaded = set(python(tmp_path, "-c", code).stdout.split())
    assert not {"jax", "pluggy", "hfseq.plugins.manager", "hfseq_plugins"} & loaded


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
def test_a_program_for_version_4_runs_unedited_and_as_a_module(tmp_path):
    (tmp_path / "program.py").write_text(
        "import sys\n"
        "from transformers import BertConfig, FlaxBertModel\n"
        "config = BertConfig(vocab_size=9, hidden_size=4, num_hidden_layers=1,\n"
        "    num_attention_heads=1, intermediate_size=4)\n"
        "print(FlaxBertModel(config)([[1, 2]]).last_hidden_state.shape, sys.argv[1:])\n"
    )
    for how in (["program.py"], ["-m", "program"]):
        done = python(tmp_path, "-m", "hfseq.v4", *how, "--flag")
        assert done.stdout == "(1, 2, 4) ['--flag']\n", done.stderr


@pytest.mark.slow
def test_a_program_that_is_not_one(tmp_path):
    (tmp_path / "wrong.py").write_text("a b\n")
    plain = python(tmp_path, "wrong.py")
    assert python(tmp_path, "-m", "hfseq.v4", "wrong.py").stderr == plain.stderr
    for arguments in ([], ["nowhere.py"]):
        done = python(tmp_path, "-m", "hfseq.v4", *arguments)
        assert done.returncode == 2 and "usage: python -m hfseq.v4" in done.stderr
    done = python(tmp_path, "-m", "hfseq.v4", "-m", "nowhere")
    assert done.returncode == 1 and "No module named nowhere" in done.stderr
    assert "usage" in python(tmp_path, "-m", "hfseq.v4", "--help").stdout
