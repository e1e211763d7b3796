"""Flags and commands of the Flax scripts of Transformers 4."""

from __future__ import annotations

# Transformers 4.56, examples/flax/language-modeling/run_mlm_flax.py: every flag and its default,
# but for --token and --hub_token.
_MLM = {
    "overwrite_output_dir": False,
    "do_train": False,
    "do_eval": False,
    "per_device_train_batch_size": 8,
    "per_device_eval_batch_size": 8,
    "learning_rate": 5e-05,
    "weight_decay": 0.0,
    "adam_beta1": 0.9,
    "adam_beta2": 0.999,
    "adam_epsilon": 1e-08,
    "adafactor": False,
    "num_train_epochs": 3.0,
    "warmup_steps": 0,
    "logging_steps": 500,
    "save_steps": 500,
    "eval_steps": None,
    "seed": 42,
    "push_to_hub": False,
    "hub_model_id": None,
    "gradient_checkpointing": False,
    "model_name_or_path": None,
    "model_type": None,
    "config_name": None,
    "tokenizer_name": None,
    "cache_dir": None,
    "use_fast_tokenizer": True,
    "dtype": "float32",
    "trust_remote_code": False,
    "dataset_name": None,
    "dataset_config_name": None,
    "train_file": None,
    "validation_file": None,
    "train_ref_file": None,
    "validation_ref_file": None,
    "overwrite_cache": False,
    "validation_split_percentage": 5,
    "max_seq_length": None,
    "preprocessing_num_workers": None,
    "mlm_probability": 0.15,
    "pad_to_max_length": False,
    "line_by_line": False,
}


# Transformers 4.56, examples/flax/language-modeling: what each script has instead of, or beside,
# the flags of run_mlm_flax.py, with its defaults.
_NOT_SHARED = {"gradient_checkpointing", "pad_to_max_length", "line_by_line", "mlm_probability"}
_LM_SHARED = {name: default for name, default in _MLM.items() if name not in _NOT_SHARED}
_REFERENCES = ("train_ref_file", "validation_ref_file", "max_seq_length")
_LANGUAGE = {
    "mlm": _MLM,
    "clm": {name: default for name, default in _LM_SHARED.items() if name not in _REFERENCES}
    | {
        "block_size": None,
        "keep_linebreaks": True,
        "max_train_samples": None,
        "max_eval_samples": None,
    },
    "span_mlm": _LM_SHARED | {"mlm_probability": 0.15, "mean_noise_span_length": 3.0},
    "denoising": _LM_SHARED
    | {"mlm_probability": 0.3, "permute_sentence_ratio": 1.0, "poisson_lambda": 3.0},
}

# Transformers 4.57, examples/flax: the flags of each script, with their defaults.
_LM_ONLY = (
    "mlm_probability",
    "line_by_line",
    "train_ref_file",
    "validation_ref_file",
    "validation_split_percentage",
)
_SHARED = {name: default for name, default in _MLM.items() if name not in _LM_ONLY}
_TABLES = {
    "test_file": None,
    "max_train_samples": None,
    "max_eval_samples": None,
    "max_predict_samples": None,
}


def _without(*names):
    return {name: default for name, default in _SHARED.items() if name not in names}


_GONE = ("gradient_checkpointing", "model_type", "use_fast_tokenizer")
_TASKS = {
    "token_classification": _without(*_GONE, "dtype", "pad_to_max_length")
    | _TABLES
    | {"model_revision": "main", "task_name": "ner", "text_column_name": None,
       "label_column_name": None, "label_all_tokens": False, "return_entity_level_metrics": False},
    "question_answering": _without(*_GONE)
    | _TABLES
    | {"do_predict": False, "model_revision": "main", "max_seq_length": 384,
       "version_2_with_negative": False, "null_score_diff_threshold": 0.0, "doc_stride": 128,
       "n_best_size": 20, "max_answer_length": 30},
    "summarization": _without("max_seq_length", "pad_to_max_length")
    | _TABLES
    | {"do_predict": False, "label_smoothing_factor": 0.0, "text_column": None,
       "summary_column": None, "max_source_length": 1024, "max_target_length": 128,
       "val_max_target_length": None, "source_prefix": None, "predict_with_generate": False,
       "num_beams": 1},
}  # fmt: skip

