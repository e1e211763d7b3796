#!/usr/bin/env bash
# Manage a GKE cluster with two nodes of one T4 each, JobSet, and the secrets of the manifests:
#
#     bash scripts/launch/gke_cluster.sh create     create the cluster, its GPU nodes and a volume driver
#     bash scripts/launch/gke_cluster.sh jobset     install the JobSet API
#     bash scripts/launch/gke_cluster.sh secrets    store HF_TOKEN and WANDB_API_KEY of this shell
#     bash scripts/launch/gke_cluster.sh submit scripts/launch/jobset.yaml
#     bash scripts/launch/gke_cluster.sh delete     delete the cluster, but not volumes and buckets
#
# Environment variables and their defaults:
#
# PROJECT          the Google Cloud project; default PROJECT_ID, otherwise the project that gcloud is
#                  configured to use
# CLUSTER          hfseq
# ZONE             us-central1-c
# NODES            2
# GPUS             1 per node
# ACCELERATOR      nvidia-tesla-t4
# MACHINE          n1-standard-4
# IMAGE            the image that `submit` inserts into a manifest; default: the image that image.sh
#                  pushes with the same PROJECT_ID, REPO_NAME, REGION, IMAGE_NAME and TAG
# JOBSET_VERSION   v0.10.1
# DRY_RUN=1        print the commands without running them
set -euo pipefail
cd "$(dirname "${BASH_SOURCE[0]}")/../.."
source scripts/launch/common.sh

cluster=${CLUSTER:-hfseq} zone=${ZONE:-us-central1-c}
location=(--zone "$zone" ${project:+--project "$project"})

create() {
    run gcloud container clusters create "$cluster" "${location[@]}" \
        --addons GcpFilestoreCsiDriver
    run gcloud container node-pools create gpu-pool --cluster "$cluster" "${location[@]}" \
        --node-locations "$zone" --num-nodes "${NODES:-2}" --machine-type "${MACHINE:-n1-standard-4}" \
        --accelerator "type=${ACCELERATOR:-nvidia-tesla-t4},count=${GPUS:-1},gpu-driver-version=LATEST"
    run gcloud container clusters get-credentials "$cluster" "${location[@]}"
}

jobset() {
    local release=https://github.com/kubernetes-sigs/jobset/releases/download
    run kubectl apply --server-side --filename "$release/${JOBSET_VERSION:-v0.10.1}/manifests.yaml"
}

# The values are passed on standard input: all users of the machine can read command lines.
secrets() {
    local values=()
    for name in HF_TOKEN WANDB_API_KEY; do
        if [[ ${!name:-} ]]; then values+=("$name=${!name}"); fi
    done
    if [[ ${#values[@]} == 0 ]]; then stop "set HF_TOKEN, WANDB_API_KEY or both"; fi
    run kubectl delete secret hfseq-secrets --ignore-not-found
    run kubectl create secret generic hfseq-secrets --from-env-file=/dev/stdin \
        < <(printf '%s\n' "${values[@]}")
}

submit() {
    if [[ $# != 1 ]]; then stop "submit requires one manifest, such as scripts/launch/jobset.yaml"; fi
    if [[ ! -f $1 ]]; then stop "submit: there is no manifest '$1'"; fi
    set_image
    echo "image: $IMAGE" >&2
    run kubectl apply --filename scripts/launch/storage.yaml
    run kubectl apply --filename - < <(sed "s|image: hfseq:cuda|image: $IMAGE|" "$1")
}

delete() {
    run gcloud container clusters delete "$cluster" "${location[@]}" --quiet
}

if [[ ${1:-} == --help ]]; then usage && exit; fi
check_names PROJECT PROJECT_ID CLUSTER ZONE NODES GPUS ACCELERATOR MACHINE JOBSET_VERSION
case ${1:-} in
create | jobset | secrets | delete) no_arguments "$@" && "$1" ;;
submit) submit "${@:2}" ;;
*) stop "expected create, jobset, secrets, submit MANIFEST or delete, but got '${1:-}' (see --help)" ;;
esac
