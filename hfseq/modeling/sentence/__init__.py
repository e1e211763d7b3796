"""Retrieval models: bi-encoders, cross-encoders, sparse encoders and multi-vector encoders.

The models read and write the files of sentence-transformers. There is one Python module per model
type. It contains a configuration, which describes the computation, and the class that users call:

- :mod:`~hfseq.modeling.sentence.bi_encoder`: One vector per text.
- :mod:`~hfseq.modeling.sentence.cross_encoder`: Scores of pairs of texts.
- :mod:`~hfseq.modeling.sentence.sparse_encoder`: One weight per vocabulary entry (SPLADE).
- :mod:`~hfseq.modeling.sentence.multi_vector_encoder`: One vector per token (ColBERT).
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from hfseq.modeling.sentence.bi_encoder import SentenceConfig, SentenceEncoder
from hfseq.modeling.sentence.config import MODULES_KEY, ModuleWeights, RetrievalConfig
from hfseq.modeling.sentence.cross_encoder import CrossEncoder, CrossEncoderConfig, LogitScore
from hfseq.modeling.sentence.directory import SentenceDirectory
from hfseq.modeling.sentence.encoder import (
    RetrievalModel,
    TextEncoder,
    saved_kind,
    unknown_kind,
)
from hfseq.modeling.sentence.modules import Dense
from hfseq.modeling.sentence.multi_vector_encoder import (
    MultiVectorConfig,
    MultiVectorEncoder,
    QueryExpansion,
    random_projection,
)
from hfseq.modeling.sentence.pooling import POOLING_MODES, l2_normalize, pool
from hfseq.modeling.sentence.sparse_encoder import SparseConfig, SparseEncoder, StaticQueryEncoder
from hfseq.modeling.sentence.texts import TokenizedTexts

__all__ = [
    "MODULES_KEY",
    "POOLING_MODES",
    "CrossEncoder",
    "CrossEncoderConfig",
    "Dense",
    "LogitScore",
    "ModuleWeights",
    "MultiVectorConfig",
    "MultiVectorEncoder",
    "QueryExpansion",
    "RetrievalConfig",
    "RetrievalModel",
    "SentenceConfig",
    "SentenceDirectory",
    "SentenceEncoder",
    "SparseConfig",
    "SparseEncoder",
    "StaticQueryEncoder",
    "TextEncoder",
    "TokenizedTexts",
    "l2_normalize",
    "pool",
    "random_projection",
    "read_config",
    "saved_kind",
]


def read_config(source: str, download: Mapping[str, Any]) -> RetrievalConfig | None:
    """Reads the sentence-transformers files of a model of any type.

    Args:
        source: A directory or repository.
        download: Options of downloads.

    Returns:
        The settings, or `None` if there is no modules.json.

    Raises:
        CheckpointError: The model type or a module is not supported, or a file is missing or not
            valid.
    """
    directory = SentenceDirectory.read(source, download)
    if not directory.modules:
        return None
    if directory.model_type not in RetrievalModel.kinds:
        raise unknown_kind(directory)
    return RetrievalModel.kinds[directory.model_type].config_class.from_directory(directory)
