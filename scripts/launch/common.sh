# shellcheck shell=bash
# Sourced by the launch scripts. With DRY_RUN=1 they print their commands without running them.

run() {
    if [[ ${DRY_RUN:-} ]]; then
        printf '%q ' "$@" | sed 's/ $//'
        echo
    else
        "$@"
    fi
}

stop() {
    printf 'error: %s\n' "$*" >&2
    exit 2
}

# need NAME DESCRIPTION: exit with an error if the variable NAME is not set.
need() {
    if [[ -z ${!1:-} ]]; then stop "set $1 ($2), as in: $1=… bash $0"; fi
}

# Print the comment at the head of the script.
usage() {
    sed -n '2,/^[^#]/{/^#/s/^# \{0,1\}//p}' "$0"
}
