"""The model card: training, data, hardware, results, and how to load the model.

The numbers of a card come from the log of the run (`CardContext.with_log`), so that the card and
the log always agree.
"""

from __future__ import annotations

import math
import os
import re
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from statistics import median
from typing import TYPE_CHECKING, Any
from urllib.parse import quote

from hfseq import plugins
from hfseq.errors import redact_private, write_atomically
from hfseq.reports.log import read_metrics

if TYPE_CHECKING:
    from huggingface_hub import ModelCardData

MARKER = "<!-- This card was written by hfseq. Remove this line and it will not be overwritten. -->"

TEMPLATE = Path(__file__).parents[1] / "templates" / "model_card.md.j2"

#: The split of the data that each prefix of metrics in the log belongs to.
SPLITS = {"eval": "validation", "predict": "test"}

RATES = ("tokens_per_second", "mfu")

LIMITS = (
    "The model is limited to the language and the domain of its training data, and reproduces the "
    "errors and biases of that data. It was only evaluated as shown above. Test it on your own "
    "data before you rely on it."
)

PIPELINES = {
    "ForMaskedLM": "fill-mask",
    "ForCausalLM": "text-generation",
    "ForSeq2SeqLM": "translation",
    "ForSequenceClassification": "text-classification",
    "ForImageClassification": "image-classification",
    "ForTokenClassification": "token-classification",
    "ForQuestionAnswering": "question-answering",
    "ForMultipleChoice": "multiple-choice",
}

AUDIO_INPUT = """\
samples, rate = soundfile.read("speech.wav")  # rate must equal processor.sampling_rate
inputs = processor(samples, sampling_rate=rate, return_tensors="{tensors}")
"""
IMAGE_INPUT = """\
image = Image.open("image.png").convert("RGB")
inputs = processor(image, return_tensors="{tensors}")
"""
GENERATE_FROM_MEDIA = """\
generated = model.generate(inputs["{input_name}"]){sequences}
print(tokenizer.batch_decode(generated, skip_special_tokens=True))"""
#: The Hub task of image and audio models, and the code that uses them, by class name.
MEDIA = {
    "WhisperForConditionalGeneration": (
        "automatic-speech-recognition",
        AUDIO_INPUT + GENERATE_FROM_MEDIA.replace("{input_name}", "input_features"),
    ),
    "Wav2Vec2ForCTC": (
        "automatic-speech-recognition",
        AUDIO_INPUT + "print(tokenizer.batch_decode(model(**inputs).logits.argmax(-1).tolist()))",
    ),
    "Wav2Vec2ForPreTraining": (None, AUDIO_INPUT + "outputs = model(**inputs)"),
    "VisionEncoderDecoderModel": (
        "image-to-text",
        IMAGE_INPUT + GENERATE_FROM_MEDIA.replace("{input_name}", "pixel_values"),
    ),
    **dict.fromkeys(
        ("CLIPModel", "VisionTextDualEncoderModel"),
        (
            "zero-shot-image-classification",
            IMAGE_INPUT
            + """\
captions = tokenizer(["a cat", "a dog"], padding=True, return_tensors="{tensors}")
print(model(**inputs, **captions).logits_per_image)""",
        ),
    ),
}

ENDINGS = {"ForConditionalGeneration": "ForSeq2SeqLM", "LMHeadModel": "ForCausalLM"}

