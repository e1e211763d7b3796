"""The table by which `hfseq port` translates PyTorch's functions, methods and modules to JAX.

Each row is a `Rule` with the names in PyTorch, the parameters, and the expressions that replace a
call. The expressions are written as text, so a new row needs no code:

    Rule("torch.cat torch.concat", "tensors, dim=...", "jnp.concatenate(tensors, axis=dim)",
         example="torch.cat((x, y), dim=1)")

`Tensor.name` stands for a method, `F.name` for a function of `torch.nn.functional`, and `nn.name`
for a call that creates a module. The test of the table evaluates each example in PyTorch and its
translation in JAX, and compares the results.
"""

from __future__ import annotations

import ast
import dataclasses
from collections.abc import Iterator

#: Parameters that have no meaning in JAX, so the translation drops them.
IGNORED_PARAMETERS = frozenset(
    {
        *("device", "requires_grad", "pin_memory", "memory_format", "non_blocking", "layout"),
        *("copy", "inplace", "sparse_grad", "output_size", "generator", "track_running_stats"),
    }
)
#: Other names that PyTorch accepts for a parameter, with the names that the rules use.
SYNONYMS = {
    **{"axis": ("dim", "dims"), "axes": ("dim", "dims"), "keepdims": ("keepdim",)},
    **{"self": ("x",), "input": ("x", "ids"), "ord": ("p",), "src": ("source",)},
    **{"source": ("src",), "split_size_or_sections": ("split_size",), "dim": ("dims",)},
    **{"split_sizes": ("split_size",), "dims": ("dim",), "n": ("k",), "size": ("sizes",)},
}
#: PyTorch's data types in JAX. 64-bit types become 32-bit types, which are the default in JAX.
DTYPES = {
    **{name: "jnp.float32" for name in ("float", "float32", "get_default_dtype()")},
    **{name: "jnp.int32" for name in ("int", "int32", "int64", "long")},
    **{name: "jnp.float16" for name in ("float16", "half")},
    **{name: f"jnp.{name}" for name in ("bfloat16", "int8", "int16", "uint8", "complex64")},
    **{"double": "jnp.float32", "float64": "jnp.float32", "bool": "bool", "short": "jnp.int16"},
}
#: Attributes of `torch` that are not functions or data types.
CONSTANTS = {
    **{f"torch.{name}": f"jnp.{name}" for name in ("inf", "pi", "nan", "e", "newaxis")},
    **{
        f"torch.{name}": "jax.Array"
        for name in ("Tensor", "FloatTensor", "LongTensor", "BoolTensor", "IntTensor")
    },
    "Tensor": "jax.Array",
}
#: Methods and functions whose result depends on the values of an array in a way that JAX cannot
#: compile: the shape of the result, or a Python number.
DATA_DEPENDENT = frozenset(
    {
        *("item", "tolist", "nonzero", "unique", "unique_consecutive", "masked_select", "numpy"),
        *("argwhere", "pad_sequence", "equal", "allclose"),
    }
)
#: Functions that draw random numbers. A port cannot reproduce PyTorch's random numbers.
RANDOM = frozenset(
    {
        *("rand", "randn", "randint", "randperm", "rand_like", "randn_like", "randint_like"),
        *("normal", "bernoulli", "multinomial", "gumbel_softmax", "uniform_", "normal_"),
        *("trunc_normal_", "exponential_", "bernoulli_"),
    }
)


@dataclasses.dataclass(frozen=True)
class Rule:
    """A row of the table.

    Attributes:
        names: Names in PyTorch, separated by spaces.
        parameters: The parameters, written like the arguments of a call, such as
            `"x, dim, keepdim=..., *sizes"`. The default `...` means that PyTorch and JAX have the
            same default. The default `ignored` and the name `*ignored` mean that JAX does not need
            the argument. The first parameter of a method is the tensor. An expression can use
            `*sizes` for the separate arguments and `sizes` for a tuple of them.
        results: Expressions in which the parameters are variables. The first expression that uses
            all arguments of a call replaces the call. If a call does not pass a parameter, the
            keyword arguments that use the parameter are left out.
        example: Calls in PyTorch for the test, separated by ` ; `. They can use the arrays that
            the test defines, such as `x` and `y`. The default is one call with `x` for each name.
    """

    names: str
    parameters: str
    results: tuple[str, ...]
    example: str = ""

    def __init__(self, names: str, parameters: str, *results: str, example: str = "") -> None:
        object.__setattr__(self, "names", names)
        object.__setattr__(self, "parameters", parameters)
        object.__setattr__(self, "results", results)
        object.__setattr__(self, "example", example)

    def examples(self) -> Iterator[str]:
        """Yields calls in PyTorch for the test."""
        if self.example:
            yield from self.example.split(" ; ")
            return
        for name in self.names.split():
            owner, _, function = name.rpartition(".")
            yield f"x.{function}()" if owner == "Tensor" else f"{name}(x)"


@dataclasses.dataclass(frozen=True)
class Parameter:
    """A parameter of a rule.

    Attributes:
        name: The name of the parameter.
        default: The default value. `None` means that the parameter is required, and the constant
            `...` that PyTorch and JAX have the same default.
        is_variadic: Whether the parameter takes any number of positional arguments.
        is_ignored: Whether JAX does not need the argument.
    """

    name: str
    default: ast.expr | None = None
    is_variadic: bool = False
    is_ignored: bool = False


def parameters(rule: Rule) -> list[Parameter]:
    """Returns the parameters of a rule in the order of positional arguments."""
    call = ast.parse(f"f({rule.parameters})", mode="eval").body
    assert isinstance(call, ast.Call)
    names: list[Parameter] = []
    for argument in call.args:
        if isinstance(argument, ast.Starred):
            name = ast.unparse(argument.value)
            names.append(Parameter(name, None, True, is_ignored=name == "ignored"))
        else:
            names.append(Parameter(ast.unparse(argument)))
    for keyword in call.keywords:
        is_ignored = isinstance(keyword.value, ast.Name) and keyword.value.id == "ignored"
        names.append(Parameter(keyword.arg or "", keyword.value, is_ignored=is_ignored))
    return names


def _both(names: str) -> str:
    """Returns the names of functions of `torch` that are also methods of tensors."""
    return " ".join(f"torch.{name} Tensor.{name}" for name in names.split())


def _unary(pairs: dict[str, str]) -> list[Rule]:
    return [Rule(_both(names), "x", result) for names, result in pairs.items()]


