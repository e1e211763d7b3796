"""Reads the classes of a model file of Transformers, their submodules and their heads."""

from __future__ import annotations

import ast
import copy
import functools
import importlib.util
import re
from collections.abc import Collection, Iterator
from pathlib import Path

from hfseq.cli.port.file_names import split_weights
from hfseq.cli.port.folding import ENCODER_INPUTS, ENCODER_TESTS, fold
from hfseq.cli.port.modernize import join_projections, modernize
from hfseq.cli.port.syntax import (
    calls,
    dotted,
    expression,
    own_attribute,
    parameters,
    replace,
)
from hfseq.errors import UsageError, did_you_mean
from hfseq.plugins.registry import FALLBACK_TASKS, TASKS


def transformers_folder() -> Path:
    """Returns the folder of the installed Transformers, without importing it."""
    spec = importlib.util.find_spec("transformers")
    if spec is None or spec.origin is None:
        raise UsageError(
            "hfseq port reads the source of Transformers, which is not installed: run pip install "
            "transformers"
        )
    return Path(spec.origin).parent


class SourceClass:
    """A class of a model file.

    Attributes:
        name: The name of the class.
        short: The name without the prefix that all classes of the file have.
        bases: The source text of each base class.
        methods: The methods, by name.
        fields: The values of class attributes, by name.
        parts: For each attribute that holds a submodule, the class of the submodule. If the
            constructor can create one of several classes, this is the first one.
        alternatives: For each attribute that holds a submodule, all classes that it can have.
        lists: For each attribute that holds a module list, the class of the modules.
        stored_buffers: The attributes of arrays that checkpoints contain and that are not trained.
    """

    def __init__(self, node: ast.ClassDef, file: SourceFile):
        self.node, self.name, self.file = node, node.name, file
        self.short = node.name.removeprefix(file.prefix) or node.name
        self.bases = [ast.unparse(base) for base in node.bases]
        self.decorators = [ast.unparse(decorator) for decorator in node.decorator_list]
        self.methods = {item.name: item for item in node.body if isinstance(item, ast.FunctionDef)}
        for method in self.methods.values():
            _to_instance_method(method)
        self.fields: dict[str, ast.expr] = {}
        for item in node.body:
            if isinstance(item, ast.Assign) and isinstance(item.targets[0], ast.Name):
                self.fields[item.targets[0].id] = item.value
        self.stored_buffers: list[str] = []
        self.parts: dict[str, SourceClass | str] = {}
        self.alternatives: dict[str, list[SourceClass | str]] = {}
        self.lists: dict[str, SourceClass | str] = {}

    def __repr__(self) -> str:
        return f"SourceClass({self.name})"

    @functools.cached_property
    def text(self) -> str:
        """The source of the class without comments."""
        return ast.unparse(self.node)

    @property
    def forward(self) -> ast.FunctionDef | None:
        """The method `forward`."""
        return self.methods.get("forward")

    @functools.cached_property
    def parent(self) -> SourceClass | None:
        """The first base class that the file defines and that is not abstract."""
        classes = (self.file.classes.get(base) for base in self.bases)
        return next((base for base in classes if base and base.kind != "abstract"), None)

    @functools.cached_property
    def kind(self) -> str:
        """The role of the class in the model.

        One of "abstract" (the base class of all models), "generic" (a head that Transformers
        defines in `modeling_layers`), "attention", "layer", "model", "module" (any other class with
        a method `forward`) and "other" (a class without `forward`).
        """
        if self.name.endswith("PreTrainedModel"):
            return "abstract"
        if any("Generic" in base for base in self.bases):
            return "generic"
        forward = self.forward
        if forward is None:
            return self.parent.kind if self.parent else "other"
        if "attention_interface(" in ast.unparse(forward):
            return "attention"
        if any("GradientCheckpointingLayer" in base for base in self.bases):
            return "layer"
        if self.name in self.file.recorded_layers:
            return "layer"
        if any(base.endswith("PreTrainedModel") for base in self.bases):
            return "model"
        if self.parent is not None and self.parent.kind in ("model", "layer"):
            return self.parent.kind
        return "module"

    @functools.cached_property
    def assigned(self) -> dict[str, str]:
        """The source text of the value that the constructor assigns to each attribute."""
        return {
            own_attribute(node.targets[0]): ast.unparse(node.value)
            for node in ast.walk(self.methods.get("__init__", ast.Pass()))
            if isinstance(node, ast.Assign) and own_attribute(node.targets[0])
        }

    @functools.cached_property
    def frozen(self) -> set[str]:
        """The attributes of embeddings that the constructor excludes from training."""
        constructor = ast.unparse(self.methods.get("__init__", ast.Pass()))
        names = re.findall(r"self\.(\w+)\.requires_grad_\(False\)", constructor)
        return {name for name in names if self.parts.get(name) == "nn.Embedding"}

    @functools.cached_property
    def optional_parameters(self) -> set[str]:
        """The attributes that are a parameter or `None` and that are never compared with `None`."""
        names: set[str] = set()
        for node in ast.walk(self.methods.get("__init__", ast.Pass())):
            if isinstance(node, ast.Assign) and isinstance(node.value, ast.IfExp):
                name, text = own_attribute(node.targets[0]), ast.unparse(node.value)
                if "nn.Parameter(" in text and text.endswith("else None"):
                    if not re.search(rf"self\.{name} is (not )?None", self.text):
                        names.add(name)
        return names

    def keeps_field(self, name: str) -> bool:
        """Returns whether an attribute, if it exists, is the configuration field of that name."""
        field = (f"config.{name}", f"self.config.{name}")
        value = self.assigned.get(name, field[0])
        if value != name:
            return value in field
        values = [
            ast.unparse(node.value)
            for node in ast.walk(self.methods["__init__"])
            if isinstance(node, ast.Assign) and dotted(node.targets[0]) == name
        ]
        return bool(values) and set(values) <= set(field)

    @property
    def base_layer(self) -> str:
        """The layer of PyTorch that the class derives from, such as `nn.Embedding`, or `""`."""
        base = self.bases[0].removeprefix("torch.") if self.bases else ""
        is_layer = re.fullmatch(r"nn\.(Embedding|Linear|LayerNorm|GroupNorm|Conv[123]d)", base)
        return base if is_layer else ""

    def literal(self, name: str, default: object) -> object:
        """Returns the value of a class attribute, or `default` if the value is not a literal."""
        try:
            return ast.literal_eval(self.fields[name]) if name in self.fields else default
        except ValueError:
            return default

    def find_parts(self) -> None:
        """Fills `parts`, `alternatives` and `lists` from the constructor."""
        self._find_buffers()
        if self.base_layer:
            self.parts[""] = self.base_layer
        local: dict[str, SourceClass | str] = {}  # classes of the modules in local lists
        for node in 2 * list(ast.walk(self.methods.get("__init__", ast.Pass()))):
            if isinstance(node, ast.Call) and isinstance(node.func, ast.Attribute):
                if node.func.attr == "append" and node.args and dotted(node.func.value):
                    self._add_appended(local, dotted(node.func.value), node.args[0])
        for node in ast.walk(self.methods.get("__init__", ast.Pass())):
            if isinstance(node, ast.Assign | ast.AnnAssign) and node.value is not None:
                target = node.targets[0] if isinstance(node, ast.Assign) else node.target
                name = own_attribute(target)
                if name:
                    self._add_parts(name, node.value)
                    listed = node.value.args if isinstance(node.value, ast.Call) else []
                    if name in self.lists and not self.lists[name] and listed:
                        self.lists[name] = local.get(dotted(listed[0]), "")
            if isinstance(node, ast.Call) and isinstance(node.func, ast.Attribute):
                name = own_attribute(node.func.value)
                if name and node.func.attr == "append" and name in self.lists and node.args:
                    self.lists[name] = next(self._classes(node.args[0]), self.lists[name])

    def inherit_parts(self) -> None:
        """Adds the submodules that the constructor of the parent creates."""
        constructor = ast.unparse(self.methods.get("__init__", ast.Pass()))
        if self.parent is None or constructor and "super().__init__(" not in constructor:
            return
        self.parent.inherit_parts()
        self.parts = self.parent.parts | self.parts
        self.alternatives = self.parent.alternatives | self.alternatives
        self.lists = self.parent.lists | self.lists

    def inherit_methods(self) -> None:
        """Adds the methods of the abstract base class that the methods of the class call."""
        shared = {
            name: method
            for base in self.bases
            if (owner := self.file.classes.get(base)) is not None and owner.kind == "abstract"
            for name, method in owner.methods.items()
            if name not in self.methods and not name.startswith("_init")
        }
        while True:
            text = "\n".join(ast.unparse(method) for method in self.methods.values())
            called = {name for name in shared.keys() - self.methods if f"self.{name}(" in text}
            if not called:
                return
            self.methods |= {name: shared[name] for name in sorted(called)}

    def _add_appended(
        self, local: dict[str, SourceClass | str], name: str, value: ast.expr
    ) -> None:
        """Records the class of the modules that are appended to a local list.

        If a module list is appended, this is the class of the modules in it.
        """
        is_list = isinstance(value, ast.Call) and dotted(value.func).endswith("ModuleList")
        inner = value.args[0] if is_list and value.args else None  # type: ignore[attr-defined]
        part = next(self._classes(value, skip=value if is_list else None), None)
        part = part or local.get(dotted(inner))
        for node in ast.walk(self.methods["__init__"]):  # stage = Stage(...); stages.append(stage)
            if part is None and isinstance(node, ast.Assign) and isinstance(value, ast.Name):
                if dotted(node.targets[0]) == value.id:
                    part = next(self._classes(node.value), None)
        if part is not None:
            local.setdefault(name, part)

    def _find_buffers(self) -> None:
        """Adds arrays that are not trained to `parts`, as `nn.Buffer`.

        The arrays are those that checkpoints contain, and those that are computed from local
        variables of the constructor.
        """
        for node in ast.walk(self.methods.get("__init__", ast.Pass())):
            if isinstance(node, ast.Assign):
                name, value = own_attribute(node.targets[0]), node.value
            elif isinstance(node, ast.Call) and dotted(node.func) == "self.register_buffer":
                first = node.args[0] if node.args else None
                name, value = str(getattr(first, "value", "")), node
            else:
                continue
            if not name or not isinstance(value, ast.Call):
                continue
            if is_stored_buffer(value):
                self.stored_buffers.append(name)
            elif not self._reads_locals(value):
                continue
            self.parts[name] = "nn.Buffer"
            self.alternatives[name] = ["nn.Buffer"]

    def _reads_locals(self, value: ast.Call) -> bool:
        """Returns whether a buffer is computed from local variables of the constructor."""
        if dotted(value.func).removeprefix("torch.") not in ("nn.Buffer", "self.register_buffer"):
            return False
        constructor = self.methods["__init__"]
        names = {arg.arg for arg in constructor.args.args} - {"self", "config"}
        names |= {
            node.id
            for node in ast.walk(constructor)
            if isinstance(node, ast.Name) and isinstance(node.ctx, ast.Store)
        }
        return any(isinstance(node, ast.Name) and node.id in names for node in ast.walk(value))

    def constructed(self) -> Iterator[SourceClass | str]:
        """Yields the classes of all modules that the constructor creates."""
        if "__init__" in self.methods:
            yield from self._classes(self.methods["__init__"])

    def _add_parts(self, name: str, value: ast.expr) -> None:
        outer = dotted(value.func) if isinstance(value, ast.Call) else ""
        if outer.endswith("ModuleList"):
            self.lists[name] = next(self._classes(value, skip=value), "")
            return
        for part in self._classes(value):
            if self.parts.get(name) == "nn.Identity":  # calls must fit the other class
                self.parts[name] = part
            self.parts.setdefault(name, part)
            if part not in self.alternatives.setdefault(name, []):
                self.alternatives[name].append(part)

    def _classes(self, value: ast.AST, skip: ast.AST | None = None) -> Iterator[SourceClass | str]:
        for node in calls(value):
            name = dotted(node.func).removesuffix("._from_config").removeprefix("torch.")
            if node is skip:
                continue
            if name in self.file.classes:
                yield self.file.classes[name]
            elif name in ("LayerNorm", "Conv1D"):
                yield f"nn.{name}" if name == "LayerNorm" else name
            elif re.fullmatch(r"nn\.(?!Buffer)[A-Z]\w+", name):
                yield name