#: Code that loads a model, with hfseq ("np") and with transformers ("pt"). `CALLS` contains the
#: code that follows it, by task.
HEADS = {
    "np": """\
from transformers import AutoTokenizer

from hfseq import FlaxAutoModel{task}

tokenizer = AutoTokenizer.from_pretrained("{name}")
model = FlaxAutoModel{task}.from_pretrained("{name}")
""",
    "pt": """\
from transformers import AutoModel{task}, AutoTokenizer

tokenizer = AutoTokenizer.from_pretrained("{name}"{trust})
model = AutoModel{task}.from_pretrained("{name}"{trust})
""",
}
CALL = """\
outputs = model(**tokenizer("Some text", return_tensors="{tensors}"))"""
GENERATE = """\
inputs = tokenizer("Some text", return_tensors="{tensors}")
generated = model.generate(**inputs, max_new_tokens=40){sequences}
print(tokenizer.batch_decode(generated, skip_special_tokens=True))"""
#: Code for models that were trained on conversations.
CHAT = """\
messages = [{{"role": "user", "content": "Some text"}}]
inputs = tokenizer.apply_chat_template(
    messages, add_generation_prompt=True, return_dict=True, return_tensors="{tensors}"
)
generated = model.generate(**inputs, max_new_tokens=40){sequences}
answer = generated[0, inputs["input_ids"].shape[1] :].tolist()
print(tokenizer.decode(answer, skip_special_tokens=True))"""
#: The Hub tag of models that sentence-transformers can load. The code below computes embeddings.
SENTENCE_TRANSFORMERS_TAG = "sentence-transformers"
SENTENCE_HEADS = {
    "np": """\
from hfseq import FlaxAutoModel

model = FlaxAutoModel.from_pretrained("{name}")
""",
    "pt": """\
from sentence_transformers import SentenceTransformer

model = SentenceTransformer("{name}")
""",
}
SENTENCE_CALL = """\
vectors = model.encode(["Some text", "Another one"])
print(vectors[0] @ vectors[1])"""
#: The class and a call of the other kinds of retrieval models, by their tags.
RETRIEVAL_CALLS = {
    "cross-encoder": (
        "CrossEncoder",
        'print(model.predict([("Some query", "Some text"), ("Some query", "Another one")]))',
    ),
    "sparse-encoder": (
        "SparseEncoder",
        'vectors = model.encode_document(["Some text", "Another one"])\n'
        "print(model.decode(vectors, top_k=5))",
    ),
    "multi-vector": (
        "MultiVectorEncoder",
        'documents = model.encode_document(["Some text", "Another one"])\n'
        'print(model.similarity(model.encode_query(["Some query"]), documents))',
    ),
}
CALLS = {
    "ForMaskedLM": """\
inputs = tokenizer(f"One word is {{tokenizer.mask_token}}.", return_tensors="{tensors}")
logits = model(**inputs).logits[0]
best = logits[inputs["input_ids"][0] == tokenizer.mask_token_id].argmax(-1)
print(tokenizer.decode(best.tolist()))""",
    "ForSequenceClassification": """\
logits = model(**tokenizer("Some text", return_tensors="{tensors}")).logits[0]
print(model.config.id2label[int(logits.argmax())])""",
    "ForTokenClassification": """\
inputs = tokenizer("Some text", return_tensors="{tensors}")
tags = model(**inputs).logits[0].argmax(-1).tolist()
print([(token, model.config.id2label[tag]) for token, tag in zip(inputs.tokens(), tags)])""",
    "ForQuestionAnswering": """\
inputs = tokenizer("Some question?", "Some text", return_tensors="{tensors}")
outputs = model(**inputs)
start, end = (int(outputs[name][0].argmax()) for name in ("start_logits", "end_logits"))
print(tokenizer.decode(inputs["input_ids"][0][start : end + 1]))""",
    "ForCausalLM": GENERATE,
    "ForSeq2SeqLM": GENERATE,
    "ForImageClassification": """\
from PIL import Image

image = Image.open("image.png").convert("RGB")
logits = model(**processor(image, return_tensors="{tensors}")).logits[0]
print(model.config.id2label[int(logits.argmax())])""",
}


def snippet(
    task: str,
    name: str,
    tensors: str,
    custom_code: bool = False,
    architecture: str = "",
    chat: bool = False,
    sentences: bool = False,
    tags: Iterable[str] = (),
) -> str:
    """Returns code that loads and calls a model.

    Args:
        task: The suffix of the Auto class, e.g. "ForMaskedLM".
        name: Directory or Hub ID of the model.
        tensors: "np" for code with hfseq, "pt" for code with transformers.
        custom_code: Whether the checkpoint contains the PyTorch code of the model.
        architecture: The class of the model. Required for image and audio models.
        chat: Whether the tokenizer has a chat template.
        sentences: Whether sentence-transformers can load the directory.
        tags: The Hub tags, which name the kind of a retrieval model.
    """
    if retrieval_tag := next((tag for tag in tags if tag in RETRIEVAL_CALLS), None):
        class_name, call = RETRIEVAL_CALLS[retrieval_tag]
        package = "hfseq" if tensors == "np" else "sentence_transformers"
        method = ".from_pretrained" if tensors == "np" else ""
        head = f'from {package} import {class_name}\n\nmodel = {class_name}{method}("{name}")\n'
        return head + call
    if sentences:
        return (SENTENCE_HEADS[tensors] + SENTENCE_CALL).format(name=name)
    if architecture in MEDIA:
        return _media_snippet(architecture, name, tensors)
    head = HEADS[tensors]
    if task == "ForImageClassification":
        head = head.replace("AutoTokenizer", "AutoImageProcessor")
        head = head.replace("tokenizer =", "processor =")
    uses_chat = chat and task == "ForCausalLM"
    return (head + (CHAT if uses_chat else CALLS.get(task, CALL))).format(
        task=task,
        name=name,
        tensors=tensors,
        trust=", trust_remote_code=True" if custom_code else "",
        sequences=".sequences" if tensors == "np" else "",
    )


