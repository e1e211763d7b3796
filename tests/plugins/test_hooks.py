"""Each hook has an example in the documentation, and the example works."""

from __future__ import annotations

from types import SimpleNamespace

import pytest

from hfseq import plugins
from hfseq.errors import PluginError, UsageError
from hfseq.plugins import hookspecs, manager
from tests.support import plugin_files
from tests.support.plugin_files import write_documented_plugin

SPECS = [name for name, value in vars(hookspecs).items() if hasattr(value, "hfseq_spec")]
project = plugin_files.project


def test_ten_hooks_exist_and_are_known():
    assert sorted(SPECS) == sorted(manager.HOOKS)
    assert len(SPECS) == 10


@pytest.mark.parametrize("hook", SPECS)
def test_every_hook_is_documented_with_an_example_and_has_a_test(hook):
    assert f"def {hook}(" in write_documented_plugin(hook).read_text(encoding="utf-8")
    assert f"test_hook_{hook}" in globals()


def test_hook_register_architectures():
    loaded = plugins.load([write_documented_plugin("register_architectures")])
    spec = loaded.architectures.get("camembert")
    from transformers import CamembertConfig

    assert spec.load_config() is CamembertConfig
    assert spec.load_head("ForMaskedLM").__name__ == "FlaxRobertaForMaskedLM"
    assert spec.card.startswith("CamemBERT") and spec.plugin == "documented_register_architectures"
    with pytest.raises(UsageError, match="no 'ForCausalLM'; it has: ForMaskedLM"):
        spec.load_head("ForCausalLM")


def test_hook_register_objectives():
    import jax.numpy as jnp
    import numpy as np

    copying = plugins.load([write_documented_plugin("register_objectives")]).objectives.get(
        "copying"
    )
    objective = copying(None, None, None)

    def model(input_ids, attention_mask, params, dropout_rng, train, extra):
        return SimpleNamespace(logits=jnp.zeros((2, 3, 4))), extra

    ids, segments = np.array([[1, 2, 0]] * 2), np.array([[1, 1, 0]] * 2)
    rows = {"input_ids": ids, "segment_ids": segments, "valid": np.array([True, False])}
    batch = objective.collate(rows, None, 1)
    total, count, extra = objective.loss(model, {}, batch, None, False, {"codebook": 1})
    assert (float(total), int(count)) == (pytest.approx(2 * 1.3862944), 2)
    assert extra == {"extra": {"codebook": 1}, "totals": {}}
    assert objective.metrics({"loss": 4.0, "count": 2})["loss"] == 2.0


def test_hook_register_optimizers():
    import jax.numpy as jnp

    factory = plugins.load([write_documented_plugin("register_optimizers")]).optimizers.get(
        "ademamix"
    )
    transform = factory(
        lambda step: 0.1, SimpleNamespace(weight_decay=0.5), lambda params: {"w": False}
    )
    params = {"w": jnp.ones(2)}
    updates, _ = transform.update({"w": jnp.ones(2)}, transform.init(params), params)
    assert (updates["w"] < 0).all()


def test_hook_register_tokenizers(tmp_path):
    from hfseq.cli import tokenizer as command

    (tmp_path / "corpus.txt").write_text("en lov om norsk språk\n" * 20, encoding="utf-8")
    file = str(write_documented_plugin("register_tokenizers"))
    flags = ["--plugin", file, "--model_type", "opt", "--train_file", "corpus.txt"]
    assert command.main([*flags, "--vocab_size", "300", "--output_dir", "out"]) == 0
    from transformers import AutoTokenizer

    tokenizer = AutoTokenizer.from_pretrained("out")
    ids = tokenizer("en lov", "norsk")["input_ids"]
    assert [tokenizer.pad_token_id, tokenizer.eos_token_id, ids[0]] == [1, 2, 2]
    assert tokenizer.decode(ids) == "</s>en lov</s>norsk"
    assert tokenizer.model_max_length == 2048


def test_a_tokenizer_family_that_is_none_is_named():
    from hfseq.data.tokenizers import train_tokenizer

    with pytest.raises(UsageError, match="unknown tokenizer model type 'berta'.*mean 'bert'"):
        train_tokenizer([], "berta")
    plugins.load().tokenizers.add("mine", "me", "builtins:dict")
    with pytest.raises(PluginError, match="'mine' is <class 'dict'>.*Family"):
        train_tokenizer([], "mine")


def test_hook_register_attention():
    import numpy as np

    function = plugins.load([write_documented_plugin("register_attention")]).attention.get("cosine")
    x = np.random.default_rng(0).normal(size=(1, 3, 2, 4)).astype("float32")
    np.testing.assert_allclose(function(x, x, x), function(5 * x, x, x), rtol=1e-5)


def test_hook_register_precisions():
    recipe = plugins.load([write_documented_plugin("register_precisions")]).precisions.get(
        "bfloat16-careful"
    )()
    assert recipe.matches("encoder/layer/0/output/dense")
    assert not recipe.matches("encoder/layer/0/attention/self/query")


def test_hook_register_trackers(tmp_path):
    make = plugins.load([write_documented_plugin("register_trackers")]).trackers.get("csv")
    tracker = make(tmp_path, None, {})
    tracker.log({"train_loss": 1.5}, 3)
    tracker.close()
    assert (tmp_path / "metrics.csv").read_text().splitlines() == ["3,train_loss,1.5"]


def test_hook_fallback_architecture():
    loaded = plugins.load([write_documented_plugin("fallback_architecture")])
    spec = loaded.find_architecture("ibert", "ForMaskedLM", bridge=True)
    assert spec.load_head("ForMaskedLM").__name__ == "FlaxRobertaForMaskedLM"
    native = loaded.find_architecture("roberta", "ForMaskedLM", bridge="auto")
    assert native.plugin == "roberta"
    with pytest.raises(UsageError, match="unknown architecture 'ibert'.*--bridge"):
        loaded.find_architecture("ibert", "ForMaskedLM")


def test_hook_load_dataset(tmp_path):
    (tmp_path / "text").write_text("one\ntwo\n")
    loaded = plugins.load([write_documented_plugin("load_dataset")])
    splits = loaded.call_first("load_dataset", name="lines:text", arguments=None)
    assert splits["train"]["text"][:] == ["one", "two"]
    assert loaded.call_first("load_dataset", name="oscar", arguments=None) is None


def test_hook_model_card_sections():
    loaded = plugins.load([write_documented_plugin("model_card_sections")])
    sections = loaded.call_all("model_card_sections", context={"train_runtime": 7200})
    assert sections == ["## Energy\n\nAbout 0.6 kWh, at 300 W for 2.0 hours."]
