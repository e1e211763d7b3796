#!/usr/bin/env bash
# Train an English-Spanish translation model on one or several GPUs or nodes:
#
#     CUDA_VISIBLE_DEVICES=0 bash scripts/launch/train.sh --device cuda           one GPU
#     bash scripts/launch/train.sh --device cuda                                  all GPUs
#     COORDINATOR_ADDRESS=node0:1234 NUM_PROCESSES=2 PROCESS_ID=0 \
#         bash scripts/launch/train.sh --device cuda       and on the other node with PROCESS_ID=1
#
# Environment variables and their defaults:
#
# TRAIN_FILE      english-spanish.csv; needs one column per language
# OUTPUT_DIR      runs/english-spanish; several nodes need a shared directory
# WANDB_API_KEY   no default; if it is set, the run also logs to Weights & Biases, to the project
#                 WANDB_PROJECT
# PYTHON          python
# DRY_RUN=1       print the command without running it
#
# Flags of train.sh are appended to the training command and override its flags. To train another model,
# edit the command below.
set -euo pipefail
cd "$(dirname "${BASH_SOURCE[0]}")/../.."
source scripts/launch/common.sh

if [[ ${1:-} == --help ]]; then usage && exit; fi
trackers=(tensorboard jsonl)
if [[ ${WANDB_API_KEY:-} ]]; then trackers+=(wandb); fi

command=(
    "${PYTHON:-python}" scripts/run_translation_flax.py
    --output_dir "${OUTPUT_DIR:-runs/english-spanish}"
    --train_file "${TRAIN_FILE:-english-spanish.csv}" --source_lang en --target_lang es
    --model_type wmt_transformer --vocab_size 16000
    --config_overrides "d_model=128,encoder_layers=2,decoder_layers=2,encoder_ffn_dim=512,decoder_ffn_dim=512"
    --max_source_length 128 --max_target_length 128
    --per_device_train_batch_size 128 --num_train_epochs 10
    --learning_rate 0.004 --lr_scheduler_type inverse_sqrt --warmup_steps 400 --adam_beta2 0.98
    --eval_steps 200 --max_eval_batches 10 --save_steps 200 --logging_steps 50
    --report_to "${trackers[@]}"
    "$@"
)
if [[ ${DRY_RUN:-} ]]; then run "${command[@]}" && exit; fi
exec "${command[@]}" # replace the shell, so that signals reach Python, which then saves