def _media_snippet(architecture: str, name: str, tensors: str) -> str:
    call = MEDIA[architecture][1]
    is_audio = call.startswith(AUDIO_INPUT)
    processor = "AutoFeatureExtractor" if is_audio else "AutoImageProcessor"
    uses_hfseq = tensors == "np"
    names = [processor, *(["AutoTokenizer"] if "tokenizer" in call else [])]
    lines = [
        "import soundfile" if is_audio else "from PIL import Image",
        f"from transformers import {', '.join(names if uses_hfseq else [*names, architecture])}",
        "",
        *([f"from hfseq import Flax{architecture}", ""] if uses_hfseq else []),
        f'processor = {processor}.from_pretrained("{name}")',
        *([f'tokenizer = AutoTokenizer.from_pretrained("{name}")'] if names[1:] else []),
        f'model = {"Flax" * uses_hfseq}{architecture}.from_pretrained("{name}")',
        call.format(tensors=tensors, sequences=".sequences" if uses_hfseq else ""),
    ]
    return "\n".join(lines)


@dataclass(frozen=True)
class CardDataset:
    """A training dataset.

    Attributes:
        name: The name of the dataset.
        config: The configuration of a Hub dataset.
        files: The files as specified by the user. Empty for a Hub dataset.
        documents: The number of documents.
        tokens: The number of tokens.
        source: The origin and license of the data.
    """

    name: str
    config: str | None = None
    files: Sequence[str] = ()
    documents: int | None = None
    tokens: int | None = None
    source: str = ""


@dataclass(frozen=True)
class CardResult:
    """The value of one metric on one split of a dataset."""

    metric: str
    value: float
    dataset: str
    split: str = "validation"


@dataclass(frozen=True)
class TrainingNumbers:
    """Numbers that are read from the log of a run.

    Attributes:
        steps: The last step.
        last: The last value of each metric, by name.
        medians: The medians of the throughput and the MFU.
        best_eval_loss: The lowest evaluation loss.
        best_step: The step of the lowest evaluation loss.
        duration_s: The time between the first and the last record in seconds.
    """

    steps: int
    last: Mapping[str, float]
    medians: Mapping[str, float]
    best_eval_loss: float | None = None
    best_step: int | None = None
    duration_s: float | None = None