ELEMENTWISE = [
    *_unary(
        {
            "abs absolute": "jnp.abs(x)",
            "neg negative": "-x",
            "sign": "jnp.sign(x)",
            "ceil": "jnp.ceil(x)",
            "floor": "jnp.floor(x)",
            "trunc": "jnp.trunc(x)",
            "exp": "jnp.exp(x)",
            "exp2": "jnp.exp2(x)",
            "expm1": "jnp.expm1(x)",
            "square": "jnp.square(x)",
            "sin": "jnp.sin(x)",
            "cos": "jnp.cos(x)",
            "tan": "jnp.tan(x)",
            "sinh": "jnp.sinh(x)",
            "cosh": "jnp.cosh(x)",
            "tanh": "jnp.tanh(x)",
            "atan arctan": "jnp.arctan(x)",
            "asinh": "jnp.arcsinh(x)",
            "sigmoid": "jax.nn.sigmoid(x)",
            "erf": "jax.lax.erf(x)",
            "relu": "jax.nn.relu(x)",
            "isnan": "jnp.isnan(x)",
            "isinf": "jnp.isinf(x)",
            "isfinite": "jnp.isfinite(x)",
            "reciprocal": "1 / x",
        }
    ),
    Rule(_both("log"), "x", "jnp.log(x)", example="torch.log(positive) ; positive.log()"),
    Rule(_both("log2"), "x", "jnp.log2(x)", example="torch.log2(positive)"),
    Rule(_both("log10"), "x", "jnp.log10(x)", example="torch.log10(positive)"),
    Rule(_both("log1p"), "x", "jnp.log1p(x)", example="torch.log1p(positive)"),
    Rule(_both("sqrt"), "x", "jnp.sqrt(x)", example="torch.sqrt(positive)"),
    Rule(_both("rsqrt"), "x", "jax.lax.rsqrt(x)", example="torch.rsqrt(positive)"),
    Rule(_both("acos arccos"), "x", "jnp.arccos(x)", example="torch.acos(unit)"),
    Rule(_both("asin arcsin"), "x", "jnp.arcsin(x)", example="torch.asin(unit)"),
    Rule(_both("logical_not"), "x", "jnp.logical_not(x)", example="torch.logical_not(mask)"),
    Rule(_both("bitwise_not"), "x", "~x", example="torch.bitwise_not(mask)"),
    Rule("torch.special.erf", "x", "jax.lax.erf(x)"),
    Rule("torch.special.expit", "x", "jax.nn.sigmoid(x)"),
    Rule(
        _both("round"),
        "x, decimals=...",
        "jnp.round(x, decimals=decimals)",
        example="torch.round(x) ; torch.round(x, decimals=1)",
    ),
    Rule(
        _both("pow"),
        "x, exponent",
        "x ** exponent",
        example="x.pow(2) ; torch.pow(positive, 1.5) ; torch.pow(2, ids)",
    ),
    Rule(
        _both("add"),
        "x, other, alpha=1",
        "x + other",
        "x + alpha * other",
        example="torch.add(x, y) ; torch.add(x, y, alpha=2)",
    ),
    Rule(_both("sub subtract"), "x, other", "x - other", example="x.sub(y)"),
    Rule(_both("mul multiply"), "x, other", "x * other", example="torch.mul(x, y)"),
    Rule(
        _both("div divide true_divide"),
        "x, other, rounding_mode=None",
        "x / other",
        "F.divide(x, other, rounding_mode)",
        example="x.div(2.5) ; torch.div(ids, 2) ; torch.div(x, 0.3, rounding_mode='floor')"
        " ; torch.div(ids - 5, 2, rounding_mode='trunc')",
    ),
    Rule(_both("floor_divide"), "x, other", "x // other", example="torch.floor_divide(ids, 2)"),
    Rule(
        _both("remainder"), "x, other", "jnp.remainder(x, other)", example="torch.remainder(x, 2)"
    ),
    Rule(_both("fmod"), "x, other", "jnp.fmod(x, other)", example="torch.fmod(x, 2)"),
    Rule(_both("maximum"), "x, other", "jnp.maximum(x, other)", example="torch.maximum(x, y)"),
    Rule(_both("minimum"), "x, other", "jnp.minimum(x, other)", example="torch.minimum(x, y)"),
    Rule(_both("atan2"), "x, other", "jnp.arctan2(x, other)", example="torch.atan2(x, y)"),
    Rule(
        _both("xlogy"),
        "x, other",
        "jax.scipy.special.xlogy(x, other)",
        example="torch.xlogy(x, positive)",
    ),
    *(
        Rule(_both(names), "x, other", f"x {sign} other", example=f"torch.{names.split()[0]}(x, y)")
        for names, sign in {
            "eq": "==",
            "ne not_equal": "!=",
            "lt less": "<",
            "le less_equal": "<=",
            "gt greater": ">",
            "ge greater_equal": ">=",
        }.items()
    ),
    *(
        Rule(_both(name), "x, other", f"jnp.{name}(x, other)", example=f"torch.{name}(mask, ~mask)")
        for name in ("logical_and", "logical_or", "logical_xor")
    ),
    *(
        Rule(_both(name), "x, other", f"x {sign} other", example=f"torch.{name}(ids, ids + 1)")
        for name, sign in {"bitwise_and": "&", "bitwise_or": "|", "bitwise_xor": "^"}.items()
    ),
    Rule(
        _both("clamp clip"),
        "x, min=..., max=...",
        "jnp.clip(x, min=min, max=max)",
        example="torch.clamp(x, min=-0.5) ; x.clamp(-0.3, 0.4) ; x.clamp(max=0.1)",
    ),
    Rule(_both("clamp_min"), "x, min", "jnp.clip(x, min=min)", example="x.clamp_min(0.1)"),
    Rule(_both("clamp_max"), "x, max", "jnp.clip(x, max=max)", example="x.clamp_max(0.1)"),
    Rule(
        _both("nan_to_num"),
        "x, nan=..., posinf=..., neginf=...",
        "jnp.nan_to_num(x, nan=nan, posinf=posinf, neginf=neginf)",
        example="torch.nan_to_num(x / 0, nan=0.0)",
    ),
    Rule(
        _both("lerp"), "x, end, weight", "x + weight * (end - x)", example="torch.lerp(x, y, 0.3)"
    ),
    Rule(
        _both("addcmul"), "x, a, b, value=1", "x + value * a * b", example="torch.addcmul(x, y, y)"
    ),
    Rule(
        "torch.where",
        "condition, x, other",
        "jnp.where(condition, x, other)",
        example="torch.where(mask, x, 0.0)",
    ),
    Rule(
        "Tensor.where",
        "x, condition, other",
        "jnp.where(condition, x, other)",
        example="x.where(mask, y)",
    ),
    Rule(
        _both("masked_fill"),
        "x, mask, value",
        "jnp.where(mask, value, x)",
        example="x.masked_fill(mask, float('-inf')) ; x.masked_fill(mask[0], -1.0)",
    ),
    Rule(
        _both("fill zero"), "x, value=0.0", "jnp.full_like(x, value)", example="torch.fill(x, 2.0)"
    ),
    Rule("torch.complex", "x, imag", "jax.lax.complex(x, imag)", example="torch.complex(x, y)"),
    Rule(
        "torch.polar",
        "x, angle",
        "jax.lax.complex(x * jnp.cos(angle), x * jnp.sin(angle))",
        example="torch.polar(torch.ones_like(x), y)",
    ),
    Rule(
        "torch.view_as_real",
        "x",
        "jnp.stack((x.real, x.imag), axis=-1)",
        example="torch.view_as_real(torch.complex(x, y))",
    ),
    Rule(
        "torch.view_as_complex",
        "x",
        "jax.lax.complex(x[..., 0], x[..., 1])",
        example="torch.view_as_complex(pairs)",
    ),
    Rule(_both("angle"), "x", "jnp.angle(x)", example="torch.angle(torch.complex(x, y))"),
]

ACTIVATIONS = [
    *(
        Rule(f"F.{name}", "x", f"jax.nn.{result}(x)")
        for name, result in {
            "relu": "relu",
            "sigmoid": "sigmoid",
            "silu": "silu",
            "relu6": "relu6",
            "mish": "mish",
            "selu": "selu",
            "logsigmoid": "log_sigmoid",
            "hardswish": "hard_swish",
            "hardsigmoid": "hard_sigmoid",
            "softsign": "soft_sign",
        }.items()
    ),
    Rule("F.tanh", "x", "jnp.tanh(x)"),
    Rule("torch.log_sigmoid", "x", "jax.nn.log_sigmoid(x)", example="F.logsigmoid(x)"),
    Rule(
        "F.softplus",
        "x, beta=1.0, threshold=20.0",
        "jax.nn.softplus(x)",
        "jax.nn.softplus(x * beta) / beta",
        example="F.softplus(x) ; F.softplus(x, beta=2.0)",
    ),
    Rule(
        "F.elu",
        "x, alpha=...",
        "jax.nn.elu(x, alpha=alpha)",
        example="F.elu(x) ; F.elu(x, alpha=0.5)",
    ),
    Rule(
        "F.leaky_relu",
        "x, negative_slope=...",
        "jax.nn.leaky_relu(x, negative_slope=negative_slope)",
        example="F.leaky_relu(x) ; F.leaky_relu(x, 0.2)",
    ),
    Rule(
        "F.gelu",
        "x, approximate='none'",
        "jax.nn.gelu(x, approximate=False)",
        "jax.nn.gelu(x, approximate=approximate == 'tanh')",
        example="F.gelu(x) ; F.gelu(x, approximate='tanh')",
    ),
    Rule("F.glu", "x, dim=-1", "jax.nn.glu(x, axis=dim)", example="F.glu(x) ; F.glu(x, dim=0)"),
    Rule(
        "F.hardtanh",
        "x, min_val=-1.0, max_val=1.0",
        "jnp.clip(x, min=min_val, max=max_val)",
        example="F.hardtanh(x) ; F.hardtanh(x, -0.2, 0.3)",
    ),
    Rule(
        "F.prelu torch.prelu",
        "x, weight",
        "jnp.where(x > 0, x, weight * x)",
        example="F.prelu(x, vector[:1])",
    ),
    Rule(
        "F.softmax torch.softmax Tensor.softmax",
        "x, dim, dtype=None, _stacklevel=ignored",
        "jax.nn.softmax(x, axis=dim)",
        "jax.nn.softmax(x.astype(dtype), axis=dim)",
        example="F.softmax(x, dim=-1) ; torch.softmax(x, 1, dtype=torch.float32) ; x.softmax(-1)",
    ),
    Rule(
        "F.log_softmax torch.log_softmax Tensor.log_softmax",
        "x, dim, dtype=None",
        "jax.nn.log_softmax(x, axis=dim)",
        "jax.nn.log_softmax(x.astype(dtype), axis=dim)",
        example="F.log_softmax(x, dim=-1) ; x.log_softmax(1)",
    ),
    Rule(
        "F.dropout",
        "x, p=0.5, training=ignored",
        "nn.dropout(x, p, rngs)",
        example="F.dropout(x, p=0.0, training=True) ; F.dropout(x, 0.1, training=False)",
    ),
]

