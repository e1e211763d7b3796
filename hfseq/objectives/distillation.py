"""Knowledge distillation (Hinton et al., 2015): a student also learns the predictions of a teacher.

The student is the trained model. `with_teacher` adds distillation to any objective that calls the
model once per batch and whose model returns logits, to the objective "embedding", and to the
objectives that train on preferences.
"""

from __future__ import annotations

import copy
import functools
import logging
import math
from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING, Any, ClassVar

import jax
import jax.numpy as jnp
import numpy as np

from hfseq import nn
from hfseq.data.batches import IGNORE_INDEX
from hfseq.errors import UsageError, first_line
from hfseq.modeling.sentence import MODULES_KEY, l2_normalize
from hfseq.nn.logits import DeferredLogits, map_logits
from hfseq.objectives import base
from hfseq.objectives import retrieval_losses as losses
from hfseq.objectives.base import AuxiliaryModel, Batch, ForwardCall, Loss, Objective, Params
from hfseq.objectives.divergences import attention_divergence, divergence, squared_error
from hfseq.objectives.preference import PreferenceObjective
from hfseq.objectives.retrieval import document_scores
from hfseq.objectives.retrieval_losses import LossSum

if TYPE_CHECKING:
    from hfseq.modeling import FlaxPreTrainedModel

logger = logging.getLogger(__name__)

#: Key of the teacher in the dictionary of auxiliary models.
TEACHER = "teacher"
#: Name of the module that maps the student's hidden states to the size of the teacher's.
PROJECTION = "projection"
#: Names of the metrics that compare the hidden states and the attention weights of both models.
HIDDEN_STATES, ATTENTIONS = "hidden_state_distance", "attention_divergence"
DIVERGENCES = ("forward_kl", "reverse_kl", "jsd")
CITATION = """\
@article{hinton2015distilling,
  title = {Distilling the Knowledge in a Neural Network},
  author = {Hinton, Geoffrey and Vinyals, Oriol and Dean, Jeff},
  journal = {arXiv preprint arXiv:1503.02531},
  year = {2015}
}"""
#: Names of the model inputs that contain token IDs.
ID_INPUTS = ("input_ids", "query_input_ids", "decoder_input_ids")


@functools.cache
def with_teacher(objective: type[Objective]) -> type[Objective]:
    """Returns a subclass of an objective that also learns the predictions of ``--teacher``."""
    part = Distillation
    if objective.name == "embedding":
        part = EmbeddingDistillation
    elif objective.name == "reward":
        part = RewardDistillation
    elif issubclass(objective, PreferenceObjective):
        part = PreferenceDistillation
    return type(f"Distilled{objective.__name__}", (part, objective), {})