@dataclass
class CardContext:
    """The content of a card. Empty fields are omitted.

    Attributes:
        model_name: The title.
        architecture: The class name, e.g. "RobertaForMaskedLM".
        model_type: The model type.
        language: Language codes.
        licence: The license of the model.
        command: The command of the user.
        datasets: The training data.
        tokenizer: A description of the tokenizer.
        hyperparameters: Flags and their values.
        hardware: The devices.
        versions: Package versions.
        duration_s: Training time in seconds.
        throughput: Tokens per second.
        mfu: Model FLOPs utilization as a fraction.
        parameters: The number of parameters.
        steps: The number of steps.
        tokens_seen: The number of training tokens.
        eval_results: The evaluation results.
        curve_file: File name of the learning curve.
        sample_outputs: Pairs of input and output.
        first_outputs: The outputs before training for the same inputs.
        limits: The section on limitations.
        citation: BibTeX entries.
        about: A line about the architecture.
        findings: Markdown text that follows the results.
        extra_sections: Markdown sections that precede the limitations.
        description: The introduction. Default: `summary()`.
        repo_id: The Hub ID of the model.
        base_model: The model that was fine-tuned.
        dequantized_from: Quantization method of the checkpoint that was fine-tuned.
        pipeline_tag: Overrides the Hub task of the architecture.
        emissions_g: CO2 equivalent of the training in grams.
        emissions_source: How `emissions_g` was determined.
        stock: Whether transformers has a PyTorch class for the architecture.
        custom_code: Whether the checkpoint contains the PyTorch code of the model.
        adapter: A description of the LoRA adapter.
        tags: Further Hub tags.
        chat: Whether the tokenizer has a chat template.
    """

    model_name: str
    architecture: str
    model_type: str
    language: str | list[str] | None = None
    licence: str | None = None
    command: str = ""
    datasets: Sequence[CardDataset] = ()
    tokenizer: str = ""
    hyperparameters: Mapping[str, Any] = field(default_factory=dict)
    hardware: str = ""
    versions: Mapping[str, str] = field(default_factory=dict)
    duration_s: float | None = None
    throughput: float | None = None
    mfu: float | None = None
    parameters: int | None = None
    steps: int | None = None
    tokens_seen: int | None = None
    eval_results: Sequence[CardResult] = ()
    curve_file: str = ""
    sample_outputs: Sequence[tuple[str, str]] = ()
    first_outputs: Sequence[str] = ()
    limits: str = ""
    citation: str = ""
    about: str = ""
    findings: str = ""
    extra_sections: Sequence[str] = ()
    description: str = ""
    repo_id: str = ""
    base_model: str | None = None
    dequantized_from: str = ""
    pipeline_tag: str | None = None
    emissions_g: float | None = None
    emissions_source: str = ""
    stock: bool = True
    custom_code: bool = False
    adapter: str = ""
    tags: Sequence[str] = ()
    chat: bool = False

    @property
    def task(self) -> str:
        """The suffix of the Auto class, e.g. "ForMaskedLM", or an empty string."""
        for ending, task in ENDINGS.items():
            if self.architecture.endswith(ending):
                return task
        match = re.search(r"For[A-Z]\w*$", self.architecture)
        return match[0] if match else ""

    def with_log(
        self,
        metrics_jsonl: str | os.PathLike[str],
        dataset: str = "",
        split_datasets: Mapping[str, str] | None = None,
    ) -> CardContext:
        """Returns a copy of the context with the numbers from the log of a run.

        Args:
            metrics_jsonl: The log.
            dataset: Name of the evaluation data. Default: the name of the training data.
            split_datasets: Names of the evaluation data by split ("validation" or "test"). Required
                only for splits whose data have a different name than `dataset`.
        """
        numbers = load_training_numbers(metrics_jsonl)
        dataset = dataset or ", ".join(data.name for data in self.datasets) or "validation data"
        results = []
        for name, value in numbers.last.items():
            prefix, _, metric = name.partition("_")
            if prefix in SPLITS and not name.endswith(("_second", "runtime", "_samples")):
                split = SPLITS[prefix]
                results.append(
                    CardResult(metric, value, (split_datasets or {}).get(split, dataset), split)
                )
        tokens = numbers.last.get("tokens_seen")
        return replace(
            self,
            steps=numbers.steps,
            tokens_seen=self.tokens_seen if tokens is None else int(tokens),
            throughput=numbers.medians.get("tokens_per_second", self.throughput),
            mfu=numbers.medians.get("mfu", self.mfu),
            duration_s=self.duration_s or numbers.duration_s,
            eval_results=results or self.eval_results,
        )

    def metadata(self, results: Sequence[CardResult]) -> ModelCardData:
        """Returns the metadata for the Hub: license, data, `results` and so on."""
        from huggingface_hub import EvalResult, ModelCardData

        media_pipeline = MEDIA[self.architecture][0] if self.architecture in MEDIA else None
        pipeline = self.pipeline_tag or media_pipeline or PIPELINES.get(self.task)
        evaluations = [
            EvalResult(
                task_type=pipeline or "other",
                dataset_type=re.sub(r"[^\w./-]+", "-", result.dataset).strip("-").lower() or "data",
                dataset_name=result.dataset,
                dataset_split=result.split,
                metric_type=result.metric,
                metric_value=result.value,
            )
            for result in results
        ]
        carbon: dict[str, Any] = {}
        if self.emissions_g is not None:
            entry = {
                "emissions": self.emissions_g,
                "source": self.emissions_source,
                "training_type": "fine-tuning" if self.base_model else "pre-training",
                "hardware_used": self.hardware,
            }
            carbon["co2_eq_emissions"] = {key: value for key, value in entry.items() if value != ""}
        return ModelCardData(
            language=self.language,
            license=self.licence,
            library_name="peft"
            if self.adapter
            else SENTENCE_TRANSFORMERS_TAG
            if SENTENCE_TRANSFORMERS_TAG in self.tags
            else "transformers"
            if self.stock or self.custom_code
            else "hfseq",
            tags=[
                "jax",
                "flax",
                "hfseq",
                self.model_type,
                *["custom_code"] * self.custom_code,
                *["lora"] * bool(self.adapter),
                *self.tags,
            ],
            datasets=[data.name for data in self.datasets if not data.files] or None,
            metrics=sorted({result.metric for result in results}) or None,
            base_model=self.hub_base,
            pipeline_tag=pipeline,
            model_name=self.model_name,
            eval_results=evaluations or None,
            **carbon,
        )

    @property
    def hub_base(self) -> str | None:
        """The Hub ID of the model that was fine-tuned, or `None` if it is not on the Hub."""
        name = self.base_model or ""
        on_hub = re.fullmatch(r"[\w-][\w.-]*(/[\w-][\w.-]*)?", name) and not Path(name).exists()
        return name if on_hub else None

    def summary(self) -> str:
        """Returns a sentence about the model, for cards without a description."""
        count, size = self.parameters or 0, ""
        for unit, word in ((1, ""), (1e3, " thousand"), (1e6, " million"), (1e9, " billion")):
            if count >= unit:
                size = f" with {count / unit:.3g}{word} parameters"
        base = self.hub_base
        origin = f", fine-tuned from [{base}](https://huggingface.co/{base})" if base else ""
        names = ", ".join(data.name for data in self.datasets)
        data = f" on {names}" if names else ""
        if self.adapter:
            return (
                f"An adapter for `{self.architecture}`{origin}, trained{data} in JAX with hfseq: "
                f"{self.adapter}."
            )
        return f"`{self.architecture}`{size}{origin}, trained{data} in JAX with hfseq."

    def training_facts(self) -> list[tuple[str, str]]:
        """Returns pairs of label and value about the training."""
        carbon, duration = "", ""
        if self.emissions_g is not None:
            source = f" ({self.emissions_source})" if self.emissions_source else ""
            carbon = f"{self.emissions_g:,.0f} g{source}"
        if self.duration_s:
            minutes, seconds = divmod(round(self.duration_s), 60)
            hours, minutes = divmod(minutes, 60)
            duration = f"{minutes} min {seconds} s" if minutes else f"{seconds} s"
            duration = f"{hours} h {minutes} min" if hours else duration
        values = {
            "Adapter": self.adapter,
            "Base weights dequantized from": self.dequantized_from,
            "Steps": _count(self.steps),
            "Tokens seen": _count(self.tokens_seen),
            "Training time": duration,
            "Throughput": f"{self.throughput:,.0f} tokens/s" if self.throughput else "",
            "Model FLOPs utilization": f"{self.mfu:.1%}" if self.mfu else "",
            "Hardware": self.hardware,
            "CO2 equivalent": carbon,
            "Software": ", ".join(f"{name} {version}" for name, version in self.versions.items()),
        }
        return [(name, value) for name, value in values.items() if value]