def _to_instance_method(method: ast.FunctionDef) -> None:
    """Turns a class method into an instance method."""
    if [ast.unparse(decorator) for decorator in method.decorator_list] == ["classmethod"]:
        first = method.args.args[0]
        replace(method, {first.arg: expression("self")})
        first.arg, method.decorator_list = "self", []


def is_stored_buffer(node: ast.Call) -> bool:
    """Returns whether a call creates an array that checkpoints contain and that is not trained."""

    def word(name: str) -> object:
        values = [w.value for w in node.keywords if w.arg == name]
        return values[0].value if values and isinstance(values[0], ast.Constant) else None

    name = dotted(node.func).removeprefix("torch.")
    if name == "nn.Parameter":
        return word("requires_grad") is False
    return name in ("nn.Buffer", "self.register_buffer") and word("persistent") is not False


class SourceFile:
    """A model file of Transformers.

    Attributes:
        model_type: The model type that is ported.
        path: The path of the file.
        prefix: The prefix of all class names, such as "Llama".
        classes: The classes, by name.
        functions: The functions, by name.
        constants: The values of other variables of the module, by name.
        imported: For each imported name, its name in the module that defines it.
        abstract: The base class of all models of the file.
        encoder_only: Whether the models can be encoders or decoders. Their ports are encoders.
        tests: Regular expressions of conditions on options that the port does not support, with
            their constant values.
        absent: The arguments that the port does not support, with the value `None`.
    """

    def __init__(self, model_type: str):
        self.model_type = model_type
        types = model_types()
        if model_type not in types:
            raise UsageError(
                f"Transformers has no model type '{model_type}'{did_you_mean(model_type, types)}"
            )
        folder = module_folder(model_type)
        self.path = transformers_folder() / "models" / folder / f"modeling_{folder}.py"
        if not self.path.is_file():  # several types share a folder, such as data2vec
            own = f"modeling_{model_type.replace('-', '_')}.py"
            self.path = (
                self.path.with_name(own) if self.path.with_name(own).is_file() else self.path
            )
        if not self.path.is_file():
            raise UsageError(
                f"Transformers has no model file for the model type '{model_type}': "
                f"models/{folder}/modeling_{folder}.py does not exist, so it cannot be ported"
            )
        tree = ast.parse(self.path.read_text(encoding="utf-8"))
        _Choices(tree).visit(tree)
        _OwnGradients(tree).visit(tree)
        modernize(tree)
        for name in task_classes(model_type).values():
            for source, names in split_weights(model_type, name):
                join_projections(tree, source, names)
            break  # the base model
        nodes = [node for node in tree.body if isinstance(node, ast.ClassDef)]
        abstract = [node.name for node in nodes if node.name.endswith("PreTrainedModel")]
        if not abstract:
            raise UsageError(
                f"{self.path.name} defines no class whose name ends in PreTrainedModel, so its "
                "models cannot be ported"
            )
        self.task_classes = task_classes(model_type)
        base = self.task_classes.get("Model", "")
        parents = {node.name: [ast.unparse(part) for part in node.bases] for node in nodes}
        own_bases: list[str] = [name for name in abstract if name in parents.get(base, [])]
        self.prefix = (own_bases or abstract)[0].removesuffix("PreTrainedModel")
        self.classes: dict[str, SourceClass] = {}
        for node in nodes:
            self.classes[node.name] = SourceClass(node, self)
        self.abstract = self.classes[(own_bases or abstract)[0]]
        self.functions = {
            node.name: node for node in tree.body if isinstance(node, ast.FunctionDef)
        }
        self.constants: dict[str, ast.expr] = {}
        self.imported: dict[str, str] = {}
        self._origins: dict[str, tuple[ast.ImportFrom, str]] = {}
        for item in tree.body:
            if isinstance(item, ast.Assign) and isinstance(item.targets[0], ast.Name):
                self.constants[item.targets[0].id] = item.value
            if isinstance(item, ast.ImportFrom):
                for alias in item.names:
                    if item.level:
                        self._origins[alias.asname or alias.name] = (item, alias.name)
                self.imported |= {alias.asname or alias.name: alias.name for alias in item.names}
        source = self.path.read_text(encoding="utf-8")
        has_cross_attention = "config.add_cross_attention" in source
        self.encoder_only = has_cross_attention and "config.is_decoder" in source
        self.tests = ENCODER_TESTS if has_cross_attention else {}
        self.absent = dict.fromkeys(ENCODER_INPUTS) if has_cross_attention else {}
        for owner in self.classes.values():
            if "__init__" in owner.methods:
                constructor = owner.methods["__init__"]
                if owner.base_layer == "nn.LayerNorm":
                    _name_arguments(constructor)
                constants = {"is_cross_attention": False} if self.encoder_only else {}
                body = fold(constructor.body, constants, self.tests)
                constructor.body = _without_aliases(body, self.classes) or [ast.Pass()]
            owner.find_parts()
        for owner in self.classes.values():
            owner.inherit_parts()
            owner.inherit_methods()

    @property
    def activations(self) -> dict[str, str]:
        """For each activation function that the file imports, its name in the table `ACT2FN`."""
        return {
            name: original
            for name, (item, original) in self._origins.items()
            if item.module == "activations" and original in _ACTIVATIONS
        }

    @functools.cached_property
    def recorded_layers(self) -> set[str]:
        """The classes whose outputs PyTorch returns as hidden states."""
        layers: set[str] = set()
        for owner in self.classes.values():
            records = owner.fields.get("_can_record_outputs")
            if isinstance(records, ast.Dict):
                for key, value in zip(records.keys, records.values, strict=True):
                    if isinstance(key, ast.Constant) and key.value == "hidden_states":
                        layers.add(dotted(value))
        return layers

    @functools.cached_property
    def text(self) -> str:
        """The source of the classes of the file without comments."""
        return "\n".join(owner.text for owner in self.classes.values())

    @property
    def hides_with_booleans(self) -> bool:
        """Whether the file uses a boolean causal mask that is true where a key is masked."""
        return bool(re.search(r"create_causal_mask\([^()]*\)\.to\(torch\.bool\)", self.text))

    @property
    def relative_path(self) -> str:
        """The path relative to the folder that contains Transformers."""
        return f"transformers/models/{self.path.parent.name}/{self.path.name}"

    def import_function(self, name: str) -> bool:
        """Adds a function that the file imports from another file to `functions`.

        Returns:
            Whether `functions` now contains the function.
        """
        if name in self.functions or name not in self._origins:
            return name in self.functions
        item, original = self._origins[name]
        folder = self.path.parents[item.level - 1]
        path = folder.joinpath(*(item.module or "").split(".")).with_suffix(".py")
        if not path.is_file():
            return False
        tree = ast.parse(path.read_text(encoding="utf-8"))
        functions = {node.name: node for node in tree.body if isinstance(node, ast.FunctionDef)}
        if original not in functions:
            return False
        self.functions[name] = functions[original]
        return True

    def _base_model(self) -> SourceClass | None:
        """Returns the base model of a model type that `AutoModel` does not list, or `None`."""
        config_name = model_types()[self.model_type]
        models = [
            owner
            for owner in self.classes.values()
            if owner.kind == "model" and _mentions(owner, config_name)
        ]
        plain = [owner for owner in models if owner.name.endswith("Model")]
        return next(iter(plain or models), None)

    def _has_other_config(self, owner: SourceClass) -> bool:
        """Returns whether a class uses the configuration of another model type of the same folder.

        For example, the ported model type can be the text model of an image-text model. The heads
        of the image-text model are then not heads of the port.
        """
        types = model_types()
        folder = self.path.parent.name
        others = {name for kind, name in types.items() if module_folder(kind) == folder}
        others.discard(types[self.model_type])
        return any(_mentions(owner, name) for name in others)

    def heads(self) -> dict[str, SourceClass]:
        """Returns the class of each head, such as `Model` and `ForCausalLM`."""
        heads: dict[str, SourceClass] = {}
        for task, name in sorted(self.task_classes.items(), key=lambda item: _task_rank(item[0])):
            owner = self.classes.get(name)
            if owner is not None and owner not in heads.values():
                suffix = name.removeprefix(self.prefix)
                if task not in _KNOWN_TASKS and not name.endswith(task):
                    task = suffix if suffix.startswith("For") else task
                heads[task] = owner
        if "Model" not in heads and (base := self._base_model()) is not None:
            heads = {"Model": base} | {
                task: owner for task, owner in heads.items() if owner is not base
            }
        found_classes = {owner.name for owner in heads.values()}
        for name, owner in self.classes.items():  # heads without an Auto class
            suffix = name.removeprefix(self.prefix)
            is_head = suffix.startswith("For") and owner.kind in ("model", "generic")
            if is_head and self._has_other_config(owner):
                continue
            if is_head and name not in found_classes and suffix not in heads and "Model" in heads:
                heads[suffix] = owner
        return dict(sorted(heads.items(), key=lambda item: item[0] != "Model"))


