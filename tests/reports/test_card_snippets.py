"""The code in model cards runs."""

from __future__ import annotations

import pytest
from tokenizers import Tokenizer, models, pre_tokenizers
from transformers import PreTrainedTokenizerFast

import hfseq
from hfseq.reports import cards
from tests.support.models import bert_config


@pytest.mark.parametrize("task", ["ForTokenClassification", "ForQuestionAnswering"])
def test_tags_and_answers_are_printed_by_what_the_card_shows(task, tmp_path, capsys) -> None:
    config = bert_config(id2label={0: "O", 1: "B-PER"}, label2id={"O": 0, "B-PER": 1})
    getattr(hfseq, f"FlaxBert{task}")(config).save_pretrained(tmp_path)
    inner = Tokenizer(models.WordLevel({"[UNK]": 0, "Some": 1, "text": 2}, unk_token="[UNK]"))
    inner.pre_tokenizer = pre_tokenizers.Whitespace()
    PreTrainedTokenizerFast(tokenizer_object=inner, unk_token="[UNK]").save_pretrained(tmp_path)
    exec(cards.snippet(task, str(tmp_path), "np"), {})
    printed = capsys.readouterr().out
    assert printed.strip() or task == "ForQuestionAnswering"
    assert ("[('Some', " in printed) == (task == "ForTokenClassification")
