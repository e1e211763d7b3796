#!/usr/bin/env bash
# Install hfseq and train a masked language model, in a few minutes on two cores:
#
#     bash scripts/quickstart.sh
#
# All files are written to .venv and quickstart/ (or $HFSEQ_QUICKSTART_DIR). The script can be run
# again. The training text is part of Python: its language reference and docstrings.
set -euo pipefail
cd "$(dirname "${BASH_SOURCE[0]}")/.."
source scripts/environment.sh

folder=${HFSEQ_QUICKSTART_DIR:-quickstart}
model=$folder/model
prepare cpu

# Nothing is downloaded after the installation, and all caches stay in this directory.
export HF_HUB_OFFLINE=1 HF_DATASETS_DISABLE_PROGRESS_BARS=1 TRANSFORMERS_NO_ADVISORY_WARNINGS=1
mkdir -p "$folder"
HFSEQ_CACHE=$(cd "$folder" && pwd)/cache
export HFSEQ_CACHE HF_DATASETS_CACHE=$HFSEQ_CACHE/datasets

say "Writing a corpus from Python's language reference and docstrings"
"$PYTHON" scripts/quickstart_corpus.py "$folder/corpus.jsonl"

say "Training a tokenizer on it"
"$PYTHON" scripts/train_tokenizer.py --train_file "$folder/corpus.jsonl" --model_type roberta \
    --vocab_size 4000 --output_dir "$folder/tokenizer" --overwrite

say "Training a RoBERTa with 1.8 million parameters (the loss starts at 8.4)"
"$PYTHON" scripts/run_mlm_flax.py --output_dir "$model" --overwrite_output_dir \
    --model_type roberta --tokenizer_name "$folder/tokenizer" --train_file "$folder/corpus.jsonl" \
    --config_overrides hidden_size=192,num_hidden_layers=2,num_attention_heads=3,intermediate_size=768,initializer_range=0.05,hidden_dropout_prob=0,attention_probs_dropout_prob=0 \
    --max_seq_length 64 --mlm_probability 0.3 --validation_split_percentage 3 \
    --per_device_train_batch_size 32 --per_device_eval_batch_size 32 --max_steps 1000 \
    --optim muon --learning_rate 5e-3 --warmup_steps 50 --weight_decay 0.01 \
    --logging_steps 50 --eval_steps 250 --save_strategy no --run_name "RoBERTa on Python's documentation"

say "Loading it with FlaxAutoModelForMaskedLM and filling masks"
"$PYTHON" -m hfseq.cli fill-mask "$model" --top_k 3 \
    "Return <mask> if the object is a string." \
    "If the file does not exist, an exception is <mask>." \
    "If the argument is <mask>, the default value is used."

bin=$(dirname "$PYTHON")
say "Done. The model is in $model, with a model card, learning_curve.png and metrics.jsonl"
echo "Its curves in TensorBoard:"
echo "    $bin/pip install tensorboard && $bin/tensorboard --logdir $model/runs"
echo "Your own sentences:"
echo "    $bin/hfseq fill-mask $model \"Raises an <mask> if the key is not found.\""
echo "Your own text: docs/getting_started.md"