class _Choices(ast.NodeTransformer):
    """Replaces lookups in dictionaries of layers and activation functions.

    For a dictionary `NORMS` of layers, `NORMS[name](size)` becomes
    `nn.LayerNorm(size) if name == "layer_norm" else {}[name]`, with one condition for each entry.
    The empty dictionary raises a KeyError for unknown names, as `NORMS` does.

    For a dictionary `FUNCTIONS` of activation functions, `FUNCTIONS[name]` becomes a lookup in
    `ACT2FN`. For a dictionary `CLASSES` of attention classes, a lookup by
    `config._attn_implementation` becomes the class for eager attention.
    """

    def __init__(self, tree: ast.Module):
        classes = {node.name for node in tree.body if isinstance(node, ast.ClassDef)}
        activations = {
            alias.asname or alias.name: alias.name
            for node in tree.body
            if isinstance(node, ast.ImportFrom) and node.module == "activations"
            for alias in node.names
        }
        self.aliases = {
            dotted(item.targets[0]): item.value
            for item in tree.body
            if isinstance(item, ast.Assign) and re.fullmatch(r"nn\.[A-Z]\w+", dotted(item.value))
        }
        self.classes: dict[str, dict[str, ast.expr]] = {}
        self.functions: dict[str, dict[str, str]] = {}
        self.eager: dict[str, str] = {}
        for item in tree.body:
            if not (isinstance(item, ast.Assign) and isinstance(item.value, ast.Dict)):
                continue
            for key, value in zip(item.value.keys, item.value.values, strict=True):
                if isinstance(key, ast.Constant) and key.value == "eager" and dotted(value):
                    self.eager[dotted(item.targets[0])] = dotted(value)
            names = [key.value for key in item.value.keys if isinstance(key, ast.Constant)]
            values = item.value.values
            if not names or len(names) != len(values) or len(item.targets) > 1:
                continue
            if not all(isinstance(name, str) for name in names):
                continue
            functions = [_activation_name(value, activations) for value in values]
            if all(functions):
                self.functions[dotted(item.targets[0])] = dict(zip(names, functions, strict=True))  # type: ignore[arg-type]
            elif all(
                dotted(value) in classes or re.fullmatch(r"nn\.[A-Z]\w+", dotted(value))
                for value in values
            ):
                self.classes[dotted(item.targets[0])] = dict(zip(names, values, strict=True))  # type: ignore[arg-type]

    def visit_Subscript(self, node: ast.Subscript) -> ast.AST:
        self.generic_visit(node)
        eager = self.eager.get(dotted(node.value))
        if eager is not None and ast.unparse(node.slice).endswith("attn_implementation"):
            return ast.copy_location(ast.Name(eager, ast.Load()), node)
        functions = self.functions.get(dotted(node.value))
        if functions is not None:
            names = ast.Dict(
                [ast.Constant(name) for name in functions],
                [ast.Constant(name) for name in functions.values()],
            )
            lookup = ast.Subscript(names, node.slice, ast.Load())
            return ast.copy_location(
                ast.Subscript(ast.Name("ACT2FN", ast.Load()), lookup, ast.Load()), node
            )
        table = self.classes.get(dotted(node.value))
        if table is not None and isinstance(node.slice, ast.Constant) and node.slice.value in table:
            return ast.copy_location(table[node.slice.value], node)
        return node

    def visit_Name(self, node: ast.Name) -> ast.AST:
        if node.id in self.aliases and isinstance(node.ctx, ast.Load):
            return ast.copy_location(copy.deepcopy(self.aliases[node.id]), node)
        return node

    def visit_Call(self, node: ast.Call) -> ast.AST:
        self.generic_visit(node)
        base = re.fullmatch(r"nn\.[A-Z]\w+\.(__init__|forward)", dotted(node.func))
        if base and node.args and dotted(node.args[0]) == "self":  # the method of the base class
            node.func, node.args = expression(f"super().{base[1]}"), node.args[1:]
            return ast.fix_missing_locations(node)
        if isinstance(node.func, ast.Attribute) and node.func.attr == "forward":
            if dotted(node.func.value):  # a module, and not super()
                node.func = node.func.value
        if not isinstance(node.func, ast.Subscript):
            return node
        table = self.classes.get(dotted(node.func.value))
        if table is None:
            return node
        result: ast.expr = ast.Subscript(
            ast.Dict([], []), copy.deepcopy(node.func.slice), ast.Load()
        )
        for name, value in reversed(table.items()):
            choice = ast.Call(value, copy.deepcopy(node.args), copy.deepcopy(node.keywords))
            test = ast.Compare(copy.deepcopy(node.func.slice), [ast.Eq()], [ast.Constant(name)])
            result = ast.IfExp(test, choice, result)
        return ast.fix_missing_locations(ast.copy_location(result, node))


