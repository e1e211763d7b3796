#!/usr/bin/env bash
# Install hfseq and train a masked language model, in a few minutes on two cores:
#
#     bash scripts/quickstart.sh
#
# All files are written to .venv and quickstart/ (or $HFSEQ_QUICKSTART_DIR). The script can be run
# again. The training text is part of Python: its language reference and docstrings.
set -euo pipefail
cd "$(dirname "${BASH_SOURCE[0]}")/.."
source scripts/environment.sh

folder=${HFSEQ_QUICKSTART_DIR:-quickstart}
prepare cpu

exec "$PYTHON" -m hfseq.cli quickstart --output_dir "$folder" "$@"
