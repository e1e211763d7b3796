#!/usr/bin/env python
r"""Train one configuration with hfseq and with PyTorch, and compare their losses.

    python scripts/compare_pytorch_training.py --objective clm --output_dir comparison \
        --model_type gpt2 --tokenizer_name my-gpt2 --train_file train.jsonl \
        --validation_file valid.jsonl --block_size 128 --max_steps 500 --learning_rate 1e-3

The flags are those of the run script of the objective (mlm, clm, span_mlm, denoising,
translation); dropout is disabled. PyTorch starts from hfseq's initial weights and uses the same
batches, masks and learning rates. The results are `pytorch_comparison.json` and `.png` in the
output directory: the differences of the first losses, the final losses of hfseq and of PyTorch
with several seeds, and the throughput of both in tokens per second.
"""

import argparse
import sys
from pathlib import Path

from hfseq.training import script

sys.path.insert(0, str(Path(__file__).resolve().parent / "benchmarks"))


def main() -> int:
    """Parse the flags, then train. JAX and PyTorch are imported after parsing."""
    parser = argparse.ArgumentParser(
        description=__doc__,
        formatter_class=argparse.RawDescriptionHelpFormatter,
        allow_abbrev=False,
    )
    objectives = ("mlm", "clm", "span_mlm", "denoising", "translation")
    parser.add_argument("--objective", choices=objectives, default="mlm", help="training objective")
    parser.add_argument(
        "--torch_seeds",
        type=int,
        default=3,
        help="number of PyTorch runs; the first uses the seed of the hfseq run",
    )
    parser.add_argument(
        "--parity_steps",
        type=int,
        default=100,
        help="number of initial steps whose losses are compared",
    )
    options, training_flags = parser.parse_known_args()
    if options.torch_seeds < 1 or options.parity_steps < 1:
        parser.error("--torch_seeds and --parity_steps must be at least 1")
    from hfseq.training.arguments import parse

    arguments = parse(training_flags, description=__doc__, objective=options.objective)

    import against_pytorch

    first = arguments.training.seed
    seeds = range(first, first + options.torch_seeds)
    result = against_pytorch.compare(arguments, options.objective, seeds, options.parity_steps)
    print(against_pytorch.report(result))
    return 0


if __name__ == "__main__":
    sys.exit(script.run(main))
