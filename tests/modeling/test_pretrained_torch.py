"""from_pretrained of PyTorch's checkpoints."""

from __future__ import annotations

import numpy as np
import pytest

from hfseq_plugins.bert.modeling import FlaxBertForMaskedLM, FlaxBertModel
from tests.support import saved_bert
from tests.support.models import bert_config, roberta_config, trees_equal

model, saved = saved_bert.model, saved_bert.saved


@pytest.mark.slow
def test_pytorch_bin_is_loaded_with_and_without_from_pt(saved, model):
    torch = pytest.importorskip("torch")
    from safetensors.torch import load_file

    torch.save(load_file(saved / "model.safetensors"), saved / "pytorch_model.bin")
    (saved / "model.safetensors").unlink()
    loaded = FlaxBertForMaskedLM.from_pretrained(saved)
    assert trees_equal(loaded.params, model.params)
    with pytest.raises(OSError, match="from_flax=True"):
        FlaxBertForMaskedLM.from_pretrained(saved, from_flax=True)
    pair = FlaxBertForMaskedLM.from_pretrained(saved, from_pt=True, _do_init=False)
    assert trees_equal(pair[1], model.params)


def heads():
    from hfseq import plugins

    for name, config in (("bert", bert_config), ("roberta", roberta_config)):
        spec = plugins.load().architectures[name].target
        for task in spec.heads:
            slow = () if task in ("ForPreTraining", "ForMaskedLM") else pytest.mark.slow
            yield pytest.param(spec, task, config, id=f"{name}-{task}", marks=slow)


@pytest.mark.parametrize(("spec", "task", "config"), list(heads()))
def test_pytorch_checkpoints_survive_a_round_trip(spec, task, config, tmp_path):
    pytest.importorskip("torch")
    import transformers
    from safetensors.numpy import load_file

    cls = spec.load_head(task)
    config = config(is_decoder=task == "ForCausalLM")
    theirs = getattr(transformers, cls.torch_class_name())(config)
    theirs.save_pretrained(tmp_path / "theirs")
    loaded = cls.from_pretrained(tmp_path / "theirs", _do_init=True)
    loaded.save_pretrained(tmp_path / "ours")
    original = load_file(tmp_path / "theirs" / "model.safetensors")
    saved_again = load_file(tmp_path / "ours" / "model.safetensors")
    assert trees_equal(dict(sorted(saved_again.items())), dict(sorted(original.items())))
    theirs.save_pretrained(tmp_path / "shards", max_shard_size="20KB")
    assert (tmp_path / "shards" / "model.safetensors.index.json").is_file()
    assert trees_equal(cls.from_pretrained(tmp_path / "shards").params, loaded.params)


@pytest.mark.slow
@pytest.mark.parametrize("present", [True, False])
def test_pytorch_base_models_load_with_and_without_their_prefix(tmp_path, present):
    pytest.importorskip("torch")
    import transformers

    torch_model = transformers.BertForMaskedLM(bert_config())
    (torch_model if present else torch_model.bert).save_pretrained(tmp_path)
    expected = torch_model.bert.embeddings.word_embeddings.weight.detach().numpy()
    for cls in (FlaxBertModel, FlaxBertForMaskedLM):
        params = cls.from_pretrained(tmp_path).params
        table = params.get("bert", params)["embeddings"]["word_embeddings"]["embedding"]
        assert np.array_equal(table, expected)
