#!/usr/bin/env bash
# Install the test dependencies and run the tests, a process for each core (WORKERS=0: one for all,
# as a debugger wants it); arguments go to pytest:
#
#     bash scripts/test.sh
#     bash scripts/test.sh -m slow --shard 1/4
#     bash scripts/test.sh tests/data -k packing
set -euo pipefail
cd "$(dirname "${BASH_SOURCE[0]}")/.."
source scripts/environment.sh

# The compilers for accelerators and the evaluation harness are large; what needs them is skipped
# where they are not there.
if [[ " $* " == *" -m slow "* ]]; then prepare test,aot,eval; else prepare test; fi
exec "$PYTHON" -m pytest -n "${WORKERS:-auto}" --dist loadfile "$@"
