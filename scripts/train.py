#!/usr/bin/env python
r"""Train with any objective, also one that a plugin of yours registers.

    python scripts/train.py --objective copying --plugin my_objective.py --output_dir copier \
        --model_type roberta --tokenizer_name FacebookAI/roberta-base \
        --train_file corpus.txt --validation_file valid.txt --do_train --do_eval

`--objective NAME` is one that `hfseq plugins` lists. The other flags are those of its data and of
every training script: `--objective NAME --help` shows them.
"""

import sys

from hfseq.training import script

if __name__ == "__main__":
    sys.exit(script.train(None, __doc__))
