#!/usr/bin/env bash
# Build the image and push it to Google's Artifact Registry:
#
#     PROJECT_ID=my-project REPO_NAME=my-repo TAG=v1 bash scripts/launch/image.sh
#
# Environment variables and their defaults:
#
# PROJECT_ID   the Google Cloud project; default PROJECT
# REPO_NAME    no default; the Artifact Registry repository
# REGION       us-central1, the region of the repository
# IMAGE_NAME   hfseq
# TAG          latest
# IMAGE        full name of the image in another registry; replaces the five variables above
# VARIANT      cuda; or cpu, tpu
# PUSH         yes; set it to an empty value to build the image without pushing it
# DRY_RUN=1    print the commands without running them
set -euo pipefail
cd "$(dirname "${BASH_SOURCE[0]}")/../.."
source scripts/launch/common.sh

if [[ ${1:-} == --help ]]; then usage && exit; fi
no_arguments image.sh "$@"
variant=${VARIANT:-cuda}
case $variant in
cuda | cpu | tpu) ;;
*) stop "VARIANT is '$variant': use cuda, cpu or tpu" ;;
esac
set_image

run docker build --file scripts/launch/Dockerfile --build-arg "VARIANT=$variant" --tag "$IMAGE" .
if [[ ${PUSH-yes} ]]; then run docker push "$IMAGE"; fi
