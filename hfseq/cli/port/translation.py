"""Translates a model file of Transformers to a plugin of hfseq.

The translation has three parts:

- Folding (`hfseq.cli.port.folding`) removes code that hfseq never runs, such as losses and caches.
- Lifting (`hfseq.cli.port.lifting`) replaces common classes, statements and calls of model files
  with code that uses `hfseq.nn`.
- All other code is translated operator by operator (`hfseq.cli.port.expressions`).

A statement without a translation becomes a marker `NotTranslated`, and the translation continues.
"""

from __future__ import annotations

import ast
import copy
import dataclasses
import functools
import re
from collections.abc import Callable, Collection, Sequence
from typing import Any

from hfseq.cli.port import (
    families,
    file_names,
    lift_experts,
    lift_heads,
    lift_outputs,
    lift_pairs,
    lift_vision,
    lifting,
    table,
    writer,
)
from hfseq.cli.port.constructors import ActivationTables, Constructor, layer_name
from hfseq.cli.port.expressions import Expressions
from hfseq.cli.port.folding import ABSENT_ARGUMENTS, absent_arguments, fold
from hfseq.cli.port.scope import (
    CALL_LIFTS,
    CLASS_LIFTS,
    IMPLICIT_ARGUMENTS,
    STATEMENT_LIFTS,
    Marker,
    PortedClass,
    Scope,
    Substitute,
)
from hfseq.cli.port.source import SourceClass, SourceFile, model_types
from hfseq.cli.port.syntax import (
    bind,
    default_values,
    dotted,
    expression,
    names_read,
    names_written,
    own_attribute,
    parameters,
    replace,
    statement,
)
from hfseq.cli.port.tidying import return_directly, tidy_body, unused_names
from hfseq.errors import UsageError, did_you_mean

#: Modules that register lifts when they are imported.
LIFT_MODULES = (lift_heads, lift_outputs, lifting, lift_experts, lift_vision, lift_pairs)


@dataclasses.dataclass(frozen=True)
class Translation:
    """The result of `translate`.

    Attributes:
        model_type: The model type.
        text: The text of the plugin file.
        heads: The name of the model class of each head.
        markers: The statements without a translation.
        unread_fields: Fields of the configuration that only the PyTorch model reads.
        lines: The line in Transformers' file for each class and each method of the port. The key of
            a method is `Class.method`.
        left_out: For each head that was left out, the reason.
        path: The path of Transformers' file.
        family: The native family from which the port derives, or an empty string.
        complete_reason: Why the port does not derive from a native family although the modular file
            does, or an empty string.
    """

    model_type: str
    text: str
    heads: dict[str, str]
    markers: tuple[Marker, ...]
    unread_fields: tuple[str, ...]
    lines: dict[str, int]
    left_out: dict[str, str]
    path: str
    family: str = ""
    complete_reason: str = ""


def translate(model_type: str, heads: Sequence[str] | None = None) -> Translation:
    """Translates the model file of a model type.

    Args:
        model_type: The model type.
        heads: The heads to translate, in addition to the base model. The default is all heads. A
            head that cannot be translated is left out, unless `heads` contains it.

    Raises:
        UsageError: The model type or a head does not exist.
    """
    return Translator(SourceFile(model_type), heads).run(derive=True)