class Distillation(Objective):
    """Mixin that adds terms to the loss of an objective, which compare the model with a teacher.

    The minimized loss is a weighted sum of four terms: the loss of the labels, the distillation
    loss, the distance of the hidden states, and the divergence of the attention weights. Each term
    is a mean over the positions with labels. In masked language modeling, the three terms that
    compare the model with its teacher are means over all tokens.
    """

    #: Whether the positions at which model and teacher are compared are not the targets of the
    #: objective. Both are then counted over the whole step.
    compares_other_positions: bool = False

    #: The values of ``--distillation_loss`` that this class supports. The first is the default.
    distillation_losses: ClassVar[tuple[str, ...]] = (*DIVERGENCES, "mse")

    def setup(self) -> None:
        """Checks the flags, and compares the vocabularies of teacher and student."""
        super().setup()
        data = self.arguments
        method = self.__dict__.get("citation", super().citation)
        self.citation = "\n\n".join(filter(None, (method, CITATION)))  # type: ignore[misc]
        self.distillation_loss = data.distillation_loss or self.distillation_losses[0]
        if self.distillation_loss not in self.distillation_losses:
            raise UsageError(
                f"--distillation_loss {self.distillation_loss}: the objective '{self.name}' "
                f"supports {', '.join(self.distillation_losses)}"
            )
        self.sums = (*self.sums, "distillation", "distilled", "task_loss", "task_targets")  # type: ignore[misc]  # per instance
        #: The weights of the terms that compare hidden states and attention weights, by metric.
        self.inner_weights = {
            name: weight
            for name, weight in (
                (HIDDEN_STATES, data.hidden_state_weight),
                (ATTENTIONS, data.attention_weight),
            )
            if weight
        }
        self.sums = (*self.sums, *self.inner_weights)  # type: ignore[misc]
        # As in DistilBERT, masked language modeling compares all tokens, not only the masked ones.
        if self.name == "mlm":
            self.computes_all_logits = self.compares_other_positions = True
        self.objective_uses_totals = self.uses_step_totals
        if self.compares_other_positions:
            self.uses_step_totals = True  # type: ignore[misc]  # per instance
        self.teacher_ids, self.num_tokens = self._match_vocabularies()

    def _match_vocabularies(self) -> tuple[np.ndarray | None, int | None]:
        """Compares the tokens of teacher and student, and their IDs.

        Returns:
            The teacher's ID for each ID of the student, or `None` if the IDs are equal, and the
            size of the vocabulary. Both are `None` for models without a tokenizer.

        Raises:
            UsageError: Teacher and student have different tokens.
        """
        tokenizer: Any = self.tokenizer
        if not hasattr(tokenizer, "get_vocab"):
            return None, None
        from transformers import AutoTokenizer

        teacher = self.arguments.teacher
        try:
            teacher_vocabulary = AutoTokenizer.from_pretrained(teacher).get_vocab()
        except Exception as error:  # the Rust tokenizers raise plain Exception
            raise UsageError(
                f"cannot load the tokenizer of --teacher {teacher} ({first_line(error)}). It is "
                "needed to compare the vocabularies of teacher and student, so save it in the "
                "directory of the teacher"
            ) from error
        vocabulary = tokenizer.get_vocab()
        differing = sorted(vocabulary.keys() ^ teacher_vocabulary.keys())
        if differing:
            examples = ", ".join(
                f"'{token}' (only {'student' if token in vocabulary else 'teacher'})"
                for token in differing[:5]
            )
            raise UsageError(
                f"--teacher {teacher} and the student have different vocabularies: "
                f"{len(differing)} tokens are only in one of them, such as {examples}. Use a "
                "teacher and a student with the same tokens"
            )
        size = max(vocabulary.values()) + 1
        if vocabulary == teacher_vocabulary:
            return None, size
        ids = np.zeros(size, np.int32)
        for token, number in vocabulary.items():
            ids[number] = teacher_vocabulary[token]
        logger.info(
            "teacher and student have the same tokens with different IDs: converting the IDs"
        )
        return ids, size

    def auxiliary_models(self) -> dict[str, AuxiliaryModel]:
        """Returns the teacher, in addition to the auxiliary models of the objective."""
        models = super().auxiliary_models()
        data = self.arguments
        teacher = AuxiliaryModel(data.teacher, dtype=data.teacher_dtype, flag="teacher")
        return models | {TEACHER: teacher}

    def prepare(self, model: FlaxPreTrainedModel) -> None:
        """Adds a linear map if student and teacher have hidden states of different sizes.

        The map converts the student's hidden states to the size of the teacher's. It is trained
        with the student, but is not saved with it.
        """
        super().prepare(model)
        teacher = self.auxiliary[TEACHER].model
        pairs = [getattr(each.config, "is_encoder_decoder", False) for each in (model, teacher)]
        if pairs[0] != pairs[1]:
            raise UsageError(
                f"--teacher {self.arguments.teacher} is {'an' if pairs[1] else 'no'} "
                f"encoder-decoder, unlike the student ('{model.config.model_type}'): use a teacher "
                "with the inputs of the student"
            )
        if getattr(self, "packing", False) and not teacher.accepts("segment_ids"):
            raise UsageError(
                f"--packing: the architecture '{teacher.config.model_type}' of --teacher "
                f"{self.arguments.teacher} does not accept segment_ids, which packing requires: "
                "drop --packing"
            )
        self.projects_hidden_states = False
        if not self.arguments.hidden_state_weight:
            return
        width, target = (_width(each) for each in (model, teacher))
        if width != target and width and target:
            draw = np.random.default_rng(0).normal(size=(width, target)) / math.sqrt(width)
            model.train_modules({PROJECTION: {"kernel": draw.astype(np.float32)}})
            self.projects_hidden_states = True
            logger.info(
                "a linear map from %d features to %d is trained to compare the hidden states of "
                "student and teacher. It is not saved with the model",
                width,
                target,
            )

    def card_rows(
        self, counts: Mapping[str, Mapping[str, Any]], log: Sequence[Mapping[str, Any]]
    ) -> dict[str, str]:
        """Adds the teacher, the weighted losses, and the last distillation loss."""
        data, rows = self.arguments, super().card_rows(counts, log)
        loss = f"`{self.distillation_loss}`"
        if self.distillation_loss in DIVERGENCES:
            loss += f" at temperature {data.distillation_temperature:g}"
        weights = {
            "loss of the labels": data.task_weight,
            loss: data.distillation_weight,
            "cosine distance of the last hidden states": data.hidden_state_weight,
            "divergence of the last attention weights": data.attention_weight,
        }
        rows["Teacher"] = f"`{data.teacher}`"
        rows["Distillation"] = " + ".join(
            f"{weight:g} × {name}" for name, weight in weights.items() if weight
        )
        values = [
            record["eval_distillation_loss"] for record in log if "eval_distillation_loss" in record
        ]
        if values:
            rows["Distillation loss on the validation split"] = f"{values[-1]:.4g}"
        return rows

    # -- the loss

    def step_totals(
        self, model: FlaxPreTrainedModel, params: Params, batch: Batch, extra: Params | None
    ) -> dict[str, jax.Array]:
        """Adds the number of labels and the number of compared tokens of the whole step."""
        totals: dict[str, jax.Array] = {}
        if self.objective_uses_totals:
            totals = super().step_totals(model, params, batch, extra)
        if not self.compares_other_positions:
            return totals
        compared = self._positions(batch).sum()
        return totals | {"targets": self._count_targets(batch), "compared": compared}

    def loss(
        self,
        model: FlaxPreTrainedModel,
        params: Params,
        batch: Batch,
        rngs: jax.Array | None,
        train: bool,
        extra: Params | None = None,
    ) -> Loss:
        """Returns the weighted sum of the terms, the number of labels, and the outputs.

        In the totals for the metrics, "loss" is the loss of the labels.
        """
        data = self.arguments
        dropout: Any = rngs
        if train and data.attention_weight:
            # With dropout, the model would return attention weights that are partly zero.
            dropout = False
        with base.record_forward(**self._requested_outputs()) as calls, nn.defer_logits():
            task_loss, count, outputs = super().loss(model, params, batch, dropout, train, extra)
        call = self._student_call(calls)
        with nn.defer_logits():
            teacher_output = self._run_teacher(call, batch)
        values, mask = self._compare(call, teacher_output, batch)
        if values.shape != mask.shape:
            raise UsageError(
                f"--teacher: the outputs of the objective '{self.name}' have the shape "
                f"{values.shape}, but its labels have the shape {mask.shape}. Distillation only "
                "supports objectives with one label per output"
            )
        scale = jnp.ones(())
        if self.compares_other_positions:
            step = batch["step_totals"]
            scale = step["targets"] / jnp.maximum(step["compared"], 1)
        distilled = jnp.where(mask, values, 0.0).sum()
        total = data.task_weight * task_loss + data.distillation_weight * scale * distilled
        totals = dict(outputs.get("totals", {}))
        fixed = {
            "distillation": distilled,
            "distilled": mask.sum(),
            "task_loss": totals.get("loss", task_loss),
            "task_targets": count,
        }
        for name, weight in self.inner_weights.items():
            compare = self._compare_hidden if name == HIDDEN_STATES else self._compare_attention
            differences = compare(call.output, teacher_output, params)
            fixed[name] = jnp.where(mask, _per_target(differences, batch, mask), 0.0).sum()
            total += weight * scale * fixed[name]
        totals |= jax.lax.stop_gradient(fixed)
        totals.setdefault("loss", fixed["task_loss"])
        totals["loss"] = jax.lax.stop_gradient(totals["loss"])
        outputs["totals"] = totals
        return total, count, outputs

    def _requested_outputs(self) -> dict[str, bool]:
        """Returns the keyword arguments with which a model returns the values to compare."""
        names = {HIDDEN_STATES: "output_hidden_states", ATTENTIONS: "output_attentions"}
        return {names[name]: True for name in self.inner_weights}

    def _student_call(self, calls: Sequence[ForwardCall]) -> ForwardCall:
        """Returns the call of the model that is compared with the teacher.

        Args:
            calls: All calls of the loss, in order.
        """
        if len(calls) != 1:
            raise UsageError(
                f"--teacher: the objective '{self.name}' runs the model {len(calls)} times per "
                "batch, but distillation supports objectives that run it once"
            )
        return calls[0]

    def _run_teacher(self, call: ForwardCall, batch: Batch) -> Any:
        """Runs the teacher on the inputs of the student."""
        teacher = self.auxiliary[TEACHER].model
        names = (teacher.main_input_name, "attention_mask", "token_type_ids", "position_ids")
        inputs = dict(zip(names, call.inputs, strict=False)) | call.keyword_inputs
        inputs = self._map_ids(inputs)
        inputs = {
            name: value
            for name, value in inputs.items()
            if value is not None and (name in names[:2] or teacher.accepts(name))
        }
        inputs |= self._requested_outputs()
        run: Any = teacher
        auxiliary: Any = batch["auxiliary"]
        return run(params=auxiliary[TEACHER], train=False, **inputs)

    def _map_ids(self, inputs: Mapping[str, Any]) -> dict[str, Any]:
        """Replaces the student's token IDs with those of the teacher."""
        if self.teacher_ids is None:
            return dict(inputs)
        table = jnp.asarray(self.teacher_ids)
        return {
            name: table[value] if name in ID_INPUTS and value is not None else value
            for name, value in inputs.items()
        }

    def _compare(
        self, call: ForwardCall, teacher_output: Any, batch: Batch
    ) -> tuple[jax.Array, jax.Array]:
        """Returns the distillation loss of each position, and a mask of the compared positions."""
        student, teacher = (
            getattr(output, "logits", None) for output in (call.output, teacher_output)
        )
        if student is None or teacher is None:
            raise UsageError(
                f"--teacher: distillation requires logits, which the model of the objective "
                f"'{self.name}' does not return: drop the flag"
            )
        data, size = self.arguments, self.num_tokens

        def compare(student: jax.Array, target: jax.Array) -> jax.Array:
            if size is not None and self.has_vocabulary:
                student = student[..., :size]
                ids = self.teacher_ids
                target = target[..., :size] if ids is None else target[..., jnp.asarray(ids)]
            target = jax.lax.stop_gradient(target)
            if self.distillation_loss == "mse":
                return squared_error(student, target)
            return divergence(
                self.distillation_loss,
                student,
                target,
                data.distillation_temperature,
                data.distillation_beta,
            )

        mask = self._positions(batch)
        if isinstance(student, DeferredLogits) or isinstance(teacher, DeferredLogits):
            return map_logits(compare, (student, teacher)), mask
        if not self.has_vocabulary and student.shape != teacher.shape:
            raise UsageError(
                f"the outputs of --teacher {data.teacher} have the shape {teacher.shape}, but "
                f"those of the student have the shape {student.shape}: use a teacher and a student "
                "with the same labels"
            )
        return compare(student, teacher), mask

    def _positions(self, batch: Batch) -> jax.Array:
        """Returns a mask of the positions at which logits are compared."""
        if self.compares_other_positions:
            return batch["segment_ids"] > 0
        if "counts" in batch:
            return batch["counts"]
        if "labels" in batch:
            return batch["labels"] != IGNORE_INDEX
        return batch["valid"]

    def _count_targets(self, batch: Batch) -> jax.Array:
        """Returns the number of targets, by which the sum of the losses is divided."""
        return (batch["labels"] != IGNORE_INDEX).sum()

    def _compare_hidden(self, output: Any, teacher_output: Any, params: Params) -> jax.Array:
        """Returns the cosine distance of the last hidden states, `(rows, tokens)`."""
        student, target = (
            _last_layer(each, "hidden_states").astype(jnp.float32)
            for each in (output, teacher_output)
        )
        if self.projects_hidden_states:
            student = student @ params[MODULES_KEY][PROJECTION]["kernel"]
        if student.shape != target.shape:
            raise UsageError(
                f"--hidden_state_weight: the hidden states of the teacher have the shape "
                f"{target.shape}, but those of the student have the shape {student.shape}: drop "
                "the flag"
            )
        return losses.pairwise_distance(student, jax.lax.stop_gradient(target), "cosine")

    def _compare_attention(self, output: Any, teacher_output: Any, params: Params) -> jax.Array:
        """Returns the divergence of the attention weights of the last layers, `(rows, tokens)`."""
        student, target = (_last_layer(each, "attentions") for each in (output, teacher_output))
        if student is None or target is None:
            raise UsageError(
                f"--attention_weight: the {'student' if student is None else 'teacher'} returns no "
                "attention weights: drop the flag"
            )
        if student.shape != target.shape:
            raise UsageError(
                f"--attention_weight: the attention weights of the teacher have the shape "
                f"{target.shape}, but those of the student have the shape {student.shape}. Use a "
                "student with the same number of attention heads, or drop the flag"
            )
        return attention_divergence(student, jax.lax.stop_gradient(target))

    def metrics(self, totals: dict[str, float]) -> dict[str, float]:
        """Adds metrics of the distillation to those of the objective.

        "distillation_loss", "hidden_state_distance" and "attention_divergence" are means over the
        compared positions. "total_loss" is the minimized loss.
        """
        data, metrics = self.arguments, super().metrics(totals)
        distilled = max(totals["distilled"], 1)
        task_loss = self._task_loss(totals, metrics)
        metrics["distillation_loss"] = totals["distillation"] / distilled
        total = data.task_weight * task_loss
        total += data.distillation_weight * metrics["distillation_loss"]
        for name, weight in self.inner_weights.items():
            metrics[name] = totals[name] / distilled
            total += weight * metrics[name]
        return metrics | {"total_loss": total}

    def _task_loss(self, totals: Mapping[str, float], metrics: Mapping[str, float]) -> float:
        """Returns the mean loss of the labels from the totals and the metrics of the objective."""
        return totals["task_loss"] / max(totals["task_targets"], 1)


