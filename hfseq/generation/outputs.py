"""What ``generate`` returns."""

from __future__ import annotations

import dataclasses
from typing import Any

from hfseq.outputs import FlaxModelOutput


@dataclasses.dataclass
class FlaxGreedySearchOutput(FlaxModelOutput):
    """Tokens of greedy search.

    ``sequences`` is (batch, max_length): the prompt, the new tokens, then ``pad_token_id``. With
    ``output_scores`` and ``output_logits``, ``scores`` and ``logits`` are (steps, batch,
    vocabulary): after and before the processors, zeros after the last step.
    """

    sequences: Any = None
    scores: Any = None
    logits: Any = None


@dataclasses.dataclass
class FlaxSampleOutput(FlaxModelOutput):
    """Sampled tokens; fields as in :class:`FlaxGreedySearchOutput`.

    There are ``num_return_sequences`` rows for each row of the input, next to each other.
    """

    sequences: Any = None
    scores: Any = None
    logits: Any = None


@dataclasses.dataclass
class FlaxBeamSearchOutput(FlaxModelOutput):
    """The best beams, best first, ``num_return_sequences`` rows for each row of the input.

    ``scores`` (batch * num_return_sequences,) are, as in Transformers 4, the scores of the beams:
    the sum of log-probabilities divided by ``length ** length_penalty``; ``sequences_scores`` is
    PyTorch's name for the same. With ``output_scores`` and ``output_logits``: ``step_scores`` and
    ``logits`` (steps, batch * num_beams, vocabulary), which PyTorch calls ``scores`` and
    ``logits``, and ``beam_indices`` (batch * num_return_sequences, steps), the row of each step
    that a token was chosen from, -1 after the end.
    """

    sequences: Any = None
    scores: Any = None
    sequences_scores: Any = None
    step_scores: Any = None
    logits: Any = None
    beam_indices: Any = None
