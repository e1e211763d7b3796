#!/usr/bin/env python
r"""Train one configuration with hfseq and with PyTorch, and compare their losses.

    python scripts/compare_pytorch_training.py --objective clm --output_dir comparison \
        --model_type gpt2 --tokenizer_name my-gpt2 --train_file train.jsonl \
        --validation_file valid.jsonl --block_size 128 --max_steps 500 --learning_rate 1e-3

The flags are those of the run script of the objective (mlm, clm, span_mlm, denoising,
translation); dropout is switched off. PyTorch starts from hfseq's initial weights and sees the same
batches, masks and learning rates. `pytorch_comparison.json` and `.png` lie in the output directory
afterwards: the differences of the first losses, the final loss beside those of PyTorch for several
seeds, and the tokens a second of both.
"""

import argparse
import sys
from pathlib import Path

from hfseq.training import script

sys.path.insert(0, str(Path(__file__).resolve().parent / "benchmarks"))


def main() -> int:
    """Parse the flags, then train: jax and torch are imported only after that."""
    parser = argparse.ArgumentParser(
        description=__doc__,
        formatter_class=argparse.RawDescriptionHelpFormatter,
        allow_abbrev=False,
    )
    kinds = ("mlm", "clm", "span_mlm", "denoising", "translation")
    parser.add_argument("--objective", choices=kinds, default="mlm", help="what is trained")
    parser.add_argument(
        "--torch_seeds", type=int, default=3, help="runs of PyTorch; the first has the run's seed"
    )
    parser.add_argument("--parity_steps", type=int, default=100, help="first losses to compare")
    own, rest = parser.parse_known_args()
    if own.torch_seeds < 1 or own.parity_steps < 1:
        parser.error("--torch_seeds and --parity_steps: give a number of at least 1")
    from hfseq.training.arguments import parse

    arguments = parse(rest, description=__doc__, objective=own.objective)

    import against_pytorch

    first = arguments.training.seed
    seeds = range(first, first + own.torch_seeds)
    result = against_pytorch.compare(arguments, own.objective, seeds, own.parity_steps)
    print(against_pytorch.report(result))
    return 0


if __name__ == "__main__":
    sys.exit(script.run(main))
