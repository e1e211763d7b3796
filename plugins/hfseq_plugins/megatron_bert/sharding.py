"""How MegatronBERT is split over devices: as BERT, with norms of another name."""

from hfseq_plugins.bert.sharding import RULES as BERT

RULES = [*BERT, (r"/ln/(scale|bias)$", "vector")]
