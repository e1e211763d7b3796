#!/usr/bin/env python
r"""Train token classification: named entities, parts of speech (Transformers 4: run_flax_ner.py).

Examples are a list of words and a list of tags. CoNLL-2003 from the Hub:

    python scripts/run_ner_flax.py --output_dir my-ner --dataset_name lhoestq/conll2003 \
        --model_name_or_path google-bert/bert-base-cased --per_device_train_batch_size 16 \
        --learning_rate 5e-5 --num_train_epochs 3

Your own data, with lines such as {"tokens": ["Ada", "went", "to", "Rome"], "ner_tags": ["B-PER",
"O", "O", "B-LOC"]}, and predictions for a file without tags:

    python scripts/run_ner_flax.py --output_dir my-ner --do_train --do_eval --do_predict \
        --train_file train.jsonl --validation_file dev.jsonl --test_file test.jsonl \
        --model_name_or_path my-bert

To continue a stopped run from its last checkpoint, run the same command again.
"""

import sys

from hfseq.training import script

if __name__ == "__main__":
    sys.exit(script.train("token_classification", __doc__))
