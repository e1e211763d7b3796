#!/usr/bin/env python
r"""Train text classification or regression on texts or text pairs: GLUE or your own data.

CoLA from its files, with both development sets (GLUE's validation set). To load it from the Hub,
use --task_name cola instead of the files:

    python scripts/run_classification_flax.py --output_dir my-cola \
        --train_file "$COLA/raw/in_domain_train.tsv" \
        --validation_file "$COLA/raw/in_domain_dev.tsv" "$COLA/raw/out_of_domain_dev.tsv" \
        --model_name_or_path FacebookAI/roberta-base --max_seq_length 64 \
        --per_device_train_batch_size 32 --learning_rate 2e-5 --num_train_epochs 3 \
        --eval_strategy epoch --metric_for_best_model eval_matthews_correlation \
        --load_best_model_at_end

The FP8 encoder of the Transformer Engine example, with a word vocabulary:

    python scripts/run_classification_flax.py --output_dir te-cola \
        --train_file "$COLA/raw/in_domain_train.tsv" \
        --validation_file "$COLA/raw/in_domain_dev.tsv" "$COLA/raw/out_of_domain_dev.tsv" \
        --model_type fp8_encoder --preset te --vocabulary words --max_seq_length 32 \
        --per_device_train_batch_size 64 --learning_rate 1e-4 --weight_decay 1e-4 \
        --num_train_epochs 3 --precision fp8_delayed

Your own text pairs, with column names, and predictions for a file without labels:

    python scripts/run_classification_flax.py --output_dir my-pairs --do_train --do_eval \
        --do_predict --train_file train.csv --validation_file dev.csv --test_file test.csv \
        --sentence1_column question --sentence2_column answer --label_column relevant \
        --model_name_or_path my-bert

To continue a stopped run from its last checkpoint, run the same command again.
"""

import sys

from hfseq.training import script

if __name__ == "__main__":
    sys.exit(script.train("classification", __doc__))