class _OwnGradients(ast.NodeTransformer):
    """Turns subclasses of `torch.autograd.Function` into functions with `jax.custom_vjp`.

    A class is translated only if it saves exactly its arguments for the backward pass.
    """

    def __init__(self, tree: ast.Module):
        self.names: dict[str, str] = {}
        for node in list(tree.body):
            if isinstance(node, ast.ClassDef) and any(
                ast.unparse(base) == "torch.autograd.Function" for base in node.bases
            ):
                function = self.function(node)
                if function is not None:
                    self.names[node.name] = function.name
                    tree.body.insert(tree.body.index(node), function)
                    tree.body.remove(node)

    @staticmethod
    def function(node: ast.ClassDef) -> ast.FunctionDef | None:
        """Returns the function that replaces a class, or `None` if its form is not supported."""
        methods = {item.name: item for item in node.body if isinstance(item, ast.FunctionDef)}
        if set(methods) != {"forward", "backward"}:
            return None
        forward, backward = copy.deepcopy(methods["forward"]), copy.deepcopy(methods["backward"])
        arguments = [arg.arg for arg in forward.args.args][1:]
        save = f"ctx.save_for_backward({', '.join(arguments)})"
        if len(backward.args.args) != 2 or forward.args.args[0].arg != "ctx":
            return None
        forward.body = [line for line in forward.body if ast.unparse(line) != save]
        replace(backward, {"ctx.saved_tensors": expression("saved")})
        results = [line for line in ast.walk(backward) if isinstance(line, ast.Return)]
        if len(results) != 1 or results[0].value is None:
            return None
        if not isinstance(results[0].value, ast.Tuple):
            results[0].value = ast.Tuple([results[0].value], ast.Load())
        bodies = [*forward.body, *backward.body]
        if any("ctx" in ast.unparse(line) for line in bodies):
            return None
        name = re.sub(r"(?<=[a-zA-Z])(?=[A-Z][a-z])", "_", node.name).lower()
        names, gradient = ", ".join(arguments), backward.args.args[1].arg
        text = (
            f"def {name}({names}):\n"
            "    @jax.custom_vjp\n"
            f"    def apply({names}): pass\n"
            f"    def forward({names}): return (apply({names}), ({names},))\n"
            f"    def backward(saved, {gradient}): pass\n"
            "    apply.defvjp(forward, backward)\n"
            f"    return apply({names})"
        )
        result = ast.parse(text).body[0]
        assert isinstance(result, ast.FunctionDef)
        for position, body in ((0, forward.body), (2, backward.body)):
            inner = result.body[position]
            assert isinstance(inner, ast.FunctionDef)
            inner.body = [
                line
                for line in body
                if not (isinstance(line, ast.Expr) and isinstance(line.value, ast.Constant))
            ]
        for part in ast.walk(result):
            ast.copy_location(part, node)
        return result

    def visit_Call(self, node: ast.Call) -> ast.AST:
        self.generic_visit(node)
        name = dotted(node.func).removesuffix(".apply")
        if dotted(node.func).endswith(".apply") and name in self.names:
            node.func = ast.copy_location(ast.Name(self.names[name], ast.Load()), node.func)
        return node


