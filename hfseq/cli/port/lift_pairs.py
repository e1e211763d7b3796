"""Translates encoder-decoders whose encoder and decoder share one token embedding, such as BART.

The base model and the head for generation get the methods `encode` and `decode` that generation
calls. Encoder and decoder get the shared embedding as their first argument. The attention class,
which serves self-attention and cross-attention, caches keys and values of both.
"""

from __future__ import annotations

import ast
import re

from hfseq.cli.port import lifting
from hfseq.cli.port.folding import fold
from hfseq.cli.port.scope import STATEMENT_LIFTS, PortedClass, Scope, Translator
from hfseq.cli.port.source import SourceClass, SourceFile, is_pair
from hfseq.cli.port.syntax import dotted, expression, own_attribute, parameters, replace, statements

_FLAGS = "rngs=rngs, output_attentions=output_attentions, output_hidden_states=output_hidden_states"
_OPTIONS = "*, rngs=None, output_attentions=False, output_hidden_states=False"
_BASE = f'''
def encode(self, input_ids, attention_mask=None, {_OPTIONS}):
    """Runs the encoder."""
    return self.encoder(self.shared, input_ids, attention_mask=attention_mask, {_FLAGS})

def decode(
    self,
    decoder_input_ids,
    encoder_hidden_states,
    encoder_attention_mask=None,
    decoder_attention_mask=None,
    decoder_position_ids=None,
    {_OPTIONS},
):
    """Runs the decoder on the output of the encoder."""
    return self.decoder(
        self.shared,
        decoder_input_ids,
        attention_mask=decoder_attention_mask,
        encoder_hidden_states=encoder_hidden_states,
        encoder_attention_mask=nn.visible_across(encoder_attention_mask),
        position_ids=decoder_position_ids,
        {_FLAGS},
    )

def __call__(
    self,
    input_ids,
    attention_mask=None,
    decoder_input_ids=None,
    decoder_attention_mask=None,
    decoder_position_ids=None,
    {_OPTIONS},
):
    encoder_outputs = self.encode(input_ids, attention_mask, {_FLAGS})
    decoder_outputs = self.decode(
        decoder_input_ids,
        encoder_outputs.last_hidden_state,
        attention_mask,
        decoder_attention_mask,
        decoder_position_ids,
        {_FLAGS},
    )
    return out.seq2seq_output(decoder_outputs, encoder_outputs)
'''
_HEAD = '''
def encode(self, *args, **kwargs):
    """Runs the encoder."""
    return self.model.encode(*args, **kwargs)

def decode(self, *args, **kwargs):
    """Runs the decoder and the head."""
    outputs = self.model.decode(*args, **kwargs)
    return out.FlaxCausalLMOutputWithCrossAttentions(
        logits=nn.vocabulary_logits(self.logits, outputs.last_hidden_state),
        hidden_states=outputs.hidden_states,
        attentions=outputs.attentions,
        cross_attentions=outputs.cross_attentions,
    )

def logits(self, hidden_states):
    """Maps hidden states, `(..., hidden)`, to logits, `(..., vocab_size)`."""
    logits = (self.lm_head or self.model.shared.attend)(hidden_states)
    return nn.add_bias(logits, jax.lax.stop_gradient(self.final_logits_bias[0]))

def __call__(self, *args, **kwargs):
    outputs = self.model(*args, **kwargs)
    logits = nn.vocabulary_logits(self.logits, outputs.last_hidden_state)
    other_outputs = {name: value for name, value in outputs.items() if name != "last_hidden_state"}
    return out.FlaxSeq2SeqLMOutput(logits=logits, **other_outputs)
'''
_WITHOUT_BIAS = (
    """    logits = (self.lm_head or self.model.shared.attend)(hidden_states)
    return nn.add_bias(logits, jax.lax.stop_gradient(self.final_logits_bias[0]))
""",
    "    return (self.lm_head or self.model.shared.attend)(hidden_states)\n",
)
#: The computation of logits, with or without `final_logits_bias`.
_LOGITS = re.compile(
    r"lm_logits = self\.lm_head\(outputs(?:\[0\]|\.last_hidden_state)\)"
    r"(?: \+ (self\.final_logits_bias)"
    r"|\n\s+lm_logits = lm_logits \+ (self\.final_logits_bias)\S*)?$",
    re.MULTILINE,
)


