#!/usr/bin/env bash
# Create, use and delete a TPU VM or a TPU pod slice from your own machine.
#
#     bash scripts/launch/tpu.sh bucket     create a bucket for data and runs
#     bash scripts/launch/tpu.sh create     create the VM or slice
#     bash scripts/launch/tpu.sh install    install hfseq on all hosts and mount SHARE
#     bash scripts/launch/tpu.sh secrets    copy HF_TOKEN and WANDB_API_KEY of this shell
#     bash scripts/launch/tpu.sh run scripts/run_mlm_flax.py --output_dir /mnt/hfseq/run …
#                                           start a script on all hosts
#     bash scripts/launch/tpu.sh log        show the output of host WORKER
#     bash scripts/launch/tpu.sh ssh        open a shell on host WORKER. Further arguments are passed to
#                                           `gcloud … ssh`: `ssh -- -L 6006:localhost:6006` forwards a
#                                           port
#     bash scripts/launch/tpu.sh stop       save and stop the run
#     bash scripts/launch/tpu.sh delete     delete the VM or slice
#
# Environment variables and their defaults:
#
# PROJECT           the Google Cloud project; default PROJECT_ID, otherwise the project that gcloud is
#                   configured to use
# TPU_NAME          hfseq
# ZONE              europe-west4-a
# TPU_TYPE          v3-32; a type up to -8 (v3-8) has one host, a larger type has several
# TPU_VERSION       tpu-ubuntu2204-base
# SPOT=1            create a preemptible VM or slice
# REPOSITORY        no default; URL of a git repository with hfseq, for `install`
# SHARE             no default; HOST:/PATH of an NFS share (Filestore). `install` mounts it at /mnt/hfseq
#                   on all hosts. Several hosts require it, because all of them write the checkpoints of
#                   a run, and also if the run is stored in a bucket. A single host does not.
# TFDS_DATA_DIR     no default; if it is set, `run` sets it on the hosts
# WANDB_PROJECT     no default; if it is set, `run` sets it on the hosts
# ENV               no default; names of further variables of this shell that `run` sets on the hosts,
#                   separated by spaces. Secrets are copied as a file and not printed.
# BUCKET            no default; name of the bucket
# WORKER            0
# DRY_RUN=1         print the commands without running them
set -euo pipefail
cd "$(dirname "${BASH_SOURCE[0]}")/../.."
source scripts/launch/common.sh

name=${TPU_NAME:-hfseq} zone=${ZONE:-europe-west4-a} tpu_type=${TPU_TYPE:-v3-32}
location=(--zone "$zone" ${project:+--project "$project"})
mount_point=/mnt/hfseq

tpu() { run gcloud compute tpus tpu-vm "$1" "$name" "${location[@]}" "${@:2}"; }

everywhere() { tpu ssh --worker=all --command="$1"; }