def _activation_name(value: ast.expr, imported: dict[str, str]) -> str | None:
    """Returns the name of an activation function in the table `ACT2FN`, or `None`."""
    if isinstance(value, ast.Call) and not value.args and not value.keywords:
        return {
            "nn.ReLU": "relu",
            "nn.GELU": "gelu",
            "nn.SiLU": "silu",
            "nn.Tanh": "tanh",
            "nn.Sigmoid": "sigmoid",
        }.get(dotted(value.func))
    name = imported.get(dotted(value))
    return name if name in _ACTIVATIONS else None


#: Names that both the module `transformers.activations` and its table `ACT2FN` contain.
_ACTIVATIONS = ("gelu_new", "silu", "gelu", "gelu_fast", "quick_gelu")


def _name_arguments(constructor: ast.FunctionDef) -> None:
    """Replaces the argument `*args` of a constructor with the arguments of `nn.LayerNorm`."""
    if constructor.args.vararg is None or len(constructor.args.args) > 1:
        return
    layer = ast.parse("def f(self, normalized_shape, eps=1e-5): pass").body[0]
    assert isinstance(layer, ast.FunctionDef)
    constructor.args.args, constructor.args.defaults = layer.args.args, layer.args.defaults
    name, constructor.args.vararg = constructor.args.vararg.arg, None
    for node in ast.walk(constructor):
        if isinstance(node, ast.Call) and any(
            isinstance(arg, ast.Starred) and dotted(arg.value) == name for arg in node.args
        ):
            node.args = [ast.Name("normalized_shape", ast.Load())]
            node.keywords = [ast.keyword("eps", ast.Name("eps", ast.Load())), *node.keywords]
    ast.fix_missing_locations(constructor)


