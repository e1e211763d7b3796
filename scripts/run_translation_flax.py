#!/usr/bin/env python
r"""Train or fine-tune a translation model (Marian, Pegasus, T5, BART, your own).

English to Spanish from a CSV file. The first run trains the vocabulary:

    python scripts/run_translation_flax.py --output_dir my-en-es \
        --train_file "$DATA/english-spanish.csv" --source_lang en --target_lang es \
        --test_split_percentage 1 --do_train --do_eval --do_predict \
        --preset base --vocab_size 16000 --per_device_train_batch_size 32 \
        --learning_rate 0.001 --lr_scheduler_type inverse_sqrt --warmup_steps 1000 \
        --adam_beta2 0.98 --num_train_epochs 10 --eval_steps 1000 --save_steps 1000 \
        --metric_for_best_model eval_bleu --load_best_model_at_end

The WMT example, German to English (--reverse_translation for English to German), with its big
model:

    python scripts/run_translation_flax.py --output_dir wmt --preset big \
        --dataset_name wmt/wmt17 --dataset_config_name de-en --source_lang de --target_lang en \
        --vocab_size 32000 --per_device_train_batch_size 32 --learning_rate 0.002 \
        --lr_scheduler_type inverse_sqrt --warmup_steps 1000 --adam_beta2 0.98 \
        --adam_epsilon 1e-9 --max_steps 100000 --eval_steps 1000 --save_steps 10000 \
        --precision bfloat16

Without data, the script trains on generated numbers and dates, English to German, in about ten
minutes on two cores (--target_lang es or nb for Spanish or Norwegian):

    python scripts/run_translation_flax.py --output_dir numbers-en-de

To continue a stopped run from its last checkpoint, run the same command again.
"""

import sys
from collections.abc import Sequence

from hfseq.training import script

DATA = ("--dataset_name", "--train_file", "--validation_file", "--test_file")
# Flags of the demonstration; flags on the command line take precedence.
DEMO = (
    *("--source_lang", "en", "--target_lang", "de", "--vocab_size", "1000"),
    *("--do_train", "--do_eval", "--do_predict", "--preset", "tiny"),
    *("--config_overrides", "dropout=0.0,attention_dropout=0.0"),
    *("--max_source_length", "64", "--max_target_length", "64"),
    *("--per_device_train_batch_size", "16", "--max_steps", "600", "--optim", "muon"),
    *("--learning_rate", "5e-3", "--warmup_steps", "50", "--logging_steps", "25"),
    *("--eval_steps", "100", "--save_steps", "100", "--max_generate_samples", "200"),
)


def with_demonstration(argv: Sequence[str]) -> list[str]:
    """Insert the flags of the demonstration before `argv`, unless `argv` names data."""
    names = {word.partition("=")[0].replace("-", "_") for word in argv}
    names_data = any(name.replace("-", "_") in names for name in DATA)
    from_file = bool(argv) and argv[0].endswith((".yaml", ".yml", ".json"))
    asks_for_help = bool({"_h", "__help"} & names)
    return list(argv) if names_data or from_file or asks_for_help or not argv else [*DEMO, *argv]


if __name__ == "__main__":
    sys.exit(script.train("translation", __doc__, with_demonstration(sys.argv[1:])))
