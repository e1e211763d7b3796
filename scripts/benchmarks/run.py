#!/usr/bin/env python
r"""Runs the benchmark suites, which compare hfseq with PyTorch, on a CPU or a GPU.

    python scripts/benchmarks/run.py                        # all suites
    python scripts/benchmarks/run.py train generation       # two suites
    python scripts/benchmarks/run.py train --only 'GPT-2.*512' --rounds 10
    python scripts/benchmarks/run.py --quick                # small models, minutes on a CPU
    python scripts/benchmarks/run.py --list                 # list the rows without running them
    python scripts/benchmarks/run.py train --peers hfseq --against ../before --output try

Requires a checkout, Python 3.11, and the packages that each row of a table needs. If packages or
the compiler of a row are missing, the row says so, and the other rows are measured. Tables are
written between markers to docs/benchmarks/tables.md, raw values to
docs/benchmarks/run_SUITE.json, and plots to the same folder. --output selects another folder.
--quick writes files only with --output. The exit code is 1 if a measured program failed, if its
results differ from those of PyTorch, or if nothing was measured.
"""

import sys

import harness

if __name__ == "__main__":
    sys.exit(harness.main(description=__doc__))
