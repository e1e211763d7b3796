"""Every configuration key that the PyTorch class of a family reads is read here, or irrelevant."""

from __future__ import annotations

import ast
import functools
import re
from pathlib import Path

import jax
import numpy as np
import pytest

import hfseq
from hfseq import plugins
from hfseq.errors import UsageError
from tests.support import models
from tests.support.models import close, ids
from tests.support.torch_counterparts import tensors, torch_counterpart

transformers = pytest.importorskip("transformers")
SOURCE = Path(transformers.__file__).parent
PACKAGE = Path(hfseq.__file__).parent
PLUGINS = Path(plugins.__file__).parents[2] / "plugins" / "hfseq_plugins"

#: Model types whose PyTorch code has another name.
MODULES = {"clip_text_model": "clip", "clip_vision_model": "clip", "gemma3_text": "gemma3"}

#: Keys without an effect on outputs at inference, or of heads that hfseq does not have.
IRRELEVANT = {
    # how the result is computed
    *("_attn_implementation", "_is_quantized", "chunk_size_feed_forward"),
    *(
        "deterministic_flash_attn",
        "pretraining_tp",
        "slow_but_exact",
        "sparse_prediction",
        "use_associative_scan",
        "use_mambapy",
        "use_sliding_window",
    ),
    # the losses of the PyTorch classes, and noise in training
    *("problem_type", "ctc_loss_reduction", "ctc_zero_infinity", "diversity_loss_weight"),
    *("contrastive_logits_temperature", "semantic_loss_ignore_index", "sparse_pred_ignore_index"),
    *("auxiliary_loss_weight", "apply_spec_augment", "layerdrop"),
    *(f"mask_{axis}_{name}" for axis in ("time", "feature") for name in ("length", "prob")),
    *(f"mask_{axis}_min_masks" for axis in ("time", "feature")),
    # attributes of configuration classes that repeat others
    *("get_text_config", "n_embd", "n_layer", "num_feat_extract_layers", "num_hidden_layers"),
    "true_hidden_size",
    # the default of layer_types in EXAONE 4; Mamba-2 stores the rank of Mamba and does not use it
    *("sliding_window_pattern", "time_step_rank"),
    # images of Gemma 3
    *("image_token_id", "mm_tokens_per_image", "layer_norm_eps"),
    # classification heads of T5, double heads of GPT-2, masked images, segmentation, backbones,
    # sequence classification and x-vectors of wav2vec 2.0
    *("classifier_dropout", "hidden_dropout", "encoder_stride", "add_fpn", "apply_layernorm"),
    *("auxiliary_channels", "auxiliary_concat_input", "auxiliary_num_convs", "out_indices"),
    *(
        "pool_scales",
        "reshape_hidden_states",
        "return_class_token",
        "use_auxiliary_head",
        "classifier_proj_size",
    ),
    *("tdnn_dilation", "tdnn_dim", "tdnn_kernel", "use_weighted_layer_sum", "xvector_output_dim"),
    *(f"summary_{part}" for part in ("activation", "type", "use_proj", "proj_to_labels")),
    *(f"summary_{place}_dropout" for place in ("first", "last")),
    # PyTorch's class for the type of attention in chunks, which no family here has
    "attention_chunk_size",
}


def keys_read_by(path: Path, class_prefix: str = "") -> set[str]:
    """Returns the names X in ``config.X``, ``self.config.X`` and ``getattr(config, "X")``.

    ``class_prefix`` selects classes of the file, and is empty for all of its code.
    """

    def is_config(node: ast.AST) -> bool:
        name = node.id if isinstance(node, ast.Name) else getattr(node, "attr", "")
        return name.endswith("config")

    tree, keys = ast.parse(path.read_text()), set()
    if class_prefix:
        tree.body = [n for n in tree.body if getattr(n, "name", "").startswith(class_prefix)]
    for node in ast.walk(tree):
        if isinstance(node, ast.Attribute) and is_config(node.value):
            keys.add(node.attr)
        if isinstance(node, ast.Call) and getattr(node.func, "id", "") in ("getattr", "hasattr"):
            if len(node.args) > 1 and is_config(node.args[0]):
                keys.add(getattr(node.args[1], "value", ""))
    return {key for key in keys if isinstance(key, str) and key}


def words(folder: Path, visited: set[Path]) -> set[str]:
    """Returns all words in the files of a family and of the siblings that it imports."""
    found: set[str] = set()
    visited.add(folder)
    for path in folder.rglob("*.py"):
        text = path.read_text()
        found.update(re.findall(r"\w+", text))
        siblings = re.findall(r"hfseq_plugins\.(\w+)", text)
        for names in re.findall(r"from hfseq_plugins import ([\w, ]+)", text):
            siblings += re.findall(r"\w+", names)
        for name in siblings:
            if (PLUGINS / name).is_dir() and PLUGINS / name not in visited:
                found |= words(PLUGINS / name, visited)
    return found


@functools.cache
def words_of_core() -> frozenset[str]:
    folders = [PACKAGE / name for name in ("nn", "modeling", "generation", "checkpoints")]
    found = set().union(*(words(folder, set()) for folder in folders))
    return frozenset(found | set(re.findall(r"\w+", (PLUGINS / "common.py").read_text())))