class Translator:
    """Translates one model file.

    Args:
        file: The model file.
        heads: The requested heads, or `None` for all.

    Attributes:
        ports: The translated classes, by name in PyTorch.
        order: The translated classes. A class comes after the classes of its submodules.
        scanned: Classes of layers that a loop over layers runs.
        per_type: For each class of layers, the arguments that are dictionaries with one value per
            layer type, and the attribute or configuration field that contains the layer type.
        read_attributes: Attributes that the file reads from objects other than `self`.
    """

    def __init__(self, file: SourceFile, heads: Sequence[str] | None = None):
        self.file, self.requested = file, heads
        self.config_name = model_types()[file.model_type]
        self.config_class = _config_class(file.model_type)
        self.ports: dict[str, PortedClass] = {}
        self.order: list[PortedClass] = []
        self.markers: dict[str, list[Marker]] = {}
        self.uses: dict[str, set[str]] = {}
        self.helpers: dict[str, ast.FunctionDef] = {}
        self.constants: dict[str, ast.stmt] = {}
        self.mask_arguments: dict[str, ast.expr | None] = {}
        self.cache_targets: dict[str, list[str]] = {}
        self.loop_variables: dict[str, SourceClass | str] = {}
        self.extra_arguments: dict[str, list[str]] = {}
        self.scanned: set[SourceClass] = set()
        #: The classes in `scanned` whose arguments depend on the layer. A Python loop runs their
        #: layers, and `nn.run_layers` runs all others.
        self.unrolled: set[SourceClass] = set()
        self.per_type: dict[str, dict[str, str]] = {}
        self.read_attributes: set[str] = set()
        self._substitutes: dict[str, Substitute | None] = {}
        self._pending: list[tuple[str, int]] = []
        self._line = 0
        self._whole: dict[str, bool] = {}
        #: Markers for names that the port reads and does not define.
        self.missing: list[str] = []
        #: Additional lines for the body of the base model class.
        self.class_attributes: list[str] = []
        #: Whether the base model is an encoder-decoder with a shared token embedding.
        self.is_pair = lift_pairs.is_pair(file)
        if self.is_pair:
            lift_pairs.prepare(self)
        self._tied = lift_heads.tied_heads(file)
        self._scan_file()

    # Facts about the whole file.

    def _scan_file(self) -> None:
        for owner in self.file.classes.values():
            for method in owner.methods.values():
                function = copy.deepcopy(method)
                lifting.remove_layerdrop(function)
                for node in ast.walk(function):
                    self._scan_node(owner, node)

    def _scan_node(self, owner: SourceClass, node: ast.AST) -> None:
        if isinstance(node, ast.Attribute):
            base = dotted(node.value)
            if base != "self" and not base.endswith("config"):
                self.read_attributes.add(node.attr)
        if not isinstance(node, ast.For):
            return
        loop = lifting.layer_loop(owner, node)
        if loop is None:
            return
        self.scanned.add(loop.layer)
        assert loop.layer.forward is not None
        for name, value in bind(loop.node, parameters(loop.layer.forward)).items():
            kind = _layer_type(value, loop)
            if kind is not None:
                self.per_type.setdefault(loop.layer.name, {})[name] = kind
            elif names_read([value]) & {loop.index, loop.variable}:
                self.unrolled.add(loop.layer)

    @property
    def base(self) -> SourceClass | None:
        """The base model."""
        return self.file.heads().get("Model")

    @property
    def heads_generate(self) -> bool:
        """Whether the file has a head that generates text."""
        return "ForCausalLM" in self.file.heads() and not self.file.encoder_only

    @functools.cached_property
    def convolutions(self) -> set[str]:
        """The names of attributes that are a convolution in every class that has them."""
        kinds: dict[str, set[str]] = {}
        for owner in self.file.classes.values():
            for name, part in owner.parts.items():
                kinds.setdefault(name, set()).add(str(part))
        is_convolution = re.compile(r"nn\.Conv[123]d")
        return {name for name, parts in kinds.items() if all(map(is_convolution.fullmatch, parts))}

    def has_field(self, name: str) -> bool:
        """Returns whether the configuration class has a field."""
        return self.config_class is None or hasattr(self.config_class, name)

    def heads_of(self, owner: SourceClass) -> dict[str, lift_heads.TiedHead]:
        """Returns the projections of a class that may be tied to the embeddings, by attribute."""
        return self._tied.get(owner.name, {})

    def substitute(self, owner: SourceClass) -> Substitute | None:
        """Returns how `hfseq.nn` replaces a class, or `None` if the class is translated."""
        if owner.name not in self._substitutes:
            base_calls = (lift(self, owner) for lift in CLASS_LIFTS)
            self._substitutes[owner.name] = next((s for s in base_calls if s is not None), None)
        return self._substitutes[owner.name]

    def passes_all(self, scope: Scope, part: SourceClass) -> bool:
        """Returns whether a head passes all arguments of `forward` to the base model `part`."""
        is_forward = scope.method == "forward"
        return is_forward and self._whole.get(scope.own.name, False) and part.kind == "model"

    # Markers.

    def reporter(self, owner: SourceClass) -> Callable[[ast.AST, str], None]:
        """Returns the function that lifts call with a node that has no translation."""

        def report(node: ast.AST, reason: str) -> None:
            self._pending.append((reason, getattr(node, "lineno", 0) or self._line))

        return report

    def guarded(
        self, owner: SourceClass, item: ast.stmt, function: Callable[[], list[ast.stmt]]
    ) -> list[ast.stmt]:
        """Translates a statement, or returns a marker if it has no translation."""
        outer, self._pending = self._pending, []
        outer_line = self._line
        self._line = getattr(item, "lineno", 0) or self._line
        text = ast.unparse(item)
        try:
            lines = function()
        except RecursionError:
            raise
        except Exception as error:  # unexpected code must not stop the translation
            self._pending.append((f"{type(error).__name__} in the translator: {error}", self._line))
            lines = []
        pending, self._pending = self._pending, outer
        if pending:
            lines = []
            for reason, line in dict.fromkeys(pending):
                marker = Marker(reason, str(self.file.path), line, text)
                self.markers.setdefault(owner.name, []).append(marker)
                lines.append(statement(f"NotTranslated({reason!r}, {line})"))
        self._line = outer_line
        return lines

    # Classes.

    def port(self, owner: SourceClass) -> PortedClass:
        """Returns the translation of a class, after translating the classes of its submodules."""
        if owner.name in self.ports:
            return self.ports[owner.name]
        ported = PortedClass(owner, self._class_name(owner))
        self.ports[owner.name] = ported
        parts = {*owner.lists.values(), *(p for ps in owner.alternatives.values() for p in ps)}
        parts |= set(owner.constructed())
        if owner.parent is not None:
            parts.add(owner.parent)
        classes = [p for p in parts if isinstance(p, SourceClass) and self.substitute(p) is None]
        for part in sorted(classes, key=lambda part: part.node.lineno):
            self.port(part)
        self.uses[owner.name] = {part.name for part in classes}
        methods: list[ast.stmt] = []
        pair_methods = lift_pairs.methods(self, ported) if self.is_pair else None
        if pair_methods is not None:
            methods += pair_methods
        elif owner.forward is not None:
            methods.append(self._method(ported, "forward"))
        elif owner.parent is not None:
            ported.arguments = list(self.port(owner.parent).arguments)
        methods += [self._methods.pop(key) for key in list(self._methods) if key[0] == owner.name]
        constructor = Constructor(self, ported, methods).build()
        methods += [self._methods.pop(key) for key in list(self._methods) if key[0] == owner.name]
        base = "nn.CachedAttention" if ast.unparse(constructor).count("super().__init__()") else ""
        if owner.parent is not None:
            base = self.port(owner.parent).name
        elif owner.base_layer:
            base = layer_name(owner.base_layer)
        node = statement(f"class {ported.name}({base or 'nnx.Module'}): pass")
        assert isinstance(node, ast.ClassDef)
        inherits = owner.base_layer and "__init__" not in owner.methods
        own_lines = [*ported.properties, *methods]
        node.body = own_lines if inherits else [constructor, *own_lines]
        node.body = node.body or [ast.Pass()]
        ported.node = node
        self.order.append(ported)
        return ported

    @property
    def _methods(self) -> dict[tuple[str, str], ast.stmt]:
        return self.__dict__.setdefault("_translated_methods", {})

    def _class_name(self, owner: SourceClass) -> str:
        base = self.file.heads().get("Model")
        if owner is base:
            name = owner.name.removesuffix("Model") or owner.name
        else:
            name = owner.short
            if owner.kind == "model" and name.startswith("For"):
                name = name.removeprefix("For")
        if not name.isidentifier() or name in ("Model", "Config"):
            name = owner.name
        used_names = {ported.name for ported in self.ports.values()}
        return owner.name if name in used_names else name

    def own_method(self, ported: PortedClass, name: str) -> list[str]:
        """Translates a method that another method calls, and returns the names of its arguments."""
        if name not in ported.methods:
            ported.methods[name] = []
            self._methods[ported.source.name, name] = self._method(ported, name)
        return ported.methods[name]

    def expressions(self, scope: Scope, lift: Callable[..., ast.AST | None]) -> Expressions:
        """Returns the object that translates the expressions of a method."""
        visitor = Expressions(scope.own.parts, lift, scope.report)
        visitor.frozen = scope.own.frozen
        visitor.optional = scope.own.optional_parameters
        if scope.method != "__init__":
            visitor.tied = {
                name: (head.embeddings, head.bias)
                for name, head in self.heads_of(scope.own).items()
                if not head.has_bias
            }
        visitor.convolutions = self.convolutions
        return visitor

    def _method(self, ported: PortedClass, name: str) -> ast.FunctionDef:
        owner = ported.source
        function = copy.deepcopy(owner.methods[name])
        scope = Scope(self, owner, ported, name, self.reporter(owner))
        decorators = " ".join(ast.unparse(d) for d in function.decorator_list)
        scope.ties_last = "tie_last_hidden_states=False" not in decorators
        if owner.kind == "attention" or lifting.extends_cache(owner):
            lifting.mark_cache_updates(function)
        ActivationTables().visit(function)
        self._expand_arguments(function)
        self._rename_reserved(function)
        names = parameters(function)
        constants = absent_arguments(names)
        constants |= {n: None for n in self.file.absent if n in names}
        if owner.kind == "attention" and name == "forward":
            constants |= dict.fromkeys(lifting.unpassed_states(owner))
        if not scope.is_model:
            constants["output_attentions"] = True
        elif names[:1] == ["pixel_values"] and "pixel_attention_mask" not in names:
            constants |= {n: None for n in names if n == "attention_mask"}
            scope.is_vision = "input_ids" not in names
        lifting.remove_layerdrop(function)
        body = fold(function.body, constants, self.file.tests)
        if owner.kind == "attention" and name == "forward":
            body = self._guard_each(
                owner, body, lambda lines: lifting.lift_attention_body(scope, lines)
            )
        elif lifting.extends_cache(owner) and name == "forward":
            body = self._guard_each(owner, body, lambda lines: lifting.lift_rotations(scope, lines))
        if name == "forward":
            self._whole[owner.name] = scope.is_model and self._passes_arguments_on(owner, body)
        body = self._configuration(scope, body)
        visitor = self.expressions(
            scope, lambda visitor, node: self._lift_call(scope, visitor, node)
        )
        visitor.enter(function)
        lines = self._lines(scope, visitor, body)
        if owner in self.scanned and name == "forward":
            lines = self._layer_result(scope, lines)
        if scope.is_model and name == "forward":
            lines = self._packed_positions(scope, names, lines)
        lines = return_directly(unused_names(tidy_body(lines)))
        return self._function(scope, function, names, lines)

    def _packed_positions(
        self, scope: Scope, names: list[str], lines: list[ast.stmt]
    ) -> list[ast.stmt]:
        """Adds position IDs that start again in each packed document.

        They are added only if the submodules of the model compute default positions in a known way.
        """
        text = "\n".join(ast.unparse(line) for line in lines)
        if "num_choices" in text and "input_ids = input_ids.reshape(" in text:
            return self._flat_choices(names, lines)
        if "segment_ids" not in names_read(lines) or "positions_in_segments" in text:
            return lines
        if "position_ids" not in names:
            return lines
        parts = scope.own.parts.values()
        if any(isinstance(part, SourceClass) and part.kind == "model" for part in parts):
            return lines  # the base model computes the positions
        classes = self.file.classes.values()
        counts_mask = r"position_ids = \(position_ids \* \w*attention_mask - 1\)"
        if "create_position_ids_from_input_ids" in self.file.path.read_text(encoding="utf-8"):
            scope.ported.attributes.setdefault("pad_token_id", "config.pad_token_id")
            offset = " + self.pad_token_id + 1"
        elif any(_counts_positions(owner) for owner in classes) or re.search(counts_mask, text):
            offset = ""
        else:  # it is not known which positions the documents of a packed row must have
            return [replace(line, {"segment_ids": "None"}) for line in lines]  # type: ignore[misc]
        check = statement(
            "if position_ids is None and segment_ids is not None:\n"
            f"    position_ids = nn.positions_in_segments(segment_ids){offset}"
        )
        return [check, *lines]

    def _flat_choices(self, names: Sequence[str], lines: list[ast.stmt]) -> list[ast.stmt]:
        """Adds the reshape of inputs that only hfseq passes to a multiple choice head."""
        written, result = names_written(lines), list(lines)
        for item in lines:
            if isinstance(item, ast.Assign) and "input_ids = input_ids." in ast.unparse(item):
                position = result.index(item)
        others = [n for n in ("position_ids", "segment_ids") if n in names_read(lines)]
        for name in others:
            if (
                name not in written
                and f"flat_{name}" not in written
                and (name in names or name == "segment_ids")
            ):
                flat = f"{name}.reshape(-1, {name}.shape[-1])"
                text = f"{name} = {flat} if {name} is not None else None"
                result.insert(position + 1, statement(text))
        return result

    def _guard_each(
        self,
        owner: SourceClass,
        body: list[ast.stmt],
        function: Callable[[list[ast.stmt]], list[ast.stmt]],
    ) -> list[ast.stmt]:
        module = ast.Module(body, [])
        original = copy.deepcopy(body)
        result: list[ast.stmt] = []

        def run() -> list[ast.stmt]:
            result.extend(function(module.body))
            return result

        lines = self.guarded(owner, _located(original), run)
        return lines

    def _rename_reserved(self, function: ast.FunctionDef) -> None:
        """Renames variables that have the name of a module that the port imports."""
        for node in ast.walk(function):
            if isinstance(node, ast.Name) and node.id in ("out", "nnx", "jnp", "jax"):
                node.id = {"out": "output"}.get(node.id, f"{node.id}_")

    def _expand_arguments(self, function: ast.FunctionDef) -> None:
        """Replaces `args` in `f(*args)` with the arguments of `args = g(x, y)`.

        This requires that `g` returns its arguments unchanged.
        """
        tuples: dict[str, list[ast.expr]] = {}
        for node in ast.walk(function):
            if isinstance(node, ast.Assign) and isinstance(node.value, ast.Call):
                helper = self.file.functions.get(dotted(node.value.func))
                if helper is not None and helper.args.vararg is not None:
                    body = fold(helper.body, {}, self.file.tests)
                    rest = node.value.args[len(helper.args.args) :]
                    if [ast.unparse(line) for line in body] == [f"return {helper.args.vararg.arg}"]:
                        node.value = ast.copy_location(ast.Tuple(rest, ast.Load()), node.value)
                        tuples[dotted(node.targets[0])] = rest
        for node in ast.walk(function):
            if isinstance(node, ast.Call):
                args: list[ast.expr] = []
                for arg in node.args:
                    is_tuple = isinstance(arg, ast.Starred) and dotted(arg.value) in tuples
                    args += copy.deepcopy(tuples[dotted(arg.value)]) if is_tuple else [arg]  # type: ignore[attr-defined]
                node.args = args

    def _passes_arguments_on(self, owner: SourceClass, body: list[ast.stmt]) -> bool:
        """Returns whether a head uses its arguments only to call the base model."""
        models = {
            f"self.{name}"
            for name, part in owner.parts.items()
            if isinstance(part, SourceClass) and part.kind == "model"
        }
        if not models or owner.forward is None:
            return False
        if not all("attention_mask" in _inputs_of(owner.parts[name[5:]]) for name in models):
            return False  # the base model must accept the arguments of the head
        inputs = set(parameters(owner.forward)) - set(ABSENT_ARGUMENTS)
        if "input_values" in inputs:
            return False  # objectives for audio look up the names of the arguments
        base_calls: list[ast.Call] = []

        class Others(ast.NodeVisitor):
            read: set[str] = set()

            def visit_Call(self, node: ast.Call) -> None:
                if dotted(node.func) in models:
                    base_calls.append(node)
                    return
                self.generic_visit(node)

            def visit_Name(self, node: ast.Name) -> None:
                self.read = self.read | {node.id}

        other_reads = Others()
        for item in body:
            other_reads.visit(item)
        if len(base_calls) != 1 or other_reads.read & inputs:
            return False
        passed = bind(base_calls[0], [f"_{i}" for i in range(20)])
        return all(
            isinstance(value, ast.Constant) or dotted(value) in inputs or not dotted(value)
            for value in passed.values()
        )

    def _base_arguments(self, owner: SourceClass) -> list[str]:
        """Returns the arguments of the base model to which a head passes all of its arguments."""
        parts = [part for part in owner.parts.values() if isinstance(part, SourceClass)]
        models = [self.port(part) for part in parts if part.kind == "model"]
        return list(models[0].arguments) if models else []

    def _configuration(self, scope: Scope, body: list[ast.stmt]) -> list[ast.stmt]:
        """Replaces reads of the configuration with reads of attributes of the module."""
        translator = self

        class Read(ast.NodeTransformer):
            def visit_Subscript(self, node: ast.Subscript) -> ast.AST:
                self.generic_visit(node)
                match = re.fullmatch(r"self\.position_ids\[:, :(\w+)\]", ast.unparse(node))
                if match and _counts_positions(scope.own):
                    return expression(f"jnp.arange({match[1]})[None]")
                return node

            def visit_Call(self, node: ast.Call) -> ast.AST:
                match = re.fullmatch(r"hasattr\(self, '(\w+)'\)", ast.unparse(node))
                if match and match[1] in scope.own.parts:
                    return expression(f"self.{match[1]} is not None")
                text = ast.unparse(node)
                match = re.fullmatch(r"getattr\(self\.config, '(\w+)', .+\)", text)
                if match and scope.own.keeps_field(match[1]):
                    value = text.replace("self.config", "config", 1)
                    scope.ported.attributes.setdefault(match[1], value)
                    return expression(f"self.{match[1]}")
                function = node.func
                if isinstance(function, ast.Attribute):
                    function.value = self.visit(function.value)
                else:
                    node.func = self.visit(function)
                node.args = [self.visit(arg) for arg in node.args]
                node.keywords = [
                    ast.keyword(w.arg, self.visit(w.value))
                    for w in node.keywords
                    if dotted(w.value) != "self.config"
                ]
                return node

            def visit_Attribute(self, node: ast.Attribute) -> ast.AST:
                path = dotted(node)
                if path == "self.training":
                    return expression("rngs is not None")
                if not path.startswith("self.config."):
                    return self.generic_visit(node)
                name, value = path.split(".")[-1], path.removeprefix("self.")
                if translator.is_list(value):
                    value = f"tuple({value})"
                if not scope.own.keeps_field(name):
                    name = f"config_{name}"  # the attribute with that name has another value
                scope.ported.attributes.setdefault(name, value)
                return expression(f"self.{name}")

        return [Read().visit(item) for item in body]

    def joined_weights(self, used: Collection[str]) -> dict[str, Any]:
        """Returns the parameters of experts that checkpoint files store as several tensors.

        Args:
            used: The names of the classes that the port contains.

        Returns:
            The result of `file_names.joined_weights`.
        """
        names: set[str] = set()
        for name in used:
            if name in self.file.classes:
                names |= lift_experts.expert_parameters(self.file.classes[name])
        base = self.file.heads()["Model"].name
        return file_names.joined_weights(self.file.model_type, base, names)

    def renamed_weights(self) -> dict[str, str]:
        """Returns the parts of parameter names that differ in checkpoint files."""
        names = [owner.name for owner in self.file.heads().values()]
        return file_names.renamed_weights(self.file.model_type, names)

    def is_list(self, path: str) -> bool:
        """Returns whether a field of the configuration is a list."""
        default = self.config_class
        for name in path.split(".")[1:]:
            default = getattr(default, name, None)
        return isinstance(default, list) or path.endswith(".layer_types")

    def _lines(self, scope: Scope, visitor: Any, body: Sequence[ast.stmt]) -> list[ast.stmt]:
        lines: list[ast.stmt] = []
        for item in body:
            lines += self.guarded(
                scope.own, item, functools.partial(self._line_of, scope, visitor, item)
            )
        return lines

    def _line_of(self, scope: Scope, visitor: Any, item: ast.stmt) -> list[ast.stmt]:
        for lift in STATEMENT_LIFTS:
            lifted = lift(scope, item)
            if lifted is not None:
                return [line for new in lifted for line in self._simple(visitor, new)]
        if isinstance(item, ast.If | ast.While):
            item.test = visitor.visit(item.test)
            item.body = self._lines(scope, visitor, item.body)
            item.orelse = self._lines(scope, visitor, item.orelse)
            return [item]
        if isinstance(item, ast.For):
            self._note_loop_variable(scope, item)
            item.iter = visitor.visit(item.iter)
            item.body = self._lines(scope, visitor, item.body)
            return [item]
        self._note_outputs(scope, item)
        return self._simple(visitor, item)

    def _simple(self, visitor: Any, item: ast.stmt) -> list[ast.stmt]:
        result = visitor.visit(item)
        return result if isinstance(result, list) else [] if result is None else [result]

    def _note_loop_variable(self, scope: Scope, item: ast.For) -> None:
        target, source = item.target, item.iter
        if isinstance(source, ast.Call) and dotted(source.func) == "enumerate":
            source = source.args[0]
            target = target.elts[1] if isinstance(target, ast.Tuple) else target
        pairs = [(target, source)]
        if isinstance(source, ast.Call) and dotted(source.func) == "zip":
            targets = target.elts if isinstance(target, ast.Tuple) else []
            pairs = list(zip(targets, source.args, strict=False))
            for inner in item.body:  # for x in zip(a, b): first, second = x
                if isinstance(inner, ast.Assign) and dotted(inner.value) == dotted(target):
                    if isinstance(inner.targets[0], ast.Tuple) and dotted(target):
                        pairs = list(zip(inner.targets[0].elts, source.args, strict=False))
        for name, value in pairs:
            value = value.value if isinstance(value, ast.Subscript) else value
            part = scope.own.lists.get(own_attribute(value))
            part = part or self.loop_variables.get(dotted(value))
            if part is not None and dotted(name):
                self.loop_variables[dotted(name)] = part

    def _note_outputs(self, scope: Scope, item: ast.stmt) -> None:
        """Records the variable that holds the output of a base model or encoder."""
        if isinstance(item, ast.Assign) and isinstance(item.value, ast.Call):
            part = scope.own.parts.get(own_attribute(item.value.func))
            part = part or lifting.nested_part(scope.own, dotted(item.value.func))
            if isinstance(part, SourceClass) and self.substitute(part) is None:
                is_output = self.port(part).collects and not _returns_array(part)
                if is_output and isinstance(item.targets[0], ast.Name):
                    scope.outputs = item.targets[0].id

    def _lift_call(self, scope: Scope, visitor: Any, node: ast.Call) -> ast.AST | None:
        for lift in CALL_LIFTS:
            lifted = lift(scope, visitor, node)
            if lifted is not None:
                return lifted
        name = own_attribute(node.func)
        if name in scope.own.methods:
            return self._own_call(scope, visitor, node, name)
        function = dotted(node.func)
        if function not in table.RULES and self.file.import_function(function):
            return self.helper_call(scope, visitor, node, function)
        return None

    def _own_call(self, scope: Scope, visitor: Any, node: ast.Call, name: str) -> ast.expr:
        arguments = self.own_method(scope.ported, name)
        values = bind(node, parameters(scope.own.methods[name]))
        words = []
        for argument in arguments:
            if argument in IMPLICIT_ARGUMENTS:
                words.append(ast.keyword(argument, expression(argument)))
            elif argument in values:
                words.append(ast.keyword(argument, visitor.visit(values[argument])))
        return _positional(node.func, words, arguments)

    def helper_call(self, scope: Scope, visitor: Any, node: ast.Call, name: str) -> ast.expr:
        """Translates the call of a function that the file defines or imports."""
        helper = self._helper(name)
        self.uses.setdefault(scope.own.name, set()).add(name)
        arguments = parameters(helper)
        values = bind(node, parameters(self.file.functions[name]))
        words = []
        for argument in arguments:
            if argument in IMPLICIT_ARGUMENTS:
                words.append(ast.keyword(argument, expression(argument)))
            elif argument in values:
                words.append(ast.keyword(argument, visitor.visit(values[argument])))
        return _positional(node.func, words, arguments)

    def _helper(self, name: str) -> ast.FunctionDef:
        """Translates a function that the file defines or imports."""
        if name in self.helpers:
            return self.helpers[name]
        function = copy.deepcopy(self.file.functions[name])
        self._rename_reserved(function)
        self.helpers[name] = function
        node = ast.ClassDef(name, [], [], [function], [], type_params=[])  # type: ignore[call-arg]
        node.lineno = function.lineno
        owner = SourceClass(node, self.file)
        ported = PortedClass(owner, name)
        scope = Scope(self, owner, ported, name, self.reporter(owner))
        names = parameters(function)
        constants = absent_arguments(names)
        body = fold(function.body, constants, self.file.tests)
        visitor = self.expressions(
            scope, lambda visitor, node: self._lift_call(scope, visitor, node)
        )
        visitor.enter(function)
        lines = return_directly(unused_names(tidy_body(self._lines(scope, visitor, body))))
        translated = self._function(scope, function, names, lines)
        translated.args.args = [arg for arg in translated.args.args if arg.arg != "self"]
        self.helpers.pop(name)
        self.helpers[name] = translated
        return translated

    def _layer_result(self, scope: Scope, lines: list[ast.stmt]) -> list[ast.stmt]:
        """Makes a layer return its hidden states and its attention weights, or `None` without them.

        Args:
            scope: The method of the layer.
            lines: The translated statements of the method.
        """
        weights = "None"
        for item in lines:
            for node in ast.walk(item):
                if isinstance(node, ast.Assign) and "return_weights=" in ast.unparse(node.value):
                    if self.is_pair and "self.encoder_attn(" in ast.unparse(node.value):
                        cross_weights = _name_weights(node, "cross_weights")
                        weights = f"({weights}, {cross_weights})"
                    else:
                        weights = _name_weights(node) or weights
        for item in lines:
            for node in ast.walk(item):
                if not isinstance(node, ast.Return) or node.value is None:
                    continue
                value = node.value
                if isinstance(value, ast.Tuple) and len(value.elts) == 1:
                    value = value.elts[0]
                if not isinstance(value, ast.Tuple):
                    node.value = ast.Tuple([value, expression(weights)], ast.Load())
        kinds = self.per_type.get(scope.own.name, {})
        for name, kind in kinds.items():
            attribute = kind
            if kind == "layer_types":
                attribute = "layer_type"
                scope.ported.attributes["layer_type"] = "config.layer_types[layer_idx]"
            for item in lines:
                replace(item, {name: f"{name}[self.{attribute}]"})
        return lines

    def _function(
        self, scope: Scope, source: ast.FunctionDef, names: list[str], lines: list[ast.stmt]
    ) -> ast.FunctionDef:
        """Builds the translated function, whose arguments are those that its statements read."""
        owner, read = scope.own, names_read(lines)
        visitor = self.expressions(scope, lambda *_: None)
        defaults = {
            name: visitor.visit(copy.deepcopy(value))
            for name, value in default_values(source).items()
        }
        forward = scope.method == "forward"
        skipped = {*absent_arguments(names), *self.file.absent, *IMPLICIT_ARGUMENTS}
        arguments = [name for name in names if name not in skipped and name in read]
        if forward and scope.is_model:
            public = () if scope.is_vision else ("attention_mask", "position_ids")
            arguments = [n for n in names if n not in skipped and (n in read or n in public)]
            if self.heads_generate and "position_ids" not in names:
                arguments.append("position_ids")  # generation passes position IDs to all decoders
        for name in self.extra_arguments.get(owner.name, ()):
            if name not in arguments:
                arguments.append(name)
                defaults[name] = expression("None")
        implicit = [name for name in IMPLICIT_ARGUMENTS if name in read]
        is_layer = forward and owner in self.scanned
        if is_layer:
            implicit = [n for n in IMPLICIT_ARGUMENTS if n in (*implicit, "rngs", "return_weights")]
        if forward and scope.is_model:
            required = ("rngs", "output_attentions", "output_hidden_states")
            implicit = [n for n in IMPLICIT_ARGUMENTS if n in (*implicit, *required)]
        result = [*arguments, *implicit]
        if forward and self._whole[owner.name]:
            result = self._base_arguments(owner) or result
        if forward:
            scope.ported.arguments = result
        else:
            scope.ported.methods[scope.method] = result
        if forward and self._whole[owner.name]:
            head = "self, *args, **kwargs"
            if "rngs" in read:
                head = "self, *args, rngs=None, **kwargs"
                _pass_keys(lines)
        else:
            head = _signature(arguments, implicit, defaults, scope.is_model and forward)
        text = f"def {'__call__' if forward else scope.method}({head}): pass"
        function = statement(text)
        assert isinstance(function, ast.FunctionDef)
        function.body = lines or [ast.Pass()]
        return function

    # The file.

    def run(self, derive: bool = False) -> Translation:
        """Translates all requested heads.

        Args:
            derive: Whether the port may derive from a native family, see
                `hfseq.cli.port.families`.
        """
        heads = self.file.heads()
        base = heads.get("Model")
        for name in self.requested or ():
            if name not in heads:
                head_names = ", ".join(heads)
                raise UsageError(
                    f"--heads {name}: '{self.file.model_type}' has no head {name}"
                    f"{did_you_mean(name, heads)} (heads of {self.file.path.name}: {head_names})"
                )
        if base is None:
            raise UsageError(
                f"{self.file.path.name} defines no base model for '{self.file.model_type}', so "
                "this model type cannot be ported"
            )
        selected_heads = {
            n: o for n, o in heads.items() if n in {"Model", *(self.requested or heads)}
        }
        left_out: dict[str, str] = {}
        for name, owner in selected_heads.items():
            if self.is_pair and owner is not base and not lift_pairs.generates(owner):
                left_out[name] = (
                    f"the port supports only the head of an encoder-decoder that generates text, "
                    f"line {owner.node.lineno}"
                )
            elif self.file.encoder_only and name == "ForCausalLM":
                left_out[name] = (
                    f"the port supports only the encoder of the file, line {owner.node.lineno}"
                )
            elif owner.kind != "generic":
                self.port(owner)
            elif name not in writer.GENERIC_HEADS:
                left_out[name] = (
                    f"the base class {owner.bases[0]} has no translation, line {owner.node.lineno}"
                )
        markers = self._markers_of(base)
        for name, owner in selected_heads.items():
            own = [m for m in self._markers_of(owner) if m not in markers]
            if own and name not in (self.requested or ()):
                left_out[name] = f"{own[0].reason}, line {own[0].line}"
        selected_heads = {n: o for n, o in selected_heads.items() if n not in left_out}
        used: set[str] = set().union(*(self._closure(owner) for owner in selected_heads.values()))
        text, names = writer.write(self, selected_heads, used, [])
        for name, missing in self._missing_names(selected_heads, text).items():
            if name not in ("Model", *(self.requested or ())):
                left_out[name] = f"the name {missing} has no translation"
        selected_heads = {n: o for n, o in selected_heads.items() if n not in left_out}
        used = set().union(*(self._closure(owner) for owner in selected_heads.values()))
        all_markers = [m for name in self.markers if name in used for m in self.markers[name]]
        text, names = writer.write(self, selected_heads, used, all_markers)
        for name in sorted(writer.undefined_names(text)):
            if name in self.file.activations:
                activation = self.file.activations[name]
                self.constants[name] = statement(f"{name} = nn.activation({activation!r})")
                continue
            value = self.file.constants.get(name)
            if value is not None and _is_literal(value):
                self.constants[name] = statement(f"{name} = {ast.unparse(value)}")
                continue
            marker = self._undefined(name)
            all_markers.append(marker)
            self.missing.append(f"NotTranslated({marker.reason!r}, {marker.line})")
        if self.constants or self.missing:
            text, names = writer.write(self, selected_heads, used, all_markers)
        unread_fields = self._unread_fields(text)
        difference, reason = None, ""
        if derive and not all_markers:
            difference, reason = families.find_difference(self, selected_heads, used)
        if difference is not None:
            text = writer.write_difference(self, selected_heads, difference)
            used = set(difference.parts)
        return Translation(
            model_type=self.file.model_type,
            text=text,
            heads=names,
            markers=tuple(all_markers),
            unread_fields=unread_fields,
            lines=self._source_lines(used),
            left_out=left_out,
            path=str(self.file.path),
            family="" if difference is None else difference.title,
            complete_reason=reason,
        )

    def _missing_names(self, heads: dict[str, SourceClass], text: str) -> dict[str, str]:
        """Returns an undefined name for each head that reads one.

        Names that the base model also reads are not considered.
        """
        missing = {
            name
            for name in writer.undefined_names(text)
            if (value := self.file.constants.get(name)) is None or not _is_literal(value)
        }
        nodes = {name: port.node for name, port in self.ports.items()} | dict(self.helpers)
        reads = {
            name: writer.undefined_names(ast.unparse(node)) & missing
            for name, node in nodes.items()
            if node is not None
        } if missing else {}  # fmt: skip
        found = {
            name: set().union(*(reads.get(part, set()) for part in self._closure(owner)))
            for name, owner in heads.items()
        }
        base = found.get("Model", set())
        return {name: min(names - base) for name, names in found.items() if names - base}

    def _undefined(self, name: str) -> Marker:
        """Returns a marker for a name that the port reads and does not define."""
        lines = self.file.path.read_text(encoding="utf-8").split("\n")
        numbers = (n for n, line in enumerate(lines, 1) if re.search(rf"\b{name}\b", line))
        uses = [n for n in numbers if not re.match(r"\s*(from|import|\w+,$)", lines[n - 1])]
        line = next(iter(uses), 0)
        reason = f"the name {name} has no translation"
        return Marker(reason, str(self.file.path), line, lines[line - 1].strip() if line else name)

    def _closure(self, owner: SourceClass) -> set[str]:
        names, open_names = set(), [owner.name]
        while open_names:
            name = open_names.pop()
            if name not in names:
                names.add(name)
                open_names += self.uses.get(name, ())
        return names

    def _markers_of(self, owner: SourceClass) -> list[Marker]:
        closure = self._closure(owner)
        return [marker for name in self.markers if name in closure for marker in self.markers[name]]

    def _unread_fields(self, text: str) -> tuple[str, ...]:
        source = self.file.path.read_text(encoding="utf-8")
        read = set(re.findall(r"\bconfig\.(\w+)", source))
        ours = set(re.findall(r"\bconfig\.(\w+)", text))
        if "nn.Rotary(" in text:
            ours |= {"max_position_embeddings", "rope_parameters", "rope_theta", "rope_scaling"}
        ignored = {"_attn_implementation", "use_cache", "return_dict", "output_attentions"}
        return tuple(sorted(read - ours - ignored))

    def _source_lines(self, used: set[str]) -> dict[str, int]:
        lines: dict[str, int] = {}
        for name, ported in self.ports.items():
            if name in used:
                lines[ported.name] = ported.source.node.lineno
                for method, node in ported.source.methods.items():
                    new = "__call__" if method == "forward" else method
                    lines[f"{ported.name}.{new}"] = node.lineno
        return lines


