#!/usr/bin/env python
r"""Measure hfseq beside its peers: every suite, one command, the same on a CPU and on a GPU.

    python scripts/benchmarks/run.py                        # every suite
    python scripts/benchmarks/run.py train generation       # two of them
    python scripts/benchmarks/run.py train --only 'GPT-2.*512' --rounds 10
    python scripts/benchmarks/run.py --quick                # small models, minutes on a CPU
    python scripts/benchmarks/run.py --list                 # the rows; runs nothing
    python scripts/benchmarks/run.py train --peers hfseq --against ../before --output try

It needs a checkout, Python 3.11 and what a row needs: a row whose packages (or compiler) are
missing says so, and the others run. Tables go to docs/benchmarks/tables.md between markers, raw
values to run_SUITE.json and pictures next to it; with --output elsewhere, and with --quick nowhere
unless --output says so. Exit code 1 if a contestant failed, if results differ, or if nothing ran.
"""

import sys

import harness

if __name__ == "__main__":
    sys.exit(harness.main(about=__doc__))
