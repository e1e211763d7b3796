#!/usr/bin/env python
r"""Tune a causal language model on conversations, or on prompts with completions (TRL's sft.py).

Lines such as {"messages": [{"role": "user", "content": "..."}, {"role": "assistant", "content":
"..."}]}; the model learns what the assistant says:

    python scripts/run_sft_flax.py --output_dir my-assistant --train_file train.jsonl \
        --validation_file dev.jsonl --model_name_or_path Qwen/Qwen2-0.5B --assistant_only_loss \
        --chat_template_path chat.jinja --eos_token "<|im_end|>" --max_length 1024 --packing \
        --per_device_train_batch_size 8 --num_train_epochs 3 --dtype bfloat16

Adapters on a base in four bits, which take a small part of the memory:

    python scripts/run_sft_flax.py --output_dir my-adapter --dataset_name trl-lib/Capybara \
        --model_name_or_path Qwen/Qwen2-0.5B-Instruct --use_peft --load_in_4bit \
        --learning_rate 2e-4 --packing --num_train_epochs 1 --dtype bfloat16

Run the same command again and a run that was stopped goes on where its last checkpoint is.
"""

import sys

from hfseq.training import script

if __name__ == "__main__":
    sys.exit(script.train("sft", __doc__))