REDUCTIONS = [
    *(
        Rule(
            _both(name),
            "x, dim=..., keepdim=..., dtype=...",
            "x.SUM(axis=dim, keepdims=keepdim, dtype=dtype)".replace("SUM", name),
            example=f"torch.{name}(x) ; x.{name}(-1, keepdim=True) ; x.{name}(dim=1)"
            f" ; torch.{name}(x, 0, dtype=torch.float32)",
        )
        for name in ("sum", "mean", "prod")
    ),
    Rule(
        _both("nansum"),
        "x, dim=..., keepdim=...",
        "jnp.nansum(x, axis=dim, keepdims=keepdim)",
        example="torch.nansum(x, -1)",
    ),
    *(
        Rule(
            _both(name),
            "x, dim=..., keepdim=...",
            f"x.{name}(axis=dim, keepdims=keepdim)",
            example=f"torch.{name}(mask) ; mask.{name}(-1) ; mask.{name}(dim=1, keepdim=True)",
        )
        for name in ("any", "all")
    ),
    *(
        Rule(
            _both(f"a{name}"),
            "x, dim=..., keepdim=...",
            f"x.{name}(axis=dim, keepdims=keepdim)",
            example=f"torch.a{name}(x) ; x.a{name}(dim=(0, 1)) ; x.a{name}(-1, keepdim=True)",
        )
        for name in ("max", "min")
    ),
    *(
        Rule(
            _both(name),
            "x, dim=..., keepdim=...",
            f"x.{name}(axis=dim, keepdims=keepdim)",
            example=f"torch.{name}(x) ; x.{name}(-1) ; x.{name}(dim=1, keepdim=True)",
        )
        for name in ("argmax", "argmin")
    ),
    *(
        Rule(
            _both(name),
            "x, dim=..., unbiased=True, keepdim=..., correction=1",
            f"x.{name}(axis=dim, ddof=1, keepdims=keepdim)",
            f"x.{name}(axis=dim, ddof=int(unbiased), keepdims=keepdim)",
            f"x.{name}(axis=dim, ddof=correction, keepdims=keepdim)",
            example=f"x.{name}(-1) ; torch.{name}(x, dim=1, keepdim=True, unbiased=False)"
            f" ; x.{name}(dim=-1, correction=0)",
        )
        for name in ("var", "std")
    ),
    Rule(
        _both("max"),
        "x, dim=None, keepdim=False",
        "x.max()",
        "F.max(x, dim, keepdim)",
        example="x.max() ; torch.max(x, dim=-1) ; x.max(1, keepdim=True) ; x.max(dim=1)[0]"
        " ; torch.max(x, -1).indices",
    ),
    Rule(
        _both("min"),
        "x, dim=None, keepdim=False",
        "x.min()",
        "F.min(x, dim, keepdim)",
        example="x.min() ; torch.min(x, dim=-1).values ; x.min(1, True)",
    ),
    Rule(
        _both("cumsum"),
        "x, dim, dtype=...",
        "jnp.cumsum(x, axis=dim, dtype=dtype)",
        example="torch.cumsum(x, dim=1) ; mask.cumsum(-1) ; x.cumsum(0, dtype=torch.float32)",
    ),
    Rule(
        _both("cumprod"),
        "x, dim, dtype=...",
        "jnp.cumprod(x, axis=dim, dtype=dtype)",
        example="torch.cumprod(x, dim=1)",
    ),
    Rule(_both("cummax"), "x, dim", "F.cummax(x, dim)", example="torch.cummax(x, dim=1)"),
    Rule(
        _both("logsumexp"),
        "x, dim, keepdim=...",
        "jax.nn.logsumexp(x, axis=dim, keepdims=keepdim)",
        example="torch.logsumexp(x, dim=-1) ; x.logsumexp(1, keepdim=True)",
    ),
    Rule(
        _both("count_nonzero"),
        "x, dim=...",
        "jnp.count_nonzero(x, axis=dim)",
        example="torch.count_nonzero(ids)",
    ),
    Rule(
        "torch.norm Tensor.norm torch.linalg.norm torch.linalg.vector_norm F.norm",
        "x, p=..., dim=..., keepdim=..., dtype=...",
        "F.norm(x, p=p, dim=dim, keepdim=keepdim, dtype=dtype)",
        example="torch.norm(x) ; x.norm(dim=-1, keepdim=True) ; x.norm(p=1, dim=1)"
        " ; torch.linalg.vector_norm(x, dim=-1)",
    ),
    Rule(
        "torch.topk Tensor.topk",
        "x, k, dim=..., largest=..., sorted=ignored",
        "F.topk(x, k, dim=dim, largest=largest)",
        example="torch.topk(x, 2, dim=-1) ; x.topk(2, dim=1) ; torch.topk(x, k=1, largest=False)"
        " ; torch.topk(x, 2, dim=-1, sorted=False)[1] ; torch.topk(x, 2).values",
    ),
    Rule(
        "torch.sort Tensor.sort",
        "x, dim=..., descending=..., stable=ignored",
        "F.sort(x, dim=dim, descending=descending)",
        example="torch.sort(x, dim=1, descending=True) ; x.sort()[0]",
    ),
    Rule(
        "torch.argsort Tensor.argsort",
        "x, dim=..., descending=..., stable=ignored",
        "jnp.argsort(x, axis=dim, descending=descending)",
        example="torch.argsort(x, dim=1) ; x.argsort(descending=True)",
    ),
    Rule(
        "torch.histc Tensor.histc",
        "x, bins, min, max",
        "jnp.histogram(x, bins, (min, max))[0]",
        example="torch.histc(ids.float(), bins=10, min=0, max=9)",
    ),
    Rule(
        "torch.bincount Tensor.bincount",
        "x, weights=..., minlength=0",
        "jnp.bincount(x, weights=weights, length=minlength)",
        example="torch.bincount(ids.flatten(), minlength=12)",
    ),
]

