#!/usr/bin/env bash
# Install the test dependencies and run the tests, one process per core (WORKERS=0: a single process,
# for a debugger). Arguments are passed to pytest:
#
#     bash scripts/test.sh
#     bash scripts/test.sh -m slow --shard 1/4
#     bash scripts/test.sh tests/data -k packing
set -euo pipefail
cd "$(dirname "${BASH_SOURCE[0]}")/.."
source scripts/environment.sh

# The compilers for accelerators and the evaluation harness are large. Tests that need them are skipped
# if they are not installed.
if [[ " $* " == *" -m slow "* ]]; then prepare test,aot,eval; else prepare test; fi
# Other processes of the run use the bytecode of the modules that one has compiled.
unset PYTHONDONTWRITEBYTECODE
# The order of the files is that of tests/conftest.py.
exec "$PYTHON" -m pytest -n "${WORKERS:-auto}" --dist loadfile --no-loadscope-reorder "$@"
