"""The model card: what was trained, on what, how, how well, and how to load it.

Its numbers come from the run's own log (`CardContext.with_log`), so card and log cannot disagree.
"""

from __future__ import annotations

import math
import os
import re
from collections.abc import Mapping, Sequence
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

#: Splits by the prefix of their metrics in the log.
SPLITS = {"eval": "validation", "predict": "test"}

RATES = ("tokens_per_second", "mfu")

LIMITS = (
    "The model knows the language and the domain of its training data and nothing else. It repeats "
    "that data's errors and biases. It was evaluated as shown above and in no other way; test it "
    "on your own data before relying on it."
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

#: Of models that read no text alone, by their class: what reads for them, the task, the call.
AUDIO_INPUT = """\
samples, rate = soundfile.read("speech.wav")  # as many samples a second as reader.sampling_rate
inputs = reader(samples, sampling_rate=rate, return_tensors="{tensors}")
"""
IMAGE_INPUT = """\
picture = Image.open("picture.png").convert("RGB")
inputs = reader(picture, return_tensors="{tensors}")
"""
GENERATE_FROM_MEDIA = """\
generated = model.generate(inputs["{given}"]){sequences}
print(tokenizer.batch_decode(generated, skip_special_tokens=True))"""
MEDIA = {
    "WhisperForConditionalGeneration": (
        "automatic-speech-recognition",
        AUDIO_INPUT + GENERATE_FROM_MEDIA.replace("{given}", "input_features"),
    ),
    "Wav2Vec2ForCTC": (
        "automatic-speech-recognition",
        AUDIO_INPUT + "print(tokenizer.batch_decode(model(**inputs).logits.argmax(-1)))",
    ),
    "Wav2Vec2ForPreTraining": (None, AUDIO_INPUT + "outputs = model(**inputs)"),
    "VisionEncoderDecoderModel": (
        "image-to-text",
        IMAGE_INPUT + GENERATE_FROM_MEDIA.replace("{given}", "pixel_values"),
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

#: How a model is loaded, and called by the head it has; with hfseq and with plain transformers.
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
#: What is said to a model that learned from conversations, and what it answers.
CHAT = """\
messages = [{{"role": "user", "content": "Some text"}}]
inputs = tokenizer.apply_chat_template(
    messages, add_generation_prompt=True, return_dict=True, return_tensors="{tensors}"
)
generated = model.generate(**inputs, max_new_tokens=40){sequences}
answer = generated[0, inputs["input_ids"].shape[1] :].tolist()
print(tokenizer.decode(answer, skip_special_tokens=True))"""
#: The tag of models whose directory sentence-transformers opens, and how vectors are made of texts.
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

picture = Image.open("picture.png").convert("RGB")
logits = model(**processor(picture, return_tensors="{tensors}")).logits[0]
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
) -> str:
    """Return the lines that load and call a model: with hfseq for "np", transformers for "pt".

    ``custom_code`` is for checkpoints that bring their PyTorch classes along; ``architecture`` is
    the class of one that reads pictures or sound; ``chat`` is for a tokenizer with a chat template,
    ``sentences`` for a model with sentence-transformers' files.
    """
    if sentences:
        return (SENTENCE_HEADS[tensors] + SENTENCE_CALL).format(name=name)
    if architecture in MEDIA:
        return _media_snippet(architecture, name, tensors)
    head = HEADS[tensors]
    if task == "ForImageClassification":
        head = head.replace("AutoTokenizer", "AutoImageProcessor")
        head = head.replace("tokenizer =", "processor =")
    talks = chat and task == "ForCausalLM"
    return (head + (CHAT if talks else CALLS.get(task, CALL))).format(
        task=task,
        name=name,
        tensors=tensors,
        trust=", trust_remote_code=True" if custom_code else "",
        sequences=".sequences" if tensors == "np" else "",
    )


def _media_snippet(architecture: str, name: str, tensors: str) -> str:
    call = MEDIA[architecture][1]
    heard = call.startswith(AUDIO_INPUT)
    reader = "AutoFeatureExtractor" if heard else "AutoImageProcessor"
    ours = tensors == "np"
    names = [reader, *(["AutoTokenizer"] if "tokenizer" in call else [])]
    lines = [
        "import soundfile" if heard else "from PIL import Image",
        f"from transformers import {', '.join(names if ours else [*names, architecture])}",
        "",
        *([f"from hfseq import Flax{architecture}", ""] if ours else []),
        f'reader = {reader}.from_pretrained("{name}")',
        *([f'tokenizer = AutoTokenizer.from_pretrained("{name}")'] if names[1:] else []),
        f'model = {"Flax" * ours}{architecture}.from_pretrained("{name}")',
        call.format(tensors=tensors, sequences=".sequences" if ours else ""),
    ]
    return "\n".join(lines)


@dataclass(frozen=True)
class CardDataset:
    """Data the model was trained on; ``files`` as given by the user, none for a Hub dataset.

    ``source`` says where it is from and under which licence.
    """

    name: str
    config: str | None = None
    files: Sequence[str] = ()
    documents: int | None = None
    tokens: int | None = None
    source: str = ""


@dataclass(frozen=True)
class CardResult:
    """One number of an evaluation."""

    metric: str
    value: float
    dataset: str
    split: str = "validation"


@dataclass(frozen=True)
class TrainingNumbers:
    """What a run's log says: last values of all metrics, medians of the rates, the best loss."""

    steps: int
    last: Mapping[str, float]
    medians: Mapping[str, float]
    best_eval_loss: float | None = None
    best_step: int | None = None
    duration_s: float | None = None


@dataclass
class CardContext:
    """Everything a card can say; what is left empty is left out of it.

    ``architecture`` is a class name ("RobertaForMaskedLM"), ``repo_id`` the name on the Hub if the
    model has one, ``command`` what the user typed, ``duration_s`` seconds, ``throughput`` tokens a
    second, ``mfu`` a fraction, ``sample_outputs`` pairs of input and output. ``stock`` says whether
    transformers has the architecture in PyTorch, ``custom_code`` whether the checkpoint brings its
    PyTorch classes along; ``pipeline_tag`` overrides the architecture's. ``tags`` are for the Hub,
    ``chat`` says whether the tokenizer has a chat template. ``about`` is a line on the
    architecture, ``findings`` are Markdown sections that follow the results. ``emissions_g`` is the
    CO2 equivalent of the training in grams and ``emissions_source`` how that is known.
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
    limits: str = ""
    citation: str = ""
    about: str = ""
    findings: str = ""
    extra_sections: Sequence[str] = ()
    description: str = ""
    repo_id: str = ""
    base_model: str | None = None
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
        """The Auto class suffix: "ForMaskedLM" of RobertaForMaskedLM, "" of RobertaModel."""
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
        """Return a copy whose numbers are those of the run's log.

        ``dataset`` names the evaluation data; without it, the training data's name is used.
        ``own`` names that of splits ("validation", "test") that have data of their own.
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
        """Return what the Hub reads of the card: licence, data, ``results`` and so on."""
        from huggingface_hub import EvalResult, ModelCardData

        known = MEDIA[self.architecture][0] if self.architecture in MEDIA else None
        pipeline = self.pipeline_tag or known or PIPELINES.get(self.task)
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
        """The model that this one was fine-tuned from, if it has a name on the Hub."""
        name = self.base_model or ""
        on_hub = re.fullmatch(r"[\w-][\w.-]*(/[\w-][\w.-]*)?", name) and not Path(name).exists()
        return name if on_hub else None

    def summary(self) -> str:
        """Return a sentence on the model, for a card without a description."""
        count, size = self.parameters or 0, ""
        for unit, word in ((1, ""), (1e3, " thousand"), (1e6, " million"), (1e9, " billion")):
            if count >= unit:
                size = f" with {count / unit:.3g}{word} parameters"
        base = self.hub_base
        begun = f", fine-tuned from [{base}](https://huggingface.co/{base})" if base else ""
        names = ", ".join(data.name for data in self.datasets)
        data = f" on {names}" if names else ""
        return f"`{self.architecture}`{size}{begun}, trained{data} in JAX with hfseq."

    def training_facts(self) -> list[tuple[str, str]]:
        """Return what is known of the training, by its label."""
        carbon, took = "", ""
        if self.emissions_g is not None:
            source = f" ({self.emissions_source})" if self.emissions_source else ""
            carbon = f"{self.emissions_g:,.0f} g{source}"
        if self.duration_s:
            minutes, seconds = divmod(round(self.duration_s), 60)
            hours, minutes = divmod(minutes, 60)
            took = f"{minutes} min {seconds} s" if minutes else f"{seconds} s"
            took = f"{hours} h {minutes} min" if hours else took
        facts = {
            "Adapter": self.adapter,
            "Steps": _count(self.steps),
            "Tokens seen": _count(self.tokens_seen),
            "Training time": took,
            "Throughput": f"{self.throughput:,.0f} tokens/s" if self.throughput else "",
            "Model FLOPs utilisation": f"{self.mfu:.1%}" if self.mfu else "",
            "Hardware": self.hardware,
            "CO2 equivalent": carbon,
            "Software": ", ".join(f"{name} {version}" for name, version in self.versions.items()),
        }
        return [(name, value) for name, value in facts.items() if value]


def load_training_numbers(metrics_jsonl: str | os.PathLike[str]) -> TrainingNumbers:
    """Read a ``metrics.jsonl``; metrics are found with and without the prefix ``train_``."""
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
        last={name: seen[-1] for name, seen in values.items()},
        medians={name: median(seen) for name, seen in values.items() if name in RATES},
        best_eval_loss=best_loss,
        best_step=best_step,
        duration_s=times[-1] - times[0] if len(times) > 1 else None,
    )


def write_model_card(output_dir: str | os.PathLike[str], context: CardContext) -> Path:
    """Write the card to README.md, or to MODEL_CARD.md if the README is the user's own.

    Sections that plugins add (hook ``model_card_sections``) come before the limits.
    """
    directory = Path(output_dir)
    path = directory / "README.md"
    if path.exists() and MARKER not in path.read_text(encoding="utf-8", errors="replace"):
        path = directory / "MODEL_CARD.md"
    directory.mkdir(parents=True, exist_ok=True)
    write_atomically(path, render_model_card(context))
    return path


def render_model_card(context: CardContext) -> str:
    """Return the card as Markdown with its metadata block."""
    import jinja2

    def cell(value: object) -> str:
        """Keep text within one cell of a Markdown table."""
        return " ".join(str("" if value is None else value).split()).replace("|", r"\|")

    def fence(text: str, language: str = "") -> str:
        """Write a code block whose fence is longer than any run of backticks inside."""
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
        private=redact_private,
        url=quote,
    )
    results = [result for result in context.eval_results if math.isfinite(result.value)]
    name = context.repo_id or context.model_name
    torch = context.stock or context.custom_code
    sentences = SENTENCE_TRANSFORMERS_TAG in context.tags
    variables = vars(context) | {  # plugins that add sections see them too
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
        ),
        "torch_snippet": snippet(
            context.task,
            name,
            "pt",
            context.custom_code,
            context.architecture,
            context.chat,
            sentences=sentences,
        )
        if torch
        else "",
        "torch_library": SENTENCE_TRANSFORMERS_TAG if sentences else "plain Transformers",
        "samples": context.sample_outputs,
        "facts": context.training_facts(),
        "command": redact_private(context.command),
        "hyperparameters": [
            (k, redact_private(str(v))) for k, v in context.hyperparameters.items()
        ],
        "limits": context.limits or LIMITS,
    }
    sections = plugins.load().call_all("model_card_sections", context=variables)
    variables["extra_sections"] = [*context.extra_sections, *filter(None, sections)]
    text = environment.from_string(TEMPLATE.read_text(encoding="utf-8")).render(variables)
    return re.sub(r"\n{3,}", "\n\n", text).rstrip() + "\n"


def _count(value: int | None) -> str:
    return "" if value is None else f"{value:,}"