def load_training_numbers(metrics_jsonl: str | os.PathLike[str]) -> TrainingNumbers:
    """Reads a `metrics.jsonl`. Metrics may or may not have the prefix `train_`."""
    records = read_metrics(metrics_jsonl)
    values: dict[str, list[float]] = {}
    for record in records:
        for name, value in record.items():
            if name not in ("step", "time") and isinstance(value, int | float):
                values.setdefault(name, []).append(value)
    for name in (*RATES, "tokens_seen"):
        if f"train_{name}" in values:
            values.setdefault(name, values[f"train_{name}"])
    losses = [(r["eval_loss"], r["step"]) for r in records if r.get("eval_loss") is not None]
    best_loss, best_step = min(losses, default=(None, None))
    times = [r["time"] for r in records if "time" in r]
    return TrainingNumbers(
        steps=max((r["step"] for r in records), default=0),
        last={name: series[-1] for name, series in values.items()},
        medians={name: median(series) for name, series in values.items() if name in RATES},
        best_eval_loss=best_loss,
        best_step=best_step,
        duration_s=times[-1] - times[0] if len(times) > 1 else None,
    )


def write_model_card(output_dir: str | os.PathLike[str], context: CardContext) -> Path:
    """Writes the card to README.md, or to MODEL_CARD.md if the README was written by the user.

    Plugins can add sections with the hook `model_card_sections`. These come before the limitations.

    Returns:
        The path of the card.
    """
    directory = Path(output_dir)
    path = directory / "README.md"
    if path.exists() and MARKER not in path.read_text(encoding="utf-8", errors="replace"):
        path = directory / "MODEL_CARD.md"
    directory.mkdir(parents=True, exist_ok=True)
    write_atomically(path, render_model_card(context))
    return path