def _inputs_of(part: SourceClass | str) -> list[str]:
    function = part.forward if isinstance(part, SourceClass) else None
    return [] if function is None else parameters(function)


def _returns_array(part: SourceClass) -> bool:
    """Returns whether a module returns the array of a PyTorch layer, and not an output class."""
    if part.forward is None:
        return False
    values = [node.value for node in ast.walk(part.forward) if isinstance(node, ast.Return)]
    return all(
        isinstance(value, ast.Call)
        and str(part.parts.get(own_attribute(value.func))).startswith("nn.")
        for value in values
    )


def _pass_keys(lines: Sequence[ast.stmt]) -> None:
    """Adds `rngs=rngs` to the call that passes `*args` and `**kwargs` to the base model."""
    for item in lines:
        for node in ast.walk(item):
            if isinstance(node, ast.Call) and any(isinstance(a, ast.Starred) for a in node.args):
                if node.keywords and node.keywords[-1].arg is None:
                    node.keywords.insert(0, ast.keyword("rngs", expression("rngs")))


def _counts_positions(owner: SourceClass) -> bool:
    """Returns whether the default positions of a class are 0, 1, 2, ..."""
    constructor = owner.methods.get("__init__")
    return constructor is not None and bool(
        re.search(
            r"position_ids\W.*torch\.arange\([\w.]+\)\.expand\(\(1, -1\)\)(, persistent=False)?\)$",
            ast.unparse(constructor),
            re.MULTILINE,
        )
    )


