"""Adds types, shapes and docstrings to the classes and functions of a port."""

from __future__ import annotations

import ast
import re
from collections.abc import Mapping, Sequence

from hfseq.cli.port.lifting import is_cached
from hfseq.cli.port.scope import PortedClass, Translator
from hfseq.cli.port.source import SourceClass
from hfseq.cli.port.syntax import default_values, dotted, is_none, own_attribute

#: Shapes of arguments, for the comments in the port.
SHAPES = {
    "input_ids": "(batch, length)",
    "attention_mask": "(batch, length)",
    "token_type_ids": "(batch, length)",
    "position_ids": "(batch, length)",
    "segment_ids": "(batch, length)",
    "pixel_values": "(batch, channels, height, width)",
    "input_values": "(batch, samples)",
    "input_features": "(batch, features, frames)",
    "hidden_states": "(batch, length, hidden)",
    "bool_masked_pos": "(batch, patches)",
}
#: Types of parameters of `__call__`, by name.
_CALL_TYPES = {
    "rngs": "Keys | None",
    "return_weights": "bool",
    "output_attentions": "bool",
    "output_hidden_states": "bool",
    "tied_embeddings": "nn.Embed | None",
}
_COUNTS = re.compile(
    r"\w*(channels|size|dim|features|heads|buckets|distance|positions|embeddings|stride|depth"
    r"|groups|dilation|_idx|layers|width|height|length|num_\w+)$"
)