class PreferenceDistillation(Distillation):
    """Compares the predictions of the tokens of all answers with those of the teacher.

    Answers are the chosen and the rejected ones, without their prompts. Each distillation loss is a
    mean over the tokens of all answers of the step.
    """

    compares_other_positions = True

    def _student_call(self, calls: Sequence[ForwardCall]) -> ForwardCall:
        # The further calls are those of the reference model.
        return calls[0]

    def _positions(self, batch: Batch) -> jax.Array:
        learned = batch["learned"]
        return learned.reshape(-1, learned.shape[-1]) > 0

    def _count_targets(self, batch: Batch) -> jax.Array:
        return batch["pairs"].sum()

    def _task_loss(self, totals: Mapping[str, float], metrics: Mapping[str, float]) -> float:
        # The loss of the objective, whose terms have different divisors.
        return metrics["loss"]

    def metrics(self, totals: dict[str, float]) -> dict[str, float]:
        """Returns the metrics of the preferences, and those of the distillation.

        With the KL divergence of KTO, there is no "total_loss", because an evaluation computes the
        loss from all rows of a split and not from sums over batches.
        """
        metrics = super().metrics(totals)
        if "kl" in metrics:
            del metrics["total_loss"]
        return metrics


class RewardDistillation(Distillation):
    """Compares the rewards of both answers of a pair with those of another reward model.

    Each distillation loss is a mean over the pairs.
    """

    distillation_losses = ("margin_mse", "mse", *DIVERGENCES)

    def prepare(self, model: FlaxPreTrainedModel) -> None:
        """Also compares the padding tokens, before which both models read the reward."""
        super().prepare(model)
        teacher_pad = self.auxiliary[TEACHER].model.config.pad_token_id
        pad = self.config.pad_token_id
        expected = pad if self.teacher_ids is None else int(self.teacher_ids[pad])
        if teacher_pad != expected:
            raise UsageError(
                f"--teacher {self.arguments.teacher} reads the reward at the last token that is "
                f"not its padding token {teacher_pad}, but the rows are padded with the token "
                f"{expected}: set --pad_token to the padding token of the teacher"
            )

    def reported_metrics(self, split: str) -> set[str] | None:
        """Returns the names of all metrics of a split."""
        names = super().reported_metrics(split) or set()
        return names | set(self.metrics(dict.fromkeys(("loss", "count", *self.sums), 1.0)))

    def _positions(self, batch: Batch) -> jax.Array:
        return batch["pairs"][:, 0]

    def _compare(
        self, call: ForwardCall, teacher_output: Any, batch: Batch
    ) -> tuple[jax.Array, jax.Array]:
        if teacher_output.logits.shape != call.output.logits.shape:
            raise UsageError(
                f"--teacher {self.arguments.teacher} has {teacher_output.logits.shape[-1]} outputs "
                "per answer, but a reward model has one: use a reward model as the teacher"
            )
        student, teacher = (
            output.logits.astype(jnp.float32).reshape(-1, 2)
            for output in (call.output, teacher_output)
        )
        teacher, data = jax.lax.stop_gradient(teacher), self.arguments
        if self.distillation_loss == "margin_mse":
            margins = (rewards[:, 0] - rewards[:, 1] for rewards in (student, teacher))
            values = jnp.square(next(margins) - next(margins))
        elif self.distillation_loss == "mse":
            values = squared_error(student, teacher)
        else:  # the two answers are the classes of the distribution of the preference
            values = divergence(
                self.distillation_loss,
                student,
                teacher,
                data.distillation_temperature,
                data.distillation_beta,
            )
        return values, self._positions(batch)