SHAPES = [
    Rule(
        "Tensor.view Tensor.reshape",
        "x, *shape",
        "x.reshape(*shape)",
        example="x.view(4, -1) ; x.reshape(x.shape[0], -1) ; x.view(*x.shape[:-1], 2, 2)"
        " ; x.reshape((6, 4)) ; x.view(x.size(0), x.size()[1] * x.size(-1))",
    ),
    Rule("torch.reshape", "x, shape", "x.reshape(shape)", example="torch.reshape(x, (6, 4))"),
    Rule(
        "Tensor.view_as Tensor.reshape_as",
        "x, other",
        "x.reshape(other.shape)",
        example="x.flatten().view_as(x)",
    ),
    Rule(
        _both("transpose swapaxes swapdims"),
        "x, dim0, dim1",
        "x.swapaxes(dim0, dim1)",
        example="x.transpose(1, 2) ; torch.transpose(x, -1, 0) ; x.transpose(dim0=0, dim1=1)",
    ),
    Rule(
        "Tensor.permute",
        "x, *dims",
        "x.transpose(*dims)",
        example="x.permute(0, 2, 1) ; x.permute((2, 0, 1)) ; x.permute(dims=(1, 0, 2))",
    ),
    Rule("torch.permute", "x, dims", "x.transpose(dims)", example="torch.permute(x, (2, 0, 1))"),
    Rule(
        _both("movedim moveaxis"),
        "x, source, destination",
        "jnp.moveaxis(x, source, destination)",
        example="torch.movedim(x, 1, -1)",
    ),
    Rule(_both("t"), "x", "x.T", example="x[0].t()"),
    Rule(
        _both("unsqueeze"),
        "x, dim",
        "jnp.expand_dims(x, dim)",
        example="x.unsqueeze(1) ; torch.unsqueeze(x, -1) ; x.unsqueeze(dim=0)",
    ),
    Rule(
        _both("squeeze"),
        "x, dim=...",
        "F.squeeze(x, dim=dim)",
        example="x[:, :1].squeeze(1) ; x.squeeze(-1) ; x[:1, :1].squeeze()",
    ),
    Rule(
        _both("flatten"),
        "x, start_dim=..., end_dim=...",
        "F.flatten(x, start_dim=start_dim, end_dim=end_dim)",
        example="x.flatten(1) ; torch.flatten(x) ; x.flatten(0, 1) ; x.flatten(start_dim=-2)",
    ),
    Rule("Tensor.ravel torch.ravel", "x", "x.reshape(-1)"),
    Rule(
        _both("unflatten"),
        "x, dim, sizes",
        "F.unflatten(x, dim, sizes)",
        example="x.unflatten(-1, (2, -1))",
    ),
    Rule(
        "Tensor.expand",
        "x, *sizes",
        "F.expand(x, *sizes)",
        example="x[:, :1].expand(-1, 5, -1) ; x[:, :1].expand((2, 3, 4)) ; vector.expand(2, 4)",
    ),
    Rule(
        "Tensor.expand_as",
        "x, other",
        "jnp.broadcast_to(x, other.shape)",
        example="x[:, :1].expand_as(y)",
    ),
    Rule(
        "Tensor.broadcast_to torch.broadcast_to",
        "x, *size",
        "F.expand(x, *size)",
        example="torch.broadcast_to(vector, (2, 4))",
    ),
    Rule(
        "torch.broadcast_tensors",
        "*tensors",
        "jnp.broadcast_arrays(*tensors)",
        example="torch.broadcast_tensors(x, vector)",
    ),
    Rule(
        "Tensor.repeat",
        "x, *sizes",
        "jnp.tile(x, sizes)",
        example="x.repeat(1, 2, 3) ; vector.repeat(2, 1) ; vector.repeat(3)",
    ),
    Rule("Tensor.tile", "x, *dims", "jnp.tile(x, dims)", example="x.tile(1, 2, 1)"),
    Rule("torch.tile", "x, dims", "jnp.tile(x, dims)", example="torch.tile(x, (2, 1))"),
    Rule(
        _both("repeat_interleave"),
        "x, repeats, dim=...",
        "jnp.repeat(x, repeats, axis=dim)",
        example="x.repeat_interleave(2, dim=1) ; torch.repeat_interleave(x, 3, 0)",
    ),
    Rule(
        "torch.cat torch.concat torch.concatenate",
        "tensors, dim=...",
        "jnp.concatenate(tensors, axis=dim)",
        example="torch.cat((x, y), dim=1) ; torch.cat([x, y]) ; torch.concat([x, y], -1)",
    ),
    Rule(
        "torch.stack",
        "tensors, dim=...",
        "jnp.stack(tensors, axis=dim)",
        example="torch.stack((x, y), dim=1) ; torch.stack([x, y])",
    ),
    Rule("torch.hstack", "tensors", "jnp.hstack(tensors)", example="torch.hstack((x, y))"),
    Rule("torch.vstack", "tensors", "jnp.vstack(tensors)", example="torch.vstack((x, y))"),
    Rule(
        _both("split split_with_sizes"),
        "x, split_size, dim=...",
        "F.split(x, split_size, dim=dim)",
        example="x.split(3, dim=-1) ; torch.split(x, [1, 3], -1) ; torch.split(x, 1)",
    ),
    Rule(
        _both("chunk"),
        "x, chunks, dim=...",
        "jnp.split(x, chunks, axis=dim)",
        example="x.chunk(2, dim=-1) ; torch.chunk(x, 2)",
    ),
    Rule(
        _both("tensor_split"),
        "x, sections, dim=...",
        "jnp.array_split(x, sections, axis=dim)",
        example="torch.tensor_split(x, 3, dim=-1)",
    ),
    Rule(
        _both("unbind"),
        "x, dim=...",
        "jnp.unstack(x, axis=dim)",
        example="x.unbind(0) ; torch.unbind(x, dim=-1)",
    ),
    Rule(
        _both("narrow"),
        "x, dim, start, length",
        "F.narrow(x, dim, start, length)",
        example="x.narrow(1, 0, 2)",
    ),
    Rule(
        _both("select"), "x, dim, index", "jnp.take(x, index, axis=dim)", example="x.select(1, 0)"
    ),
    Rule(
        _both("flip"),
        "x, *dims",
        "jnp.flip(x, axis=dims)",
        example="x.flip(1) ; torch.flip(x, [0, -1]) ; x.flip(dims=(1,))",
    ),
    Rule(
        _both("roll"),
        "x, shifts, dims=...",
        "jnp.roll(x, shifts, axis=dims)",
        example="torch.roll(x, 1, dims=1) ; torch.roll(x, shifts=(1, -1), dims=(0, 1))",
    ),
    Rule(
        _both("tril"),
        "x, diagonal=0",
        "jnp.tril(x)",
        "jnp.tril(x, diagonal)",
        example="torch.tril(x) ; x.tril(-1)",
    ),
    Rule(
        _both("triu"),
        "x, diagonal=0",
        "jnp.triu(x)",
        "jnp.triu(x, diagonal)",
        example="torch.triu(x, diagonal=1) ; x.triu(1)",
    ),
    Rule(
        _both("diagonal"),
        "x, offset=0, dim1=0, dim2=1",
        "jnp.diagonal(x, offset=offset, axis1=dim1, axis2=dim2)",
        example="torch.diagonal(x, dim1=-2, dim2=-1)",
    ),
    Rule(
        _both("diag"),
        "x, diagonal=0",
        "jnp.diag(x, diagonal)",
        example="torch.diag(vector) ; torch.diag(x[0], 1)",
    ),
    Rule(
        _both("diff"),
        "x, n=..., dim=...",
        "jnp.diff(x, n=n, axis=dim)",
        example="torch.diff(x) ; torch.diff(x, dim=1)",
    ),
    Rule(
        "Tensor.unfold",
        "x, dimension, size, step",
        "F.windows(x, dimension, size, step)",
        example="x.unfold(-1, 2, 1) ; x.unfold(dimension=1, size=2, step=1)",
    ),
    Rule(
        "torch.meshgrid",
        "*tensors, indexing='ij'",
        "F.meshgrid(*tensors)",
        "F.meshgrid(*tensors, indexing=indexing)",
        example="torch.meshgrid(vector, vector[:2], indexing='xy')"
        " ; torch.meshgrid([vector, vector[:2]], indexing='ij')",
    ),
    Rule("Tensor.dim Tensor.ndimension", "x", "x.ndim", example="x * x.dim()"),
    Rule("Tensor.numel Tensor.nelement torch.numel", "x", "x.size", example="x * x.numel()"),
    Rule(
        "Tensor.size",
        "x, dim=None",
        "x.shape",
        "x.shape[dim]",
        example="x * x.size(1) ; x * x.size()[-1]",
    ),
    Rule(
        "Tensor.is_floating_point torch.is_floating_point",
        "x",
        "jnp.issubdtype(x.dtype, jnp.floating)",
        example="x * x.is_floating_point()",
    ),
    Rule("torch.atleast_1d", "x", "jnp.atleast_1d(x)"),
    Rule("torch.atleast_2d", "x", "jnp.atleast_2d(x)"),
]

INDEXING = [
    Rule(
        _both("gather"),
        "x, dim, index",
        "F.gather(x, dim, index)",
        example="torch.gather(x, 1, places) ; x.gather(1, places) ; torch.gather(x, "
        "dim=1, index=places[:, :2, :3])",
    ),
    Rule(
        "torch.take_along_dim Tensor.take_along_dim",
        "x, indices, dim",
        "jnp.take_along_axis(x, indices, axis=dim)",
        example="torch.take_along_dim(x, places, dim=1)",
    ),
    Rule(
        _both("index_select"),
        "x, dim, index",
        "jnp.take(x, index, axis=dim)",
        example="x.index_select(1, places[0, :, 0]) ; torch.index_select(x, 0, "
        "places[0, :, 0] % 2)",
    ),
    Rule(
        _both("scatter"),
        "x, dim, index, src=None, value=None",
        "F.scatter(x, dim, index, src)",
        "F.scatter(x, dim, index, value)",
        example="x.scatter(1, places[:, :1], 1.0) ; torch.zeros_like(x).scatter_(1, "
        "places[:, :1], y)"
        " ; torch.scatter(x, 1, places[:, :1], value=2.0)",
    ),
    Rule(
        _both("scatter_add"),
        "x, dim, index, src",
        "F.scatter_add(x, dim, index, src)",
        example="x.scatter_add(1, places, y) ; torch.zeros_like(x).scatter_add_(1, places, y)",
    ),
    Rule(
        _both("scatter_reduce"),
        "x, dim, index, src, reduce, include_self=...",
        "F.scatter_reduce(x, dim, index, src, reduce, include_self=include_self)",
        example="x.scatter_reduce(1, places, y, reduce='amax')"
        " ; x.scatter_reduce(1, places, y, 'mean', include_self=False)",
    ),
    Rule(
        _both("index_add"),
        "x, dim, index, source, alpha=...",
        "F.index_add(x, dim, index, source, alpha=alpha)",
        example="x.index_add(1, places[0, :, 0], y) ; "
        "torch.zeros_like(x).index_add_(0, places[0, :2, 0] % 2, y)",
    ),
    Rule(
        _both("index_copy"),
        "x, dim, index, source",
        "F.index_copy(x, dim, index, source)",
        example="x.index_copy(1, order, y)",
    ),
    Rule(
        _both("masked_scatter"),
        "x, mask, source",
        "F.masked_scatter(x, mask, source)",
        example="x.masked_scatter(mask, y)",
    ),
    Rule(
        "F.one_hot",
        "x, num_classes",
        "F.one_hot(x, num_classes)",
        example="F.one_hot(ids, num_classes=12) ; F.one_hot(ids, 11)",
    ),
    Rule(
        "F.embedding torch.embedding",
        "ids, weight, padding_idx=ignored, scale_grad_by_freq=False, sparse=ignored",
        "jnp.take(weight, ids, axis=0)",
        example="F.embedding(ids, table)",
    ),
    Rule(
        "torch.searchsorted",
        "edges, x, right=False, side='left'",
        "jnp.searchsorted(edges, x)",
        "jnp.searchsorted(edges, x, side=side)",
        "jnp.searchsorted(edges, x, side='right' if right else 'left')",
        example="torch.searchsorted(ascending, x) ; torch.searchsorted(ascending, x, right=True)",
    ),
    Rule(
        "torch.bucketize Tensor.bucketize",
        "x, boundaries, right=False, out_int32=ignored",
        "jnp.searchsorted(boundaries, x)",
        "jnp.searchsorted(boundaries, x, side='right' if right else 'left')",
        example="torch.bucketize(x, ascending) ; torch.bucketize(x, ascending, right=True)",
    ),
]

