#!/usr/bin/env python
r"""Measure the latency and throughput of a BERT-like model in float32 and bfloat16.

    python scripts/run_bert_flax.py --batch_size 1
    python scripts/run_bert_flax.py --precision bfloat16
    python scripts/run_bert_flax.py --model_name_or_path google-bert/bert-base-uncased \
        --text "One sentence." --json result.json

The default model is BERT-base with random weights, on random tokens. With `--precision bfloat16`,
both precisions run alternately, and their outputs are compared. The runs take at most about two
minutes (`--time_limit`). No XLA_FLAGS are needed.
"""

import sys
from pathlib import Path

from hfseq.training import script

sys.path.insert(0, str(Path(__file__).resolve().parent / "benchmarks"))


def main() -> int:
    """Parse the flags, then measure. jax is imported after the flags have been validated."""
    import inference

    from hfseq.training.arguments import parse_flags

    (arguments,) = parse_flags((inference.InferenceArguments,), sys.argv[1:], __doc__)
    inference.run(arguments)
    return 0


if __name__ == "__main__":
    sys.exit(script.run(main))