class Annotator:
    """Writes the text of functions and classes with types, shapes and docstrings.

    Args:
        translator: The translator of the file.
        nodes: The simplified definitions of the port.
    """

    def __init__(self, translator: Translator, nodes: Sequence[ast.stmt]):
        self.translator = translator
        self.ports = {port.name: port for port in translator.order}
        self.text = "\n".join(ast.unparse(node) for node in nodes)
        self.uses_masks = "nn.visible(" in self.text
        self.uses_rotary = "nn.Rotary(" in self.text or "nn.rotate(" in self.text
        convolutions = len(re.findall(r"nn\.(Conv|BatchNorm)\(", self.text))
        self.is_convolutional = convolutions > 2 and "nn.attend(" not in self.text
        self.has_sequences = convolutions <= 1 or "pixel_values" not in self.text
        self.returns: dict[str, str] = {}
        self.classes = {node.name: node for node in nodes if isinstance(node, ast.ClassDef)}

    def write(self, node: ast.stmt) -> str:
        """Returns the text of a definition."""
        if isinstance(node, ast.ClassDef) and node.name in self.ports:
            return self.write_class(node, self.ports[node.name])
        if isinstance(node, ast.FunctionDef):
            self.annotate_function(node)
        return unparse(node)

    def write_class(self, node: ast.ClassDef, port: PortedClass) -> str:
        """Returns the text of a class."""
        signatures: dict[str, str] = {}
        for item in node.body:
            if isinstance(item, ast.FunctionDef):
                if item.name == "__init__":
                    self.annotate_constructor(item, port)
                elif item.name == "__call__":
                    self.annotate_call(item, node, port)
                    signatures[item.name] = self.call_signature(item, port)
                else:
                    self.annotate_function(item)
        lines = unparse(node).split("\n")
        for number, line in enumerate(lines):
            if line.startswith("    def __call__(") and "__call__" in signatures:
                lines[number] = signatures["__call__"]
        docstring = describe(self.translator, port, node)
        if docstring:
            lines[1:1] = [f'    """{docstring}"""', ""]
        return "\n".join(lines)

    def annotate_constructor(self, function: ast.FunctionDef, port: PortedClass) -> None:
        """Adds types to the parameters of a constructor."""
        defaults = default_values(function)
        types = {
            "config": self.translator.config_name,
            "rngs": "nnx.Rngs",
            "init": "jax.nn.initializers.Initializer",
        }
        for arg in function.args.args[1:]:
            kind = types.get(arg.arg) or _constant_type(defaults.get(arg.arg))
            if not kind and _COUNTS.fullmatch(arg.arg):
                kind = "int"
            if kind == "str" and self.passes_none(port.name, arg.arg):
                kind = "str | None"
            arg.annotation = ast.Name(kind or "Any")

    def passes_none(self, name: str, argument: str) -> bool:
        """Returns whether a constructor call of the port passes `None` for an argument."""
        return bool(re.search(rf"\b{name}\([^()]*\b{argument}=None", self.text))

    def annotate_call(
        self, function: ast.FunctionDef, node: ast.ClassDef, port: PortedClass
    ) -> None:
        """Adds types to `__call__`."""
        arguments = function.args
        if arguments.vararg is not None:
            arguments.vararg.annotation = ast.Name("Any")
        if arguments.kwarg is not None:
            arguments.kwarg.annotation = ast.Name("Any")
        defaults = default_values(function)
        for arg in (*arguments.args[1:], *arguments.kwonlyargs):
            arg.annotation = ast.Name(self.call_type(arg.arg, defaults.get(arg.arg), port))
        result = self.result_type(function, node)
        self.returns[node.name] = result
        if result:
            function.returns = ast.Name(result)

    def call_type(self, name: str, default: ast.expr | None, port: PortedClass) -> str:
        """Returns the type of a parameter of `__call__`."""
        if name in _CALL_TYPES:
            return _CALL_TYPES[name]
        if name == "attention_mask" and port.source.kind != "model" and self.uses_masks:
            return "Mask"
        kind = _constant_type(default)
        if kind:
            return kind
        array = "jax.Array"
        if name in ("position_embeddings", "sinusoidal_pos") and self.uses_rotary:
            array = "tuple[jax.Array, jax.Array]"
            if "position_embeddings[" in self.text:
                array = f"dict[str, {array}]" if "layer_type" in self.text else array
        elif re.fullmatch(r"num_\w+|height|width|\w*_(size|length)", name):
            array = "int"
        elif name.endswith("_shape"):
            array = "tuple[int, ...]"
        return f"{array} | None" if is_none(default) else array

    def result_type(self, function: ast.FunctionDef, node: ast.ClassDef) -> str:
        """Returns the type of the result of `__call__`, or `""` if it is not known."""
        values = [n.value for n in ast.walk(function) if isinstance(n, ast.Return)]
        types = {self.value_type(value, function, node) for value in values}
        return types.pop() if len(types) == 1 else ""

    def value_type(
        self, value: ast.expr | None, function: ast.FunctionDef, node: ast.ClassDef
    ) -> str:
        """Returns the type of a returned expression."""
        if isinstance(value, ast.Tuple):
            if len(value.elts) == 2 and is_none(value.elts[1]):
                return "tuple[jax.Array, None]"
            if len(value.elts) == 2 and re.search(
                r"weights|probs|None", ast.unparse(value.elts[1])
            ):
                return "tuple[jax.Array, jax.Array | None]"
            if any(re.search(r"attentions|states", dotted(part)) for part in value.elts[1:]):
                return ""
            return f"tuple[{', '.join(['jax.Array'] * len(value.elts))}]"
        if isinstance(value, ast.Call):
            name = dotted(value.func)
            if re.match(r"(out\.|Flax)\w+$", name):
                return "out.FlaxModelOutput"
            attribute = own_attribute(value.func)
            if attribute:
                made = [
                    dotted(item.value.func)
                    for item in ast.walk(node)
                    if isinstance(item, ast.Assign)
                    and own_attribute(item.targets[0]) == attribute
                    and isinstance(item.value, ast.Call)
                ]
                if made and made[0] in self.classes:
                    return self.returns.get(made[0], "")
        if isinstance(value, ast.Name):
            # The last assignment of a tuple to the name is not followed.
            for item in ast.walk(function):
                if isinstance(item, ast.Assign) and dotted(item.targets[0]) == value.id:
                    if isinstance(item.value, ast.Tuple | ast.Dict | ast.List):
                        return ""
        if value is None or isinstance(value, ast.Constant):
            return ""
        return "jax.Array"

    def annotate_function(self, function: ast.FunctionDef) -> None:
        """Adds types to a helper function or to another method, as far as they are certain."""
        defaults = default_values(function)
        for arg in function.args.args:
            if arg.arg == "self":
                continue
            kind = _CALL_TYPES.get(arg.arg) or _constant_type(defaults.get(arg.arg))
            if not kind and _is_array(function, arg.arg):
                kind = "jax.Array | None" if is_none(defaults.get(arg.arg)) else "jax.Array"
            elif not kind and re.fullmatch(r"num_\w+|dim|height|width|\w+_size", arg.arg):
                kind = "int | None" if is_none(defaults.get(arg.arg)) else "int"
            if kind:
                arg.annotation = ast.Name(kind)
        for arg in function.args.kwonlyargs:
            if arg.arg in _CALL_TYPES:
                arg.annotation = ast.Name(_CALL_TYPES[arg.arg])
        values = [n.value for n in ast.walk(function) if isinstance(n, ast.Return)]
        if values and all(_is_array_expression(value) for value in values):
            function.returns = ast.Name("jax.Array")

    def call_signature(self, function: ast.FunctionDef, port: PortedClass) -> str:
        """Returns the text of the signature of `__call__` with the shapes of the inputs."""
        arguments = function.args
        returns = f" -> {ast.unparse(function.returns)}" if function.returns else ""
        defaults = default_values(function)
        rows: list[tuple[str, str]] = [("self", "")]
        for arg in arguments.args[1:]:
            rows.append((_parameter(arg, defaults), self.shape(arg.arg, port)))
        if arguments.vararg is not None:
            rows.append((f"*{ast.unparse(arguments.vararg)}", ""))
        elif arguments.kwonlyargs:
            rows.append(("*", ""))
        rows += [(_parameter(arg, defaults), "") for arg in arguments.kwonlyargs]
        if arguments.kwarg is not None:
            rows.append((f"**{ast.unparse(arguments.kwarg)}", ""))
        comments = [comment for _, comment in rows if comment]
        one = f"    def __call__({', '.join(text for text, _ in rows)}){returns}:"
        if not comments:
            return one
        if len(comments) == 1 and rows[1][1]:
            line = f"{one}  # {comments[0]}"
            if len(line) <= 100:
                return line
        lines = [f"        {text},{f'  # {comment}' if comment else ''}" for text, comment in rows]
        return "\n".join(["    def __call__(", *lines, f"    ){returns}:"])

    def shape(self, name: str, port: PortedClass) -> str:
        """Returns the shape of an argument, or an empty string if it is not certain."""
        if name in ("hidden_states", "hidden_state", "x", "input", "features"):
            if self.is_convolutional:
                return "" if name == "features" else SHAPES["pixel_values"]
            certain = name == "hidden_states" and self.has_sequences
            return SHAPES["hidden_states"] if certain else ""
        if name == "attention_mask" and port.source.kind != "model":
            return ""
        shape = SHAPES.get(name, "")
        if port.name.endswith("MultipleChoice") and shape == "(batch, length)":
            return "(batch, choices, length)"
        return shape