def _without_aliases(body: list[ast.stmt], classes: Collection[str]) -> list[ast.stmt]:
    """Replaces local variables that hold a class of the file with that class."""
    aliases = {
        dotted(item.targets[0]): item.value
        for item in body
        if isinstance(item, ast.Assign)
        and isinstance(item.targets[0], ast.Name)
        and dotted(item.value) in classes
    }
    lines = [
        item
        for item in body
        if not (isinstance(item, ast.Assign) and dotted(item.targets[0]) in aliases)
    ]
    return [replace(item, aliases) for item in lines]  # type: ignore[misc]


#: Tasks whose names are kept even if the name of the class does not end with the task.
_KNOWN_TASKS = {*TASKS, *FALLBACK_TASKS}


def _mentions(owner: SourceClass, config_name: str) -> bool:
    """Returns whether a model class is annotated with a configuration class."""
    for item in owner.node.body:
        if isinstance(item, ast.AnnAssign) and dotted(item.target) == "config":
            return ast.unparse(item.annotation) == config_name
    constructor = owner.methods.get("__init__")
    annotations = [arg.annotation for arg in constructor.args.args] if constructor else []
    return any(ast.unparse(note) == config_name for note in annotations if note is not None)


def _task_rank(task: str) -> int:
    """Returns the sort key of a task. A class with several tasks gets the first one in order."""
    if task in ("Model", "ForSeq2SeqLM"):
        return 0
    return 2 if task in ("ForPreTraining", "ForTextEncoding") else 1


