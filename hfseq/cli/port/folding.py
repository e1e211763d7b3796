"""Removes code that hfseq never runs, such as losses, cache arguments and warnings.

hfseq passes only some of the arguments that a PyTorch model accepts. The other arguments have
constant values. These values are propagated in execution order. A variable stops being constant
where another value is assigned to it.
"""

from __future__ import annotations

import ast
import copy
import re
from collections.abc import Mapping, Sequence

from hfseq.cli.port.syntax import assign, dotted, names_written

#: Arguments that hfseq does not pass, and their values.
ABSENT_ARGUMENTS: dict[str, object] = {
    "labels": None,
    "inputs_embeds": None,
    "cache": None,
    "past_key_values": None,
    "past_key_value": None,
    "layer_past": None,
    "encoder_past_key_values": None,
    "cache_params": None,
    "use_cache": False,
    "return_dict": True,
    "logits_to_keep": 0,
    "num_logits_to_keep": 0,
    "output_router_logits": False,
    "return_loss": None,
    "mems": None,
    "head_mask": None,
    "cross_attn_head_mask": None,
    "decoder_head_mask": None,
    "cache_position": None,
    "start_positions": None,
    "end_positions": None,
    "next_sentence_label": None,
    "sentence_order_label": None,
    "decoder_inputs_embeds": None,
    "interpolate_pos_encoding": False,
    "past_key_values_length": 0,
    "past_seen_tokens": 0,
    "device": None,
}
#: Regular expressions of conditions that are constant in a port, with their values. They are
#: constant because hfseq computes attention itself and PyTorch never compiles or wraps the model.
CONSTANT_TESTS: dict[str, bool] = {
    r"is_torchdynamo_compiling\(\)|torch\.jit\.is_tracing\(\)|is_tracing\(.*\)": False,
    r"is_flash_attention_requested\(.*\)": False,
    r"self\.gradient_checkpointing": False,
    r"(self\.)?config\._attn_implementation (==|!=) .*": False,
    r"hasattr\(self\.config, '_pre_quantization_dtype'\)": False,
    r"(transformers\.)?is_(deepspeed_zero3_enabled|fsdp_managed_module)\(.*\)": False,
    r"isinstance\((\w+ := )?\w*mask\w*, (dict|BlockMask)\)": False,
    # The slices of a product only imitate the rounding of tensor parallelism.
    r"self\.(config\.)?pretraining_tp > 1": False,
    r"torch\.is_autocast_enabled\(.*\)": False,
    r"isinstance\(None, \w+\)": False,
    r"isinstance\(hidden_states, (collections\.abc\.)?Sequence\)": False,
    r"isinstance\(\w+, (torch\.)?(FloatTensor|Tensor)\)": True,
}
#: Conditions that are constant in ports of models that can be encoders or decoders. Such a port is
#: an encoder.
ENCODER_TESTS: dict[str, bool] = {
    r"(self\.)?config\.(is_decoder|add_cross_attention)": False,
    r"self\.(is_decoder|add_cross_attention|is_cross_attention)": False,
}
#: Arguments that only models with cross-attention use.
ENCODER_INPUTS = ("encoder_hidden_states", "encoder_attention_mask")
_PRESENT = (
    "output_attentions",
    "output_hidden_states",
    "input_ids",
    "pixel_values",
    "input_values",
    "input_features",
    "hidden_states",
    "self",
)
_SKIPPED_CALLS = (
    "kwargs.pop",
    "logger.",
    "warnings.",
    "self.warn_if",
    "torch._check",
    "torch_compilable_check",
)
#: Arguments with labels, such as `audio_labels`. hfseq computes losses outside of the module.
_LABELS = re.compile(r"(?!input_)\w+_labels|labels_\w+")
_UNKNOWN = object()