CREATION = [
    *(
        Rule(
            f"torch.{names}",
            "*size, dtype=...",
            f"jnp.{result}(size, dtype=dtype)",
            example=f"(torch.{names}(2, 3) == 0) & False ; "
            f"torch.{names}((2, 3), dtype=torch.bool) & False"
            if names == "empty"
            else f"torch.{names}(2, 3) ; torch.{names}(4) ; "
            f"torch.{names}((2, x.shape[1]), dtype=torch.long, device=x.device)"
            f" ; torch.{names}(size=(2, 2)) ; torch.{names}(*x.shape[:2], dtype=x.dtype)",
        )
        for names, result in {"zeros": "zeros", "ones": "ones", "empty": "zeros"}.items()
    ),
    Rule(
        "torch.full",
        "size, fill_value, dtype=...",
        "jnp.full(size, fill_value, dtype=dtype)",
        example="torch.full((2, 3), -1.5) ; torch.full((2,), 7) ; torch.full((2, 1), "
        "1, dtype=torch.float32)",
    ),
    *(
        Rule(
            f"torch.{name}_like",
            "x, dtype=...",
            f"jnp.{result}_like(x, dtype=dtype)",
            example=f"(torch.{name}_like(x) == 0) & False ; "
            f"torch.{name}_like(x, dtype=torch.bool) & False"
            if name == "empty"
            else f"torch.{name}_like(x) ; torch.{name}_like(x, dtype=torch.bool)",
        )
        for name, result in {"zeros": "zeros", "ones": "ones", "empty": "zeros"}.items()
    ),
    Rule(
        "torch.full_like",
        "x, fill_value, dtype=...",
        "jnp.full_like(x, fill_value, dtype=dtype)",
        example="torch.full_like(x, 2.0)",
    ),
    *(
        Rule(
            f"Tensor.new_{name}",
            "x, *size, dtype=None",
            f"jnp.{result}(size, x.dtype)",
            f"jnp.{result}(size, dtype)",
            example=f"(x.new_{name}(2, 3) == 0) & False"
            if name == "empty"
            else f"x.new_{name}(2, 3) ; x.new_{name}((2,), dtype=torch.bool) ; "
            f"ids.new_{name}(x.shape)",
        )
        for name, result in {"zeros": "zeros", "ones": "ones", "empty": "zeros"}.items()
    ),
    Rule(
        "Tensor.new_full",
        "x, size, fill_value, dtype=None",
        "jnp.full(size, fill_value, x.dtype)",
        "jnp.full(size, fill_value, dtype)",
        example="x.new_full((2, 3), 0.5)",
    ),
    Rule(
        "Tensor.new_tensor",
        "x, data, dtype=None",
        "jnp.asarray(data, x.dtype)",
        "jnp.asarray(data, dtype)",
        example="x.new_tensor([1.0, 2.0])",
    ),
    Rule(
        "torch.arange",
        "*bounds, end=..., step=..., dtype=...",
        "jnp.arange(*bounds, dtype=dtype)",
        "jnp.arange(end, dtype=dtype)",
        "jnp.arange(*bounds, end, dtype=dtype)",
        "jnp.arange(*bounds, end, step, dtype=dtype)",
        "jnp.arange(*bounds, step=step, dtype=dtype)",
        example="torch.arange(5) ; torch.arange(1, 7, 2) ; torch.arange(0, 6, 2, "
        "dtype=torch.float32)"
        " ; torch.arange(end=4) ; torch.arange(0, end=x.shape[1]) ; torch.arange(3.0)"
        " ; torch.arange(1, end=9, step=3) ; torch.arange(1, 9, step=3)",
    ),
    Rule(
        "torch.linspace",
        "start, end, steps, dtype=...",
        "jnp.linspace(start, end, steps, dtype=dtype)",
        example="torch.linspace(0, 1, 5) ; torch.linspace(-1, 1, steps=3)",
    ),
    Rule(
        "torch.logspace",
        "start, end, steps, base=...",
        "jnp.logspace(start, end, steps, base=base)",
        example="torch.logspace(0, 1, 5)",
    ),
    Rule(
        "torch.eye",
        "n, m=..., dtype=...",
        "jnp.eye(n, M=m, dtype=dtype)",
        example="torch.eye(3) ; torch.eye(2, 4)",
    ),
    Rule(
        "torch.FloatTensor",
        "data",
        "jnp.asarray(data, jnp.float32)",
        example="torch.FloatTensor([1.0, 2.0])",
    ),
    Rule(
        "torch.LongTensor torch.IntTensor",
        "data",
        "jnp.asarray(data, jnp.int32)",
        example="torch.LongTensor([1, 2])",
    ),
    Rule(
        "torch.tensor torch.as_tensor torch.scalar_tensor torch.asarray torch.from_numpy",
        "data, dtype=...",
        "jnp.asarray(data, dtype=dtype)",
        example="torch.tensor([1.0, 2.0]) ; torch.tensor(3, dtype=torch.float32) ; "
        "torch.as_tensor(x)",
    ),
    Rule(
        "torch.tril_indices",
        "row, col, offset=0",
        "jnp.stack(jnp.tril_indices(row, offset, col))",
        example="torch.tril_indices(3, 3)",
    ),
    Rule(
        "torch.triu_indices",
        "row, col, offset=0",
        "jnp.stack(jnp.triu_indices(row, offset, col))",
        example="torch.triu_indices(3, 4, 1)",
    ),
    Rule("torch.finfo", "dtype", "jnp.finfo(dtype)", example="x * torch.finfo(torch.float32).eps"),
    Rule(
        "torch.iinfo",
        "dtype",
        "jnp.iinfo(dtype)",
        example="ids.new_full((2,), torch.iinfo(torch.int32).max)",
    ),
    Rule("torch.is_tensor", "x", "isinstance(x, jax.Array)", example="x * torch.is_tensor(x)"),
    Rule("torch.Size", "sizes", "tuple(sizes)", example="x.reshape(torch.Size([6, 4]))"),
]

CASTS = [
    Rule("Tensor.float", "x", "x.astype(jnp.float32)", example="ids.float()"),
    Rule("Tensor.long Tensor.int", "x", "x.astype(jnp.int32)"),
    Rule("Tensor.bool", "x", "x.astype(bool)", example="ids.bool()"),
    Rule("Tensor.half", "x", "x.astype(jnp.float16)"),
    Rule("Tensor.bfloat16", "x", "x.astype(jnp.bfloat16)"),
    Rule("Tensor.double", "x", "x.astype(jnp.float32)", example="ids.double()"),
    Rule("Tensor.type_as", "x, other", "x.astype(other.dtype)", example="ids.type_as(x)"),
    Rule(
        "Tensor.contiguous Tensor.clone Tensor.cpu Tensor.cuda torch.clone",
        "x",
        "x",
        example="x.contiguous() ; x.clone() ; x.cpu() ; torch.clone(x)",
    ),
    Rule("Tensor.detach torch.detach", "x", "jax.lax.stop_gradient(x)"),
]

