"""Translates constructors, in which layers of `hfseq.nn` replace the layers of PyTorch."""

from __future__ import annotations

import ast
import copy
import functools
import re

from hfseq.cli.port import lift_heads, table
from hfseq.cli.port.folding import fold
from hfseq.cli.port.lift_audio import weight_norm_call, weight_norm_statement
from hfseq.cli.port.lifting import extends_cache, is_cached, pads_values, rotary_kind
from hfseq.cli.port.scope import PortedClass, Scope, Translator, Visitor
from hfseq.cli.port.source import SourceClass
from hfseq.cli.port.syntax import (
    argument,
    assign,
    bind,
    call,
    calls,
    default_values,
    dotted,
    expression,
    is_none,
    names_read,
    own_attribute,
    parameters,
    replace,
    statement,
)
from hfseq.cli.port.tidying import tidy_constructor

_SKIPPED = re.compile(
    r"self\.(post_init|config = config|gradient_checkpointing|tie_weights|_?init_\w*)\b"
    r"|self\.\w+\.(weight|bias)\.data(\.\w+_\(| = )"
    r"|nn\.init\.|self\.reset_parameters\(\)|self\._is_hf_initialized"
    r"|requires_backends\(|self\.eval\(\)|self\.[\w.]+\.data\.\w+_\("
)


#: Options that a class may pass on to the PyTorch layer from which it derives. They are dropped,
#: because no model changes their defaults.
_UNUSED_OPTIONS = ("padding_mode", "device", "dtype")


class ActivationTables(ast.NodeTransformer):
    """Replaces lookups in the activation tables of Transformers with `nn.activation(name)`.

    The values of `ACT2FN` are functions. The values of `ACT2CLS` are classes, so the call without
    arguments that creates the function is removed.
    """

    def __init__(self) -> None:
        self.classes: set[str] = set()

    def visit_Assign(self, node: ast.Assign) -> ast.AST:
        """Records the variables that hold an activation class from `ACT2CLS`."""
        value, name = node.value, dotted(node.targets[0])
        if isinstance(value, ast.Subscript) and dotted(value.value) == "ACT2CLS":
            self.classes.add(name)
        return self.generic_visit(node)

    def visit_Subscript(self, node: ast.Subscript) -> ast.AST:
        """Replaces a lookup in `ACT2FN` or `ACT2CLS`."""
        self.generic_visit(node)
        if dotted(node.value) in ("ACT2FN", "ACT2CLS"):
            return call("nn.activation", node.slice)
        return node

    def visit_Call(self, node: ast.Call) -> ast.AST:
        """Replaces a call of `get_activation`, and removes the call of an activation class."""
        function = node.func
        is_class = isinstance(function, ast.Subscript) and dotted(function.value) == "ACT2CLS"
        self.generic_visit(node)
        if (is_class or dotted(function) in self.classes) and not node.args:
            return node.func
        if dotted(node.func) == "get_activation":
            return call("nn.activation", node.args[0])
        return node