class Folding(ast.NodeTransformer):
    """Evaluates the constant expressions in a sequence of statements.

    Args:
        constants: The values of variables that are constant at the start. A value is `None`, a
            boolean or a number.
        texts: Regular expressions of constant expressions, with their values.
    """

    def __init__(self, constants: Mapping[str, object], texts: Mapping[str, bool] = CONSTANT_TESTS):
        self.constants = dict(constants)
        self.texts = texts

    def body(self, body: Sequence[ast.stmt]) -> list[ast.stmt]:
        """Evaluates the constant expressions in statements, in execution order.

        Statements after a `return` or `raise` are dropped.
        """
        folded: list[ast.stmt] = []
        for item in body:
            folded += self.statements(item)
            if folded and isinstance(folded[-1], ast.Return | ast.Raise):
                break
        return folded

    def statements(self, item: ast.stmt) -> list[ast.stmt]:
        """Evaluates the constant expressions in a statement.

        Returns:
            The statements that replace the statement. The list may be empty.
        """
        result = self.visit(item)
        return result if isinstance(result, list) else [] if result is None else [result]

    def truth(self, node: ast.AST) -> bool | None:
        """Returns the truth value of an expression, or `None` if it is not constant."""
        if isinstance(node, ast.Constant):
            return bool(node.value)
        if isinstance(node, ast.UnaryOp) and isinstance(node.op, ast.Not):
            inner = self.truth(node.operand)
            return None if inner is None else not inner
        if isinstance(node, ast.Compare) and len(node.ops) == 1:
            return self._compare(node)
        if isinstance(node, ast.BoolOp):
            return self._bool_op(node)
        if isinstance(node, ast.BinOp) and isinstance(node.op, ast.BitXor):
            left, right = self.truth(node.left), self.truth(node.right)
            return None if left is None or right is None else left != right
        return self._text_truth(node)

    def _text_truth(self, node: ast.AST) -> bool | None:
        if isinstance(node, ast.Call | ast.Compare | ast.Attribute):
            text = ast.unparse(node)
            return next((v for p, v in self.texts.items() if re.fullmatch(p, text)), None)
        return None

    def _bool_op(self, node: ast.BoolOp) -> bool | None:
        values = [self.truth(value) for value in node.values]
        decisive = isinstance(node.op, ast.Or)
        if decisive in values:
            return decisive
        return None if None in values else not decisive

    def _compare(self, node: ast.Compare) -> bool | None:
        left, operator, right = node.left, node.ops[0], node.comparators[0]
        if isinstance(operator, ast.Is | ast.IsNot) and isinstance(right, ast.Constant):
            if isinstance(left, ast.Constant):
                same = left.value is right.value
            elif right.value is None and dotted(left) in _PRESENT:
                same = False
            else:
                return None
            return same if isinstance(operator, ast.Is) else not same
        if isinstance(left, ast.Constant) and isinstance(right, ast.Constant):
            if isinstance(operator, ast.Eq | ast.NotEq):
                return (left.value == right.value) == isinstance(operator, ast.Eq)
            numbers = isinstance(left.value, int) and isinstance(right.value, int)
            if numbers and isinstance(operator, ast.Gt | ast.Lt):
                larger, smaller = (left.value, right.value)
                if isinstance(operator, ast.Lt):
                    larger, smaller = smaller, larger
                return larger > smaller  # type: ignore[operator]
        return self._text_truth(node)

    # Statements.

    def visit_Expr(self, node: ast.Expr) -> ast.Expr | None:
        """Removes docstrings, messages and checks."""
        value = node.value
        if isinstance(value, ast.Constant):
            return None
        if isinstance(value, ast.Call) and dotted(value.func).startswith(_SKIPPED_CALLS):
            return None
        self.generic_visit(node)
        return node

    def visit_Assert(self, node: ast.Assert) -> None:
        """Removes an assertion."""
        return None

    def visit_If(self, node: ast.If) -> list[ast.stmt] | ast.If:
        """Keeps the branch that a constant condition selects."""
        node.test = self.visit(node.test)
        truth = self.truth(node.test)
        if truth is not None:
            return self.body(node.body if truth else node.orelse)
        refuses = "self.training" not in ast.unparse(node.test)
        if refuses and all(isinstance(item, ast.Raise) or _is_skipped(item) for item in node.body):
            # This branch only rejects inputs, and the model classes of hfseq check their inputs.
            return self.body(node.orelse)
        constants_before = dict(self.constants)
        node.body = self.body(node.body)
        after_body, self.constants = self.constants, dict(constants_before)
        node.orelse = self.body(node.orelse)
        after_else = self.constants
        self.constants = {}
        for name in after_body.keys() | after_else.keys():
            first, second = after_body.get(name, _UNKNOWN), after_else.get(name, _UNKNOWN)
            if first is not _UNKNOWN and first is second:
                self.constants[name] = first
                continue
            for value, branch in ((first, node.body), (second, node.orelse)):
                if value is not _UNKNOWN and not _ends(branch):
                    branch.append(assign(name, ast.Constant(value)))  # type: ignore[arg-type]
        if _ends(node.body):
            self.constants = after_else
        elif node.orelse and _ends(node.orelse):
            self.constants = after_body
        if not node.body and not node.orelse:
            return []
        if not node.body:
            node.test = ast.UnaryOp(ast.Not(), node.test)
            node.body, node.orelse = node.orelse, []
        return node

    def _loop(self, node: ast.For | ast.While) -> list[ast.stmt]:
        constants_before: list[ast.stmt] = []
        for name in sorted(names_written([node]) & self.constants.keys()):
            constants_before.append(assign(name, ast.Constant(self.constants.pop(name))))  # type: ignore[arg-type]
        if isinstance(node, ast.For):
            node.iter = self.visit(node.iter)
        else:
            node.test = self.visit(node.test)
        node.body = self.body(node.body) or [ast.Pass()]
        for name in names_written([node]):
            self.constants.pop(name, None)
        return [*constants_before, node]

    visit_For = _loop
    visit_While = _loop

    def visit_Try(self, node: ast.Try) -> ast.AST | list[ast.stmt]:
        """Removes handlers that only raise another error."""
        raises = all(
            all(isinstance(item, ast.Raise) or _is_skipped(item) for item in handler.body)
            for handler in node.handlers
        )
        if raises and not node.finalbody:
            return self.body([*node.body, *node.orelse])
        return self.generic_visit(node)

    def visit_With(self, node: ast.With) -> ast.AST | list[ast.stmt]:
        """Removes context managers that set precision, disable gradients or serve DeepSpeed."""
        text = " ".join(ast.unparse(item) for item in node.items)
        if re.search(r"autocast|no_grad|maybe_autocast|set_grad_enabled|is_deepspeed", text):
            return self.body(node.body)
        node.body = self.body(node.body)
        return node

    def visit_Assign(self, node: ast.Assign) -> ast.Assign | None:
        """Records the value of a constant variable, and removes the assignment."""
        node.value = self.visit(node.value)
        target = node.targets[0]
        if dotted(target) in self.constants and re.match(
            r"(Dynamic|EncoderDecoder|Static)Cache\(", ast.unparse(node.value)
        ):
            return None  # hfseq stores its caches in the modules
        if isinstance(target, ast.Name) and len(node.targets) == 1:
            if isinstance(node.value, ast.Constant) and (
                node.value.value is None
                or isinstance(node.value.value, bool)
                or re.fullmatch(r"(past|cache)\w*", target.id)
            ):
                self.constants[target.id] = node.value.value
                return None
            if dotted(node.value) == target.id:
                return None
        for name in names_written([node]):
            self.constants.pop(name, None)
        return node

    def visit_AnnAssign(self, node: ast.AnnAssign) -> ast.Assign | None:
        """Removes the annotation of a variable."""
        return self.visit_Assign(assign(node.target, node.value)) if node.value else None

    def visit_AugAssign(self, node: ast.AugAssign) -> ast.AugAssign | ast.Assign:
        """Replaces an update of a constant variable, such as `x += y`, with an assignment."""
        node.value = self.visit(node.value)
        name = dotted(node.target)
        if name in self.constants:
            constant = ast.Constant(self.constants.pop(name))  # type: ignore[arg-type]
            return assign(name, ast.BinOp(constant, node.op, node.value))
        return node

    def visit_FunctionDef(self, node: ast.FunctionDef) -> ast.FunctionDef:
        """Leaves nested functions unchanged."""
        return node

    # Expressions.

    def visit_IfExp(self, node: ast.IfExp) -> ast.AST:
        """Keeps the value that a constant condition selects."""
        self.generic_visit(node)
        truth = self.truth(node.test)
        return node if truth is None else node.body if truth else node.orelse

    def visit_BoolOp(self, node: ast.BoolOp) -> ast.AST:
        """Removes constant operands."""
        self.generic_visit(node)
        neutral = isinstance(node.op, ast.And)
        values: list[ast.expr] = []
        for value in node.values:
            truth = self.truth(value)
            if truth is neutral and value is not node.values[-1]:
                continue
            values.append(value)
            if truth is (not neutral):
                break
        if len(values) > 1 and self.truth(values[-1]) is neutral and _is_test(values[:-1]):
            values.pop()
        node.values = values
        return values[0] if len(values) == 1 else node

    def visit_Name(self, node: ast.Name) -> ast.AST:
        """Replaces a constant variable by its value."""
        if isinstance(node.ctx, ast.Load) and node.id in self.constants:
            return ast.Constant(self.constants[node.id])  # type: ignore[arg-type]
        return node

    def visit_Attribute(self, node: ast.Attribute) -> ast.AST:
        """Replaces a constant option by its value."""
        truth = self._text_truth(node) if isinstance(node.ctx, ast.Load) else None
        return self.generic_visit(node) if truth is None else ast.Constant(truth)

    def visit_Compare(self, node: ast.Compare) -> ast.AST:
        """Replaces a comparison by its value if that is constant."""
        self.generic_visit(node)
        truth = self.truth(node)
        return node if truth is None else ast.Constant(truth)

    def visit_Call(self, node: ast.Call) -> ast.AST:
        """Replaces a call by its result if that is constant."""
        self.generic_visit(node)
        truth = self._text_truth(node)
        return node if truth is None else ast.Constant(truth)

    def visit_BinOp(self, node: ast.BinOp) -> ast.AST:
        """Removes the addition of 0."""
        self.generic_visit(node)
        if isinstance(node.op, ast.Add):
            for side, other in ((node.left, node.right), (node.right, node.left)):
                if isinstance(side, ast.Constant) and side.value == 0:
                    return other
        return node

    def visit_Slice(self, node: ast.Slice) -> ast.AST:
        """Removes a lower bound of 0."""
        self.generic_visit(node)
        if isinstance(node.lower, ast.Constant) and node.lower.value == 0:
            node.lower = None
        return node


