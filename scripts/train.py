#!/usr/bin/env python
r"""Train with any objective, including those of plugins.

    python scripts/train.py --objective copying --plugin my_objective.py --output_dir copier \
        --model_type roberta --tokenizer_name FacebookAI/roberta-base \
        --train_file corpus.txt --validation_file valid.txt --do_train --do_eval

`hfseq plugins` lists the objectives. The other flags are those of the objective's data and of all
training scripts; `--objective NAME --help` lists them.
"""

import sys

from hfseq.training import script

if __name__ == "__main__":
    sys.exit(script.train(None, __doc__))