class Constructor:
    """Translates the constructor of a class.

    Args:
        translator: The translator of the file.
        ported: The port of the class. Its other methods are already translated.
        methods: The translated methods of the class.
    """

    def __init__(self, translator: Translator, ported: PortedClass, methods: list[ast.stmt]):
        self.translator, self.ported, self.methods = translator, ported, methods
        self.own = ported.source
        self.scope = Scope(translator, self.own, ported, "__init__", translator.reporter(self.own))
        self.variables = self.class_variables()
        self.choices: dict[str, ast.expr] = {}
        #: Local variables that hold a method of the class, with the name of the method.
        self.method_names: dict[str, str] = {}
        #: Fields of the configuration that the constructor overwrites, with their values.
        self.fixed: dict[str, str] = {}
        #: Attributes that the statements translated so far assign.
        self.assigned: set[str] = set()
        #: Arguments whose default is a layer class of PyTorch, such as `nn.LayerNorm`.
        self.layer_defaults = (
            {
                name: value
                for name, value in default_values(self.own.methods["__init__"]).items()
                if re.fullmatch(r"nn\.[A-Z]\w+", dotted(value))
            }
            if "__init__" in self.own.methods
            else {}
        )

    def build(self) -> ast.FunctionDef:
        """Returns the translated constructor and sets `ported.constructor_arguments`."""
        source = self.own.methods.get("__init__")
        if source is None:
            source = statement("def __init__(self, config): pass")  # type: ignore[assignment]
        assert isinstance(source, ast.FunctionDef)
        source = copy.deepcopy(source)
        replace(source, {"self.config": "config"})
        ActivationTables().visit(source)
        names = parameters(source)
        self.argument_names = set(names) - {"config"}
        self.stored = {
            own_attribute(item.targets[0]): dotted(item.value)
            for item in source.body
            if isinstance(item, ast.Assign) and own_attribute(item.targets[0])
        }
        body = fold(source.body, {"device": None} if "device" in names else {})
        visitor = self.translator.expressions(self.scope, self.lift_call)
        visitor.enter(source)
        lines = self.lines(body, visitor)
        self.rename_classes(lines)
        self.add_configuration(lines)
        if self.translator.is_pair and self.own is self.translator.base:
            message = "this port requires tie_word_embeddings=True in the configuration"
            check = f"if not config.tie_word_embeddings:\n    raise UsageError({message!r})"
            lines.insert(0, statement(check))
        if self.translator.is_pair and "encoder_attn" in self.own.parts:
            lines.append(statement("self.encoder_attn.cross = True"))
        kv_heads = self.add_cache(lines)
        called = [node for key, node in self.translator._methods.items() if key[0] == self.own.name]
        used = [*self.methods, *called, *self.ported.properties]
        lines = tidy_constructor(lines, used, self.translator.read_attributes)
        if kv_heads:
            lines.insert(0, statement("super().__init__()"))
        if self.translator.file.encoder_only and self.own is self.translator.base:
            message = "this port of an encoder does not support is_decoder=True"
            lines.insert(0, statement(f"if config.is_decoder:\n    raise UsageError({message!r})"))
        self.add_convolution_init(lines)
        self.add_position_init(lines)
        text = "\n".join(ast.unparse(item) for item in lines)
        read = set(re.findall(r"\b\w+\b", text))
        self.ported.constructor_arguments = [name for name in names if name in read]
        if re.search(r"\binit\b(?! *=)", text):
            if "config" in self.ported.constructor_arguments or "config" in names:
                deviation = initial_deviation(self.translator)
                lines.insert(1 if kv_heads else 0, statement(f"init = nn.normal({deviation})"))
                if "config" in names and "config" not in self.ported.constructor_arguments:
                    if "config." in deviation:
                        position = names.index("config")
                        self.ported.constructor_arguments.insert(position, "config")
            else:  # the class that creates the module passes its initializer
                defaults = default_values(source)
                arguments = self.ported.constructor_arguments
                required = [name for name in arguments if name not in defaults]
                arguments.insert(len(required), "init")
        return self.signature(source, lines)

    def add_convolution_init(self, lines: list[ast.stmt]) -> None:
        """Uses PyTorch's Kaiming initialization for convolutions, if the model file does."""
        method = self.translator.file.abstract.methods.get("_init_weights")
        pattern = (
            r"nn\.Conv2d\)?\w*\)?:\s+init\.kaiming_normal_\(module\.weight, mode='fan_out', "
            r"nonlinearity='relu'\)"
        )
        if method is None or not re.search(pattern, ast.unparse(method)):
            return
        for node in (inner for line in lines for inner in calls(line)):
            if dotted(node.func) == "nn.Conv":
                node.args = [
                    expression("CONV_INIT") if dotted(arg) == "init" else arg for arg in node.args
                ]
                text = 'jax.nn.initializers.variance_scaling(2.0, "fan_out", "normal")'
                line = statement(f"CONV_INIT = {text}")
                self.translator.constants.setdefault("CONV_INIT", line)

    def add_position_init(self, lines: list[ast.stmt]) -> None:
        """Initializes sinusoidal position embeddings as PyTorch does in `_init_weights`."""
        method = self.translator.file.abstract.methods.get("_init_weights")
        text = ast.unparse(method) if method is not None else ""
        own = re.escape(self.own.name)
        creates = f"isinstance(module, {self.own.name}):\n" in text + "\n"
        table = re.search(
            rf"isinstance\(module, {own}\):\s+(?:if self\.(config\.\w+):\s+)?init\.copy_\("
            r"module\.((?:\w+\.)?)weight, (?:module\.create_weight\(\)|create_sinusoidal_emb\w+\()",
            text,
        )
        if not creates or table is None:
            return
        name = table[2].rstrip(".")
        halves = "create_weight" in self.own.methods
        for node in (inner for line in lines for inner in ast.walk(line)):
            if isinstance(node, ast.Assign) and own_attribute(node.targets[0]) == name and name:
                call_node: ast.AST = node.value
            elif isinstance(node, ast.Call) and dotted(node.func) == "super().__init__":
                call_node = node
            elif isinstance(node, ast.Call) and ast.unparse(node.func) == "super().__init__":
                call_node = node
            else:
                continue
            if isinstance(call_node, ast.Call):
                value = (
                    f"sinusoidal_init if {table[1]} else init" if table[1] else "sinusoidal_init"
                )
                call_node.args = [
                    expression(value) if dotted(arg) == "init" else arg for arg in call_node.args
                ]
                line = statement(_SINUSOIDS_IN_HALVES if halves else _SINUSOIDS_IN_TURN)
                self.translator.constants.setdefault("sinusoidal_init", line)

    def signature(self, source: ast.FunctionDef, lines: list[ast.stmt]) -> ast.FunctionDef:
        """Returns the constructor with its arguments. `rngs` is inserted after `config`."""
        defaults = default_values(source)
        spelled = [
            name + (f"={ast.unparse(defaults[name])}" if name in defaults else "")
            for name in self.ported.constructor_arguments
        ]
        uses_rngs = any("rngs" in ast.unparse(item) for item in lines)
        self.ported.takes_rngs = uses_rngs or self.own.kind == "model"
        if self.own.kind == "model" and "config" not in self.ported.constructor_arguments:
            self.ported.constructor_arguments.insert(0, "config")
            spelled.insert(0, "config")
        position = 1 if self.ported.constructor_arguments[:1] == ["config"] else 0
        if "config" in self.ported.constructor_arguments[:1]:
            spelled[0] = "config"
        if self.ported.takes_rngs:
            if position == 0 and any("=" in item for item in spelled):
                position = next(i for i, item in enumerate(spelled) if "=" in item)
            elif position == 0:
                position = len(spelled)
            spelled.insert(position, "rngs")
            self.ported.rngs_position = position
        function = statement(f"def __init__({', '.join(['self', *spelled])}): pass")
        assert isinstance(function, ast.FunctionDef)
        function.body = lines or [ast.Pass()]
        return function

    def add_configuration(self, lines: list[ast.stmt]) -> None:
        """Adds assignments such as `self.name = config.name` for the fields that methods read."""
        existing = {
            own_attribute(item.targets[0]) for item in lines if isinstance(item, ast.Assign)
        }
        for name, value in self.ported.attributes.items():
            if name not in existing:
                lines.append(statement(f"self.{name} = {value}"))

    def add_cache(self, lines: list[ast.stmt]) -> bool:
        """Assigns the attributes that `nn.CachedAttention` needs.

        Returns:
            Whether the class derives from `nn.CachedAttention`.
        """
        has_cache = self.own.kind == "attention" and is_cached(self.own)
        if not has_cache and not extends_cache(self.own):
            return False
        text = "\n".join(ast.unparse(item) for item in lines)
        matching = re.search(r"\bself\.(num_key_value_heads|num_kv_heads|kv_heads)\b", text)
        if matching is None:
            matching = re.search(r"\bconfig\.(num_key_value_heads|num_kv_heads)\b", text)
        if matching is None:
            matching = re.search(
                r"\b(self|config)\.(num_attention_heads|num_heads|n_heads?)\b", text
            )
        value = matching[0] if matching else "config.num_attention_heads"
        if pads_values(self.own):  # keys and values are expanded to all heads
            value = "config.num_attention_heads"
            lines.append(statement("self.head_dim = self.qk_head_dim"))
            text += "self.head_dim ="
        if value != "self.kv_heads":
            lines.append(statement(f"self.kv_heads = {value}"))
        if "self.head_dim =" not in text:
            other = re.search(r"self\.(attention_head_size|head_size|d_head)\b", text)
            default = "config.hidden_size // config.num_attention_heads"
            lines.append(statement(f"self.head_dim = {other[0] if other else default}"))
        return True

    def lines(self, body: list[ast.stmt], visitor: Visitor) -> list[ast.stmt]:
        """Translates a block of statements."""
        lines: list[ast.stmt] = []
        for item in body:
            lines += self.translator.guarded(
                self.own, item, functools.partial(self.line, item, visitor)
            )
            self.assigned |= _assigned([item])
        return lines

    def line(self, item: ast.stmt, visitor: Visitor) -> list[ast.stmt]:
        """Translates one statement."""
        text = ast.unparse(item)
        simpler = weight_norm_statement(item)
        if simpler is not None:
            return [line for new in simpler for line in self.line(new, visitor)]
        if text.startswith("super(") and self.own.base_layer:
            return [self.base_constructor(item, visitor)]
        if text.startswith("super(") and self.own.parent is not None:
            return self.parent_constructor(item, visitor)
        if _SKIPPED.match(text) or text.startswith("super("):
            return []
        if re.match(r"(self\.)?config\.num_labels = \d+$", text):
            self.fixed["config.num_labels"] = text.split(" = ")[1]
            return []
        if self.fixed:
            replace(item, self.fixed)
        if re.match(r"self\.\w+ = (torch\.)?nn\.\w+Loss\(", text):
            return []
        if isinstance(item, ast.If):
            return self.branch(item, visitor)
        if isinstance(item, ast.Assign) and is_none(item.value):
            part = self.own.parts.get(own_attribute(item.targets[0]))
            if part is not None and not self.is_rotary(part):  # a later statement assigns it
                item.value = expression("nnx.data(None)")
                return [item]
        if isinstance(item, ast.Assign) and isinstance(item.targets[0], ast.Name):
            name = item.targets[0].id
            if own_attribute(item.value) in self.own.methods:  # a variable for a method
                self.method_names[name] = own_attribute(item.value)
                return []
            matching = self.variables.get(name, [])
            if len(matching) == 2 and isinstance(item.value, ast.IfExp):
                self.choices[name] = item.value.test
                return []
        if isinstance(item, ast.For):
            item.body = self.lines(item.body, visitor)
            return [item] if item.body else []
        if isinstance(item, ast.Expr) and "register_buffer(" in text:
            node = item.value
            assert isinstance(node, ast.Call)
            assert isinstance(node.args[0], ast.Constant)
            name = str(node.args[0].value)
            if self.own.parts.get(name) == "nn.Buffer":
                buffer = call("nn.Buffer", visitor.visit(node.args[1]))
                return [assign(f"self.{name}", buffer)]
            self.buffer(name, node.args[1], visitor)
            return []
        if (
            isinstance(item, ast.Assign)
            and self.own.parts.get(own_attribute(item.targets[0])) == "nn.Buffer"
        ):
            if isinstance(item.value, ast.Call) and item.value.args:
                buffer = call("nn.Buffer", visitor.visit(item.value.args[0]))
                return [assign(item.targets[0], buffer)]
        if isinstance(item, ast.Assign) and "nn.Buffer(" in text:
            name = own_attribute(item.targets[0])
            if (
                name
                and isinstance(item.value, ast.Call)
                and dotted(item.value.func).endswith("nn.Buffer")
            ):
                self.buffer(name, item.value.args[0], visitor)
                return []
        if isinstance(item, ast.Assign) and isinstance(item.value, ast.IfExp):
            value = item.value
            if is_none(value.orelse):
                value.orelse = expression("nnx.data(None)")
            if is_none(value.body):
                value.body = expression("nnx.data(None)")
        if isinstance(item, ast.Expr) and isinstance(item.value, ast.Call):
            function = item.value.func
            is_append = isinstance(function, ast.Attribute) and function.attr == "append"
            frozen = re.fullmatch(r"self\.(\w+)\.requires_grad_\(False\)", text)
            if frozen and frozen[1] in self.own.frozen:  # the port stops the gradient
                return []
            if not is_append:
                self.scope.report(item, "this statement in a constructor has no translation")
                return []
        result = visitor.visit(item)
        result = result if isinstance(result, list) else [] if result is None else [result]
        return self.tie(result)

    @staticmethod
    def is_rotary(part: SourceClass | str) -> bool:
        """Whether a submodule becomes `nn.Rotary`, which is not an `nnx.Module`."""
        return isinstance(part, SourceClass) and rotary_kind(part) is not None

    def rename_classes(self, lines: list[ast.stmt]) -> None:
        """Renames classes of the model file that the constructor uses as values."""
        for node in (node for line in lines for node in ast.walk(line)):
            owner = self.translator.file.classes.get(dotted(node))
            if isinstance(node, ast.Name) and owner is not None and owner.kind != "abstract":
                self.translator.uses.setdefault(self.own.name, set()).add(owner.name)
                node.id = self.translator.port(owner).name

    def base_constructor(self, item: ast.stmt, visitor: Visitor) -> ast.stmt:
        """Translates `super().__init__(...)` in a class that derives from a PyTorch layer."""
        assert isinstance(item, ast.Expr) and isinstance(item.value, ast.Call)
        defaults = default_values(self.own.methods["__init__"])
        words = [
            word
            for word in item.value.keywords
            if word.arg and not (word.arg in _UNUSED_OPTIONS and dotted(word.value) in defaults)
        ]
        base = ast.Call(expression(self.own.base_layer), item.value.args, words)
        result = visitor.visit(base)
        assert isinstance(result, ast.Call)
        result.func = expression("super().__init__")
        return ast.Expr(result)

    def parent_constructor(self, item: ast.stmt, visitor: Visitor) -> list[ast.stmt]:
        """Translates `super().__init__(...)` in a class that derives from a class of the file."""
        parent = self.own.parent
        if not ast.unparse(item).startswith("super().__init__("):
            return []
        assert isinstance(item, ast.Expr) and isinstance(item.value, ast.Call)
        assert parent is not None
        node = item.value
        result = self.construct(visitor, node, parent)
        if not isinstance(result, ast.Call) or self.translator.substitute(parent) is not None:
            reason = f"the class derives from {parent.name}, which hfseq replaces"
            self.scope.report(item, reason)
            return []
        result.func = expression("super().__init__")
        return [ast.Expr(result)]

    def class_variables(self) -> dict[str, list[SourceClass]]:
        """Returns the classes that each variable of the constructor may hold.

        A variable holds a class if the constructor assigns the class to it, or if it is an argument
        for which another constructor of the file passes the class.
        """
        classes = self.translator.file.classes
        source = self.own.methods.get("__init__")
        names: dict[str, list[SourceClass]] = {}

        def add(name: str, value: ast.expr) -> None:
            parts = [value.body, value.orelse] if isinstance(value, ast.IfExp) else [value]
            matching = [classes[dotted(part)] for part in parts if dotted(part) in classes]
            defaults_by_name = names.setdefault(name, [])
            defaults_by_name += [part for part in matching if part not in defaults_by_name]

        if source is None:
            return {}
        for node in ast.walk(source):
            if isinstance(node, ast.Assign) and isinstance(node.targets[0], ast.Name):
                add(node.targets[0].id, node.value)
        for owner in classes.values():
            for node in calls(owner.methods.get("__init__", ast.Pass())):
                if dotted(node.func) == self.own.name:
                    for name, value in bind(node, parameters(source)).items():
                        add(name, value)
        return {name: matching for name, matching in names.items() if matching}

    def tie(self, lines: list[ast.stmt]) -> list[ast.stmt]:
        """Translates the projections whose kernel may be the embedding matrix."""
        heads = self.translator.heads_of(self.own)
        result: list[ast.stmt] = []
        for item in lines:
            name = own_attribute(item.targets[0]) if isinstance(item, ast.Assign) else ""
            if name in heads:
                assert isinstance(item, ast.Assign)
                result += lift_heads.tie(heads[name], item)
            else:
                result.append(item)
        return result

    def branch(self, item: ast.If, visitor: Visitor) -> list[ast.stmt]:
        """Translates an `if` statement.

        NNX requires an attribute that holds a module in one configuration to be data in all of
        them. If a branch does not create the module, the attribute is set to `nnx.data(None)`.
        """
        earlier = set(self.assigned)
        item.test = visitor.visit(item.test)
        item.body, item.orelse = self.lines(item.body, visitor), self.lines(item.orelse, visitor)
        if not item.body and not item.orelse:
            return []
        preceding_lines: list[ast.stmt] = []
        modules = {
            own_attribute(line.targets[0])
            for line in ast.walk(item)
            if isinstance(line, ast.Assign) and _creates_module(line.value)
        }
        assigned = [_assigned(item.body), _assigned(item.orelse)]
        for branch, own, other in (
            (item.body, assigned[0], assigned[1]),
            (item.orelse, assigned[1], assigned[0]),
        ):
            for line in branch:
                if isinstance(line, ast.Assign) and is_none(line.value):
                    if own_attribute(line.targets[0]) in modules:
                        line.value = expression("nnx.data(None)")
            missing = sorted(n for n in own - other if n in modules - earlier)
            preceding_lines += [statement(f"self.{name} = nnx.data(None)") for name in missing]
        item.body = item.body or [ast.Pass()]
        return [*preceding_lines, item]

    def buffer(self, name: str, value: ast.expr, visitor: Visitor) -> None:
        """Turns a buffer that is not stored in checkpoints into a property that computes it."""
        reads = any(
            own_attribute(node) == name for method in self.methods for node in ast.walk(method)
        )
        if not reads:
            return
        translated = visitor.visit(value)
        for node in ast.walk(translated):
            path = dotted(node)
            if path == f"config.{name}":  # the property has the name of the field
                self.ported.attributes[f"{name}_value"] = path
            elif path.startswith("config.") and path.count(".") == 1:
                self.ported.attributes.setdefault(path[7:], path)
        translated = replace(translated, {f"config.{name}": f"self.{name}_value"})
        texts = {"config": "self"}
        for argument_name in names_read([translated]) & self.argument_names:
            attribute = next((a for a, n in self.stored.items() if n == argument_name), "")
            if not attribute:
                attribute = f"{argument_name}_value"
                self.ported.attributes[attribute] = argument_name
            texts[argument_name] = f"self.{attribute}"
        translated = replace(translated, texts)
        method = f"@property\ndef {name}(self):\n    return {ast.unparse(translated)}"
        self.ported.properties.append(statement(method))

    def lift_call(self, visitor: Visitor, node: ast.Call) -> ast.expr | None:
        """Translates the call that creates a layer or an instance of a class of the file."""
        name = dotted(node.func).removesuffix("._from_config").removeprefix("torch.")
        owner = self.translator.file.classes.get(name)
        if owner is not None:
            return self.construct(visitor, node, owner)
        normed = weight_norm_call(node)
        if normed is not None:
            normed.args = [visitor.visit(arg) for arg in normed.args]
            return normed
        default = self.layer_defaults.get(name)
        if default is not None:
            node = ast.copy_location(ast.Call(default, node.args, node.keywords), node)
            return self.lift_call(visitor, node)
        if name in self.method_names:
            node.func = expression(f"self.{self.method_names[name]}")
        method = own_attribute(node.func)
        if method in self.own.methods:
            self.translator.own_method(self.ported, method)
            return None
        if isinstance(node.func, ast.Name) and (matching := self.variables.get(name)):
            if len(matching) == 1:
                return self.construct(visitor, node, matching[0])
            if name in self.choices and len(matching) == 2:
                choice = self.choices[name]
                first, second = (
                    self.construct(visitor, copy.deepcopy(node), part) for part in matching
                )
                return ast.IfExp(visitor.visit(copy.deepcopy(choice)), first, second)
        if name == "nn.ModuleList":
            return self.module_list(visitor, node)
        if name == "Conv1D":  # GPT-2's layer, whose first argument is the output size
            sizes = [visitor.visit(arg) for arg in node.args[::-1]]
            return call("nn.Conv1D", *sizes, "init", "rngs")
        if name == "LayerNorm" and name in self.translator.file.imported:
            name = "nn.LayerNorm"
        function = _LAYERS.get(name)
        if function is not None:
            arguments = [visitor.visit(arg) for arg in node.args]
            words = [ast.keyword(w.arg, visitor.visit(w.value)) for w in node.keywords]
            return function(ast.Call(node.func, arguments, words))
        if name == "nn.activation":
            return node
        if name not in table.RULES and self.translator.file.import_function(name):
            return self.translator.helper_call(self.scope, visitor, node, name)
        if re.fullmatch(r"nn\.[A-Z]\w+", name):
            return visitor.construct(node)
        return None

    def module_list(self, visitor: Visitor, node: ast.Call) -> ast.expr:
        """Translates `nn.ModuleList`.

        Layers that `nn.run_layers` runs become `nn.Layers`. Other modules become `nnx.List`.
        """
        inner = next(
            (
                self.translator.file.classes[dotted(part.func)]
                for part in calls(node)
                if dotted(part.func) in self.translator.file.classes
            ),
            None,
        )
        arguments = [visitor.visit(arg) for arg in node.args]
        if arguments and isinstance(arguments[0], ast.GeneratorExp):
            arguments[0] = ast.ListComp(arguments[0].elt, arguments[0].generators)
        if arguments and isinstance(arguments[0], ast.ListComp):
            comprehension = arguments[0]
            index = comprehension.generators[0].target
            if isinstance(index, ast.Name) and index.id not in {
                n.id for n in ast.walk(comprehension.elt) if isinstance(n, ast.Name)
            }:
                comprehension.generators[0].target = ast.Name("_", ast.Store())
        scanned = inner in self.translator.scanned and inner not in self.translator.unrolled
        return call("nn.Layers" if scanned else "nnx.List", *arguments)

    def construct(self, visitor: Visitor, node: ast.Call, owner: SourceClass) -> ast.expr:
        """Returns the call that creates a submodule whose class is defined in the file."""
        values = ast.Call(
            node.func,
            [visitor.visit(arg) for arg in node.args],
            [ast.keyword(w.arg, visitor.visit(w.value)) for w in node.keywords],
        )
        substitute = self.translator.substitute(owner)
        if substitute is not None:
            return substitute.construct(self.scope, values)
        ported = self.translator.port(owner)
        self.translator.uses.setdefault(self.own.name, set()).add(owner.name)
        if owner.base_layer and "__init__" not in owner.methods:
            values.func = expression(owner.base_layer)
            result = self.lift_call(visitor, values)
            assert isinstance(result, ast.Call)
            result.func = expression(ported.name)
            return result
        init = owner.methods.get("__init__")
        if init is None and owner.parent is not None:
            init = owner.parent.methods.get("__init__")
        names = parameters(init) if init is not None else ["config"]
        arguments_by_name = bind(values, names)
        args: list[ast.expr] = []
        words: list[ast.keyword] = []
        rngs = ported.takes_rngs
        if "init" in ported.constructor_arguments:
            arguments_by_name.setdefault("init", expression("init"))
        for index, name in enumerate(ported.constructor_arguments):
            if rngs and not words and len(args) == index == ported.rngs_position:
                args.append(expression("rngs"))
                rngs = False
            if name not in arguments_by_name:
                continue
            if not words and len(args) - (ported.takes_rngs and not rngs) == index:
                args.append(arguments_by_name[name])
            else:
                words.append(ast.keyword(name, arguments_by_name[name]))
        if rngs and not words and len(args) == ported.rngs_position:
            args.append(expression("rngs"))
        elif rngs:
            words.append(ast.keyword("rngs", expression("rngs")))
        return ast.Call(expression(ported.name), args, words)