def generates(owner: SourceClass) -> bool:
    """Returns whether a head of an encoder-decoder is the language model that generates text."""
    text = "" if owner.forward is None else ast.unparse(owner.forward)
    match = _LOGITS.search(text)
    if match is None or "self.model(input_ids" not in text:
        return False
    return len(re.findall(r"lm_logits = ", text)) == 1 + match[0].count("\n")


def prepare(translator: Translator) -> None:
    """Changes the classes of an encoder-decoder before they are translated."""
    file: SourceFile = translator.file
    for owner in file.classes.values():
        if owner.forward is not None:
            lifting.remove_layerdrop(owner.forward)
            _AlwaysAcross().visit(owner.forward)
            owner.forward.body = fold(owner.forward.body, {}, file.tests)
            _use_given_positions(owner)
        for method in owner.methods.values():
            replace(method, {"self.model.shared.num_embeddings": expression("config.vocab_size")})
    base = file.classes[file.task_classes["Model"]]
    for name in ("encoder", "decoder"):
        stack = base.parts[name]
        assert isinstance(stack, SourceClass) and stack.forward is not None
        _share_embedding(translator, stack)


class _AlwaysAcross(ast.NodeTransformer):
    """Removes the condition of cross-attention, because the decoder always gets hidden states."""

    def visit_If(self, node: ast.If) -> ast.AST | list[ast.stmt]:
        self.generic_visit(node)
        is_condition = ast.unparse(node.test) == "encoder_hidden_states is not None"
        return node.body if is_condition and not node.orelse else node


def _use_given_positions(owner: SourceClass) -> None:
    """Accepts positions with a batch axis in a class of position embeddings."""
    assert owner.forward is not None
    for item in owner.forward.body:
        if isinstance(item, ast.If) and ast.unparse(item.test) == "position_ids is None":
            text = "\n".join(ast.unparse(line) for line in item.orelse)
            if text == "position_ids = position_ids.unsqueeze(0)":
                item.orelse = []


def _share_embedding(translator: Translator, stack: SourceClass) -> None:
    """Makes the token embedding of an encoder or decoder an argument of its method `forward`."""
    constructor, forward = stack.methods["__init__"], stack.forward
    assert forward is not None
    constructor.body = [
        item
        for item in constructor.body
        if not (isinstance(item, ast.Assign) and own_attribute(item.targets[0]) == "embed_tokens")
    ]
    part = stack.parts.pop("embed_tokens", None)
    stack.alternatives.pop("embed_tokens", None)
    if part is not None:
        translator.loop_variables["embed_tokens"] = part
    replace(forward, {"self.embed_tokens": expression("embed_tokens")})
    forward.args.args.insert(1, ast.arg("embed_tokens"))
    if "position_ids" not in parameters(forward):
        forward.args.args.append(ast.arg("position_ids"))
        forward.args.defaults.append(ast.Constant(None))


def methods(translator: Translator, ported: PortedClass) -> list[ast.stmt] | None:
    """Returns the methods of the base model or of the head that generates, or `None`."""
    owner = ported.source
    if owner is translator.base:
        ported.arguments = ["input_ids", "attention_mask", "decoder_input_ids"]
        return ast.parse(_BASE).body
    if translator.file.classes.get(owner.name) is owner and generates(owner):
        ported.arguments = ["input_ids"]
        match = _LOGITS.search(ast.unparse(owner.forward)) if owner.forward else None
        has_bias = match is not None and any(match.groups())
        return ast.parse(_HEAD if has_bias else _HEAD.replace(*_WITHOUT_BIAS)).body
    return None


def lift_pair_statement(scope: Scope, item: ast.stmt) -> list[ast.stmt] | None:
    """Translates positions and masks in the decoder of an encoder-decoder."""
    if not scope.translator.is_pair or not scope.is_model:
        return None
    if isinstance(item, ast.If) and ast.unparse(item.test) == "attention_mask is None":
        return [] if "attention_mask = torch.ones(" in ast.unparse(item) else None
    if not isinstance(item, ast.Assign):
        return None
    target, text = dotted(item.targets[0]), ast.unparse(item.value)
    if target == "encoder_attention_mask" and text.startswith("create_bidirectional_mask("):
        return []  # the method `decode` of the base model creates this mask
    if target == "position_ids" and text.startswith("torch.arange("):
        return statements(
            "if position_ids is None:\n    position_ids = jnp.arange(input_ids.shape[1])[None]"
        )
    return None


STATEMENT_LIFTS.insert(0, lift_pair_statement)


__all__ = ["generates", "is_pair", "lift_pair_statement", "methods", "prepare"]
