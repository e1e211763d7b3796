"""Help texts with examples for the objectives of `hfseq train`, and other names of objectives.

The examples use the command ``hfseq train``. The help of a script shows the name of the script
instead.
"""

from __future__ import annotations

#: The objective for each alias. Most aliases are part of the name of a script.
ALIASES = {
    "bart_dlm": "denoising",
    "captioning": "image_to_text",
    "clip": "image_text",
    "image_captioning": "image_to_text",
    "ner": "token_classification",
    "qa": "question_answering",
    "speech_recognition_ctc": "ctc",
    "t5_mlm": "span_mlm",
    "wav2vec2_pretrain": "wav2vec2",
}

RESUME = """
To continue a stopped run from its last checkpoint, run the same command again.
"""

#: Description of ``scripts/train.py``.
ANY_OBJECTIVE = r"""Train with any objective, including those of plugins.

    python scripts/train.py --objective copying --plugin my_objective.py --output_dir copier \
        --model_type roberta --tokenizer_name FacebookAI/roberta-base \
        --train_file corpus.txt --validation_file valid.txt --do_train --do_eval

`hfseq train copying` does the same. `hfseq train --list` lists the objectives, and `--objective
NAME --help` lists the flags of an objective.
"""

USAGE: dict[str, str] = {
    "mlm": r"""
Pretrain or fine-tune a masked language model (BERT, RoBERTa or your own architecture).

    hfseq tokenizer --model_type roberta --config_name roberta --vocab_size 8000 \
        --train_file "$DATA/train.jsonl" --output_dir my-roberta

    hfseq train mlm --output_dir my-roberta --config_name my-roberta \
        --tokenizer_name my-roberta --train_file "$DATA/train.jsonl" \
        --validation_file "$DATA/valid.jsonl" --max_seq_length 128 \
        --per_device_train_batch_size 32 --learning_rate 3e-4 --warmup_steps 1000 \
        --weight_decay 0.01 --adam_beta2 0.98 --num_train_epochs 18 --logging_steps 100 \
        --save_steps 1000 --eval_steps 1000
""",
    "clm": r"""
Pretrain or fine-tune a causal language model (GPT-2, VQ Transformer, your own).

Create a tokenizer and a configuration, then train the model:

    hfseq tokenizer --model_type gpt2 --config_name gpt2 --vocab_size 50257 \
        --train_file "$DATA/train.jsonl" --output_dir my-gpt2 \
        --config_overrides resid_pdrop=0.0,embd_pdrop=0.0,attn_pdrop=0.0

    hfseq train clm --output_dir my-gpt2 --config_name my-gpt2 --tokenizer_name my-gpt2 \
        --train_file "$DATA/train.jsonl" --validation_file "$DATA/valid.jsonl" --do_train \
        --do_eval --block_size 512 --per_device_train_batch_size 64 --learning_rate 5e-3 \
        --warmup_steps 1000 --adam_beta2 0.98 --weight_decay 0.01 --num_train_epochs 20 \
        --logging_steps 500 --save_steps 2500 --eval_steps 2500

Compute the perplexity per word of WikiText-2, where all lines form one continuous text:

    hfseq train clm --output_dir wikitext --model_name_or_path my-gpt2 --do_eval \
        --validation_file wikitext-2/test.txt --cross_documents --word_perplexity

Train a VQ Transformer on the bytes of enwik8 with the settings of its paper, where rows have 8,192
bytes and the weights are updated every 2,048 bytes:

    hfseq tokenizer --model_type vq_transformer --vocabulary bytes --output_dir bytes

    hfseq train clm --output_dir vq-enwik8 --model_type vq_transformer --preset enwik8 \
        --tokenizer_name bytes --train_file enwik8 --sample_by raw --test_split_percentage 5 \
        --do_train --do_eval --do_predict --start_with_eos --block_size 8192 \
        --update_length 2048 --global_batch_size 128 --max_steps 125000 --learning_rate 4e-4 \
        --warmup_steps 10000 --lr_scheduler_type cosine --lr_end_ratio 0.1 --adam_beta2 0.98 \
        --adam_epsilon 1e-9 --max_grad_norm 0.1 --weight_decay 2e-4 \
        --weight_decay_mode absolute --loss_per_position --eval_steps 1000 \
        --max_eval_batches 100 --load_best_model_at_end --save_steps 1000 --dtype bfloat16
""",
    "rtd": r"""
Pretrain ELECTRA, whose discriminator finds the tokens that a small generator replaced.

    hfseq train rtd --output_dir my-electra --model_type electra --tokenizer_name my-bert \
        --train_file "$DATA/train.jsonl" --validation_file "$DATA/valid.jsonl"
""",
    "sop": r"""
Pretrain ALBERT or BERT to predict masked tokens and how two text segments are related.

For ALBERT, the model predicts whether the segments are in the right order, and for BERT, whether
the second one follows the first:

    hfseq train sop --output_dir my-albert --model_type albert --tokenizer_name my-bert \
        --train_file "$DATA/train.jsonl" --validation_file "$DATA/valid.jsonl"
""",
    "span_mlm": r"""
Pretrain T5 with span corruption: the decoder predicts the masked spans of the input.

Create a tokenizer and a configuration, then train the model:

    hfseq tokenizer --model_type t5 --config_name t5 --vocab_size 32000 \
        --train_file "$DATA/train.jsonl" --output_dir my-t5 \
        --config_overrides feed_forward_proj=gated-gelu,tie_word_embeddings=false

    hfseq train span_mlm --output_dir my-t5 --config_name my-t5 --tokenizer_name my-t5 \
        --train_file "$DATA/train.jsonl" --validation_file "$DATA/valid.jsonl" \
        --max_seq_length 512 --per_device_train_batch_size 32 --adafactor \
        --learning_rate 0.005 --weight_decay 0.001 --warmup_steps 2000 --logging_steps 500 \
        --save_steps 10000 --eval_steps 2500
""",
    "denoising": r"""
Pretrain BART by denoising: reconstruct text with permuted sentences and masked spans.

Create a tokenizer and a configuration, then train the model:

    hfseq tokenizer --model_type bart --config_name bart --vocab_size 50265 \
        --train_file "$DATA/train.jsonl" --output_dir my-bart \
        --config_overrides d_model=768,encoder_layers=6,decoder_layers=6

    hfseq train denoising --output_dir my-bart --config_name my-bart --tokenizer_name my-bart \
        --train_file "$DATA/train.jsonl" --validation_file "$DATA/valid.jsonl" \
        --max_seq_length 1024 --per_device_train_batch_size 32 --learning_rate 1e-4 \
        --warmup_steps 2000 --logging_steps 500 --save_steps 2000 --eval_steps 2000
""",
    "translation": r"""
Train or fine-tune a translation model (Marian, Pegasus, T5, BART, your own).

Train on English-Spanish pairs from a CSV file. The first run also trains the tokenizer:

    hfseq train translation --output_dir my-en-es --train_file "$DATA/english-spanish.csv" \
        --source_lang en --target_lang es --test_split_percentage 1 --do_train --do_eval \
        --do_predict --preset base --vocab_size 16000 --per_device_train_batch_size 32 \
        --learning_rate 0.001 --lr_scheduler_type inverse_sqrt --warmup_steps 1000 \
        --adam_beta2 0.98 --num_train_epochs 10 --eval_steps 1000 --save_steps 1000 \
        --metric_for_best_model eval_bleu --load_best_model_at_end

Train a big model on German-English data of WMT. Add --reverse_translation to train from English to
German:

    hfseq train translation --output_dir wmt --preset big --dataset_name wmt/wmt17 \
        --dataset_config_name de-en --source_lang de --target_lang en --vocab_size 32000 \
        --per_device_train_batch_size 32 --learning_rate 0.002 \
        --lr_scheduler_type inverse_sqrt --warmup_steps 1000 --adam_beta2 0.98 \
        --adam_epsilon 1e-9 --max_steps 100000 --eval_steps 1000 --save_steps 10000 \
        --precision bfloat16

Without flags for data, the command trains a model that translates generated numbers and dates from
English to German. This takes about ten minutes on two cores. Use --target_lang es or nb to
translate to Spanish or Norwegian:

    hfseq train translation --output_dir numbers-en-de
""",
    "summarization": r"""
Train summarization: XSum, CNN/DailyMail or your own data.

    hfseq train summarization --output_dir my-summaries --dataset_name EdinburghNLP/xsum \
        --model_name_or_path facebook/bart-base --max_source_length 512 --max_target_length 64 \
        --per_device_train_batch_size 16 --learning_rate 5e-5 --warmup_steps 500 \
        --num_train_epochs 3

Use your own data, with lines such as {"text": "...", "summary": "..."}. T5 requires a prefix:

    hfseq train summarization --output_dir my-summaries --do_train --do_eval --do_predict \
        --train_file train.jsonl --validation_file dev.jsonl --test_file test.jsonl \
        --model_name_or_path google-t5/t5-small --source_prefix "summarize: "
""",
    "classification": r"""
Train text classification or regression on texts or text pairs: GLUE or your own data.

Train on the files of CoLA. Its two development sets together are the validation set of GLUE. To
load CoLA from the Hub, use --task_name cola instead of the files:

    hfseq train classification --output_dir my-cola \
        --train_file "$COLA/raw/in_domain_train.tsv" \
        --validation_file "$COLA/raw/in_domain_dev.tsv" "$COLA/raw/out_of_domain_dev.tsv" \
        --model_name_or_path FacebookAI/roberta-base --max_seq_length 64 \
        --per_device_train_batch_size 32 --learning_rate 2e-5 --num_train_epochs 3 \
        --eval_strategy epoch --metric_for_best_model eval_matthews_correlation \
        --load_best_model_at_end

Train the FP8 encoder from the Transformer Engine example, with a vocabulary of words:

    hfseq train classification --output_dir te-cola \
        --train_file "$COLA/raw/in_domain_train.tsv" \
        --validation_file "$COLA/raw/in_domain_dev.tsv" "$COLA/raw/out_of_domain_dev.tsv" \
        --model_type fp8_encoder --preset te --vocabulary words --max_seq_length 32 \
        --per_device_train_batch_size 64 --learning_rate 1e-4 --weight_decay 1e-4 \
        --num_train_epochs 3 --precision fp8_delayed

Use your own text pairs, with the names of their columns, and predict the labels for a test file,
which may lack them:

    hfseq train classification --output_dir my-pairs --do_train --do_eval --do_predict \
        --train_file train.csv --validation_file dev.csv --test_file test.csv \
        --sentence1_column question --sentence2_column answer --label_column relevant \
        --model_name_or_path my-bert
""",
    "token_classification": r"""
Train token classification, e.g. named entities or parts of speech (run_flax_ner.py of v4).

Each example consists of a list of words and a list of tags. Train on CoNLL-2003 from the Hub:

    hfseq train token_classification --output_dir my-ner --dataset_name lhoestq/conll2003 \
        --model_name_or_path google-bert/bert-base-cased --per_device_train_batch_size 16 \
        --learning_rate 5e-5 --num_train_epochs 3

Use your own data, with lines such as {"tokens": ["Ada", "went", "to", "Rome"], "ner_tags":
["B-PER", "O", "O", "B-LOC"]}, and predict the tags for a test file, which may lack them:

    hfseq train token_classification --output_dir my-ner --do_train --do_eval --do_predict \
        --train_file train.jsonl --validation_file dev.jsonl --test_file test.jsonl \
        --model_name_or_path my-bert
""",
    "question_answering": r"""
Train extractive question answering on SQuAD or your own data (run_qa.py in Transformers 4).

Train on SQuAD from the Hub. To include unanswerable questions, use --dataset_name
rajpurkar/squad_v2 --version_2_with_negative:

    hfseq train question_answering --output_dir my-qa --dataset_name rajpurkar/squad \
        --model_name_or_path google-bert/bert-base-uncased --max_seq_length 384 \
        --doc_stride 128 --per_device_train_batch_size 12 --learning_rate 3e-5 \
        --num_train_epochs 2

Use your own data, and predict the answers for a test file, which may lack them. The files are in
the format of SQuAD, or have lines such as {"id": "1", "question": "Who sings?", "context":
"Ada sings.", "answers": {"text": ["Ada"], "answer_start": [0]}}:

    hfseq train question_answering --output_dir my-qa --do_train --do_eval --do_predict \
        --train_file train.jsonl --validation_file dev.jsonl --test_file test.jsonl \
        --model_name_or_path my-bert
""",
    "sft": r"""
Fine-tune a causal language model on conversations or prompts with completions, like TRL's SFT.

Train on the assistant's messages in conversations, which are lines such as {"messages": [{"role":
"user", "content": "..."}, {"role": "assistant", "content": "..."}]}:

    hfseq train sft --output_dir my-assistant --train_file train.jsonl \
        --validation_file dev.jsonl --model_name_or_path Qwen/Qwen2-0.5B --assistant_only_loss \
        --chat_template_path chat.jinja --eos_token "<|im_end|>" --max_length 1024 --packing \
        --per_device_train_batch_size 8 --num_train_epochs 3 --dtype bfloat16

Train LoRA adapters on a base model that is quantized to four bits. This takes much less memory:

    hfseq train sft --output_dir my-adapter --dataset_name trl-lib/Capybara \
        --model_name_or_path Qwen/Qwen2-0.5B-Instruct --use_peft --load_in_4bit \
        --learning_rate 2e-4 --packing --num_train_epochs 1 --dtype bfloat16
""",
    "dpo": r"""
Train a language model on preferences with direct preference optimization, like TRL's DPO.

The data are lines with a prompt and two answers, such as {"prompt": "...", "chosen": "...",
"rejected": "..."}. Prompts and answers can also be lists of messages. The reference model is the
model from which the run starts:

    hfseq train dpo --output_dir my-dpo --train_file train.jsonl --validation_file dev.jsonl \
        --model_name_or_path my-assistant --learning_rate 1e-6 --beta 0.1 --max_length 1024 \
        --per_device_train_batch_size 4 --gradient_accumulation_steps 8 --num_train_epochs 1

Train LoRA adapters. The reference model is the base model without adapters, so there is no second
copy of the weights:

    hfseq train dpo --output_dir my-adapter --dataset_name trl-lib/ultrafeedback_binarized \
        --model_name_or_path Qwen/Qwen2-0.5B-Instruct --use_peft --learning_rate 1e-5 \
        --dtype bfloat16

Combine several losses:

    hfseq train dpo --output_dir my-mpo --train_file train.jsonl --model_name_or_path my-assistant \
        --loss_type sigmoid bco_pair sft --loss_weights 0.8 0.2 1.0
""",
    "kto": r"""
Train a language model on good and bad completions, like TRL's KTO.

The data are lines such as {"prompt": "...", "completion": "...", "label": true}. A pair of a chosen
and a rejected answer is split into two completions:

    hfseq train kto --output_dir my-kto --train_file train.jsonl --validation_file dev.jsonl \
        --model_name_or_path my-assistant --learning_rate 1e-6 --per_device_train_batch_size 8 \
        --num_train_epochs 1
""",
    "orpo": r"""
Fine-tune a language model on preferences without a reference model, like TRL's ORPO.

The data are lines such as {"prompt": "...", "chosen": "...", "rejected": "..."}:

    hfseq train orpo --output_dir my-orpo --train_file train.jsonl --validation_file dev.jsonl \
        --model_name_or_path my-llama --learning_rate 8e-6 --beta 0.1 --num_train_epochs 1
""",
    "cpo": r"""
Train a language model on preferences with CPO or SimPO, like TRL's CPO.

Train with SimPO, which has no reference model, and its recommended beta and margin:

    hfseq train cpo --output_dir my-simpo --train_file train.jsonl --validation_file dev.jsonl \
        --model_name_or_path my-assistant --loss_type simpo --beta 2 --simpo_gamma 1 \
        --learning_rate 1e-6 --num_train_epochs 1
""",
    "reward": r"""
Train a reward model on pairs of answers, like TRL's reward trainer.

The data are lines such as {"chosen": [...], "rejected": [...]} with lists of messages, optionally
with a number "margin" by which the rewards should differ:

    hfseq train reward --output_dir my-reward --train_file train.jsonl \
        --validation_file dev.jsonl --model_name_or_path my-assistant --learning_rate 1e-4 \
        --center_rewards_coefficient 0.01 --num_train_epochs 1
""",
    "embedding": r"""
Train text embeddings on pairs of related texts, like sentence-transformers.

The data are lines such as {"anchor": "how old is the law", "positive": "The law was made in
1814."}. Lines can also have a hard negative, under the key "negative":

    hfseq train embedding --output_dir my-vectors --train_file pairs.jsonl \
        --validation_file dev.jsonl \
        --model_name_or_path sentence-transformers/all-MiniLM-L6-v2 \
        --per_device_train_batch_size 128 --num_train_epochs 1 --learning_rate 2e-5

Train a pretrained encoder, with embeddings that can be truncated (Matryoshka):

    hfseq train embedding --output_dir my-vectors --train_file pairs.jsonl \
        --model_name_or_path answerdotai/ModernBERT-base --pooling mean --max_seq_length 256 \
        --matryoshka_dims 768,256,64 --per_device_train_batch_size 256 --dtype bfloat16

Use other losses for other data, for example pairs with scores such as {"a": "…", "b": "…",
"score": 0.8}, and encode a large batch in chunks that fit into memory (GradCache):

    hfseq train embedding --output_dir my-vectors --train_file scored.jsonl --loss cosent \
        --model_name_or_path sentence-transformers/all-MiniLM-L6-v2

    hfseq train embedding --output_dir my-vectors --train_file pairs.jsonl \
        --model_name_or_path sentence-transformers/all-MiniLM-L6-v2 \
        --per_device_train_batch_size 4096 --mini_batch_size 64 --batch_sampler no_duplicates
""",
    "cross_encoder": r"""
Train a cross-encoder (reranker), which scores pairs of a query and a document.

The data are lines such as {"query": "how old is the law", "document": "The law was made in 1814.",
"label": 1}. Labels are numbers from 0 to 1:

    hfseq train cross_encoder --output_dir my-reranker --train_file labeled.jsonl \
        --validation_file dev.jsonl --model_name_or_path answerdotai/ModernBERT-base \
        --per_device_train_batch_size 64 --num_train_epochs 1 --learning_rate 2e-5

Train on lists of documents per query, such as {"query": "…", "documents": ["…", "…"], "labels":
[1, 0]}:

    hfseq train cross_encoder --output_dir my-reranker --train_file lists.jsonl \
        --loss lambda_loss --model_name_or_path answerdotai/ModernBERT-base

Train on pairs of related texts. The negatives are documents of other examples:

    hfseq train cross_encoder --output_dir my-reranker --train_file pairs.jsonl \
        --loss multiple_negatives_ranking --batch_sampler no_duplicates \
        --model_name_or_path answerdotai/ModernBERT-base
""",
    "sparse_encoder": r"""
Train a sparse encoder (SPLADE), which assigns a weight to each vocabulary entry.

The data are the same as those of `hfseq train embedding`:

    hfseq train sparse_encoder --output_dir my-splade --train_file pairs.jsonl \
        --validation_file dev.jsonl --model_name_or_path distilbert-base-uncased \
        --per_device_train_batch_size 32 --num_train_epochs 1 --learning_rate 2e-5

Larger weights of the regularizers make the vectors sparser:

    hfseq train sparse_encoder --output_dir my-splade --train_file pairs.jsonl \
        --model_name_or_path distilbert-base-uncased --document_regularizer_weight 1e-3 \
        --query_regularizer_weight 1e-3 --mini_batch_size 8
""",
    "multi_vector": r"""
Train a multi-vector encoder (ColBERT), which compares the tokens of queries and documents.

The data are the same as those of `hfseq train embedding`:

    hfseq train multi_vector --output_dir my-colbert --train_file pairs.jsonl \
        --validation_file dev.jsonl --model_name_or_path bert-base-uncased \
        --query_prompt "[unused0] " --document_prompt "[unused1] " --query_length 32 \
        --document_length 180 --per_device_train_batch_size 32 --learning_rate 1e-5

Distill the scores of a reranker, from lines such as {"query": "…", "positive": "…", "negative":
"…", "scores": [8.1, 2.3]}:

    hfseq train multi_vector --output_dir my-colbert --train_file scored.jsonl \
        --loss distill_kl_div --model_name_or_path bert-base-uncased
""",
    "image_classification": r"""
Train image classification on folders, tables of image files, or a dataset with images.

Fine-tune a pretrained ViT on images that are sorted into one folder per class:

    hfseq train image_classification --output_dir my-flowers --train_dir flowers/train \
        --validation_dir flowers/validation \
        --model_name_or_path google/vit-base-patch16-224-in21k \
        --per_device_train_batch_size 32 --learning_rate 2e-5 --num_train_epochs 5 \
        --eval_strategy epoch --metric_for_best_model eval_accuracy --load_best_model_at_end

Train a new model on a table with a label column and a column of image paths, which are relative to
the directory of the table:

    hfseq train image_classification --output_dir my-digits --train_file digits/train.csv \
        --image_column file --label_column digit --model_type vit --image_size 32 --no_augment \
        --config_overrides hidden_size=64,intermediate_size=128,num_hidden_layers=2,patch_size=8

Predict the classes of images without labels with a trained model:

    hfseq train image_classification --output_dir guesses --do_predict \
        --model_name_or_path my-flowers --test_dir holiday
""",
    "image_text": r"""
Train an image encoder and a text encoder on images with captions, like CLIP.

The data are a table with two columns: image paths, which are relative to the directory of the
table, and captions or lists of captions:

    hfseq train image_text --output_dir my-pairs --model_name_or_path vit-bert \
        --train_file coco/train.jsonl --validation_file coco/validation.jsonl \
        --image_column image_path --caption_column captions --max_seq_length 96 \
        --per_device_train_batch_size 64 --learning_rate 5e-5 --num_train_epochs 20

Instead of --model_name_or_path, you can use --vision_model_name_or_path and
--text_model_name_or_path, as in run_hybrid_clip.py of Transformers 4. The command then combines the
two models first, and saves the result in a directory next to the output directory.

The loss compares all images and captions of the global batch, across all devices.
""",
    "image_to_text": r"""
Train an image captioning model that consists of an image encoder and a text decoder.

The data are a table with two columns: image paths, which are relative to the directory of the
table, and captions or lists of captions:

    hfseq train image_to_text --output_dir my-captions --model_name_or_path vit-gpt2 \
        --train_file coco/train.jsonl --validation_file coco/validation.jsonl \
        --image_column image_path --caption_column captions --max_target_length 64 \
        --per_device_train_batch_size 32 --learning_rate 5e-5 --num_train_epochs 3 \
        --num_beams 4

Create the directory vit-gpt2 from two checkpoints:

    hfseq combine --output_dir vit-gpt2 \
        --encoder_model_name_or_path google/vit-base-patch16-224-in21k \
        --decoder_model_name_or_path gpt2

Each evaluation generates captions for the validation images and reports ROUGE. `hfseq caption
my-captions FILE` captions other images.
""",
    "wav2vec2": r"""
Pretrain wav2vec 2.0 on audio without transcripts, with the contrastive objective.

Train a new model on a folder of audio files. libsndfile must be able to read their format. Audio is
resampled if necessary:

    hfseq train wav2vec2 --output_dir my-speech --train_dir talks/train \
        --validation_dir talks/validation --config_name facebook/wav2vec2-base \
        --mask_time_prob 0.65 --per_device_train_batch_size 8 --learning_rate 5e-4 \
        --warmup_steps 2000 --adam_beta2 0.98 --weight_decay 0.01 --max_steps 20000 \
        --gumbel_temperature_decay 0.9999

Continue training a pretrained model on a dataset with audio:

    hfseq train wav2vec2 --output_dir my-more-speech \
        --model_name_or_path facebook/wav2vec2-large-lv60 \
        --dataset_name openslr/librispeech_asr --dataset_config_name clean \
        --train_split_name train.100 --mask_time_prob 0.65 --max_duration_in_seconds 15 \
        --min_duration_in_seconds 2 --num_train_epochs 3
""",
    "ctc": r"""
Train wav2vec 2.0 for speech recognition with CTC, where the labels are letters.

The data are a table with two columns: paths of audio files, which are relative to the directory of
the table, and transcripts. This command fine-tunes a model that was pretrained on audio without
transcripts:

    hfseq train ctc --output_dir my-ears --train_file spoken/train.csv \
        --validation_file spoken/validation.csv --audio_column_name audio \
        --text_column_name text --chars_to_ignore , . ! ? \
        --model_name_or_path facebook/wav2vec2-base --freeze_feature_extractor \
        --per_device_train_batch_size 8 --learning_rate 1e-4 --warmup_steps 500 \
        --num_train_epochs 20
""",
    "speech_recognition": r"""
Train Whisper on audio with transcripts.

The data are a dataset with audio, or a table with two columns: paths of audio files, which are
relative to the directory of the table, and transcripts:

    hfseq train speech_recognition --output_dir my-whisper \
        --model_name_or_path openai/whisper-small --language norwegian --task transcribe \
        --train_file speech/train.csv --validation_file speech/validation.csv \
        --max_duration_in_seconds 30 --per_device_train_batch_size 16 --learning_rate 1e-5 \
        --warmup_steps 500 --max_steps 5000 --eval_steps 1000

Each evaluation transcribes the validation audio and reports the word and character error rates.
`hfseq transcribe my-whisper FILE` transcribes other files.
""",
}


def objective_name(name: str) -> str:
    """Returns the name of an objective from one of its spellings.

    Args:
        name: The name of an objective or an alias in `ALIASES`, with dashes or underscores. Other
            names, such as those of objectives in plugins, are returned unchanged.
    """
    normalized = name.replace("-", "_")
    return ALIASES.get(normalized, normalized if normalized in USAGE else name)


def summary(objective: str) -> str:
    """Returns one sentence about an objective, or an empty string for an objective of a plugin."""
    return " ".join(USAGE.get(objective, "").strip().partition("\n\n")[0].split())


def usage(objective: str, program: str | None = None) -> str:
    """Returns the description of an objective for ``--help``.

    Args:
        objective: The objective.
        program: The command that the examples show. Default: ``hfseq train OBJECTIVE``.
    """
    command = f"hfseq train {objective}"
    text = USAGE.get(objective, f"Train with the objective '{objective}'.\n")
    return text.lstrip().replace(command, program or command) + RESUME
