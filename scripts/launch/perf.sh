#!/usr/bin/env bash
# Benchmark train.sh: run 60 steps, then print tokens per second, MFU and peak memory. A profile of
# steps 40 to 45 is written to $OUTPUT_DIR/profile. GPUs and nodes are selected as in train.sh:
#
#     CUDA_VISIBLE_DEVICES=0 bash scripts/launch/perf.sh --device cuda
#     bash scripts/launch/perf.sh --device cuda
#     COORDINATOR_ADDRESS=node0:1234 NUM_PROCESSES=2 PROCESS_ID=0 \
#         bash scripts/launch/perf.sh --device cuda        and on the other node with PROCESS_ID=1
#
# Environment variables and their defaults:
#
# PEAK_TFLOPS   no default; peak TFLOP/s of one device, for devices that hfseq does not know
#               (T4: 65 in float16)
# OUTPUT_DIR    runs/perf; the directory is overwritten
#
# The variables and flags of train.sh also apply.
set -euo pipefail
cd "$(dirname "${BASH_SOURCE[0]}")/../.."
source scripts/launch/common.sh

if [[ ${1:-} == --help ]]; then usage && exit; fi
export OUTPUT_DIR=${OUTPUT_DIR:-runs/perf}
peak=()
if [[ ${PEAK_TFLOPS:-} ]]; then peak=(--peak_tflops "$PEAK_TFLOPS"); fi

bash scripts/launch/train.sh --do_train --overwrite_output_dir --max_steps 60 --warmup_steps 10 \
    --logging_steps 20 --save_strategy no --profile 40-45 --report_to jsonl "${peak[@]}" "$@"
# Only the first process has the measurements.
if [[ ${DRY_RUN:-} || ${PROCESS_ID:-${JOB_COMPLETION_INDEX:-${SLURM_PROCID:-0}}} != 0 ]]; then exit; fi
"${PYTHON:-python}" - "$OUTPUT_DIR/metrics.jsonl" <<'END'
import json
import sys

logged = [json.loads(line) for line in open(sys.argv[1])]
last = [record for record in logged if "train_tokens_per_second" in record][-1]
for name, value in last.items():
    if name.startswith("train_"):
        print(f"{name:32} {value:.6g}")
END
