"""Values of configurations: all stock configurations are valid, and infinities are saved."""

from __future__ import annotations

import pytest
import transformers
from transformers.models.auto.configuration_auto import CONFIG_MAPPING

from hfseq.checkpoints.config import check_numbers, write_config
from hfseq.errors import ConfigError
from tests.support import models


@pytest.mark.parametrize("name", ["DebertaV2Config", "LlavaConfig", "ViltConfig", "Mamba2Config"])
def test_negative_defaults_are_not_sizes(name):
    check_numbers(getattr(transformers, name)(), name)


@pytest.mark.slow
def test_no_stock_configuration_is_refused():
    checked = 0
    for name in CONFIG_MAPPING:
        try:
            config = CONFIG_MAPPING[name]()
        except Exception:  # some have required arguments
            continue
        check_numbers(config, name)
        checked += 1
    assert checked > 500


def test_negative_sizes_are_named():
    config = models.bert_config(intermediate_size=-3)
    with pytest.raises(ConfigError, match="intermediate_size is -3"):
        check_numbers(config, "bert")


def test_infinities_in_lists_are_saved(tmp_path):
    config = transformers.Mamba2Config(time_step_limit=(0.0, float("inf")))
    write_config(config, tmp_path)
    loaded = transformers.Mamba2Config.from_pretrained(tmp_path)
    assert list(loaded.time_step_limit) == [0.0, float("inf")]