def families() -> list[str]:
    return [
        entry.target.model_type
        for entry in plugins.load().architectures.entries()
        if (PLUGINS / folder_of(entry.target.model_type)).is_dir()
        and torch_code(entry.target.model_type).is_file()
    ]


def folder_of(model_type: str) -> str:
    name = model_type.replace("-", "_")
    return "clip" if name.startswith("clip") else name


def torch_code(model_type: str) -> Path:
    name = MODULES.get(model_type, model_type.replace("-", "_"))
    folder = "data2vec" if name.startswith("data2vec") else name
    return SOURCE / "models" / folder / f"modeling_{name}.py"


@pytest.mark.parametrize("model_type", families())
def test_configuration_keys_of_pytorch_are_read(model_type):
    known = words(PLUGINS / folder_of(model_type), set()) | words_of_core() | IRRELEVANT
    assert sorted(keys_read_by(torch_code(model_type)) - known) == []


@pytest.mark.parametrize(
    ("module", "classes"), [("masking_utils.py", ""), ("modeling_layers.py", "Generic")]
)
def test_configuration_keys_of_shared_pytorch_code_are_read(module, classes):
    everything = set().union(*(words(PLUGINS / folder_of(name), set()) for name in families()))
    unread = keys_read_by(SOURCE / module, classes) - everything - words_of_core() - IRRELEVANT
    assert sorted(unread) == []


#: Classes and configurations. The default suite runs the first.
DECODERS = {
    "LlamaModel": models.llama_config,
    "Gemma3TextModel": models.gemma3_text_config,
    "MistralModel": models.mistral_config,
    "Qwen2Model": models.qwen2_config,
    "SmolLM3Model": models.smollm3_config,
    "GPT2Model": models.gpt2_config,
    "GPTJModel": models.gptj_config,
    "GPTNeoModel": models.gpt_neo_config,
    "OPTModel": models.opt_config,
    "BloomModel": models.bloom_config,
    "XGLMModel": models.xglm_config,
    "ModernBertDecoderModel": models.modernbert_decoder_config,
    "CLIPTextModel": models.clip_text_model_config,
    "EsmModel": functools.partial(models.esm_config, is_decoder=True),
    "BertModel": functools.partial(models.bert_config, is_decoder=True),
}


@pytest.mark.parametrize(
    "name", ["LlamaModel", *(pytest.param(n, marks=pytest.mark.slow) for n in [*DECODERS][1:])]
)
def test_attention_is_bidirectional_with_is_causal_false(name, tmp_path):
    pytest.importorskip("torch")
    class_name = f"Flax{name}" if hasattr(hfseq, f"Flax{name}") else "FlaxGemma3Model"
    model = getattr(hfseq, class_name)(DECODERS[name](is_causal=False))
    input_ids = ids() % 20 + 4
    mask = np.ones_like(input_ids)
    mask[1, -4:] = 0
    theirs = torch_counterpart(model, tmp_path, name)
    expected = theirs(**tensors(input_ids=input_ids, attention_mask=mask))[0].detach().numpy()
    loaded = getattr(hfseq, class_name).from_pretrained(tmp_path)
    output = np.asarray(jax.jit(loaded)(input_ids, attention_mask=mask)[0])
    assert close(output * mask[..., None], expected * mask[..., None])


def test_part_of_a_composite_model_is_bidirectional_with_is_causal_false(tmp_path):
    pytest.importorskip("torch")
    config = models.encoder_decoder_config()
    config.decoder.is_causal = False
    model = hfseq.FlaxEncoderDecoderModel(config)
    inputs = {"input_ids": ids(), "decoder_input_ids": ids(length=6, seed=1)}
    mask = {"decoder_attention_mask": np.ones((2, 6), np.int32)}
    expected = torch_counterpart(model, tmp_path)(**tensors(**inputs, **mask))[0].detach().numpy()
    assert close(jax.jit(model)(**inputs, **mask)[0], expected)


@pytest.mark.parametrize("name", ["llama", "bart"])
def test_models_with_is_causal_false_do_not_generate(name):
    classes = {"llama": "FlaxLlamaForCausalLM", "bart": "FlaxBartForConditionalGeneration"}
    config = getattr(models, f"{name}_config")(is_causal=False)
    with pytest.raises(UsageError, match="is_causal"):
        getattr(hfseq, classes[name])(config).generate(ids(), max_new_tokens=2)


@pytest.mark.slow
@pytest.mark.parametrize("summary_type", ["first", "last", "mean", "cls_index"])
@pytest.mark.parametrize("name", ["Electra", "RoFormer"])
def test_summaries_of_multiple_choice(name, summary_type, tmp_path):
    pytest.importorskip("torch")
    config = getattr(models, f"{name.lower()}_config")(summary_type=summary_type)
    model = getattr(hfseq, f"Flax{name}ForMultipleChoice")(config)
    theirs = torch_counterpart(model, tmp_path)
    choices = ids()[None]
    expected = theirs(**tensors(input_ids=choices)).logits.detach().numpy()
    assert close(model(choices).logits, expected)


def test_unsupported_summary_is_refused():
    config = models.electra_config(summary_type="attn")
    with pytest.raises(UsageError, match="summary_type='attn'"):
        hfseq.FlaxElectraForMultipleChoice(config)
