# Sourced by quickstart.sh and test.sh. `prepare EXTRAS` installs hfseq from this checkout with EXTRAS
# in a virtual environment (the active one, or .venv in the checkout, which is created if necessary)
# and sets $PYTHON to its interpreter, Python 3.11 or newer. Set PYTHON to select the interpreter.

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
    stop "hfseq requires Python 3.11 or newer, but ${PYTHON:-python3} is" \
        "$("${PYTHON:-python3}" --version 2>&1 || true): install it, or set PYTHON," \
        "PYTHON=/path/to/python3.11 bash $0"
}

find_environment() {
    local active=${VIRTUAL_ENV:-} base
    # Do not install into conda's base environment, which is shared.
    if [[ -z $active && ${CONDA_DEFAULT_ENV:-base} != base ]]; then active=${CONDA_PREFIX:-}; fi
    if [[ -n $active ]]; then
        PYTHON=$active/bin/python
        recent "$PYTHON" || stop "the active environment $active does not have Python 3.11 or newer:" \
            "deactivate it, or activate one that does"
        return
    fi
    if ! recent .venv/bin/python; then
        base=$(find_python)
        say "Creating a virtual environment in .venv with $("$base" --version)"
        "$base" -m venv --clear .venv || {
            rm -rf .venv
            stop "cannot create a virtual environment; on Debian and Ubuntu: apt install python3-venv"
        }
    fi
    PYTHON=.venv/bin/python
}

prepare() {
    local extras=$1 stamp state
    find_environment
    # Install once per state of pyproject.toml, so that the next start is fast and works offline.
    stamp=$("$PYTHON" -c 'import sys; print(sys.prefix)')/.hfseq-${extras//,/-}
    state="$PWD $(cksum <pyproject.toml)"
    if [[ $(cat "$stamp" 2>/dev/null) != "$state" ]]; then
        say "Installing hfseq[$extras] and its dependencies (a few minutes the first time)"
        "$PYTHON" -m pip install --disable-pip-version-check -qq --editable ".[$extras]"
        printf '%s\n' "$state" >"$stamp"
    fi
}