# The number at the end of a type counts cores or chips, of which one host has up to 8.
has_one_host() { [[ ${tpu_type##*-} -le 8 ]]; }

require_share() {
    if [[ -z ${SHARE:-} ]]; then
        stop "$1: set SHARE (HOST:/PATH of an NFS share), because a $tpu_type has several hosts, which" \
            "all write checkpoints. For one host, set TPU_TYPE to its type, such as v3-8"
    fi
}

bucket() {
    need BUCKET "the name of a bucket"
    run gcloud storage buckets create "gs://${BUCKET#gs://}" ${project:+--project "$project"} \
        --location="${zone%-*}" --uniform-bucket-level-access --public-access-prevention
}

create() {
    tpu create --accelerator-type "$tpu_type" \
        --version "${TPU_VERSION:-tpu-ubuntu2204-base}" ${SPOT:+--spot}
}

install() {
    need REPOSITORY "the URL of a git repository with hfseq"
    has_one_host || require_share install
    local steps=(
        "sudo apt-get update"
        "sudo apt-get install -y python3.11-venv tmux${SHARE:+ nfs-common}"
    )
    if [[ ${SHARE:-} ]]; then
        steps+=(
            "sudo mkdir -p $mount_point"
            "(mountpoint -q $mount_point || sudo mount -t nfs $(printf %q "$SHARE") $mount_point)"
            "sudo chmod a+rwx $mount_point"
        )
    fi
    steps+=(
        "(test -d hfseq || git clone $(printf %q "$REPOSITORY") hfseq)"
        "python3.11 -m venv hfseq-env"
        "hfseq-env/bin/pip install -e 'hfseq[tpu,wandb]' 'gcsfs>=2025.3' tensorboard"
    )
    local line
    line=$(printf '%s && ' "${steps[@]}")
    everywhere "${line% && }"
}

# copy_variables FILE NAME…: write variables to a file on all hosts. Secrets are not passed as
# arguments, because all users of a host can read command lines.
copy_variables() {
    local file variable
    file=$(mktemp)
    # shellcheck disable=SC2064  # expand $file now, because it is a local variable
    trap "rm -f '$file'" EXIT
    for variable in "${@:2}"; do
        printf 'export %s=%q\n' "$variable" "${!variable}" >>"$file"
    done
    echo "copying ${*:2} to ~/$1 on all hosts" >&2
    run gcloud compute tpus tpu-vm scp "$file" "$name:$1" "${location[@]}" --worker=all
}

secrets() {
    local names=()
    for variable in HF_TOKEN WANDB_API_KEY; do
        if [[ ${!variable:-} ]]; then names+=("$variable"); fi
    done
    if [[ ${#names[@]} == 0 ]]; then stop "set HF_TOKEN, WANDB_API_KEY or both"; fi
    copy_variables .hfseq-secrets "${names[@]}"
}

# Whether a variable may contain a secret, according to its name, or because it is a URL with a user.
is_secret() {
    grep -qiE 'key|token|secret|pass|auth|credential' <<<"$1" || [[ ${!1} == *://*@* ]]
}

start() {
    if [[ $# == 0 ]]; then stop "run requires a script and its flags"; fi
    # shellcheck disable=SC2016  # $HOME is that of the host
    local cache='$HOME/.cache/hfseq' flags=(--device tpu) exports="" names private=() variable
    if ! has_one_host; then
        flags=(--distributed "${flags[@]}")
        if [[ " $*" =~ \ --output[_-]dir[=\ ](gs|gcs):// ]]; then
            # The directory that the hosts write, before host 0 copies it to the bucket.
            require_share "run --output_dir ${BASH_REMATCH[1]}://…"
            cache=$mount_point/cache
        fi
    fi
    read -rd '' -a names <<<"${ENV:-}" || true
    for variable in ${names[@]+"${names[@]}"}; do
        if [[ ! $variable =~ ^[A-Za-z_][A-Za-z0-9_]*$ ]]; then
            stop "ENV contains '$variable': use names of variables, separated by spaces"
        fi
        if [[ -z ${!variable+set} ]]; then stop "ENV contains $variable, which is not set"; fi
    done
    for variable in TFDS_DATA_DIR WANDB_PROJECT; do
        if [[ ${!variable:-} && " ${ENV:-} " != *" $variable "* ]]; then names+=("$variable"); fi
    done
    for variable in ${names[@]+"${names[@]}"}; do
        if is_secret "$variable"; then
            private+=("$variable")
        else
            exports+="; export $variable=$(printf %q "${!variable}")"
        fi
    done
    if [[ ${#private[@]} != 0 ]]; then
        copy_variables .hfseq-env "${private[@]}"
        exports+="; . ../.hfseq-env"
    fi

    local command session
    command=$(printf '%q ' ../hfseq-env/bin/python "$@" "${flags[@]}")
    session="cd hfseq; test ! -f ../.hfseq-secrets || . ../.hfseq-secrets"
    session+="; export HFSEQ_CACHE=$cache$exports; exec ${command% } >>../hfseq.log 2>&1"
    local check="test -x hfseq-env/bin/python || { echo 'error: run tpu.sh install first' >&2; exit 2; }"
    everywhere "$check; tmux new-session -d -s hfseq bash -c $(printf %q "$session")"
}

# The process of the tmux pane is Python. A SIGTERM on one host would be enough, as all hosts save at the
# same step.
stop_run() {
    everywhere "kill -TERM \$(tmux list-panes -s -t hfseq -F '#{pane_pid}')"
}

if [[ ${1:-} == --help ]]; then usage && exit; fi
check_names PROJECT PROJECT_ID TPU_NAME ZONE TPU_TYPE TPU_VERSION BUCKET WORKER
if [[ ! $tpu_type =~ -[1-9][0-9]*$ ]]; then
    stop "TPU_TYPE is '$tpu_type': use an accelerator type, such as v3-8"
fi
if [[ ${SHARE:-} && $SHARE != ?*:/* ]]; then
    stop "SHARE is '$SHARE': use HOST:/PATH of an NFS share, such as 10.0.0.2:/share"
fi
case ${1:-} in
bucket | create | install | secrets) no_arguments "$@" && "$1" ;;
run) start "${@:2}" ;;
log) no_arguments "$@" && tpu ssh --worker="${WORKER:-0}" --command="tail -n 50 -f hfseq.log" ;;
ssh) tpu ssh --worker="${WORKER:-0}" "${@:2}" ;;
stop) no_arguments "$@" && stop_run ;;
delete) no_arguments "$@" && tpu delete --quiet ;;
*)
    stop "expected bucket, create, install, secrets, run, log, ssh, stop or delete, but got" \
        "'${1:-}' (see --help)"
    ;;
esac