PRODUCTS = [
    Rule(
        _both("matmul mm bmm"),
        "x, other",
        "jnp.matmul(x, other)",
        example="torch.matmul(x, y.transpose(1, 2)) ; torch.bmm(x, y.mT) ; x[0].mm(y[0].T)",
    ),
    Rule(_both("dot mv"), "x, other", "jnp.dot(x, other)", example="torch.dot(vector, vector)"),
    Rule(
        _both("outer ger"), "x, other", "jnp.outer(x, other)", example="torch.outer(vector, vector)"
    ),
    Rule(
        "torch.einsum",
        "equation, *operands",
        "jnp.einsum(equation, *operands)",
        example="torch.einsum('bij,bkj->bik', x, y)",
    ),
    Rule(
        "torch.tensordot",
        "x, other, dims",
        "jnp.tensordot(x, other, axes=dims)",
        example="torch.tensordot(x, y, dims=([1, 2], [1, 2]))",
    ),
    Rule("torch.kron", "x, other", "jnp.kron(x, other)", example="torch.kron(x[0], y[0])"),
    Rule(
        _both("cross") + " torch.linalg.cross",
        "x, other, dim=-1",
        "jnp.cross(x, other, axis=dim)",
        example="torch.cross(x[..., :3], y[..., :3], dim=-1)",
    ),
    Rule(
        _both("baddbmm addmm"),
        "x, batch1, batch2, beta=..., alpha=...",
        "F.baddbmm(x, batch1, batch2, beta=beta, alpha=alpha)",
        example="torch.baddbmm(square, x, y.mT, beta=0.5, alpha=2.0) ; "
        "torch.addmm(square[0], x[0], y[0].T)",
    ),
    Rule(
        "torch.cdist",
        "x, other, p=...",
        "F.norm(x[..., :, None, :] - other[..., None, :, :], p=p, dim=-1)",
        example="torch.cdist(x, y)",
    ),
    Rule(
        "torch.inverse torch.linalg.inv",
        "x",
        "jnp.linalg.inv(x)",
        example="torch.inverse(square + 3 * torch.eye(3))",
    ),
    Rule(
        "torch.linalg.solve",
        "x, other",
        "jnp.linalg.solve(x, other)",
        example="torch.linalg.solve(square + 3 * torch.eye(3), x)",
    ),
    Rule(
        "torch.linalg.solve_triangular",
        "x, other, upper",
        "jax.lax.linalg.triangular_solve(x, other, left_side=True, lower=not upper)",
        example="torch.linalg.solve_triangular(square.tril() + torch.eye(3) * 3, x, upper=False)",
    ),
    Rule(
        "torch.fft.rfft",
        "x, n=..., dim=..., norm=...",
        "jnp.fft.rfft(x, n=n, axis=dim, norm=norm)",
        example="torch.fft.rfft(x) ; torch.fft.rfft(x, dim=1, norm='ortho')",
    ),
    Rule(
        "torch.fft.irfft",
        "x, n=..., dim=..., norm=...",
        "jnp.fft.irfft(x, n=n, axis=dim, norm=norm)",
        example="torch.fft.irfft(torch.fft.rfft(x), n=4)",
    ),
    Rule(
        "torch.fft.fftn",
        "x, s=..., dim=..., norm=...",
        "jnp.fft.fftn(x, s=s, axes=dim, norm=norm)",
        example="torch.fft.fftn(x, dim=(1, 2)).real",
    ),
    Rule(
        "torch.fft.fft",
        "x, n=..., dim=..., norm=...",
        "jnp.fft.fft(x, n=n, axis=dim, norm=norm)",
        example="torch.fft.fft(x, dim=-1).real",
    ),
    Rule(
        "F.linear",
        "x, weight, bias=None",
        "F.linear(x, weight)",
        "F.linear(x, weight, bias)",
        example="F.linear(x, table) ; F.linear(x, table, table[:, 0])",
    ),
    Rule(
        "F.scaled_dot_product_attention",
        "query, key, value, attn_mask=..., dropout_p=..., is_causal=..., scale=...",
        "F.scaled_dot_product_attention(query, key, value, attn_mask=attn_mask, "
        "is_causal=is_causal, scale=scale)",
        "F.scaled_dot_product_attention(query, key, value, attn_mask=attn_mask, "
        "dropout_p=dropout_p, is_causal=is_causal, scale=scale, rngs=rngs)",
        example="F.scaled_dot_product_attention(image[:, :, :4, :4], image[:, :, 4:, "
        ":4], image[:, :, 4:, :4])"
        " ; F.scaled_dot_product_attention(image, image, image, is_causal=True, scale=0.2)",
    ),
]

NORMALIZATION = [
    Rule(
        "F.normalize",
        "x, p=..., dim=..., eps=...",
        "F.normalize(x, p=p, dim=dim, eps=eps)",
        example="F.normalize(x, dim=-1) ; F.normalize(x, p=1.0) ; F.normalize(x, "
        "p=2, dim=-1, eps=1e-6)",
    ),
    Rule(
        "F.cosine_similarity torch.cosine_similarity",
        "x, other, dim=..., eps=...",
        "F.cosine_similarity(x, other, dim=dim, eps=eps)",
        example="F.cosine_similarity(x, y, dim=-1) ; torch.cosine_similarity(x, y)",
    ),
    Rule(
        "F.layer_norm torch.layer_norm",
        "x, normalized_shape, weight=..., bias=..., eps=...",
        "F.layer_norm(x, normalized_shape, weight=weight, bias=bias, eps=eps)",
        example="F.layer_norm(x, (4,)) ; F.layer_norm(x, x.shape[-1:], vector, vector, 1e-6)",
    ),
    Rule(
        "F.rms_norm torch.rms_norm",
        "x, normalized_shape, weight=..., eps=...",
        "F.rms_norm(x, normalized_shape, weight=weight, eps=eps)",
        example="F.rms_norm(x, (4,), vector, 1e-6)",
    ),
    Rule(
        "F.group_norm torch.group_norm",
        "x, num_groups, weight=..., bias=..., eps=...",
        "F.group_norm(x, num_groups, weight=weight, bias=bias, eps=eps)",
        example="F.group_norm(image, 2) ; F.group_norm(image, 4, vector, vector)",
    ),
    Rule(
        "F.batch_norm",
        "x, running_mean, running_var, weight=..., bias=..., training=False, momentum=0.1, eps=...",
        "F.batch_norm(x, running_mean, running_var, weight=weight, bias=bias, eps=eps)",
        example="F.batch_norm(image, vector, vector.abs(), vector, vector)",
    ),
    Rule(
        "torch._weight_norm",
        "v, g, dim=...",
        "F.weight_norm(v, g, dim=dim)",
        example="torch._weight_norm(x, x[:, :1, :1], 0)",
    ),
]