class EmbeddingDistillation(Distillation):
    """Compares the embeddings of the model with those of the teacher.

    The distillation loss is a mean over the examples of the batch.
    """

    distillation_losses = ("cosine", "mse", "margin_mse", *DIVERGENCES)

    def setup(self) -> None:
        """Also rejects the flags that compare hidden states and attention weights."""
        super().setup()
        data = self.arguments
        for flag in ("hidden_state_weight", "attention_weight"):
            if getattr(data, flag):
                raise UsageError(
                    f"--{flag}: the objective 'embedding' only compares the embeddings of teacher "
                    "and student. Drop the flag"
                )

    def loss(self, *args: Any, **kwargs: Any) -> Loss:
        """Returns the loss of the objective, which includes the terms of :meth:`add_terms`."""
        objective: Any = super(Distillation, self)
        return objective.loss(*args, **kwargs)

    def add_terms(
        self, result: Any, vectors: Any, batch: Batch, train: bool, totals: dict[str, jax.Array]
    ) -> tuple[jax.Array, dict[str, jax.Array]]:
        """Returns the weighted sum of the objective's loss and the distillation loss.

        The second value contains the totals for the metrics of both.
        """
        objective: Any = super()
        task_loss, totals = objective.add_terms(result, vectors, batch, train, totals)
        compared = self._compare_vectors(vectors, self._teacher_vectors(batch), batch)
        fixed = {
            "loss": task_loss,
            "distillation": compared.total,
            "distilled": compared.count,
            "task_loss": task_loss,
            "task_targets": result.count,
        }
        data = self.arguments
        total = data.task_weight * task_loss + data.distillation_weight * compared.total
        return total, totals | jax.lax.stop_gradient(fixed)

    def _teacher_vectors(self, batch: Batch) -> jax.Array:
        """Returns the teacher's embeddings, `(rows, texts, features)`."""
        teacher = self.auxiliary[TEACHER].model
        objective: Any = copy.copy(self)
        if teacher.sentence_config is not None:
            objective.retrieval_config = teacher.sentence_config
        params = batch["auxiliary"][TEACHER]
        inputs = self._map_ids(batch)
        vectors, _ = objective.encode(teacher, params, inputs, None, False, None)
        return jax.lax.stop_gradient(vectors)

    def _compare_vectors(self, student: jax.Array, teacher: jax.Array, batch: Batch) -> LossSum:
        """Returns the distillation loss, which is a mean over the examples."""
        name, texts, valid = self.distillation_loss, student.shape[1], batch["valid"]
        student, teacher = student.astype(jnp.float32), teacher.astype(jnp.float32)
        if name == "margin_mse":
            if texts < 3:
                raise UsageError(
                    "--distillation_loss margin_mse requires negatives, but the data has no column "
                    "for them: add a column 'negative'"
                )
            return losses.margin_mse(document_scores(student), document_scores(teacher), valid)
        if name in ("cosine", "mse"):
            if student.shape != teacher.shape:
                raise UsageError(
                    f"--distillation_loss {name}: the embeddings of the teacher have "
                    f"{teacher.shape[-1]} features, but those of the student have "
                    f"{student.shape[-1]}. Use margin_mse or forward_kl, which compare "
                    "similarities instead of embeddings"
                )
            metric: Any = name
            return losses.embed_distill(student, teacher, valid, metric=metric)
        data: Any = self.arguments
        scale = 20.0 if data.scale is None else data.scale

        def scores(vectors: jax.Array) -> jax.Array:
            unit = l2_normalize(vectors)
            candidates = unit[:, 1:].reshape(-1, unit.shape[-1])
            similarities = scale * (unit[:, 0] @ candidates.T)
            return jnp.where(jnp.repeat(valid, texts - 1)[None], similarities, -1e9)

        values = divergence(
            name,
            scores(student),
            scores(teacher),
            data.distillation_temperature,
            data.distillation_beta,
        )
        return losses.weighted_sum(values, valid)