#: The flags of each script with their defaults, by objective.
V4 = {**_LANGUAGE, **_TASKS}

#: Where the default is another one.
CHANGED = {
    # `--precision` decides where `--dtype` is not given: float32 again.
    "dtype": None,
    # With neither flag, both run.
    "do_train": True,
    "do_eval": True,
    # Lengths and the stride are those of version 4 where they fit. Summaries are always evaluated.
    "doc_stride": None,
    "max_source_length": None,
    "max_target_length": None,
    "predict_with_generate": True,
}


#: Data arguments of scripts whose other flags are not listed.
OWN_FLAGS = {
    "classification": (
        *("task_name", "dataset_name", "dataset_config_name", "train_file", "validation_file"),
        *("test_file", "text_column_name", "label_column_name", "overwrite_cache"),
        *("max_seq_length", "max_train_samples", "max_eval_samples", "max_predict_samples"),
    ),
    "image_classification": (
        *("train_dir", "validation_dir", "image_size", "max_train_samples", "max_eval_samples"),
        *("overwrite_cache", "preprocessing_num_workers"),
    ),
}

#: The commands of the guides as they were printed, except for the corpora.
GUIDES = {
    "mlm": """
python run_mlm_flax.py \
    --output_dir="./norwegian-roberta-base" \
    --model_type="roberta" \
    --config_name="./norwegian-roberta-base" \
    --tokenizer_name="./norwegian-roberta-base" \
    --dataset_name="HuggingFaceFW/fineweb-2" \
    --dataset_config_name="nob_Latn" \
    --max_seq_length="128" \
    --weight_decay="0.01" \
    --per_device_train_batch_size="128" \
    --per_device_eval_batch_size="128" \
    --learning_rate="3e-4" \
    --warmup_steps="1000" \
    --overwrite_output_dir \
    --num_train_epochs="18" \
    --adam_beta1="0.9" \
    --adam_beta2="0.98" \
    --logging_steps="500" \
    --save_steps="2500" \
    --eval_steps="2500" \
    --push_to_hub
""",
    "clm": """
python run_clm_flax.py \
    --output_dir="./norwegian-gpt2" \
    --model_type="gpt2" \
    --config_name="./norwegian-gpt2" \
    --tokenizer_name="./norwegian-gpt2" \
    --dataset_name="HuggingFaceFW/fineweb-2" \
    --dataset_config_name="nob_Latn" \
    --do_train --do_eval \
    --block_size="512" \
    --per_device_train_batch_size="64" \
    --per_device_eval_batch_size="64" \
    --learning_rate="5e-3" --warmup_steps="1000" \
    --adam_beta1="0.9" --adam_beta2="0.98" --weight_decay="0.01" \
    --overwrite_output_dir \
    --num_train_epochs="20" \
    --logging_steps="500" \
    --save_steps="2500" \
    --eval_steps="2500" \
    --push_to_hub
""",
    "span_mlm": """
python run_t5_mlm_flax.py \
	--output_dir="./norwegian-t5-base" \
	--model_type="t5" \
	--config_name="./norwegian-t5-base" \
	--tokenizer_name="./norwegian-t5-base" \
	--dataset_name="HuggingFaceFW/fineweb-2" \
	--dataset_config_name="nob_Latn" \
	--max_seq_length="512" \
	--per_device_train_batch_size="32" \
	--per_device_eval_batch_size="32" \
	--adafactor \
	--learning_rate="0.005" \
	--weight_decay="0.001" \
	--warmup_steps="2000" \
	--overwrite_output_dir \
	--logging_steps="500" \
	--save_steps="10000" \
	--eval_steps="2500" \
	--push_to_hub
""",
    "denoising": """
python run_bart_dlm_flax.py \
    --output_dir="./norwegian-bart-base" \
    --config_name="./norwegian-bart-base" \
    --tokenizer_name="./norwegian-bart-base" \
    --dataset_name="HuggingFaceFW/fineweb-2" \
    --dataset_config_name="nob_Latn" \
    --max_seq_length="1024" \
    --per_device_train_batch_size="32" \
    --per_device_eval_batch_size="32" \
    --learning_rate="1e-4" \
    --warmup_steps="2000" \
    --overwrite_output_dir \
    --logging_steps="500" \
    --save_steps="2000" \
    --eval_steps="2000" \
    --push_to_hub
""",
    "classification": """
python run_flax_glue.py \
  --model_name_or_path google-bert/bert-base-cased \
  --task_name mrpc \
  --max_seq_length 128 \
  --learning_rate 2e-5 \
  --num_train_epochs 3 \
  --per_device_train_batch_size 4 \
  --eval_steps 100 \
  --output_dir ./mrpc/ \
  --push_to_hub
""",
    "image_classification": """
python run_image_classification.py \
    --output_dir ./vit-base-patch16-imagenette \
    --model_name_or_path google/vit-base-patch16-224-in21k \
    --train_dir="imagenette2/train" \
    --validation_dir="imagenette2/val" \
    --num_train_epochs 5 \
    --learning_rate 1e-3 \
    --per_device_train_batch_size 128 --per_device_eval_batch_size 128 \
    --overwrite_output_dir \
    --preprocessing_num_workers 32 \
    --push_to_hub
""",
    "image_to_text": """
python run_image_captioning_flax.py \
    --output_dir ./image-captioning-training-results \
    --model_name_or_path model \
    --dataset_name ydshieh/coco_dataset_script \
    --dataset_config_name=2017 \
    --data_dir data \
    --image_column image_path \
    --caption_column caption \
    --do_train --do_eval --predict_with_generate \
    --num_train_epochs 1 \
    --eval_steps 500 \
    --learning_rate 3e-5 --warmup_steps 0 \
    --per_device_train_batch_size 32 \
    --per_device_eval_batch_size 32 \
    --overwrite_output_dir \
    --max_target_length 32 \
    --num_beams 8 \
    --preprocessing_num_workers 16 \
    --logging_steps 10 \
    --block_size 16384 \
    --push_to_hub
""",
    # --use_auth_token is left out: tokens must not be flags.
    "speech_recognition": """
python run_flax_speech_recognition_seq2seq.py \
    --model_name_or_path openai/whisper-small \
    --dataset_name mozilla-foundation/common_voice_13_0 \
    --dataset_config_name hi \
    --language hindi \
    --train_split_name train+validation \
    --eval_split_name test \
    --output_dir ./whisper-small-hi-flax \
    --per_device_train_batch_size 16 \
    --per_device_eval_batch_size 16 \
    --num_train_epochs 10 \
    --learning_rate 1e-4 \
    --warmup_steps 500 \
    --logging_steps 25 \
    --generation_max_length 40 \
    --preprocessing_num_workers 32 \
    --dataloader_num_workers 32 \
    --max_duration_in_seconds 30 \
    --text_column_name sentence \
    --overwrite_output_dir \
    --do_train \
    --do_eval \
    --predict_with_generate \
    --push_to_hub
""",
    # The research project jax-projects/wav2vec2.
    "wav2vec2": """
python run_wav2vec2_pretrain_flax.py
    --output_dir ./wav2vec2-base-robust --num_train_epochs 5 --per_device_train_batch_size 32
    --per_device_eval_batch_size 32 --learning_rate 5e-4 --weight_decay 0.01 --warmup_steps 2000
    --model_name_or_path ./wav2vec2-base-robust --dataset_name librispeech_asr
    --dataset_config_name clean --train_split_name train.100
    --validation_split_name validation --speech_file_column file --preprocessing_num_workers 4
    --max_duration_in_seconds 10.0 --adam_beta1 0.9 --adam_beta2 0.98 --pad_to_multiple_of 16384
    --validation_split_percentage 5 --overwrite_cache --freeze_feature_extractor False
    --verbose_logging --max_gumbel_temperature 2 --min_gumbel_temperature 0.1
    --gumbel_temperature_decay 0.999995 --dtype float32 --cache_dir ./cache --gradient_checkpointing
    --logging_steps 50 --push_to_hub
""",
}
