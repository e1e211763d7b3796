#!/usr/bin/env bash
# Validate and measure hfseq on this device: outputs and training compared with the CPU, tokens per
# second, memory, and FP8. This takes at most nine minutes on one H200. The exit code is 1 if a result
# is wrong. Arguments are passed to scripts/benchmarks/device.py:
#
#     bash scripts/validate_device.sh
#     bash scripts/validate_device.sh --only attention training
set -euo pipefail
cd "$(dirname "${BASH_SOURCE[0]}")/.."
source scripts/environment.sh

find_environment
exec "$PYTHON" scripts/benchmarks/device.py "$@"
