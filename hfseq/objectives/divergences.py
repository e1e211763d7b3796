"""Divergences between the predictions of a teacher and a student, per position, in float32."""

from __future__ import annotations

import jax
import jax.numpy as jnp


def divergence(
    name: str,
    student: jax.Array,
    teacher: jax.Array,
    temperature: float = 1.0,
    beta: float = 0.5,
) -> jax.Array:
    """Returns a divergence between two distributions over the last axis.

    T and S are the distributions of the teacher and the student at the given temperature. The
    result is multiplied by the square of the temperature, so that the size of the gradient does not
    depend on the temperature (Hinton et al., 2015). TRL omits this factor.

    Args:
        name: `forward_kl` is KL(T || S), `reverse_kl` is KL(S || T), and `jsd` is the generalized
            Jensen-Shannon divergence beta KL(T || M) + (1 - beta) KL(S || M) with the mixture
            M = beta T + (1 - beta) S (Agarwal et al., 2023).
        student: Logits of the student, `(..., classes)`.
        teacher: Logits of the teacher, `(..., classes)`.
        temperature: Divisor of the logits.
        beta: Weight of the teacher in the mixture.

    Returns:
        Float32, `(...)`.
    """
    log_student, log_teacher = (
        jax.nn.log_softmax(logits.astype(jnp.float32) / temperature)
        for logits in (student, teacher)
    )
    if name == "forward_kl":
        result = _kl(log_teacher, log_student)
    elif name == "reverse_kl":
        result = _kl(log_student, log_teacher)
    else:
        mixture = jnp.logaddexp(log_teacher + jnp.log(beta), log_student + jnp.log1p(-beta))
        result = beta * _kl(log_teacher, mixture) + (1 - beta) * _kl(log_student, mixture)
    return result * temperature**2


def _kl(first: jax.Array, second: jax.Array) -> jax.Array:
    """Returns the KL divergence of two distributions from their log-probabilities."""
    return (jnp.exp(first) * (first - second)).sum(-1)


def squared_error(first: jax.Array, second: jax.Array) -> jax.Array:
    """Returns the mean squared difference over the last axis, in float32."""
    return jnp.square(first.astype(jnp.float32) - second.astype(jnp.float32)).mean(-1)


def attention_divergence(student: jax.Array, teacher: jax.Array) -> jax.Array:
    """Returns KL(T || S) between the attention weights of two models (Wang et al., 2020).

    Args:
        student: Attention weights of the student, `(rows, heads, queries, keys)`.
        teacher: Attention weights of the teacher, of the same shape. The weights of a query are all
            0 if it attends to no key. Its divergence is then 0.

    Returns:
        The mean over the heads, float32 `(rows, queries)`.
    """
    student, teacher = student.astype(jnp.float32), teacher.astype(jnp.float32)
    # Softmax weights of float32 can underflow to 0, for which the logarithm would be infinite.
    smallest = jnp.finfo(jnp.float32).tiny
    ratio = jnp.log(jnp.maximum(teacher, smallest)) - jnp.log(jnp.maximum(student, smallest))
    return (teacher * ratio).sum(-1).mean(1)