def model_types() -> dict[str, str]:
    """Returns the name of the configuration class of each model type."""
    from transformers.models.auto.configuration_auto import CONFIG_MAPPING_NAMES

    return dict(CONFIG_MAPPING_NAMES)


def module_folder(model_type: str) -> str:
    """Returns the folder of a model type in `transformers/models`."""
    from transformers.models.auto.configuration_auto import model_type_to_module_name

    return model_type_to_module_name(model_type).replace(".", "/")


@functools.cache
def _auto_mappings() -> tuple[dict[str, dict[str, str]], dict[str, str]]:
    """Reads the tables of `modeling_auto`, which cannot be imported without PyTorch."""
    path = transformers_folder() / "models" / "auto" / "modeling_auto.py"
    tables: dict[str, dict[str, str]] = {}
    tasks: dict[str, str] = {}
    for node in ast.parse(path.read_text(encoding="utf-8")).body:
        if isinstance(node, ast.Assign) and dotted(node.targets[0]).endswith("_MAPPING_NAMES"):
            pairs = [item for item in ast.walk(node.value) if isinstance(item, ast.Tuple)]
            table = {}
            for pair in pairs:
                try:
                    model_type, name = ast.literal_eval(pair)
                except (ValueError, TypeError):
                    continue
                table[model_type] = name if isinstance(name, str) else name[0]
            tables[dotted(node.targets[0]).removesuffix("_NAMES")] = table
        if isinstance(node, ast.ClassDef) and node.name.startswith("AutoModel"):
            for item in node.body:
                if isinstance(item, ast.Assign) and dotted(item.targets[0]) == "_model_mapping":
                    tasks.setdefault(
                        node.name.removeprefix("AutoModel") or "Model", dotted(item.value)
                    )
    return tables, tasks