def _parameter(arg: ast.arg, defaults: Mapping[str, ast.expr]) -> str:
    text = ast.unparse(arg)
    default = defaults.get(arg.arg)
    if default is None:
        return text
    return (
        f"{text} = {ast.unparse(default)}" if arg.annotation else f"{text}={ast.unparse(default)}"
    )


def _constant_type(default: ast.expr | None) -> str:
    if isinstance(default, ast.Constant) and default.value is not None:
        return type(default.value).__name__
    return ""


_ARRAY_METHODS = "shape|reshape|astype|swapaxes|transpose|ndim|dtype|sum|mean|T"


def _is_array(function: ast.FunctionDef, name: str) -> bool:
    text = "\n".join(ast.unparse(item) for item in function.body)
    pattern = rf"\b{name}\.({_ARRAY_METHODS})\b|\b{name}\[\.\.\.|self\.\w+\({name}\b"
    return re.search(rf"{pattern}|jnp\.(?!arange)\w+\({name}\b|-{name}\b", text) is not None


def _is_array_expression(value: ast.expr | None) -> bool:
    text = "" if value is None else ast.unparse(value)
    return (
        re.match(r"jnp\.(?!ndim|shape)\w+\(", text) is not None
        or re.search(r"\.(reshape|astype|swapaxes|transpose)\([^()]*\)$", text) is not None
    )


def unparse(node: ast.AST) -> str:
    """Returns the text of a definition, with `return a, b` for tuples."""
    text = ast.unparse(ast.fix_missing_locations(node))
    text = re.sub(r"^( *return) \((.*)\)$", _without_parentheses, text, flags=re.MULTILINE)
    text = re.sub(r"\*\* \((-[\d.]+)\)", r"**\1", text)
    return re.sub(r"\b1e-0(\d)\b", r"1e-\1", text)


def _without_parentheses(match: re.Match[str]) -> str:
    try:
        value = ast.parse(f"({match[2]})", mode="eval").body
    except SyntaxError:
        return match[0]
    if isinstance(value, ast.Tuple) and value.elts:
        return f"{match[1]} {match[2]}"
    return match[0]


# -- docstrings

