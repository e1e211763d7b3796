#!/usr/bin/env python
r"""Fine-tune a causal language model on conversations or prompts with completions, like TRL's SFT.

With lines such as {"messages": [{"role": "user", "content": "..."}, {"role": "assistant",
"content": "..."}]}, the model learns the turns of the assistant:

    python scripts/run_sft_flax.py --output_dir my-assistant --train_file train.jsonl \
        --validation_file dev.jsonl --model_name_or_path Qwen/Qwen2-0.5B --assistant_only_loss \
        --chat_template_path chat.jinja --eos_token "<|im_end|>" --max_length 1024 --packing \
        --per_device_train_batch_size 8 --num_train_epochs 3 --dtype bfloat16

Adapters on a base quantized to four bits need a fraction of the memory:

    python scripts/run_sft_flax.py --output_dir my-adapter --dataset_name trl-lib/Capybara \
        --model_name_or_path Qwen/Qwen2-0.5B-Instruct --use_peft --load_in_4bit \
        --learning_rate 2e-4 --packing --num_train_epochs 1 --dtype bfloat16

To continue a stopped run from its last checkpoint, run the same command again.
"""

import sys

from hfseq.training import script

if __name__ == "__main__":
    sys.exit(script.train("sft", __doc__))