def render_model_card(context: CardContext) -> str:
    """Returns the card as Markdown with its metadata block."""
    import jinja2

    def cell(value: object) -> str:
        """Formats a value for one cell of a Markdown table."""
        return " ".join(str("" if value is None else value).split()).replace("|", r"\|")

    def fence(text: str, language: str = "") -> str:
        """Returns a code block whose fence is longer than any run of backticks in the text."""
        longest = max((len(run) for run in re.findall(r"`+", text)), default=0)
        ticks = "`" * max(3, longest + 1)
        return f"{ticks}{language}\n{text}\n{ticks}"

    environment = jinja2.Environment(
        undefined=jinja2.StrictUndefined,
        trim_blocks=True,
        lstrip_blocks=True,
        keep_trailing_newline=True,
        autoescape=False,  # noqa: S701 - Markdown, not HTML
    )
    environment.filters.update(
        cell=cell,
        count=_count,
        fence=fence,
        number=lambda value: f"{value:,}" if isinstance(value, int) else f"{value:.4g}",
        private=shorten_paths,
        url=quote,
    )
    results = [result for result in context.eval_results if math.isfinite(result.value)]
    name = context.repo_id or context.model_name
    torch = context.stock or context.custom_code
    sentences = SENTENCE_TRANSFORMERS_TAG in context.tags
    variables = vars(context) | {  # also passed to plugins that add sections
        "context": context,
        "card_data": context.metadata(results).to_yaml(),
        "marker": MARKER,
        "name": context.model_name,
        "description": context.description or context.summary(),
        "results": results,
        "auto_class": f"AutoModel{context.task}",
        "jax_snippet": snippet(
            context.task,
            name,
            "np",
            architecture=context.architecture,
            chat=context.chat,
            sentences=sentences,
            tags=context.tags,
        ),
        "torch_snippet": snippet(
            context.task,
            name,
            "pt",
            context.custom_code,
            context.architecture,
            context.chat,
            sentences=sentences,
            tags=context.tags,
        )
        if torch
        else "",
        "torch_library": SENTENCE_TRANSFORMERS_TAG if sentences else "plain Transformers",
        "samples": _samples(context),
        "facts": context.training_facts(),
        "command": shorten_paths(context.command),
        "hyperparameters": [(k, shorten_paths(str(v))) for k, v in context.hyperparameters.items()],
        "limits": context.limits or LIMITS,
    }
    sections = plugins.load().call_all("model_card_sections", context=variables)
    variables["extra_sections"] = [*context.extra_sections, *filter(None, sections)]
    text = environment.from_string(TEMPLATE.read_text(encoding="utf-8")).render(variables)
    return re.sub(r"\n{3,}", "\n\n", text).rstrip() + "\n"


def _samples(context: CardContext) -> list[str]:
    """Returns the text of each sample."""
    samples = []
    for number, (prompt, output) in enumerate(context.sample_outputs):
        answers = [output]
        if context.first_outputs:
            answers = [f"Before training: {context.first_outputs[number]}"]
            answers.append(f"After training: {output}")
        samples.append("\n\n".join([f"> {prompt}", *answers]))
    return samples


def shorten_paths(text: str) -> str:
    """Removes secrets from a text, and shortens absolute paths to the name of the file.

    The directories of a path exist only on this machine.
    """
    return re.sub(r"(?<![\w:/.~-])/(?:[\w.@%+~-]+/)+([\w.@%+~-]+)", r"\1", redact_private(text))


def _count(value: int | None) -> str:
    return "" if value is None else f"{value:,}"
