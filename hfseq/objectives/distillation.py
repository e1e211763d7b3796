"""Knowledge distillation: the model also learns the predictions of a teacher (Hinton et al., 2015).

`with_teacher` adds distillation to any objective whose loss calls the model once and whose model
returns logits, and to the objective "embedding".
"""

from __future__ import annotations

import copy
import functools
import logging
from collections.abc import Mapping
from typing import TYPE_CHECKING, Any, ClassVar

import jax
import jax.numpy as jnp
import numpy as np

from hfseq import nn
from hfseq.data.batches import IGNORE_INDEX
from hfseq.errors import UsageError, first_line
from hfseq.modeling.sentence import l2_normalize
from hfseq.nn.logits import DeferredLogits, map_logits
from hfseq.objectives import base
from hfseq.objectives.base import AuxiliaryModel, Batch, ForwardCall, Loss, Objective, Params
from hfseq.objectives.divergences import (
    cosine_distance,
    divergence,
    margin_squared_error,
    squared_error,
)

if TYPE_CHECKING:
    from hfseq.modeling import FlaxPreTrainedModel

logger = logging.getLogger(__name__)

#: Name of the teacher among the auxiliary models.
TEACHER = "teacher"
DIVERGENCES = ("forward_kl", "reverse_kl", "jsd")
#: The inputs of models that contain token IDs.
ID_INPUTS = ("input_ids", "query_input_ids", "decoder_input_ids")


@functools.cache
def with_teacher(objective: type[Objective]) -> type[Objective]:
    """Returns a subclass of an objective that also learns the predictions of ``--teacher``."""
    part = EmbeddingDistillation if objective.name == "embedding" else Distillation
    return type(f"Distilled{objective.__name__}", (part, objective), {})


