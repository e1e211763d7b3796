#!/usr/bin/env bash
# Build the image and push it to Google's Artifact Registry:
#
#     PROJECT_ID=my-project REPO_NAME=my-repo TAG=v1 bash scripts/launch/image.sh
#
# VARIANT   cuda (default), cpu or tpu
# REGION    region of the registry, us-central1
# IMAGE_NAME, TAG   hfseq and latest
# IMAGE     full name, for another registry (PROJECT_ID and REPO_NAME are then not needed)
# PUSH      if empty, the image is built but not pushed
# DRY_RUN=1 prints the commands
set -euo pipefail
cd "$(dirname "${BASH_SOURCE[0]}")/../.."
source scripts/launch/common.sh

if [[ ${1:-} == --help ]]; then usage && exit; fi
if [[ -z ${IMAGE:-} ]]; then
    need PROJECT_ID "a Google Cloud project"
    need REPO_NAME "an Artifact Registry repository: gcloud artifacts repositories create"
    IMAGE=${REGION:-us-central1}-docker.pkg.dev/$PROJECT_ID/$REPO_NAME/${IMAGE_NAME:-hfseq}:${TAG:-latest}
fi

run docker build --file scripts/launch/Dockerfile --build-arg "VARIANT=${VARIANT:-cuda}" \
    --tag "$IMAGE" .
if [[ ${PUSH-yes} ]]; then run docker push "$IMAGE"; fi