def _last_layer(output: Any, name: str) -> Any:
    """Returns the hidden states or the attention weights of the last layer of a model.

    Args:
        output: The output of the model. For an encoder-decoder, the values of the decoder are used.
        name: "hidden_states" or "attentions".
    """
    for field in (f"decoder_{name}", name):
        layers = getattr(output, field, None)
        if layers is not None:
            return layers[-1]
    return getattr(output, "last_hidden_state", None) if name == "hidden_states" else None


def _per_target(values: jax.Array, batch: Batch, mask: jax.Array) -> jax.Array:
    """Converts one value per token to one value per target.

    If each row has a single target, its value is the mean over the tokens of the row.

    Args:
        values: One value per token, `(rows, tokens)`.
        batch: The batch.
        mask: Mask of the targets that count. It determines the shape of the result.
    """
    if values.shape == mask.shape:
        return values
    names = ("attention_mask", "segment_ids", "segments")
    tokens = next(batch[name] for name in names if name in batch) > 0
    real = tokens.reshape(values.shape)
    mean = jnp.where(real, values, 0.0).sum(-1) / jnp.maximum(real.sum(-1), 1)
    return mean.reshape(len(mask), -1).mean(-1)


def _width(model: FlaxPreTrainedModel) -> int | None:
    """Returns the number of features of a model's last hidden states."""
    config = getattr(model.config, "decoder", model.config)
    return getattr(config, "hidden_size", None)
