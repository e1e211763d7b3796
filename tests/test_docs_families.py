"""Every registered architecture has its page, which names its classes, options and parameters."""

from __future__ import annotations

import re
from pathlib import Path

import pytest

from hfseq import plugins
from hfseq.nn import trees
from tests.support import models

FAMILIES = Path(__file__).resolve().parent.parent / "docs" / "families"
NAMES = [
    "albert", "bart", "beit", "bert", "big_bird", "blenderbot", "blenderbot-small", "bloom",
    "camembert", "clip", "clip_text_model", "clip_vision_model", "cohere", "cohere2",
    "data2vec-text", "deberta-v2", "dinov2", "dinov3_vit", "distilbert", "electra",
    "encoder-decoder", "ernie", "ernie4_5", "esm", "eurobert", "exaone4", "falcon", "falcon_mamba",
    "fp8_encoder", "gemma", "gemma2", "gemma3_text", "glm", "glm4", "gpt2", "gpt_neo", "gpt_neox",
    "gpt_oss", "gptj", "granite", "granitemoe", "gte", "helium", "hubert", "jina_embeddings_v3",
    "llama", "longt5", "m2m_100", "mamba2", "marian", "mbart", "megatron-bert", "ministral",
    "mistral", "mixtral", "mobilebert", "modernbert", "modernbert-decoder", "mpnet", "mt5", "new",
    "nomic_bert", "olmo", "olmo2", "olmo3", "olmoe", "opt", "pegasus", "phi", "phi3", "qwen2",
    "qwen2_moe", "qwen3", "qwen3_moe", "regnet", "resnet", "roberta", "roberta-prelayernorm",
    "roformer", "seed_oss", "siglip", "siglip2", "siglip2_text_model", "siglip2_vision_model",
    "siglip_text_model", "siglip_vision_model", "smollm3", "speech-encoder-decoder", "stablelm",
    "starcoder2", "t5", "umt5", "vision-encoder-decoder", "vision-text-dual-encoder", "vit",
    "vq_transformer", "wav2vec2", "wavlm", "whisper", "wmt_transformer", "xglm", "xlm-roberta",
    "xlm-roberta-xl",
]  # fmt: skip
#: What is in the trees of their parts is on the pages of those.
PAIRS = ("encoder_decoder", "speech_encoder_decoder", "vision_encoder_decoder")
#: No script trains them: their pages show a step.
PICTURES = (
    "beit",
    "clip",
    "dinov2",
    "dinov3_vit",
    "hubert",
    "regnet",
    "resnet",
    "siglip",
    "siglip2",
    "vision_text_dual_encoder",
    "vit",
    "wav2vec2",
    "wavlm",
    "whisper",
    *PAIRS,
)
SECTIONS = [
    "Classes",
    "Configuration",
    "Train",
    "Use",
    "Convert",
    "Parameters",
    "Sharding",
    "Notes",
]
WIDE = {
    "whisper": {"tie_word_embeddings": False, "use_weighted_layer_sum": True},
    "beit": {"use_absolute_position_embeddings": True, "use_shared_relative_position_bias": True},
    "bert": {"add_cross_attention": True, "is_decoder": True},
    "deberta-v2": {"share_att_key": False, "type_vocab_size": 2, "embedding_size": 20},
    "fp8_encoder": {"hidden_act": "geglu", "head": "te_flatten", "flatten_length": 8},
    "megatron-bert": {"add_cross_attention": True, "is_decoder": True},
    "gpt2": {"add_cross_attention": True},
    "t5": {"feed_forward_proj": "gated-gelu"},
    "marian": {"tie_word_embeddings": False},
    "vq_transformer": {"absolute_positions": True, "head_bias": True},
    "wmt_transformer": {
        "attention": "differential",
        "positions": "learned",
        "logits_via_embedding": False,
    },
}


@pytest.fixture(autouse=True, scope="module")
def only_our_plugins():
    """Unloads the plugins that other tests have loaded."""
    plugins.unload()
    yield
    plugins.unload()


def text_of(name: str) -> str:
    return (FAMILIES / f"{page_of(name)}.md").read_text(encoding="utf-8")


def page_of(name: str) -> str:
    return plugins.load().architectures.get(name).plugin


def test_every_registered_architecture_has_a_page():
    assert sorted(plugins.load().architectures) == NAMES
    assert sorted(page.stem for page in FAMILIES.glob("*.md")) == sorted({*map(page_of, NAMES)})


def test_pages_have_all_sections_in_order():
    for page in FAMILIES.glob("*.md"):
        sections = re.findall(r"^## (.+)$", page.read_text(encoding="utf-8"), flags=re.M)
        assert sections == SECTIONS, page.stem


def test_pages_name_every_class_and_its_auto_class():
    for name in NAMES:
        text, spec = text_of(name), plugins.load().architectures.get(name)
        for task in spec.heads:
            kind = spec.load_head(task)
            start = f"| `{kind.__name__}`"
            row = next((line for line in text.splitlines() if line.startswith(start)), "")
            chosen = {"Model": "none"}.get(task, f"`{task}`")
            assert (chosen if task in plugins.TASKS else "–") in row, kind
            if kind.torch_class_name() != kind.__name__.removeprefix("Flax"):
                assert f"`{kind.torch_class_name()}`" in text, kind


def test_options_that_a_page_explains_are_options():
    from transformers import GenerationConfig

    configs: dict[str, list[object]] = {}
    for spec in map(plugins.load().architectures.get, NAMES):
        configs.setdefault(spec.plugin, [GenerationConfig()]).append(spec.load_config()())
    for page, owners in configs.items():
        text = (FAMILIES / f"{page}.md").read_text(encoding="utf-8")
        section = text.split("## Configuration")[1].split("\n## ")[0]
        for cell in re.findall(r"^\| ([^|]+) \|", section, flags=re.M):
            for option in re.findall(r"`(\w+)`", cell):
                names = [option]
                if page == "bart":  # "`encoder_` and `decoder_` `layers`"
                    names += [f"encoder_{option}", f"{option}layers"]
                known = any(hasattr(owner, name) for owner in owners for name in names)
                assert known, f"{page}: {option}"


@pytest.mark.slow
@pytest.mark.parametrize("name", NAMES)
def test_every_part_of_the_parameter_tree_is_in_the_sketch(name):
    spec = plugins.load().architectures.get(name)
    sketch = set(re.findall(r"\w+", text_of(name).split("## Parameters")[1].split("\n## ")[0]))
    if name == "roberta":  # which refers to BERT
        sketch |= set(re.findall(r"\w+", text_of("bert").split("## Parameters")[1]))
    sketch |= {f"{part}_embeddings" for part in ("word", "position", "token_type", "task_type")}
    config = getattr(models, f"{name.replace('-', '_')}_config")(**WIDE.get(name, {}))
    for task in spec.heads:
        model = spec.load_head(task)(config, _do_init=False)
        for path in trees.flatten(model.abstract_params):
            path = path[:1] if page_of(name) in PAIRS else path
            absent = {part for part in path if not part.isdigit()} - sketch
            assert not absent, ("/".join(path), absent)


def test_pages_show_how_to_train_and_how_to_convert():
    for page in FAMILIES.glob("*.md"):
        text = page.read_text(encoding="utf-8")
        script = "```python" if page.stem in PICTURES else r"python scripts/run_\w+_flax\.py"
        assert re.search(script, text.split("## Train")[1].split("\n## ")[0]), page.stem
        convert = text.split("## Convert")[1].split("\n## ")[0]
        assert "safe_serialization=False" in convert, page.stem
        assert "from transformers import" in convert, page.stem