_TASKS = {
    "ForCausalLM": "Causal language model. A tied head reuses the word embeddings.",
    "ForMaskedLM": "Encoder with a masked language modeling head.",
    "ForPreTraining": "Encoder with the heads of the pre-training objectives.",
    "ForSequenceClassification": "Sequence classification or regression.",
    "ForTokenClassification": "Classification of each token.",
    "ForQuestionAnswering": "Extractive question answering: first and last token of the answer.",
    "ForMultipleChoice": "Multiple choice. Each choice is one row of the encoder's batch.",
    "ForNextSentencePrediction": "Classification of whether the second sentence follows the first.",
    "ForImageClassification": "Image classification.",
    "ForMaskedImageModeling": "Reconstruction of the pixels of masked patches.",
    "ForSemanticSegmentation": "Classification of each pixel.",
    "ForAudioClassification": "Audio classification.",
    "ForCTC": "Speech recognition with connectionist temporal classification (CTC).",
}
#: Docstrings of common classes, by the end of the name.
_ENDINGS = {
    "Experts": "The feed-forward blocks of all experts.",
    "Router": "Chooses the experts of each token.",
    "MoeBlock": "Routes each token to the experts that the router chooses.",
    "MoE": "Routes each token to the experts that the router chooses.",
    "PatchEmbeddings": "Embeddings of the patches of an image, row by row.",
    "SwiGLUFFN": "Gated feed-forward block (SwiGLU).",
    "Intermediate": "First half of the feed-forward block: projection and activation.",
    "SelfOutput": "Output projection of attention, with dropout, residual connection and norm.",
    "LayerScale": "Scales each feature by a learned factor.",
    "ConvLayer": "Convolution, batch norm and activation.",
    "ShortCut": "Residual connection to a block with another number of channels or resolution.",
    "BottleNeckLayer": "Residual block of three convolutions, the middle one with fewer channels.",
    "BasicLayer": "Residual block of two convolutions.",
    "Encoder": "Stages of the network, from high to low resolution.",
    "Stage": "Residual blocks of one resolution. The first one may reduce it.",
    "LMPredictionHead": "Projection to the vocabulary, after a transform.",
    "PredictionHeadTransform": "Projection, activation and norm before the vocabulary.",
    "OnlyMLMHead": "Holds the language modeling head, as in checkpoints.",
    "MLMHead": "Masked language modeling head.",
    "LMHead": "Language modeling head.",
    "SequenceSummary": "Summary of a sequence: one of its states, projected.",
    "RotaryEmbedding": "Sines and cosines of rotary position embeddings.",
    "SOPHead": "Sentence order prediction from the pooled output.",
    "ClassificationHead": "Classifier of the first token, with a hidden layer.",
    "LayerGroup": "Layers that several steps of the encoder share.",
    "LearnedPositionalEmbedding": "Learned position embeddings.",
    "SinusoidalPositionalEmbedding": "Sinusoidal position embeddings.",
}


def describe(translator: Translator, port: PortedClass, node: ast.ClassDef) -> str:
    """Returns a docstring for a class, or `""` if there is none for this kind of class."""
    owner, text = port.source, ast.unparse(node)
    heads = translator.file.heads()
    task = next((task for task, head in heads.items() if head is owner), "")
    if task == "Model":
        kind = "decoder" if translator.heads_generate else "encoder"
        main = port.arguments[:1]
        if main == ["pixel_values"] and "nn.attend(" not in text:
            return f"{translator.file.prefix} without a head. Returns features of the image."
        return f"{translator.file.prefix} {kind} without a head."
    if task in _TASKS:
        return _TASKS[task]
    if owner.kind == "attention" or "nn.attend(" in text or "nn.extend_cache(" in text:
        return _describe_attention(owner, text)
    if owner.kind == "layer":
        return "Layer of attention and a feed-forward block, each with a residual connection."
    if "nn.run_layers(" in text and not port.name.endswith("LayerGroup"):
        return "Stack of layers."
    if port.name.endswith("Attention"):
        return "Self-attention and its output projection."
    for ending, description in _ENDINGS.items():
        if ending == "Encoder" and "stages" not in text:
            continue
        if port.name.endswith(ending):
            return description
    if port.name.endswith("Pooler"):
        return "Projection of the first token, with an activation." if "[:, 0]" in text else ""
    if port.name.endswith("Embeddings"):
        return _describe_embeddings(text)
    if port.name.endswith(("MLP", "FFN", "FeedForward")):
        return "Gated feed-forward block." if "gate" in text else "Feed-forward block."
    if port.name == "Output":
        return "Projection with dropout, residual connection and norm."
    return ""


def _describe_attention(owner: SourceClass, text: str) -> str:
    if is_cached(owner) or "nn.extend_cache(" in text:
        if "num_key_value_heads" in owner.text:
            return "Causal attention, in which several query heads share a key-value head."
        return "Causal multi-head attention."
    return "Bidirectional multi-head attention."


def _describe_embeddings(text: str) -> str:
    if "pixel_values" in text:
        if "cls_token" in text and "position_embed" in text:
            return "Class token and patch embeddings, plus position embeddings."
        if "cls_token" in text or "position_embed" in text:
            return "Patch embeddings with position embeddings." if "position" in text else ""
        return "First layers of the network, which reduce the resolution."
    kinds = {"word": "word_embeddings", "position": "position_embeddings",
             "token type": "token_type_embeddings"}  # fmt: skip
    names = [name for name, attribute in kinds.items() if attribute in text]
    if len(names) < 2:
        return ""
    listed = f"{', '.join(names[:-1])} and {names[-1]}"
    norm = ", followed by a norm and dropout" if "LayerNorm" in text and "dropout" in text else ""
    return f"Sum of {listed} embeddings{norm}."
