"""Logits processors and warpers, called as ``(input_ids, scores, cur_len)``."""

from hfseq.generation.processors.base import (
    FlaxLogitsProcessor,
    FlaxLogitsProcessorList,
    FlaxLogitsWarper,
)
from hfseq.generation.processors.cleaning import (
    FlaxInfNanRemoveLogitsProcessor,
    FlaxLogitNormalization,
)
from hfseq.generation.processors.lengths import (
    FlaxExponentialDecayLengthPenalty,
    FlaxForcedBOSTokenLogitsProcessor,
    FlaxForcedEOSTokenLogitsProcessor,
    FlaxForceTokensLogitsProcessor,
    FlaxMinLengthLogitsProcessor,
    FlaxMinNewTokensLengthLogitsProcessor,
)
from hfseq.generation.processors.repetition import (
    FlaxEncoderNoRepeatNGramLogitsProcessor,
    FlaxEncoderRepetitionPenaltyLogitsProcessor,
    FlaxNoRepeatNGramLogitsProcessor,
    FlaxRepetitionPenaltyLogitsProcessor,
)
from hfseq.generation.processors.tokens import (
    FlaxNoBadWordsLogitsProcessor,
    FlaxSequenceBiasLogitsProcessor,
    FlaxSuppressTokensAtBeginLogitsProcessor,
    FlaxSuppressTokensLogitsProcessor,
)
from hfseq.generation.processors.warpers import (
    FlaxEpsilonLogitsWarper,
    FlaxEtaLogitsWarper,
    FlaxMinPLogitsWarper,
    FlaxTemperatureLogitsWarper,
    FlaxTopHLogitsWarper,
    FlaxTopKLogitsWarper,
    FlaxTopPLogitsWarper,
    FlaxTypicalLogitsWarper,
)
from hfseq.generation.processors.whisper import FlaxWhisperTimeStampLogitsProcessor

__all__ = [
    "FlaxEncoderNoRepeatNGramLogitsProcessor",
    "FlaxEncoderRepetitionPenaltyLogitsProcessor",
    "FlaxEpsilonLogitsWarper",
    "FlaxEtaLogitsWarper",
    "FlaxExponentialDecayLengthPenalty",
    "FlaxForceTokensLogitsProcessor",
    "FlaxForcedBOSTokenLogitsProcessor",
    "FlaxForcedEOSTokenLogitsProcessor",
    "FlaxInfNanRemoveLogitsProcessor",
    "FlaxLogitNormalization",
    "FlaxLogitsProcessor",
    "FlaxLogitsProcessorList",
    "FlaxLogitsWarper",
    "FlaxMinLengthLogitsProcessor",
    "FlaxMinNewTokensLengthLogitsProcessor",
    "FlaxMinPLogitsWarper",
    "FlaxNoBadWordsLogitsProcessor",
    "FlaxNoRepeatNGramLogitsProcessor",
    "FlaxRepetitionPenaltyLogitsProcessor",
    "FlaxSequenceBiasLogitsProcessor",
    "FlaxSuppressTokensAtBeginLogitsProcessor",
    "FlaxSuppressTokensLogitsProcessor",
    "FlaxTemperatureLogitsWarper",
    "FlaxTopHLogitsWarper",
    "FlaxTopKLogitsWarper",
    "FlaxTopPLogitsWarper",
    "FlaxTypicalLogitsWarper",
    "FlaxWhisperTimeStampLogitsProcessor",
]