def _is_literal(value: ast.expr) -> bool:
    try:
        ast.literal_eval(value)
    except ValueError:
        return False
    return True


def _config_class(model_type: str) -> Any:
    """Loads the configuration class of a model type.

    Returns:
        An instance with the default values. If the class has no defaults, the class itself. If the
        class cannot be imported, `None`.
    """
    from transformers import CONFIG_MAPPING

    try:
        config_class = CONFIG_MAPPING[model_type]
    except Exception:  # some configurations need packages that are not installed
        return None
    try:
        return config_class()
    except Exception:  # some configurations have no defaults
        return config_class


def _layer_type(value: ast.expr, loop: lifting.LayerLoop) -> str | None:
    """Returns the source of the layer type if an argument is `values[layer_type]`.

    Returns:
        "layer_types" for the field of the configuration, the name of an attribute of the layer, or
        `None` if the layer type does not select the argument.
    """
    if not isinstance(value, ast.Subscript):
        return None
    text = ast.unparse(value.slice)
    if loop.index and re.fullmatch(rf"self\.config\.layer_types\[{loop.index}\]", text):
        return "layer_types"
    match = re.fullmatch(rf"{loop.variable}(?:\.self_attn)?\.(\w+)", text)
    return match[1] if match else None


def _name_weights(node: ast.Assign, name: str = "weights") -> str:
    """Assigns the attention weights to a variable, and returns the name of the variable."""
    target = node.targets[0]
    if isinstance(node.value, ast.Subscript) and ast.unparse(node.value.slice) == "0":
        node.value = node.value.value
        node.targets = [ast.Tuple([target, ast.Name(name, ast.Store())], ast.Store())]
        return name
    if isinstance(target, ast.Tuple) and len(target.elts) == 2:
        if dotted(target.elts[1]) == "_":
            target.elts[1] = ast.Name(name, ast.Store())
        return dotted(target.elts[1])
    return ""