def absent_arguments(names: Sequence[str]) -> dict[str, object]:
    """Returns the constant values of the parameters that hfseq does not pass to a function.

    `inputs_embeds` is included only if the function has a parameter `input_ids`. Encoders without
    token IDs get their hidden states as `inputs_embeds`.

    Args:
        names: The names of the function's parameters.
    """
    absent = {name: ABSENT_ARGUMENTS[name] for name in names if name in ABSENT_ARGUMENTS}
    absent |= {name: None for name in names if _LABELS.fullmatch(name)}
    if "input_ids" not in names:
        absent.pop("inputs_embeds", None)
    return absent


def fold(
    body: Sequence[ast.stmt],
    constants: Mapping[str, object],
    texts: Mapping[str, bool] | None = None,
) -> list[ast.stmt]:
    """Evaluates the constant expressions in a copy of statements, as `Folding` describes."""
    folding = Folding(constants, CONSTANT_TESTS | dict(texts or {}))
    return folding.body(copy.deepcopy(list(body)))


def _is_skipped(item: ast.stmt) -> bool:
    is_call = isinstance(item, ast.Expr) and isinstance(item.value, ast.Call)
    return is_call and dotted(item.value.func).startswith(_SKIPPED_CALLS)  # type: ignore[attr-defined]


def _is_test(values: Sequence[ast.expr]) -> bool:
    return all(isinstance(value, ast.Compare | ast.BoolOp) for value in values)


def _ends(body: Sequence[ast.stmt]) -> bool:
    return bool(body) and isinstance(body[-1], ast.Return | ast.Raise)
