"""What ``import hfseq`` changes in other libraries: nothing except one finder."""

from __future__ import annotations

import os
import subprocess
import sys
import textwrap
from pathlib import Path

ROOT = Path(__file__).resolve().parent.parent

SNAPSHOT = """
import logging, sys, warnings
import huggingface_hub, tokenizers, transformers
from huggingface_hub.utils import _http
from transformers.models.auto import configuration_auto, modeling_auto
import transformers.utils.generic
from transformers import PreTrainedConfig  # the lazy package remembers names

PACKAGES = ("transformers", "huggingface_hub", "tokenizers", "logging", "warnings")

def snapshot():
    state = {"meta_path": list(sys.meta_path), "filters": list(warnings.filters)}
    loggers = {None: logging.root, **logging.Logger.manager.loggerDict}
    for name, logger in loggers.items():
        if isinstance(logger, logging.Logger) and not str(name).startswith("hfseq"):
            state["logger", name] = (logger.level, list(logger.handlers), logger.propagate)
    for name, module in list(sys.modules.items()):
        if name.partition(".")[0] in PACKAGES:
            for key, value in list(vars(module).items()):
                state[name, key] = id(value)
                if isinstance(value, type) and value.__module__ == name:
                    for attribute, member in vars(value).items():
                        state[name, key, attribute] = id(member)
    mappings = [m for m in vars(modeling_auto).values() if hasattr(m, "_extra_content")]
    for number, mapping in enumerate([configuration_auto.CONFIG_MAPPING, *mappings]):
        names = sorted(getattr(key, "__name__", key) for key in mapping._extra_content)
        state["mapping", number] = (type(mapping._extra_content), names)
    return state

def changes(before, after):
    keys = before.keys() | after.keys()
    return {key for key in keys if before.get(key) != after.get(key)}
"""


def run(code: str, folder: Path, *flags: str) -> str:
    command = [sys.executable, *flags, "-c", textwrap.dedent(code)]
    environment = os.environ | {"PYTHONPATH": f"{ROOT}:{ROOT / 'plugins'}"}
    process = subprocess.run(command, capture_output=True, text=True, cwd=folder, env=environment)
    assert process.returncode == 0, process.stderr
    return process.stdout


def test_import_changes_only_the_registered_architectures(tmp_path):
    """All Auto modules are imported before, so the finder is not needed either."""
    code = """
    before = snapshot()
    import hfseq
    after = snapshot()
    names = {key: set(after[key][1]) - set(before[key][1])
             for key in changes(before, after) if key[0] == "mapping"}
    assert names, "no architecture was registered"
    print(sorted(key for key in changes(before, after) if key[0] != "mapping"))
    print(sorted(names["mapping", 0]))
    """
    others, architectures = run(SNAPSHOT + textwrap.dedent(code), tmp_path).splitlines()
    assert others == "[]"
    assert architectures == "['fp8_encoder', 'new', 'vq_transformer', 'wmt_transformer']"


def test_import_before_transformers_adds_one_finder_that_removes_itself(tmp_path):
    code = """
    import sys
    before = list(sys.meta_path)
    import hfseq
    assert not {"jax", "transformers", "huggingface_hub"} & set(sys.modules)
    added = [finder for finder in sys.meta_path if finder not in before]
    print(len(added), added[0].__class__.__module__)
    from transformers import AutoConfig
    print(type(AutoConfig.for_model("vq_transformer")).__name__)
    from transformers.models.auto import modeling_auto
    print(any("hfseq" in type(finder).__module__ for finder in sys.meta_path), "jax" in sys.modules)
    """
    lines = run(code, tmp_path).splitlines()
    assert lines == ["1 hfseq.plugins.transformers_hook", "VQTransformerConfig", "False False"]


def test_a_plain_tokenizer_decodes_and_old_names_need_hfseq_v4(tmp_path):
    """``generate`` returns NumPy sequences, which Transformers decodes without a patch."""
    code = """
    import numpy as np
    import transformers
    from transformers import AutoTokenizer
    from hfseq.data.tokenizers import train_tokenizer
    train_tokenizer(["a word and another"], "gpt2", vocab_size=270, output_dir="words")
    tokenizer = AutoTokenizer.from_pretrained("words")
    sequences = np.array(tokenizer(["a word", "a word"])["input_ids"])
    texts = tokenizer.batch_decode(sequences)
    assert texts == [tokenizer.decode(row.tolist()) for row in sequences]
    assert len(texts) == 2 and texts[0].startswith("a word")
    names = ("FlaxBertModel", "is_flax_available")
    assert not any(hasattr(transformers, name) for name in names)
    import hfseq.v4
    assert all(hasattr(transformers, name) for name in names)
    """
    run(code, tmp_path)


def test_downloads_keep_the_client_factory(tmp_path):
    code = """
    import os
    os.environ |= {"HF_ENDPOINT": "http://127.0.0.1:9", "HF_HUB_OFFLINE": "0"}
    from huggingface_hub.utils import _http
    factory = _http._GLOBAL_CLIENT_FACTORY
    from hfseq.checkpoints import hub
    hub.time.sleep = lambda seconds: None
    try:
        hub.resolve_file("nobody/nothing", "config.json")
    except OSError as error:
        print(_http._GLOBAL_CLIENT_FACTORY is factory)
    """
    assert run(code, tmp_path).split() == ["True"]


def test_a_plugin_file_in_the_current_directory_is_not_executed(tmp_path):
    (tmp_path / "hfseqfile.py").write_text("print('executed')")
    code = """
    import logging
    logging.basicConfig(format="%(message)s")
    import hfseq
    from transformers import AutoTokenizer
    hfseq.plugins.load()
    """
    command = [sys.executable, "-c", textwrap.dedent(code)]
    environment = os.environ | {"PYTHONPATH": f"{ROOT}:{ROOT / 'plugins'}"}
    done = subprocess.run(command, capture_output=True, text=True, cwd=tmp_path, env=environment)
    assert done.returncode == 0 and "executed" not in done.stdout
    assert "hfseqfile.py in the current directory is not loaded" in done.stderr
    assert "--plugin hfseqfile.py" in done.stderr and "HFSEQ_PLUGIN_FILES" in done.stderr
    environment["HFSEQ_PLUGIN_FILES"] = "hfseqfile.py"
    command[2] = "import hfseq; hfseq.plugins.load()"
    done = subprocess.run(command, capture_output=True, text=True, cwd=tmp_path, env=environment)
    assert "executed" in done.stdout and "is not loaded" not in done.stderr
