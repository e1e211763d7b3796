#!/usr/bin/env python
r"""Train a translator on parallel text, or fine-tune one (Marian, Pegasus, T5, BART, your own).

English to Spanish from a CSV file; the vocabulary is trained on the first run:

    python scripts/run_translation_flax.py --output_dir my-en-es \
        --train_file "$DATA/english-spanish.csv" --source_lang en --target_lang es \
        --test_split_percentage 1 --do_train --do_eval --do_predict \
        --preset base --vocab_size 16000 --per_device_train_batch_size 32 \
        --learning_rate 0.001 --lr_scheduler_type inverse_sqrt --warmup_steps 1000 \
        --adam_beta2 0.98 --num_train_epochs 10 --eval_steps 1000 --save_steps 1000 \
        --metric_for_best_model eval_bleu --load_best_model_at_end

The WMT example, German to English (--reverse_translation for the other way), and its big model:

    python scripts/run_translation_flax.py --output_dir wmt --preset big \
        --dataset_name wmt/wmt17 --dataset_config_name de-en --source_lang de --target_lang en \
        --vocab_size 32000 --per_device_train_batch_size 32 --learning_rate 0.002 \
        --lr_scheduler_type inverse_sqrt --warmup_steps 1000 --adam_beta2 0.98 \
        --adam_epsilon 1e-9 --max_steps 100000 --eval_steps 1000 --save_steps 10000 \
        --precision bfloat16

With no data at all it learns numbers and dates, English to German, in about ten minutes on two
cores (--target_lang es or nb for Spanish or Norwegian):

    python scripts/run_translation_flax.py --output_dir numbers-en-de

Run the same command again and a run that was stopped goes on where its last checkpoint is.
"""

import sys
from collections.abc import Sequence

from hfseq.training import script

DATA = ("--dataset_name", "--train_file", "--validation_file", "--test_file")
# What the demonstration is trained with; flags that are given win.
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
    """Put the demonstration's flags before the given ones where these name no data."""
    names = {word.partition("=")[0].replace("-", "_") for word in argv}
    told = any(name.replace("-", "_") in names for name in DATA)
    from_file = bool(argv) and argv[0].endswith((".yaml", ".yml", ".json"))
    asks = bool({"_h", "__help"} & names)
    return list(argv) if told or from_file or asks or not argv else [*DEMO, *argv]


if __name__ == "__main__":
    sys.exit(script.train("translation", __doc__, with_demonstration(sys.argv[1:])))
