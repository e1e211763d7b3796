"""Fixtures of a tiny BERT model and of a directory that contains it.

Test modules import them with ``model, saved = saved_bert.model, saved_bert.saved``.
"""

from __future__ import annotations

import logging

import pytest

from hfseq_plugins.bert.modeling import FlaxBertForMaskedLM
from tests.support.models import bert_config


@pytest.fixture(scope="module")
def model():
    return FlaxBertForMaskedLM(bert_config())


@pytest.fixture
def saved(model, tmp_path):
    model.save_pretrained(tmp_path / "saved")
    return tmp_path / "saved"


def capture_warnings(caplog):
    return caplog.at_level(logging.WARNING, logger="hfseq.modeling")