def task_classes(model_type: str) -> dict[str, str]:
    """Returns the name of the PyTorch class of a model type for each task."""
    tables, tasks = _auto_mappings()
    classes = {task: tables.get(table, {}).get(model_type) for task, table in tasks.items()}
    return {task: name for task, name in classes.items() if name is not None}


_SHARED = {
    "decoder.embed_tokens.weight": "shared.weight",
    "encoder.embed_tokens.weight": "shared.weight",
}


def is_pair(file: SourceFile) -> bool:
    """Returns whether the base model is an encoder-decoder that this module supports."""
    base = file.classes.get(file.task_classes.get("Model", ""))
    if base is None or base.forward is None or base.literal("_tied_weights_keys", {}) != _SHARED:
        return False
    if "decoder_input_ids" not in parameters(base.forward):
        return False
    encoder, decoder = (base.parts.get(name) for name in ("encoder", "decoder"))
    if encoder is decoder or not any(map(is_shared_attention, file.classes.values())):
        return False
    return all(
        isinstance(stack, SourceClass) and stack.forward is not None for stack in (encoder, decoder)
    )


def is_shared_attention(owner: SourceClass) -> bool:
    """Returns whether a class of an encoder-decoder computes self-attention and cross-attention."""
    return (
        owner.kind == "attention"
        and owner.forward is not None
        and "key_value_states" in parameters(owner.forward)
        and owner.assigned.get("is_causal") == "is_causal"
    )
