"""Products of matrices, decompositions and Fourier transforms."""

from __future__ import annotations

from typing import Any

import jax
import jax.numpy as jnp
from jax import lax

from hfseq.nn import functional as F
from hfseq_plugins.bridge.operators.table import Sizes, add_all, operator

Array = jax.Array

add_all(
    {
        "mm bmm matmul mv dot vdot": jnp.matmul,
        "einsum": lambda equation, operands, path=None: jnp.einsum(equation, *operands),
        "outer ger": jnp.outer,
        "linalg_cross": lambda a, b, dim=-1: jnp.cross(a, b, axis=dim),
        "linalg_det": jnp.linalg.det,
        "linalg_inv_ex": lambda a, check_errors=False: (
            jnp.linalg.inv(a),
            jnp.zeros(a.shape[:-2], jnp.int32),
        ),
        "inverse": jnp.linalg.inv,
        "linalg_cholesky_ex": lambda a, upper=False, check_errors=False: (
            jnp.linalg.cholesky(a, upper=upper),
            jnp.zeros(a.shape[:-2], jnp.int32),
        ),
        "linalg_matrix_exp": jax.scipy.linalg.expm,
        "_linalg_svd": lambda a, full_matrices=False, compute_uv=True, driver=None: jnp.linalg.svd(
            a, full_matrices
        ),
        "linalg_eigh _linalg_eigh": lambda a, *_, **__: tuple(jnp.linalg.eigh(a)),
        "linalg_qr": lambda a, mode="reduced": tuple(jnp.linalg.qr(a, mode)),
    }
)


@operator("addmm", "baddbmm", "addmv")
def _add_product(c: Array, a: Array, b: Array, beta: float = 1, alpha: float = 1) -> Array:
    return F.baddbmm(c, a, b, beta=beta, alpha=alpha)


@operator("_addmm_activation")
def _add_product_relu(c: Array, a: Array, b: Array, **_: Any) -> Array:
    return jax.nn.relu(c + a @ b)


@operator("linear")
def _linear(x: Array, weight: Array, bias: Array | None = None) -> Array:
    outputs = lax.dot_general(x, weight, (((x.ndim - 1,), (weight.ndim - 1,)), ((), ())))
    return outputs if bias is None else outputs + bias


@operator("_linalg_solve_ex")
def _solve(
    a: Array, b: Array, left: bool = True, check_errors: bool = False
) -> tuple[Array, Array, Array, Array]:
    lu, _, permutation = lax.linalg.lu(a)
    is_vector = b.ndim == a.ndim - 1
    right = b[..., None] if is_vector else b
    solution = jnp.linalg.solve(a, right) if left else jnp.linalg.solve(a.mT, right.mT).mT
    solution = solution[..., 0] if is_vector else solution
    return solution, lu, permutation, jnp.zeros(a.shape[:-2], jnp.int32)


@operator("linalg_solve_triangular")
def _solve_triangular(
    a: Array, b: Array, upper: bool, left: bool = True, unitriangular: bool = False
) -> Array:
    lead = jnp.broadcast_shapes(a.shape[:-2], b.shape[:-2])
    a, b = (jnp.broadcast_to(x, (*lead, *x.shape[-2:])) for x in (a, b))
    solve = jax.scipy.linalg.solve_triangular
    if not left:
        return solve(a.mT, b.mT, lower=upper, unit_diagonal=unitriangular).mT
    return solve(a, b, lower=not upper, unit_diagonal=unitriangular)


@operator("triangular_solve")
def _triangular_solve(
    b: Array, a: Array, upper: bool = True, transpose: bool = False, unitriangular: bool = False
) -> tuple[Array, Array]:
    solution = jax.scipy.linalg.solve_triangular(
        a, b, trans=int(transpose), lower=not upper, unit_diagonal=unitriangular
    )
    return solution, a


@operator("_cdist_forward", "cdist")
def _distances(a: Array, b: Array, p: float = 2.0, compute_mode: int | None = None) -> Array:
    from hfseq_plugins.bridge.operators.reductions import vector_norm

    return vector_norm(a[..., :, None, :] - b[..., None, :, :], p, -1)


@operator("_euclidean_dist")
def _euclidean_distances(a: Array, b: Array) -> Array:
    return _distances(a, b)


# -- Fourier transforms
# ---------------------------------------------------------------------------------------

#: For PyTorch's normalization codes, the exponent of the length in the factor of the result.
_NORMALIZATION = {0: 0.0, 1: -0.5, 2: -1.0}


def _scale(x: Array, shape: Sizes, dim: Sizes, normalization: int) -> Array:
    count = 1
    for axis in dim:
        count *= shape[axis]
    factor = float(count) ** _NORMALIZATION[normalization]
    return x if factor == 1 else x * factor


@operator("_fft_r2c")
def _real_to_complex(x: Array, dim: Sizes, normalization: int, onesided: bool) -> Array:
    if onesided:
        *others, last = dim
        result = jnp.fft.rfft(x, axis=last)
        if others:
            result = jnp.fft.fftn(result, axes=others)
    else:
        result = jnp.fft.fftn(x, axes=dim)
    return _scale(result, x.shape, dim, normalization)


@operator("_fft_c2c")
def _complex_to_complex(x: Array, dim: Sizes, normalization: int, forward: bool) -> Array:
    if forward:
        result = jnp.fft.fftn(x, axes=dim)
    else:
        result = jnp.fft.ifftn(x, axes=dim, norm="forward")
    return _scale(result, x.shape, dim, normalization)


@operator("_fft_c2r")
def _complex_to_real(x: Array, dim: Sizes, normalization: int, last_dim_size: int) -> Array:
    *others, last = dim
    if others:
        x = jnp.fft.ifftn(x, axes=others, norm="forward")
    result = jnp.fft.irfft(x, last_dim_size, axis=last, norm="forward")
    return _scale(result, result.shape, dim, normalization)
