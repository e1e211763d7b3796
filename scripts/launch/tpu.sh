#!/usr/bin/env bash
# Create, use and delete a TPU pod slice from your own machine. `run` starts a command on all hosts.
#
#     bash scripts/launch/tpu.sh bucket     create a bucket for data (and for runs on a single host)
#     bash scripts/launch/tpu.sh create     create the slice
#     bash scripts/launch/tpu.sh install    install hfseq on all hosts and mount SHARE
#     bash scripts/launch/tpu.sh secrets    copy HF_TOKEN and WANDB_API_KEY of this shell
#     bash scripts/launch/tpu.sh run scripts/run_mlm_flax.py --output_dir /mnt/hfseq/run …
#     bash scripts/launch/tpu.sh log        show the output of host WORKER
#     bash scripts/launch/tpu.sh ssh        open a shell on host WORKER
#     bash scripts/launch/tpu.sh stop       save and stop the run
#     bash scripts/launch/tpu.sh delete     delete the slice
#
# TPU_NAME, ZONE    hfseq, europe-west4-a
# TPU_TYPE          v3-32
# TPU_VERSION       tpu-ubuntu2204-base
# SPOT=1            a preemptible slice
# REPOSITORY        URL of a git repository with hfseq, for `install`
# SHARE             HOST:/PATH of an NFS share (Filestore) that all hosts mount at /mnt/hfseq, because
#                   all of them write the checkpoints of a run
# BUCKET            name of the bucket
# WORKER            0
# DRY_RUN=1         prints the commands
set -euo pipefail
cd "$(dirname "${BASH_SOURCE[0]}")/../.."
source scripts/launch/common.sh

name=${TPU_NAME:-hfseq} zone=${ZONE:-europe-west4-a}

tpu() { run gcloud compute tpus tpu-vm "$1" "$name" --zone "$zone" "${@:2}"; }

everywhere() { tpu ssh --worker=all --command="$1"; }

bucket() {
    need BUCKET "the name of a bucket"
    run gcloud storage buckets create "gs://$BUCKET" --location="${zone%-*}" \
        --uniform-bucket-level-access --public-access-prevention
}

create() {
    tpu create --accelerator-type "${TPU_TYPE:-v3-32}" \
        --version "${TPU_VERSION:-tpu-ubuntu2204-base}" ${SPOT:+--spot}
}

install() {
    need REPOSITORY "the URL of a git repository with hfseq"
    need SHARE "HOST:/PATH of an NFS share"
    local steps=(
        "sudo apt-get update"
        "sudo apt-get install -y python3.11-venv nfs-common tmux"
        "sudo mkdir -p /mnt/hfseq"
        "(mountpoint -q /mnt/hfseq || sudo mount -t nfs $(printf %q "$SHARE") /mnt/hfseq)"
        "sudo chmod a+rwx /mnt/hfseq"
        "(test -d hfseq || git clone $(printf %q "$REPOSITORY") hfseq)"
        "python3.11 -m venv hfseq-env"
        "hfseq-env/bin/pip install -e 'hfseq[tpu,wandb]'"
    )
    local line
    line=$(printf '%s && ' "${steps[@]}")
    everywhere "${line% && }"
}

# Copied as a file: all users of a host can read command lines.
secrets() {
    local file is_set=0
    file=$(mktemp)
    # shellcheck disable=SC2064  # this file
    trap "rm -f '$file'" EXIT
    for variable in HF_TOKEN WANDB_API_KEY; do
        if [[ ${!variable:-} ]]; then
            printf 'export %s=%q\n' "$variable" "${!variable}" >>"$file"
            is_set=1
        fi
    done
    if [[ $is_set == 0 ]]; then stop "set HF_TOKEN, WANDB_API_KEY or both"; fi
    run gcloud compute tpus tpu-vm scp "$file" "$name:.hfseq-secrets" --zone "$zone" --worker=all
}

start() {
    if [[ $# == 0 ]]; then stop "run requires a script and its flags"; fi
    local command session
    command=$(printf '%q ' ../hfseq-env/bin/python "$@" --distributed --device tpu)
    session="cd hfseq; test ! -f ../.hfseq-secrets || . ../.hfseq-secrets"
    session+="; export HFSEQ_CACHE=\$HOME/.cache/hfseq; exec ${command% } >>../hfseq.log 2>&1"
    everywhere "tmux new-session -d -s hfseq bash -c $(printf %q "$session")"
}

# The process of the pane is Python. A SIGTERM on one host is enough: all save at the same step.
stop_run() {
    everywhere "kill -TERM \$(tmux list-panes -s -t hfseq -F '#{pane_pid}')"
}

case ${1:-} in
bucket | create | install | secrets) "$1" ;;
run) start "${@:2}" ;;
log) tpu ssh --worker="${WORKER:-0}" --command="tail -n 50 -f hfseq.log" ;;
ssh) tpu ssh --worker="${WORKER:-0}" ;;
stop) stop_run ;;
delete) tpu delete --quiet ;;
--help) usage ;;
*) stop "expected bucket, create, install, secrets, run, log, ssh, stop or delete (see --help)" ;;
esac