def _positional(function: ast.expr, words: list[ast.keyword], arguments: Sequence[str]) -> ast.expr:
    """Builds a call. Arguments are positional up to the first one that is left out."""
    args: list[ast.expr] = []
    for word, name in zip(words, arguments, strict=False):
        if word.arg != name or name in IMPLICIT_ARGUMENTS:
            break
        args.append(word.value)
    return ast.Call(function, args, words[len(args) :])


def _signature(
    arguments: Sequence[str],
    implicit: Sequence[str],
    defaults: dict[str, ast.expr],
    is_model: bool,
) -> str:
    parts = ["self"]
    has_default = False
    for position, name in enumerate(arguments):
        if is_model:
            parts.append(name if position == 0 else f"{name}=None")
            continue
        # Callers omit a mask that is `None`, so `attention_mask` needs a default.
        has_default = has_default or name in defaults or name == "attention_mask"
        value = ast.unparse(defaults[name]) if name in defaults else "None"
        parts.append(f"{name}={value}" if has_default else name)
    if "segment_ids" in implicit and is_model:
        parts.append("segment_ids=None")
    words = [n for n in implicit if not (n == "segment_ids" and is_model)]
    if words:
        parts.append("*")
        parts += [f"{name}={IMPLICIT_ARGUMENTS[name]}" for name in words]
    return ", ".join(parts)


def _located(body: Sequence[ast.stmt]) -> ast.stmt:
    """Wraps statements in one statement that has the line number of the first one."""
    item = ast.If(ast.Constant(True), list(body) or [ast.Pass()], [])
    item.lineno = next((line.lineno for line in body if getattr(line, "lineno", 0)), 0)
    return item