IMAGES = [
    Rule(
        "F.pad torch.pad",
        "x, pad, mode=..., value=...",
        "F.pad(x, pad, mode=mode, value=value)",
        example="F.pad(x, (1, 2)) ; F.pad(x, (0, 0, 1, -1), value=2.0) ; "
        "F.pad(image, (1, 1, 2, 2), mode='reflect')"
        " ; F.pad(x, (1, 2), mode='replicate') ; F.pad(x, pad=(1, 0), mode='constant', value=1.0)",
    ),
    *(
        Rule(
            f"F.conv{n}d torch.conv{n}d",
            "x, weight, bias=..., stride=..., padding=..., dilation=..., groups=...",
            "F.conv(x, weight, bias=bias, stride=stride, padding=padding, "
            "dilation=dilation, groups=groups)",
            example=example,
        )
        for n, example in {
            1: "F.conv1d(x, taps, padding=1) ; F.conv1d(x, taps[:, :1], groups=3, stride=2)"
            " ; F.conv1d(x, taps, padding='same', dilation=2)",
            2: "F.conv2d(image, image_taps, vector, stride=2, padding=1)",
            3: "F.conv3d(image[None], image_taps[None][:, :2, :2], padding=(0, 1, 1))",
        }.items()
    ),
    *(
        Rule(
            f"F.conv_transpose{n}d",
            "x, weight, bias=..., stride=..., padding=..., output_padding=..., "
            "groups=..., dilation=...",
            "F.conv_transpose(x, weight, bias=bias, stride=stride, padding=padding, "
            "output_padding=output_padding, groups=groups, dilation=dilation)",
            example=example,
        )
        for n, example in {
            1: "F.conv_transpose1d(x, taps, stride=2, padding=1, output_padding=1)"
            " ; F.conv_transpose1d(x, taps[:, :1], groups=3)",
            2: "F.conv_transpose2d(image, image_taps, vector, stride=2)",
        }.items()
    ),
    *(
        Rule(
            f"F.max_pool{n}d torch.max_pool{n}d",
            "x, kernel_size, stride=..., padding=..., dilation=..., ceil_mode=...",
            "F.max_pool(x, kernel_size, stride=stride, padding=padding, "
            "dilation=dilation, ceil_mode=ceil_mode)",
            example=f"F.max_pool{n}d({x}, 2) ; F.max_pool{n}d({x}, kernel_size=3, "
            "stride=2, padding=1, ceil_mode=True)",
        )
        for n, x in {1: "x", 2: "image"}.items()
    ),
    *(
        Rule(
            f"F.avg_pool{n}d",
            "x, kernel_size, stride=..., padding=..., ceil_mode=..., count_include_pad=...",
            "F.avg_pool(x, kernel_size, stride=stride, padding=padding, "
            "ceil_mode=ceil_mode, count_include_pad=count_include_pad)",
            example=f"F.avg_pool{n}d({x}, 2) ; F.avg_pool{n}d({x}, 3, stride=2, "
            "padding=1, count_include_pad=False)"
            f" ; F.avg_pool{n}d({x}, 3, 2, 1, ceil_mode=True)",
        )
        for n, x in {1: "x", 2: "image"}.items()
    ),
    *(
        Rule(
            f"F.adaptive_{kind}_pool{n}d",
            "x, output_size",
            f"F.adaptive_{kind}_pool(x, output_size)",
            example=f"F.adaptive_{kind}_pool{n}d({x}, 3) ; F.adaptive_{kind}_pool{n}d({x}, 1)",
        )
        for n, x in {1: "x", 2: "image"}.items()
        for kind in ("avg", "max")
    ),
    Rule(
        "F.interpolate F.upsample",
        "x, size=..., scale_factor=..., mode=..., align_corners=..., "
        "recompute_scale_factor=..., antialias=...",
        "F.interpolate(x, size=size, scale_factor=scale_factor, mode=mode, "
        "align_corners=align_corners, "
        "recompute_scale_factor=recompute_scale_factor, antialias=antialias)",
        example="F.interpolate(image, size=(5, 11), mode='bilinear', align_corners=False)"
        " ; F.interpolate(image, scale_factor=2, mode='nearest') ; F.interpolate(x, 7)"
        " ; F.interpolate(image, size=(6, 6), mode='bicubic', align_corners=True)"
        " ; F.interpolate(image, scale_factor=0.5, mode='bilinear', antialias=True)"
        " ; F.interpolate(x, scale_factor=1.7, mode='linear') ; F.interpolate(image, "
        "(4, 4), mode='area')",
    ),
    Rule(
        "F.grid_sample",
        "x, grid, mode=..., padding_mode=..., align_corners=...",
        "F.grid_sample(x, grid, mode=mode, padding_mode=padding_mode, align_corners=align_corners)",
        example="F.grid_sample(image, grid, mode='bilinear', padding_mode='zeros', "
        "align_corners=False)"
        " ; F.grid_sample(image, grid, padding_mode='border', align_corners=True)"
        " ; F.grid_sample(image, grid, mode='bicubic', padding_mode='reflection', "
        "align_corners=False)",
    ),
    Rule(
        "F.unfold",
        "x, kernel_size, dilation=..., padding=..., stride=...",
        "F.unfold(x, kernel_size, dilation=dilation, padding=padding, stride=stride)",
        example="F.unfold(image, 3, padding=1, stride=2) ; F.unfold(image, "
        "kernel_size=(2, 4), stride=(2, 4))",
    ),
    Rule(
        "F.fold",
        "x, output_size, kernel_size, dilation=..., padding=..., stride=...",
        "F.fold(x, output_size, kernel_size, dilation=dilation, padding=padding, stride=stride)",
        example="F.fold(F.unfold(image, 3, padding=1, stride=2), (8, 6), 3, padding=1, stride=2)",
    ),
    Rule(
        "F.pixel_shuffle torch.pixel_shuffle",
        "x, upscale_factor",
        "F.pixel_shuffle(x, upscale_factor)",
        example="F.pixel_shuffle(image, 2)",
    ),
    Rule(
        "F.pixel_unshuffle torch.pixel_unshuffle",
        "x, downscale_factor",
        "F.pixel_unshuffle(x, downscale_factor)",
        example="F.pixel_unshuffle(image, 2)",
    ),
]

#: Helper functions of Transformers and PyTorch, by the names that model files use.
HELPERS = [
    Rule("torch_int", "x", "int(x)"),
    Rule("torch_float", "x", "float(x)"),
    Rule(
        "is_torchdynamo_compiling is_torchdynamo_exporting torch.jit.is_tracing "
        "torch.compiler.is_compiling is_flash_attention_requested is_peft_available "
        "is_fsdp_managed_module "
        "is_deepspeed_zero3_enabled torch.is_autocast_enabled is_tracing",
        "*ignored, config=ignored",
        "False",
    ),
    Rule(
        "apply_chunking_to_forward", "function, chunk_size, chunk_dim, *inputs", "function(*inputs)"
    ),
    Rule("get_activation", "name", "nn.activation(name)"),
    Rule("gelu", "x", "nn.activation('gelu')(x)"),
    Rule("torch.get_default_dtype", "", "jnp.float32"),
    Rule("torch.result_type", "x, other", "jnp.result_type(x, other)"),
    Rule("torch.promote_types", "x, other", "jnp.promote_types(x, other)"),
]

