"""What the page on model classes says is what the code has."""

from __future__ import annotations

import ast
import inspect
import re
from pathlib import Path

import pytest
from flax import nnx

from hfseq import FlaxPreTrainedModel, nn
from hfseq.nn.sharding import TACTICS

DOCS = Path(__file__).resolve().parent.parent / "docs"
PAGE = (DOCS / "model_class.md").read_text(encoding="utf-8")


def section(title: str) -> str:
    return re.split(r"^#+ ", PAGE.split(f" {title}\n", 1)[1], maxsplit=1, flags=re.M)[0]


def test_every_class_attribute_is_documented_with_its_default():
    rows = re.findall(r"^\| `(\w+)` \| `(.*?)` \|", section("The model class"), flags=re.M)
    described = {
        name: ast.literal_eval(value.replace('r"', '"').replace("\\", "\\\\"))
        for name, value in rows
    }
    assert described == {name: getattr(FlaxPreTrainedModel, name) for name in described}
    declared = {
        name
        for kind in FlaxPreTrainedModel.__mro__
        for name, annotation in vars(kind).get("__annotations__", {}).items()
        if "ClassVar" in str(annotation) and not name.startswith("_")
    }
    assert declared <= described.keys()


def test_documented_call_arguments_match_the_families():
    described = set(re.findall(r"`(\w+)`", "".join(re.findall(r"^\| (.*?) \|", PAGE, flags=re.M))))
    call = inspect.signature(FlaxPreTrainedModel.__call__).parameters
    for name in ("input_ids", "attention_mask", "token_type_ids", "position_ids"):
        assert name in call and name in described
    from hfseq_plugins.bert.modeling import FlaxBertForMaskedLM, FlaxBertModel

    taken = set(inspect.signature(FlaxBertModel.module_class.__call__).parameters)
    assert {"segment_ids", "rngs", "output_attentions", "output_hidden_states"} <= taken & described
    assert FlaxBertForMaskedLM(bert(), _do_init=False).accepts("masked_positions")


def bert():
    from tests.support.models import bert_config

    return bert_config()


def test_methods_to_override_and_names_of_layers_and_tactics_exist():
    methods = section("The model class").split("Methods to override")[1]
    for name in set(re.findall(r"`(?:self\.)?(\w+)(?:\(.*?\))?`", methods)):
        assert callable(getattr(FlaxPreTrainedModel, name)), name
    for name in set(re.findall(r"(?<![\w.])nn\.(\w+)", PAGE)) - {"Module", "outputs"}:
        assert hasattr(nn, name), name
    for name in set(re.findall(r"nnx\.(\w+)", PAGE)):
        assert hasattr(nnx, name), name
    assert set(re.findall(r"`(\w+)`", section("Sharding"))) <= TACTICS.keys()


@pytest.mark.parametrize("page", ["plugins.md", "generation.md", "testing.md", "../README.md"])
def test_page_is_linked(page):
    assert "model_class.md" in (DOCS / page).read_text(encoding="utf-8")


def test_page_lists_all_examples():
    linked = set(re.findall(r"\]\((examples/[\w./-]+)\)", PAGE))
    files = {
        p.relative_to(DOCS).as_posix()
        for p in (DOCS / "examples").rglob("*.py")
        if "register" in p.read_text(encoding="utf-8")
    }
    assert linked == files