_SINUSOIDS_IN_HALVES = """
def sinusoidal_init(key: jax.Array, shape: tuple[int, int], dtype: Any) -> jax.Array:
    angles = np.arange(shape[0])[:, None] / 10000 ** (np.arange(0, shape[1], 2) / shape[1])
    return jnp.asarray(np.concatenate([np.sin(angles), np.cos(angles)], axis=1), dtype)
"""
_SINUSOIDS_IN_TURN = """
def sinusoidal_init(key: jax.Array, shape: tuple[int, int], dtype: Any) -> jax.Array:
    angles = np.arange(shape[0])[:, None] / 10000 ** (np.arange(0, shape[1], 2) / shape[1])
    return jnp.asarray(np.stack([np.sin(angles), np.cos(angles)], axis=2).reshape(shape), dtype)
"""


def initial_deviation(translator: Translator) -> str:
    """Returns the expression of the standard deviation of initial weights, as in Transformers."""
    names = ("initializer_range", "init_std", "initializer_factor")
    name = next((name for name in names if translator.has_field(name)), "")
    return f"config.{name}" if name else "0.02"


def _creates_module(value: ast.expr) -> bool:
    """Returns whether a translated expression creates a module or a parameter."""
    text = ast.unparse(value)
    return re.search(r"\bnnx?\.(?!(Function|Rotary)\b)[A-Z]|\brngs\b", text) is not None


