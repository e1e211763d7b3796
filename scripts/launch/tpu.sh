#!/usr/bin/env bash
# A TPU pod slice: made, used and deleted from your own machine. `run` starts one command on all hosts.
#
#     bash scripts/launch/tpu.sh bucket     a bucket for data (and for the runs of a single host)
#     bash scripts/launch/tpu.sh create     the slice
#     bash scripts/launch/tpu.sh install    hfseq on all hosts, and the shared folder SHARE
#     bash scripts/launch/tpu.sh secrets    HF_TOKEN and WANDB_API_KEY of this shell
#     bash scripts/launch/tpu.sh run scripts/run_mlm_flax.py --output_dir /mnt/hfseq/run …
#     bash scripts/launch/tpu.sh log        what host WORKER prints
#     bash scripts/launch/tpu.sh ssh        a shell on host WORKER
#     bash scripts/launch/tpu.sh stop       the run saves and ends
#     bash scripts/launch/tpu.sh delete     the slice
#
# TPU_NAME, ZONE    hfseq, europe-west4-a
# TPU_TYPE          v3-32
# TPU_VERSION       tpu-ubuntu2204-base
# SPOT=1            a slice that can be taken away (and costs less)
# REPOSITORY        what `install` clones: the URL of a git repository with hfseq
# SHARE             HOST:/PATH of an NFS share (Filestore) that all hosts mount at /mnt/hfseq: all of
#                   them write the checkpoints of a run
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

# As a file: what stands on a command line can be read by every user of a host.
secrets() {
    local file given=0
    file=$(mktemp)
    # shellcheck disable=SC2064  # this file
    trap "rm -f '$file'" EXIT
    for variable in HF_TOKEN WANDB_API_KEY; do
        if [[ ${!variable:-} ]]; then
            printf 'export %s=%q\n' "$variable" "${!variable}" >>"$file"
            given=1
        fi
    done
    if [[ $given == 0 ]]; then stop "set HF_TOKEN, WANDB_API_KEY or both"; fi
    run gcloud compute tpus tpu-vm scp "$file" "$name:.hfseq-secrets" --zone "$zone" --worker=all
}

start() {
    if [[ $# == 0 ]]; then stop "run needs a script and its flags"; fi
    local command session
    command=$(printf '%q ' ../hfseq-env/bin/python "$@" --distributed --device tpu)
    session="cd hfseq; test ! -f ../.hfseq-secrets || . ../.hfseq-secrets"
    session+="; export HFSEQ_CACHE=\$HOME/.cache/hfseq; exec ${command% } >>../hfseq.log 2>&1"
    everywhere "tmux new-session -d -s hfseq bash -c $(printf %q "$session")"
}

# The pane's process is Python itself; one host's SIGTERM is enough, and all save at one step.
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
*) stop "give bucket, create, install, secrets, run, log, ssh, stop or delete (--help says more)" ;;
esac
