#!/usr/bin/env python
r"""Train extractive question answering: SQuAD or your own data (Transformers 4: run_qa.py).

SQuAD from the Hub. To include unanswerable questions, use --dataset_name rajpurkar/squad_v2
--version_2_with_negative:

    python scripts/run_qa_flax.py --output_dir my-qa --dataset_name rajpurkar/squad \
        --model_name_or_path google-bert/bert-base-uncased --max_seq_length 384 --doc_stride 128 \
        --per_device_train_batch_size 12 --learning_rate 3e-5 --num_train_epochs 2

Your own data, in SQuAD's format or with lines such as {"id": "1", "question": "Who sings?",
"context": "Ada sings.", "answers": {"text": ["Ada"], "answer_start": [0]}}, and predictions for a
file without answers:

    python scripts/run_qa_flax.py --output_dir my-qa --do_train --do_eval --do_predict \
        --train_file train.jsonl --validation_file dev.jsonl --test_file test.jsonl \
        --model_name_or_path my-bert

To continue a stopped run from its last checkpoint, run the same command again.
"""

import sys

from hfseq.training import script

if __name__ == "__main__":
    sys.exit(script.train("question_answering", __doc__))