class Distillation(Objective):
    """The part of an objective that compares the model with a teacher.

    The minimized loss is the sum of the loss of the labels, the distillation loss and the distance
    of the hidden states, each multiplied by its weight. Each is a mean over its positions: the
    positions with labels or, in masked language modeling, all tokens for the last two.
    """

    #: The values of ``--distillation_loss`` that this class supports. The first is the default.
    distillation_losses: ClassVar[tuple[str, ...]] = (*DIVERGENCES, "mse")

    def setup(self) -> None:
        """Compares the vocabularies of teacher and student."""
        super().setup()
        data = self.arguments
        self.distillation_loss = data.distillation_loss or self.distillation_losses[0]
        if self.distillation_loss not in self.distillation_losses:
            raise UsageError(
                f"--distillation_loss {self.distillation_loss}: the objective '{self.name}' "
                f"supports {', '.join(self.distillation_losses)}"
            )
        self.sums = (*self.sums, "distillation", "distilled", "task_loss", "task_targets")  # type: ignore[misc]  # per instance
        if data.hidden_state_weight:
            self.sums = (*self.sums, "hidden_state_distance")  # type: ignore[misc]
        # In masked language modeling, all tokens are compared, as in DistilBERT.
        self.compares_all_tokens = self.name == "mlm"
        if self.compares_all_tokens:
            self.computes_all_logits = True
            self.uses_step_totals = True  # type: ignore[misc]  # per instance
        self.teacher_ids, self.num_tokens = self._match_vocabularies()

    def _match_vocabularies(self) -> tuple[np.ndarray | None, int | None]:
        """Returns the teacher's ID of each token (if the IDs differ) and the vocabulary size.

        Raises:
            UsageError: The vocabularies differ.
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
                f"cannot load the tokenizer of --teacher {teacher} ({first_line(error)}), whose "
                "vocabulary is compared with the student's. Save the tokenizer in this directory"
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
                f"{len(differing)} tokens differ, such as {examples}. Use a teacher and a student "
                "with the same tokens"
            )
        size = max(vocabulary.values()) + 1
        if vocabulary == teacher_vocabulary:
            return None, size
        ids = np.zeros(size, np.int32)
        for token, number in vocabulary.items():
            ids[number] = teacher_vocabulary[token]
        logger.info("teacher and student assign different IDs to the tokens: mapping the IDs")
        return ids, size

    def auxiliary_models(self) -> dict[str, AuxiliaryModel]:
        """Returns the teacher, in addition to the auxiliary models of the objective."""
        models = super().auxiliary_models()
        data = self.arguments
        teacher = AuxiliaryModel(data.teacher, dtype=data.teacher_dtype, flag="teacher")
        return models | {TEACHER: teacher}

    # -- the loss

    def step_totals(
        self, model: FlaxPreTrainedModel, params: Params, batch: Batch, extra: Params | None
    ) -> dict[str, jax.Array]:
        """Adds the numbers of labels and of compared tokens."""
        totals: dict[str, jax.Array] = super().step_totals(model, params, batch, extra)
        if not self.compares_all_tokens:
            return totals
        return totals | {
            "labels": (batch["labels"] != IGNORE_INDEX).sum(),
            "compared": (batch["segment_ids"] > 0).sum(),
        }

    def loss(
        self,
        model: FlaxPreTrainedModel,
        params: Params,
        batch: Batch,
        rngs: jax.Array | None,
        train: bool,
        extra: Params | None = None,
    ) -> Loss:
        """Returns the weighted sum of the losses. In the totals, "loss" is that of the labels."""
        data, keywords = self.arguments, {}
        if data.hidden_state_weight:
            keywords["output_hidden_states"] = True
        with base.record_forward(**keywords) as calls, nn.defer_logits():
            task_loss, count, outputs = super().loss(model, params, batch, rngs, train, extra)
        if len(calls) != 1:
            raise UsageError(
                f"--teacher: the objective '{self.name}' runs the model {len(calls)} times per "
                "batch, but distillation supports objectives that run it once"
            )
        (call,) = calls
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
        if self.compares_all_tokens:
            step = batch["step_totals"]
            scale = step["labels"] / jnp.maximum(step["compared"], 1)
        distilled = jnp.where(mask, values, 0.0).sum()
        total = data.task_weight * task_loss + data.distillation_weight * scale * distilled
        totals = dict(outputs.get("totals", {}))
        fixed = {
            "distillation": distilled,
            "distilled": mask.sum(),
            "task_loss": totals.get("loss", task_loss),
            "task_targets": count,
        }
        if data.hidden_state_weight:
            distance, hidden_mask = self._hidden_distance(call, teacher_output, batch, mask)
            hidden = jnp.where(hidden_mask, distance, 0.0).sum()
            total += data.hidden_state_weight * scale * hidden
            fixed["hidden_state_distance"] = hidden
        totals |= jax.lax.stop_gradient(fixed)
        totals.setdefault("loss", fixed["task_loss"])
        totals["loss"] = jax.lax.stop_gradient(totals["loss"])
        outputs["totals"] = totals
        return total, count, outputs

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
        if self.arguments.hidden_state_weight:
            inputs["output_hidden_states"] = True
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
        """Returns the distillation loss of each position, and a mask of the valid positions."""
        student, teacher = (
            getattr(output, "logits", None) for output in (call.output, teacher_output)
        )
        if student is None or teacher is None:
            raise UsageError(
                f"--teacher: the model of the objective '{self.name}' returns no logits. "
                "Distillation requires a model with logits"
            )
        data, size = self.arguments, self.num_tokens

        def losses(student: jax.Array, target: jax.Array) -> jax.Array:
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
            return map_logits(losses, (student, teacher)), mask
        if not self.has_vocabulary and student.shape != teacher.shape:
            raise UsageError(
                f"the outputs of --teacher {data.teacher} have the shape {teacher.shape}, but "
                f"those of the student have the shape {student.shape}: use a teacher and a student "
                "with the same labels"
            )
        return losses(student, teacher), mask

    def _positions(self, batch: Batch) -> jax.Array:
        """Returns a mask of the positions at which logits are compared."""
        if self.compares_all_tokens:
            return batch["segment_ids"] > 0
        if "counts" in batch:
            return batch["counts"]
        if "labels" in batch:
            return batch["labels"] != IGNORE_INDEX
        return batch["valid"]

    def _hidden_distance(
        self, call: ForwardCall, teacher_output: Any, batch: Batch, mask: jax.Array
    ) -> tuple[jax.Array, jax.Array]:
        """Returns the cosine distance of the last hidden states, and which positions count."""
        student, target = (_last_hidden(output) for output in (call.output, teacher_output))
        if student.shape != target.shape:
            raise UsageError(
                f"--hidden_state_weight: the hidden states of the teacher have "
                f"{target.shape[-1]} features, but those of the student {student.shape[-1]}. Use a "
                "student with the same hidden_size, or drop the flag"
            )
        distance = cosine_distance(student, jax.lax.stop_gradient(target))
        if distance.ndim == mask.ndim and distance.shape == mask.shape:
            return distance, mask
        tokens = batch["attention_mask" if "attention_mask" in batch else "segment_ids"] > 0
        real = tokens.reshape(distance.shape)
        # One number per row, so that both losses have the same divisor.
        mean = jnp.where(real, distance, 0.0).sum(-1) / jnp.maximum(real.sum(-1), 1)
        return mean.reshape(len(mask), -1).mean(-1), mask

    def metrics(self, totals: dict[str, float]) -> dict[str, float]:
        """Returns the metrics of the label loss, and those of the distillation.

        "distillation_loss" and "hidden_state_distance" are means over the compared positions, and
        "total_loss" is the minimized loss.
        """
        data, metrics = self.arguments, super().metrics(totals)
        distilled = max(totals["distilled"], 1)
        task_loss = totals["task_loss"] / max(totals["task_targets"], 1)
        metrics["distillation_loss"] = totals["distillation"] / distilled
        total = data.task_weight * task_loss
        total += data.distillation_weight * metrics["distillation_loss"]
        if "hidden_state_distance" in totals:
            metrics["hidden_state_distance"] = totals["hidden_state_distance"] / distilled
            total += data.hidden_state_weight * metrics["hidden_state_distance"]
        return metrics | {"total_loss": total}


class EmbeddingDistillation(Distillation):
    """Compares the embeddings of the model with those of the teacher.

    Each distillation loss is a mean over the rows of the batch.
    """

    distillation_losses = ("cosine", "mse", "margin_mse", *DIVERGENCES)

    def setup(self) -> None:
        """Also rejects the comparison of hidden states."""
        super().setup()
        if self.arguments.hidden_state_weight:
            raise UsageError(
                "--hidden_state_weight is for models with logits: the objective 'embedding' "
                "compares embeddings. Drop the flag"
            )

    def loss(self, *args: Any, **kwargs: Any) -> Loss:
        """Returns the loss of the objective, to which :meth:`add_terms` adds the distillation."""
        objective: Any = super(Distillation, self)
        return objective.loss(*args, **kwargs)

    def add_terms(
        self, result: Any, vectors: Any, batch: Batch, train: bool, totals: dict[str, jax.Array]
    ) -> tuple[jax.Array, dict[str, jax.Array]]:
        """Returns the weighted sum of both losses, and the totals of both."""
        objective: Any = super()
        task_loss, totals = objective.add_terms(result, vectors, batch, train, totals)
        values, valid = self._compare_vectors(vectors, self._teacher_vectors(batch), batch)
        distilled = jnp.where(valid, values, 0.0).sum()
        fixed = {
            "loss": task_loss,
            "distillation": distilled,
            "distilled": valid.sum(),
            "task_loss": task_loss,
            "task_targets": result.count,
        }
        data = self.arguments
        total = data.task_weight * task_loss + data.distillation_weight * distilled
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

    def _compare_vectors(
        self, own: jax.Array, other: jax.Array, batch: Batch
    ) -> tuple[jax.Array, jax.Array]:
        """Returns the distillation loss of each row, and which rows count."""
        name, texts = self.distillation_loss, own.shape[1]
        if name in ("cosine", "mse") and own.shape != other.shape:
            raise UsageError(
                f"--distillation_loss {name}: the embeddings of the teacher have "
                f"{other.shape[-1]} features, but those of the student {own.shape[-1]}. Use "
                "margin_mse or forward_kl, which compare similarities"
            )
        if name == "margin_mse":
            if texts < 3:
                raise UsageError(
                    "--distillation_loss margin_mse requires negatives: add a column 'negative'"
                )
            return margin_squared_error(own, other), batch["valid"]
        if name == "cosine":
            return cosine_distance(own, other).mean(-1), batch["valid"]
        if name == "mse":
            return squared_error(own, other).mean(-1), batch["valid"]
        data: Any = self.arguments
        scale = 20.0 if data.scale is None else data.scale

        def scores(vectors: jax.Array) -> jax.Array:
            unit = l2_normalize(vectors)
            candidates = unit[:, 1:].reshape(-1, unit.shape[-1])
            similarities = scale * (unit[:, 0] @ candidates.T)
            return jnp.where(jnp.repeat(batch["valid"], texts - 1)[None], similarities, -1e9)

        values = divergence(
            name, scores(own), scores(other), data.distillation_temperature, data.distillation_beta
        )
        return values, batch["valid"]


def _last_hidden(output: Any) -> jax.Array:
    """Returns the last hidden states of a model's output, of the decoder if there is one."""
    for name in ("decoder_hidden_states", "hidden_states"):
        states = getattr(output, name, None)
        if states is not None:
            return states[-1]
    last: jax.Array = output.last_hidden_state
    return last
