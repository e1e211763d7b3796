"""Creates the pipeline of a task: :func:`hfseq.pipeline`."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from hfseq.checkpoints.config import Source, check_directory, class_names, model_type, read_config
from hfseq.errors import CheckpointError, UsageError, did_you_mean, first_line
from hfseq.pipelines import images, load_tokenizer, speech, tasks
from hfseq.pipelines.base import Pipeline
from hfseq.pipelines.generation import Summarization, Text2Text, TextGeneration, Translation

if TYPE_CHECKING:
    from jax.typing import DTypeLike
    from transformers import PreTrainedConfig, PreTrainedTokenizerBase

    from hfseq.modeling import FlaxPreTrainedModel

#: Pipelines by Transformers task name.
PIPELINES: dict[str, type[Pipeline]] = {
    "fill-mask": tasks.FillMask,
    "feature-extraction": tasks.FeatureExtraction,
    "sentence-similarity": tasks.SentenceSimilarity,
    "text-ranking": tasks.TextRanking,
    "text-classification": tasks.TextClassification,
    "zero-shot-classification": tasks.ZeroShotClassification,
    "token-classification": tasks.TokenClassification,
    "question-answering": tasks.QuestionAnswering,
    "text-generation": TextGeneration,
    "text2text-generation": Text2Text,
    "summarization": Summarization,
    "translation": Translation,
    "image-classification": images.ImageClassification,
    "zero-shot-image-classification": images.ZeroShotImageClassification,
    "image-feature-extraction": images.ImageFeatureExtraction,
    "image-to-text": images.ImageToText,
    "automatic-speech-recognition": speech.SpeechRecognition,
}
ALIASES = {
    "sentiment-analysis": "text-classification",
    "ner": "token-classification",
    "image-captioning": "image-to-text",
}
#: Default task by the end of the model's class name, for calls without a task.
TASKS_BY_CLASS = {
    "ForMaskedLM": "fill-mask",
    "ForSequenceClassification": "text-classification",
    "ForTokenClassification": "token-classification",
    "ForQuestionAnswering": "question-answering",
    "ForImageClassification": "image-classification",
    "ForCTC": "automatic-speech-recognition",
    "WhisperForConditionalGeneration": "automatic-speech-recognition",
    "SpeechEncoderDecoderModel": "automatic-speech-recognition",
    "VisionEncoderDecoderModel": "image-to-text",
    "ForConditionalGeneration": "text2text-generation",
    "ForSeq2SeqLM": "text2text-generation",
    "MarianMTModel": "text2text-generation",
    "EncoderDecoderModel": "text2text-generation",
    "ForCausalLM": "text-generation",
    "LMHeadModel": "text-generation",
}


def pipeline(
    task: str | None = None,
    model: str | FlaxPreTrainedModel | None = None,
    config: str | PreTrainedConfig | None = None,
    tokenizer: str | PreTrainedTokenizerBase | None = None,
    feature_extractor: Any = None,
    image_processor: Any = None,
    processor: Any = None,
    *,
    revision: str | None = None,
    token: str | bool | None = None,
    device: Any = None,
    dtype: DTypeLike | None = None,
    precision: str | None = None,
    batch_size: int = 8,
    num_workers: int = 0,
    progress: bool = False,
    model_kwargs: dict[str, Any] | None = None,
    device_map: Any = None,
    trust_remote_code: bool | None = None,
    use_fast: bool | None = None,
    **options: Any,
) -> Pipeline:
    """Creates a pipeline for a task.

    Arguments and return values are those of ``pipeline`` in Transformers.

    Args:
        task: A key of :data:`PIPELINES`, ``sentiment-analysis``, ``ner`` or
            ``translation_xx_to_yy``. Default: the task for the model's class.
        model: Directory or Hub name of a checkpoint or adapter, or a model.
        config: Configuration, or its directory or Hub name. Default: the model's configuration.
        tokenizer: The tokenizer, or its directory or Hub name. Default: the model's tokenizer.
        feature_extractor: The feature extractor for audio, or its directory or Hub name.
        image_processor: The image processor, or its directory or Hub name.
        processor: A processor that contains the tokenizer and the feature extractor or image
            processor.
        revision: Revision of a Hub repository.
        token: Access token of the Hub.
        device: Device of the computation: "cpu", "gpu", "tpu", "cuda:0", a number, or a JAX device.
            Default: the default device of JAX.
        dtype: As in ``from_pretrained``.
        precision: Precision recipe, such as "float32" or "bfloat16".
        batch_size: Maximum rows per batch.
        num_workers: Number of processes that decode images.
        progress: Whether to show a progress bar.
        model_kwargs: More arguments of ``from_pretrained``.
        device_map: As in ``from_pretrained``.
        trust_remote_code: Must not be true: code from the Hub requires PyTorch.
        use_fast: Ignored; tokenizers are fast whenever possible.
        **options: Default options of the task.

    Returns:
        A pipeline. Call it with one input, a list, an iterator, a dataset or, for tasks on texts, a
        ``pathlib.Path``. See :class:`~hfseq.pipelines.base.Pipeline`.

    Raises:
        UsageError: The task or an option is unknown, or the model does not have the task's head.
        CheckpointError: The checkpoint cannot be loaded.
    """
    if model is None:
        raise UsageError(
            f"pipeline({task!r}): model= is required: a directory, a Hub name or a model. hfseq "
            "has no default models"
        )
    if trust_remote_code:
        raise UsageError("trust_remote_code=True is not supported: code on the Hub is for PyTorch")
    if config is not None and not isinstance(config, str) and not hasattr(config, "model_type"):
        raise UsageError(
            f"pipeline({task!r}): config= is a {type(config).__name__}; it must be a configuration "
            "or its name. Pass tokenizers and processors by keyword: tokenizer=…"
        )
    if not isinstance(model, str) and (dtype is not None or precision is not None):
        name = "precision" if dtype is None else "dtype"
        raise UsageError(
            f"pipeline({task!r}): {name}= requires the name of a checkpoint. The model is already "
            f"loaded; pass {name}= to from_pretrained"
        )
    if task is None:
        task = default_task(model)
    pipeline_class = find_pipeline(task)
    loading = {
        "dtype": dtype,
        "precision": precision,
        "revision": revision,
        "token": token,
        "config": config,
        "device_map": device_map,
    }
    loading = {name: value for name, value in loading.items() if value is not None}
    loading |= model_kwargs or {}
    given: dict[str, Any] = {
        "tokenizer": tokenizer,
        "feature_extractor": feature_extractor,
        "image_processor": image_processor,
    }
    for name, value in given.items():
        if value is None and processor is not None:
            given[name] = getattr(processor, name, None)
    if isinstance(model, str):
        source, loaded_model = model, _load_model(pipeline_class, model, loading)
        pipeline_class.check_head(loaded_model, model)
    else:
        source, loaded_model = model.name_or_path, model
    pipeline_class.check_model(loaded_model, task)
    processors = {
        name: _load_processor(name, given[name], loaded_model, source, task, loading)
        for name in pipeline_class.processors
    }
    return pipeline_class(
        loaded_model,
        task=task,
        **processors,
        device=device,
        batch_size=batch_size,
        num_workers=num_workers,
        progress=progress,
        **options,
    )


def generation_task(name: str) -> str:
    """Returns "text-generation" or "text2text-generation", whichever a checkpoint supports.

    Raises:
        UsageError: The model cannot generate text.
        CheckpointError: The configuration cannot be read.
    """
    from hfseq import plugins
    from hfseq.modeling import lora

    source = Source.parse(name)
    adapter, base, download = lora.find_base(source.weights, {})
    config = read_config(source.location if adapter is None else base, download)
    architecture = str(model_type(config))
    spec = plugins.load().architectures.get(architecture)
    heads = [head for head in ("ForSeq2SeqLM", "ForCausalLM") if head in spec.heads]
    heads = [head for head in heads if spec.load_head(head).can_generate()]
    if not heads:
        raise UsageError(
            f"'{name}' has the model type '{architecture}', which cannot generate text"
        )
    is_causal = "ForSeq2SeqLM" not in heads or "CausalLM" in " ".join(class_names(config))
    return "text-generation" if is_causal else "text2text-generation"


def find_pipeline(task: str) -> type[Pipeline]:
    """Returns the pipeline class for a task.

    Raises:
        UsageError: The task is unknown.
    """
    name = ALIASES.get(task, "translation" if task.startswith("translation_") else task)
    if name not in PIPELINES:
        names = [*PIPELINES, *ALIASES, "translation_xx_to_yy"]
        raise UsageError(
            f"unknown task '{task}'{did_you_mean(task, names)}; use {', '.join(names)}"
        )
    return PIPELINES[name]


def default_task(model: str | FlaxPreTrainedModel) -> str:
    """Returns the task of a model or checkpoint, according to the name of its class.

    Raises:
        UsageError: The class does not define a task.
    """
    if isinstance(model, str):
        from hfseq.modeling import lora

        source = Source.parse(model)
        adapter, base, download = lora.find_base(source.weights, {})
        location = source.location if adapter is None else base
        names = class_names(read_config(location, download))
    else:
        names = [type(model).__name__]
    for end, task in TASKS_BY_CLASS.items():
        if any(name.endswith(end) for name in names):
            return task
    raise UsageError(
        f"pipeline(): {' '.join(names) or 'the checkpoint'} does not define a task. Set task to "
        f"one of {', '.join(PIPELINES)}"
    )


def _load_model(
    pipeline_class: type[Pipeline], name: str, loading: dict[str, Any]
) -> FlaxPreTrainedModel:
    """Returns the model with the head of the task."""
    from hfseq.modeling import auto

    auto_class = pipeline_class.auto_class()
    if pipeline_class is speech.SpeechRecognition and default_task_class(name).endswith("ForCTC"):
        auto_class = auto.FlaxAutoModelForCTC
    if pipeline_class is tasks.TextRanking and "ForCausalLM" in default_task_class(name):
        auto_class = auto.FlaxAutoModelForCausalLM  # scores pairs by the logits of two tokens
    return auto.load(auto_class, name, **loading)


def default_task_class(name: str) -> str:
    """Returns the first class name in the configuration of a checkpoint."""
    return next(iter(class_names(read_config(Source.parse(name).location))), "")


def _load_processor(
    kind: str,
    processor: Any,
    model: FlaxPreTrainedModel,
    source: str,
    task: str,
    loading: dict[str, Any],
) -> Any:
    """Returns a processor. If none is given, loads it from the model's checkpoint."""
    if processor is not None and not isinstance(processor, str):
        return processor
    if not processor and not source:
        raise UsageError(
            f"pipeline('{task}', model): a new model also requires {kind}=, because it was not "
            "loaded from a checkpoint"
        )
    options = {key: loading[key] for key in ("revision", "token") if key in loading}
    if kind == "tokenizer":
        return load_tokenizer(model, source, processor, **options)
    name = processor or source
    check_directory(name)
    if kind == "image_processor":
        from hfseq.data.images import load_image_processor

        return load_image_processor(name, None, **options)
    from transformers import AutoFeatureExtractor

    try:
        return AutoFeatureExtractor.from_pretrained(name, **options)
    except Exception as error:  # OSError without a file, ValueError for an unknown type
        raise CheckpointError(
            f"'{name}' has no feature extractor ({first_line(error)}). Use a directory with a "
            "preprocessor_config.json."
        ) from error
