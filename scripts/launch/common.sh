# shellcheck shell=bash
# Sourced by the launch scripts. With DRY_RUN=1 they print their commands without running them.

# The project of gcloud commands. If it is empty, gcloud uses the project of its configuration.
# shellcheck disable=SC2034  # used by the scripts that source this file
project=${PROJECT:-${PROJECT_ID:-}}

run() {
    if [[ ${DRY_RUN:-} ]]; then
        printf '%q ' "$@" | sed 's/ $//'
        echo
    elif type "$1" &>/dev/null; then
        "$@"
    else
        stop "$1 is not installed"
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

# check_names NAME…: exit with an error if the value of a variable is not one word without special
# characters.
check_names() {
    local variable
    for variable in "$@"; do
        if [[ ${!variable:-} == -* || ${!variable:-} == *[![:alnum:]._:/@-]* ]]; then
            stop "$variable is '${!variable}': use letters, digits and . _ - : / @ only, without spaces"
        fi
    done
}

# no_arguments COMMAND ARGUMENT…: exit with an error if there are arguments.
no_arguments() {
    if [[ $# -gt 1 ]]; then stop "$1 takes no arguments, but got '${*:2}' (see --help)"; fi
}

# Set IMAGE to the name of the image in Google's Artifact Registry, unless it is set.
set_image() {
    check_names IMAGE PROJECT PROJECT_ID REPO_NAME REGION IMAGE_NAME TAG
    if [[ ${IMAGE:-} ]]; then return; fi
    PROJECT_ID=${PROJECT_ID:-${PROJECT:-}}
    need PROJECT_ID "the Google Cloud project of the image, unless IMAGE is its full name"
    need REPO_NAME "an Artifact Registry repository: gcloud artifacts repositories create"
    IMAGE=${REGION:-us-central1}-docker.pkg.dev/$PROJECT_ID/$REPO_NAME/${IMAGE_NAME:-hfseq}:${TAG:-latest}
}

# Print the comment at the head of the script.
usage() {
    sed -n '2,/^[^#]/{/^#/s/^# \{0,1\}//p}' "$0"
}
