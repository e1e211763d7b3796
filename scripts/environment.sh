# Sourced by quickstart.sh and test.sh: `prepare EXTRAS` sets $PYTHON to an interpreter of at least
# Python 3.11 in a virtual environment (the active one, else .venv in the checkout, made if need be)
# in which hfseq is installed from this checkout with EXTRAS. Set PYTHON to choose the interpreter.

say() { printf '\n==> %s\n' "$*"; }

stop() {
    printf 'error: %s\n' "$*" >&2
    exit 1
}

recent() { "$1" -c 'import sys; sys.exit(sys.version_info < (3, 11))' 2>/dev/null; }

find_python() {
    local name
    for name in ${PYTHON:-python3 python3.13 python3.12 python3.11 python}; do
        if recent "$name"; then
            command -v "$name"
            return
        fi
    done
    stop "hfseq needs Python 3.11 or newer, but ${PYTHON:-python3} is" \
        "$("${PYTHON:-python3}" --version 2>&1 || true): install one, or name it," \
        "PYTHON=/path/to/python3.11 bash $0"
}

find_environment() {
    local active=${VIRTUAL_ENV:-} base
    # conda's base environment is everybody's: leave it alone.
    if [[ -z $active && ${CONDA_DEFAULT_ENV:-base} != base ]]; then active=${CONDA_PREFIX:-}; fi
    if [[ -n $active ]]; then
        PYTHON=$active/bin/python
        recent "$PYTHON" || stop "the active environment $active has no Python 3.11 or newer:" \
            "deactivate it, or activate one that has"
        return
    fi
    if ! recent .venv/bin/python; then
        base=$(find_python)
        say "Making a virtual environment in .venv with $("$base" --version)"
        "$base" -m venv --clear .venv || {
            rm -rf .venv
            stop "no virtual environment could be made; on Debian and Ubuntu: apt install python3-venv"
        }
    fi
    PYTHON=.venv/bin/python
}

prepare() {
    local extras=$1 stamp wanted
    find_environment
    # Installed once for each state of setup.cfg, so that running again is quick and works offline.
    stamp=$("$PYTHON" -c 'import sys; print(sys.prefix)')/.hfseq-${extras//,/-}
    wanted="$PWD $(cksum <setup.cfg)"
    if [[ $(cat "$stamp" 2>/dev/null) != "$wanted" ]]; then
        say "Installing hfseq[$extras] and what it needs (some minutes the first time)"
        "$PYTHON" -m pip install --disable-pip-version-check -qq --editable ".[$extras]"
        printf '%s\n' "$wanted" >"$stamp"
    fi
}
