#!/usr/bin/env bash
# Install the lowest and the highest versions of the dependencies that pyproject.toml allows, each into
# a separate environment under VERSIONS_DIR (default: a temporary directory), and run tests there. The
# first argument selects one of them (default: both). Further arguments are tests. By default, tests run
# that together use every dependency:
#
#     bash scripts/check_versions.sh
#     bash scripts/check_versions.sh lowest
#     bash scripts/check_versions.sh highest tests
#     bash scripts/check_versions.sh audit
#
# "audit" checks the highest versions for known vulnerabilities with pip-audit, which needs access to
# its online service.
set -euo pipefail
cd "$(dirname "${BASH_SOURCE[0]}")/.."
source scripts/environment.sh

CORE=(
    tests/checkpoints/test_weights.py tests/checkpoints/test_checkpoint_files.py tests/modeling/test_pretrained.py
    tests/modeling/test_auto.py tests/checkpoints/test_hub.py tests/checkpoints/test_storage.py tests/reports/test_plots.py
    tests/test_metrics.py tests/data/test_sources.py tests/data/test_store.py
    tests/data/test_tokenization.py tests/data/test_tokenizers.py tests/data/test_parallel.py
    tests/training/test_tracking.py tests/training/test_loop.py tests/training/test_optimizers.py
    tests/plugins/test_bert.py
    tests/generation/test_generate.py
)

which=${1:-both}
[[ $# -gt 0 ]] && shift
[[ $# -gt 0 ]] && CORE=("$@")
folder=${VERSIONS_DIR:-$(mktemp -d)}
base=$(find_python)
"$base" -m venv "$folder/tools"
"$folder/tools/bin/python" -m pip install -qq --disable-pip-version-check uv
uv=$folder/tools/bin/uv

# make lowest|highest: create the environment. "lowest" applies to the dependencies in pyproject.toml,
# but not to the dependencies of these packages.
make() {
    say "Installing the $1 versions into $folder/$1"
    "$base" -m venv --clear "$folder/$1"
    local resolution=highest
    [[ $1 == lowest ]] && resolution=lowest-direct
    "$uv" pip install -q --python "$folder/$1/bin/python" --resolution "$resolution" --editable .
    # Packages that only the tests use are not constrained.
    "$uv" pip install -q --python "$folder/$1/bin/python" pytest pytest-xdist sentencepiece \
        Babel num2words tensorboard jsonschema "setuptools>=77"
    "$uv" pip freeze --python "$folder/$1/bin/python" | sort >"$folder/$1.txt"
}

check() {
    make "$1"
    say "Testing with the $1 versions ($folder/$1.txt)"
    HFSEQ_TEST_CACHE=$folder/$1-cache "$folder/$1/bin/python" -m pytest \
        -n "${WORKERS:-auto}" --dist loadfile -q "${CORE[@]}"
}

case $which in
lowest | highest) check "$which" ;;
both)
    check lowest
    check highest
    ;;
audit)
    make highest
    "$folder/tools/bin/python" -m pip install -qq --disable-pip-version-check pip-audit
    grep -v '^-e\|^hfseq' "$folder/highest.txt" >"$folder/audited.txt"
    "$folder/tools/bin/pip-audit" -r "$folder/audited.txt" --no-deps --disable-pip
    ;;
*) stop "'$which': expected lowest, highest, both or audit" ;;
esac