#: Calls that create modules. In the expressions, `init` is the initializer of kernels, and `rngs`
#: provides random keys.
MODULES = [
    Rule(
        "nn.Linear",
        "in_features, out_features, bias=...",
        "nn.Linear(in_features, out_features, init, rngs, use_bias=bias)",
        example="nn.Linear(4, 6)(x) ; nn.Linear(4, 6, bias=False)(x)",
    ),
    Rule(
        "nn.Embedding",
        "num_embeddings, embedding_dim, padding_idx=ignored",
        "nn.Embed(num_embeddings, embedding_dim, init, rngs)",
        example="nn.Embedding(12, 4, 0)(ids)",
    ),
    Rule(
        "nn.LayerNorm",
        "normalized_shape, eps=1e-05, elementwise_affine=..., bias=...",
        "nn.LayerNorm(normalized_shape, eps, rngs, use_scale=elementwise_affine, use_bias=bias)",
        example="nn.LayerNorm(4)(x) ; nn.LayerNorm(4, eps=1e-3, bias=False)(x)",
    ),
    Rule(
        "nn.RMSNorm",
        "normalized_shape, eps=1.1920929e-07",
        "nn.RMSNorm(normalized_shape, eps, rngs)",
        example="nn.RMSNorm(4, eps=1e-6)(x)",
    ),
    Rule(
        "nn.GroupNorm",
        "num_groups, num_channels, eps=1e-05, affine=True",
        "nn.GroupNorm(num_groups, num_channels, eps, rngs, channels_first=True)",
        example="nn.GroupNorm(2, 4)(image) ; nn.GroupNorm(num_groups=4, "
        "num_channels=4, eps=1e-3)(image)",
    ),
    *(
        Rule(
            f"nn.BatchNorm{n}d",
            "num_features, eps=1e-05, momentum=0.1, affine=True, dtype=jnp.float32",
            "nn.BatchNorm(num_features, eps, rngs, channels_first=True)",
            "nn.BatchNorm(num_features, eps, rngs, momentum=1 - momentum, channels_first=True)",
            example=f"nn.BatchNorm{n}d({size}).eval()({x})"
            f" ; nn.BatchNorm{n}d({size}, eps=1e-3, momentum=0.2).eval()({x})",
        )
        for n, size, x in ((1, 3, "x"), (2, 4, "image"))
    ),
    *(
        Rule(
            f"nn.Conv{n}d",
            "in_channels, out_channels, kernel_size, stride=..., padding=..., "
            "dilation=..., groups=..., bias=..., "
            "padding_mode='zeros'",
            f"nn.Conv(in_channels, out_channels, nn.per_axis(kernel_size, {n}), init, "
            "rngs, stride=stride, "
            "padding=padding, dilation=dilation, groups=groups, use_bias=bias, "
            "channels_first=True)",
            example=example,
        )
        for n, example in {
            1: "nn.Conv1d(3, 6, 3, padding=1, bias=False)(x) ; nn.Conv1d(3, 6, "
            "kernel_size=2, dilation=2, groups=3)(x)"
            " ; nn.Conv1d(3, 6, 3, padding='same')(x)",
            2: "nn.Conv2d(4, 6, 3, stride=2, padding=1)(image) ; nn.Conv2d(4, 6, (2, "
            "3), stride=(2, 3))(image)"
            " ; nn.Conv2d(4, 4, kernel_size=3, padding=(1, 0), groups=4)(image)",
            3: "nn.Conv3d(2, 4, kernel_size=(2, 3, 3), stride=(2, 3, 3))(image[None])",
        }.items()
    ),
    *(
        Rule(
            f"nn.ConvTranspose{n}d",
            "in_channels, out_channels, kernel_size, stride=..., padding=..., "
            "output_padding=..., groups=..., "
            "bias=..., dilation=...",
            "nn.ConvTranspose(in_channels, out_channels, nn.per_axis(kernel_size, "
            f"{n}), init, rngs, stride=stride, "
            "padding=padding, output_padding=output_padding, groups=groups, "
            "use_bias=bias, dilation=dilation)",
            example=example,
        )
        for n, example in {
            1: "nn.ConvTranspose1d(3, 6, 4, stride=2, padding=1)(x)",
            2: "nn.ConvTranspose2d(4, 6, 2, stride=2, bias=False)(image)"
            " ; nn.ConvTranspose2d(4, 8, 3, stride=2, padding=1, output_padding=1, "
            "groups=2)(image)",
        }.items()
    ),
    *(
        Rule(
            f"nn.{kind}Pool{n}d",
            "kernel_size, stride=..., padding=..., dilation=..., ceil_mode=..., "
            "count_include_pad=...",
            f"nn.Function(F.{kind.lower()}_pool, kernel_size=kernel_size, "
            "stride=stride, padding=padding, "
            "dilation=dilation, ceil_mode=ceil_mode, count_include_pad=count_include_pad)",
            example=f"nn.{kind}Pool{n}d(2)({x}) ; nn.{kind}Pool{n}d(kernel_size=3, "
            f"stride=2, padding=1)({x})",
        )
        for n, x in {1: "x", 2: "image"}.items()
        for kind in ("Max", "Avg")
    ),
    *(
        Rule(
            f"nn.Adaptive{kind}Pool{n}d",
            "output_size",
            f"nn.Function(F.adaptive_{kind.lower()}_pool, output_size=output_size)",
            example=f"nn.Adaptive{kind}Pool{n}d(1)({x}) ; nn.Adaptive{kind}Pool{n}d(3)({x})",
        )
        for n, x in {1: "x", 2: "image"}.items()
        for kind in ("Avg", "Max")
    ),
    Rule(
        "nn.Upsample",
        "size=..., scale_factor=..., mode=..., align_corners=...",
        "nn.Function(F.interpolate, size=size, scale_factor=scale_factor, mode=mode, "
        "align_corners=align_corners)",
        example="nn.Upsample(scale_factor=2, mode='bilinear', align_corners=True)(image)",
    ),
    Rule(
        "nn.PixelShuffle",
        "upscale_factor",
        "nn.Function(F.pixel_shuffle, factor=upscale_factor)",
        example="nn.PixelShuffle(2)(image)",
    ),
    Rule(
        "nn.PixelUnshuffle",
        "downscale_factor",
        "nn.Function(F.pixel_unshuffle, factor=downscale_factor)",
        example="nn.PixelUnshuffle(2)(image)",
    ),
    Rule(
        "nn.Unfold",
        "kernel_size, dilation=..., padding=..., stride=...",
        "nn.Function(F.unfold, kernel_size=kernel_size, dilation=dilation, "
        "padding=padding, stride=stride)",
        example="nn.Unfold(2, stride=2)(image)",
    ),
    Rule(
        "nn.Flatten",
        "start_dim=1, end_dim=-1",
        "nn.Function(F.flatten, start_dim=start_dim, end_dim=end_dim)",
        example="nn.Flatten()(x) ; nn.Flatten(2)(image)",
    ),
    Rule(
        "nn.ZeroPad2d nn.ConstantPad1d nn.ConstantPad2d",
        "padding, value=...",
        "nn.Function(F.pad, pad=nn.per_axis(padding, 4), value=value)",
        example="nn.ZeroPad2d((1, 0, 2, 1))(image) ; nn.ZeroPad2d(1)(image)",
    ),
    Rule(
        "nn.ReflectionPad2d",
        "padding",
        "nn.Function(F.pad, pad=nn.per_axis(padding, 4), mode='reflect')",
        example="nn.ReflectionPad2d(1)(image)",
    ),
    Rule(
        "nn.Softmax",
        "dim",
        "nn.Function(jax.nn.softmax, axis=dim)",
        example="nn.Softmax(dim=-1)(x)",
    ),
    Rule(
        "nn.LogSoftmax",
        "dim",
        "nn.Function(jax.nn.log_softmax, axis=dim)",
        example="nn.LogSoftmax(dim=1)(x)",
    ),
    Rule(
        "nn.GLU",
        "dim=-1",
        "nn.Function(jax.nn.glu, axis=dim)",
        example="nn.GLU(dim=0)(x) ; nn.GLU()(x)",
    ),
    Rule(
        "nn.LeakyReLU",
        "negative_slope=...",
        "nn.Function(jax.nn.leaky_relu, negative_slope=negative_slope)",
        example="nn.LeakyReLU(0.2)(x) ; nn.LeakyReLU()(x)",
    ),
    Rule("nn.ELU", "alpha=...", "nn.Function(jax.nn.elu, alpha=alpha)", example="nn.ELU()(x)"),
    Rule("nn.Softplus", "beta=1.0", "jax.nn.softplus", example="nn.Softplus()(x)"),
    Rule(
        "nn.Hardtanh",
        "min_val=-1.0, max_val=1.0",
        "nn.Function(jnp.clip, min=min_val, max=max_val)",
        example="nn.Hardtanh()(x)",
    ),
    Rule(
        "nn.GELU",
        "approximate='none'",
        "nn.activation('gelu')",
        "nn.activation('gelu' if approximate == 'none' else 'gelu_pytorch_tanh')",
        example="nn.GELU()(x) ; nn.GELU(approximate='tanh')(x)",
    ),
    Rule(
        "nn.ReLU",
        "inplace=ignored",
        "jax.nn.relu",
        example="nn.ReLU()(x) ; nn.ReLU(inplace=True)(x + 0)",
    ),
    Rule("nn.ReLU6", "", "jax.nn.relu6", example="nn.ReLU6()(x)"),
    Rule("nn.SiLU", "", "jax.nn.silu", example="nn.SiLU()(x)"),
    Rule("nn.Mish", "", "jax.nn.mish", example="nn.Mish()(x)"),
    Rule("nn.Hardswish", "", "jax.nn.hard_swish", example="nn.Hardswish()(x)"),
    Rule("nn.Sigmoid", "", "jax.nn.sigmoid", example="nn.Sigmoid()(x)"),
    Rule("nn.LogSigmoid", "", "jax.nn.log_sigmoid", example="nn.LogSigmoid()(x)"),
    Rule("nn.Tanh", "", "jnp.tanh", example="nn.Tanh()(x)"),
    Rule("nn.Identity", "*ignored", "nn.identity", example="nn.Identity()(x)"),
    Rule("nn.Dropout nn.Dropout1d nn.Dropout2d", "p=0.5", "nn.Dropout(p)"),
    Rule(
        "nn.Sequential",
        "*layers",
        "nn.Sequential(*layers)",
        example="nn.Sequential(nn.Conv2d(4, 6, 3), nn.BatchNorm2d(6), nn.ReLU(), "
        "nn.AdaptiveAvgPool2d(1)).eval()(image)",
    ),
    Rule(
        "nn.MultiheadAttention",
        "embed_dim, num_heads, dropout=0.0, bias=..., batch_first=...",
        "nn.MultiheadAttention(embed_dim, num_heads, init, rngs, use_bias=bias, "
        "batch_first=batch_first)",
        example="nn.MultiheadAttention(4, 2, batch_first=True)(x, x, x) ; "
        "nn.MultiheadAttention(4, 2)(x, x, x)",
    ),
    Rule("nn.ModuleList", "layers=...", "nn.Layers(layers)"),
    Rule("nn.ModuleDict", "modules=...", "nnx.Dict(modules)"),
    Rule(
        "nn.Parameter torch.nn.Parameter",
        "data, requires_grad=True",
        "nnx.Param(data)",
        example="nn.Parameter(torch.ones(2, 3)) * 1",
    ),
]

GROUPS: dict[str, list[Rule]] = {
    "elementwise": ELEMENTWISE,
    "activations": ACTIVATIONS,
    "reductions": REDUCTIONS,
    "shapes": SHAPES,
    "indexing": INDEXING,
    "creation": CREATION,
    "casts": CASTS,
    "products": PRODUCTS,
    "normalization": NORMALIZATION,
    "images": IMAGES,
    "modules": MODULES,
    "helpers": HELPERS,
}
RULES: dict[str, Rule] = {
    name: rule for rules in GROUPS.values() for rule in rules for name in rule.names.split()
}
#: Names of the tensor methods in the table, without the underscore of in-place methods.
METHODS = frozenset(name.removeprefix("Tensor.") for name in RULES if name.startswith("Tensor."))