def _assigned(body: list[ast.stmt]) -> set[str]:
    return {own_attribute(item.targets[0]) for item in body if isinstance(item, ast.Assign)} - {""}


def layer_name(name: str) -> str:
    """Returns the name of the hfseq layer that replaces a PyTorch layer."""
    names = {"nn.Embedding": "nn.Embed"}
    return names.get(name, re.sub(r"Conv\dd$", "Conv", name))


def _linear(node: ast.Call) -> ast.expr:
    values = bind(node, ["in_features", "out_features", "bias"])
    bias = values.get("bias")
    words = {}
    if bias is not None and not (isinstance(bias, ast.Constant) and bias.value is True):
        words["use_bias"] = bias
    return call("nn.Linear", values["in_features"], values["out_features"], "init", "rngs", **words)


def _embedding(node: ast.Call) -> ast.expr:
    values = bind(node, ["num_embeddings", "embedding_dim"])
    return call("nn.Embed", values["num_embeddings"], values["embedding_dim"], "init", "rngs")


def _layer_norm(node: ast.Call) -> ast.expr:
    values = bind(node, ["normalized_shape", "eps", "elementwise_affine", "bias"])
    words: dict[str, ast.expr] = {}
    affine, bias = values.get("elementwise_affine"), values.get("bias")
    if affine is not None and ast.unparse(affine) != "True":
        words = {"use_bias": affine, "use_scale": affine}
    if bias is not None and ast.unparse(bias) != "True":
        words["use_bias"] = bias
    epsilon = values.get("eps") or expression("1e-5")
    return call("nn.LayerNorm", values["normalized_shape"], epsilon, **words)


def _dropout(node: ast.Call) -> ast.expr:
    return call("nn.Dropout", argument(node, 0, "p") or expression("0.5"))


def _identity(_: ast.Call) -> ast.expr:
    return expression("nn.identity")


_LAYERS = {
    "nn.Linear": _linear,
    "nn.Embedding": _embedding,
    "nn.LayerNorm": _layer_norm,
    "nn.Dropout": _dropout,
    "nn.Identity": _identity,
}


__all__ = ["ActivationTables", "Constructor", "assign", "initial_deviation"]
