#!/usr/bin/env python
r"""Answer questions by a span of a given text: SQuAD, or your own (version 4: run_qa.py).

SQuAD from the Hub; --dataset_name rajpurkar/squad_v2 --version_2_with_negative has questions
without an answer, too:

    python scripts/run_qa_flax.py --output_dir my-qa --dataset_name rajpurkar/squad \
        --model_name_or_path google-bert/bert-base-uncased --max_seq_length 384 --doc_stride 128 \
        --per_device_train_batch_size 12 --learning_rate 3e-5 --num_train_epochs 2

Your own, of SQuAD's files or of lines such as {"id": "1", "question": "Who sings?", "context": "Ada
sings.", "answers": {"text": ["Ada"], "answer_start": [0]}}, and answers for a file without any:

    python scripts/run_qa_flax.py --output_dir my-qa --do_train --do_eval --do_predict \
        --train_file train.jsonl --validation_file dev.jsonl --test_file test.jsonl \
        --model_name_or_path my-bert

Run the same command again and a run that was stopped goes on where its last checkpoint is.
"""

import sys

from hfseq.training import script

if __name__ == "__main__":
    sys.exit(script.train("question_answering", __doc__))
