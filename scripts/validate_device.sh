#!/usr/bin/env bash
# Is hfseq right and fast on this device? Parity, training against the CPU, tokens/s, memory, FP8;
# at most nine minutes on one H200, exit code 1 where a result is wrong. Arguments go to device.py:
#
#     bash scripts/validate_device.sh
#     bash scripts/validate_device.sh --only attention training
set -euo pipefail
cd "$(dirname "${BASH_SOURCE[0]}")/.."
source scripts/environment.sh

find_environment
exec "$PYTHON" scripts/benchmarks/device.py "$@"
