"""Lifts of ``hfseq port``: common pieces of model files, in small model files of their own."""

from __future__ import annotations

import ast
import textwrap
from types import SimpleNamespace

import pytest

from hfseq.cli.port import lift_outputs, source
from hfseq.cli.port.source import SourceFile
from hfseq.cli.port.translation import Translation, Translator

FILE = """
from ...activations import ACT2CLS, ACT2FN
from ...masking_utils import create_bidirectional_mask, create_causal_mask
from ...masking_utils import create_sliding_window_causal_mask
from ...modeling_layers import GradientCheckpointingLayer
from ...pytorch_utils import apply_chunking_to_forward

class LlamaAttention(nn.Module):
    def __init__(self, config):
        self.proj = nn.Linear(config.hidden_size, config.hidden_size)
        self.is_causal = False

    def forward(self, hidden_states, attention_mask=None):
        states = self.proj(hidden_states).unsqueeze(1)
        attn_output, attn_weights = attention_interface(
            self, states, states, states, attention_mask, dropout=0.0, scaling=1.0)
        return attn_output.squeeze(2), attn_weights

class LlamaLayer(GradientCheckpointingLayer):
    def __init__(self, config):
        super().__init__()
        self.attention = LlamaAttention(config)

    def forward(self, hidden_states, attention_mask=None):
        output, _ = self.attention(hidden_states, attention_mask)
        return hidden_states + output

class LlamaPreTrainedModel(PreTrainedModel):
    base_model_prefix = "model"

class LlamaModel(LlamaPreTrainedModel):
    def __init__(self, config):
        super().__init__(config)
        self.embed_tokens = nn.Embedding(config.vocab_size, config.hidden_size)
        self.layers = nn.ModuleList([LlamaLayer(config) for _ in range(2)])
        self.dense = nn.Linear(config.hidden_size, config.hidden_size)
        self.layerdrop = config.layerdrop
        self.config = config
{constructor}

    def chunk(self, states):
        return self.dense(states)

    def forward(self, input_ids, attention_mask=None, token_type_ids=None, position_ids=None):
        hidden_states = self.embed_tokens(input_ids)
{body}
        return BaseModelOutput(last_hidden_state=hidden_states)
"""


@pytest.fixture
def translate(tmp_path, monkeypatch):
    """Returns a function that translates a model file with statements of the test."""
    source._auto_mappings()
    lift_outputs._shared_outputs()
    folder = tmp_path / "models" / "llama"
    folder.mkdir(parents=True)
    monkeypatch.setattr(source, "transformers_folder", lambda: tmp_path)

    def run(body: str, constructor: str = "") -> Translation:
        text = FILE.format(
            body=textwrap.indent(textwrap.dedent(body).strip(), " " * 8),
            constructor=textwrap.indent(textwrap.dedent(constructor).strip(), " " * 8),
        )
        (folder / "modeling_llama.py").write_text(text)
        return Translator(SourceFile("llama"), ["Model"]).run()

    return run


def normalized(text: str) -> str:
    return ast.unparse(ast.parse(text))


LAYERS = "hidden_states, attentions, inputs = nn.run_layers(self.layers, hidden_states, "
#: Statements of a model, and a part of their translation. The masks ignore `segment_ids`, because
#: the model file does not show which positions the documents of a packed row must have.
LIFTS = [
    (
        "for layer in self.layers:\n    hidden_states = layer(hidden_states, attention_mask)",
        f"{LAYERS}attention_mask=attention_mask, rngs=rngs, collect=output_hidden_states, "
        "return_weights=output_attentions)",
    ),
    (
        "for i, layer in enumerate(self.layers[: self.config.num_hidden_layers]):\n"
        "    hidden_states = layer(hidden_states, attention_mask)",
        LAYERS,
    ),
    (
        "for layer in self.layers:\n"
        "    outputs = layer(hidden_states, attention_mask)\n"
        "    hidden_states = outputs[0] if isinstance(outputs, tuple) else outputs",
        LAYERS,
    ),
    (
        "hidden_states = apply_chunking_to_forward(self.chunk, 0, 1, hidden_states)",
        "hidden_states = self.dense(hidden_states)",
    ),
    (
        "if token_type_ids is None:\n"
        "    if hasattr(self.embeddings, 'token_type_ids'):\n"
        "        buffered_token_type_ids = self.embeddings.token_type_ids[:, :4]\n"
        "        token_type_ids = buffered_token_type_ids.expand(1, 4)\n"
        "    else:\n"
        "        token_type_ids = torch.zeros((1, 4), dtype=torch.long)\n"
        "hidden_states = hidden_states + token_type_ids[:, :, None]",
        "token_type_ids = jnp.zeros_like(input_ids)",
    ),
    (
        "if position_ids is None:\n"
        "    position_ids = torch.arange(hidden_states.shape[1])\n"
        "    position_ids = position_ids.unsqueeze(0)\n"
        "hidden_states = hidden_states + position_ids[:, :, None]",
        "position_ids = nn.positions_in_segments(documents)",
    ),
    (
        "mask = create_bidirectional_mask(config=self.config, inputs_embeds=hidden_states,\n"
        "                                 attention_mask=attention_mask)\n"
        "hidden_states = self.layers[0](hidden_states, mask)",
        "nn.visible(attention_mask, None)",
    ),
    (
        "mask = create_causal_mask(config=self.config, inputs_embeds=hidden_states,\n"
        "                          attention_mask=attention_mask)\n"
        "hidden_states = self.layers[0](hidden_states, mask)",
        "nn.visible(attention_mask, None, causal=True)",
    ),
    (
        "mask_function = create_causal_mask if self.config.sliding_window is None "
        "else create_sliding_window_causal_mask\n"
        "mask = mask_function(self.config, hidden_states, attention_mask)\n"
        "hidden_states = self.layers[0](hidden_states, mask)",
        "nn.visible(attention_mask, None, window=self.window)",
    ),
    (
        "if self.training and self.config.jitter_noise > 0:\n"
        "    hidden_states *= torch.empty_like(hidden_states).uniform_(0.9, 1.1)",
        "raise NotImplementedError('jitter_noise must be 0 in training')",
    ),
    (
        "for layer in self.layers:\n"
        "    if self.training and torch.rand([]) < self.layerdrop:\n"
        "        continue\n"
        "    hidden_states = layer(hidden_states, attention_mask)",
        "raise NotImplementedError('layerdrop must be 0 in training')",
    ),
    (
        "if self.training:\n    hidden_states.requires_grad = True",
        "hidden_states = self.embed_tokens(input_ids)\n        return",
    ),
]


@pytest.mark.parametrize(("body", "expected"), LIFTS)
def test_common_statements_have_a_short_translation(translate, body, expected):
    result = translate(body)
    assert not result.markers
    assert expected in normalized(result.text)


@pytest.mark.parametrize(
    ("body", "reason"),
    [
        (
            "mask = create_bidirectional_mask(config=self.config, inputs_embeds=hidden_states,\n"
            "    attention_mask=attention_mask, encoder_hidden_states=hidden_states)\n"
            "hidden_states = self.layers[0](hidden_states, mask)",
            "a mask with the unsupported argument encoder_hidden_states",
        ),
        (
            "mask = create_causal_mask(config=self.config, inputs_embeds=hidden_states,\n"
            "    attention_mask=attention_mask, or_mask_function=image_mask)\n"
            "hidden_states = self.layers[0](hidden_states, mask)",
            "a mask with the unsupported argument or_mask_function",
        ),
        ("hidden_states = hidden_states + torch.randn(3)", "draws random numbers"),
        ("return BaseModelOutput(**{'last_hidden_state': hidden_states})", "with ** arguments"),
    ],
)
def test_statements_in_another_form_become_markers(translate, body, reason):
    result = translate(body)
    assert any(reason in marker.reason for marker in result.markers)
    assert all("modeling_llama.py" in marker.path and marker.line for marker in result.markers)
    assert "NotTranslated(" in result.text and "refuse_untranslated(__file__)" in result.text


@pytest.mark.parametrize(
    ("constructor", "body", "expected"),
    [
        (
            "self.act = ACT2FN[config.hidden_act]",
            "hidden_states = self.act(hidden_states)",
            "self.act = nn.activation(config.hidden_act)",
        ),
        (
            "self.act = ACT2CLS[config.hidden_act]()",
            "hidden_states = self.act(hidden_states)",
            "self.act = nn.activation(config.hidden_act)",
        ),
        (
            "self.drop = nn.Dropout(config.attention_dropout)",
            "hidden_states = self.drop(hidden_states)",
            "hidden_states = self.drop(hidden_states, rngs)",
        ),
        (
            "self.out = nn.Linear(3, 4, bias=False) if config.attention_bias else nn.Identity()",
            "hidden_states = self.out(hidden_states)",
            "nn.Linear(3, 4, init, rngs, use_bias=False) if config.attention_bias else nn.identity",
        ),
        (
            "self.embed_tokens.requires_grad_(False)",
            "hidden_states = hidden_states + 1",
            "jax.lax.stop_gradient(",
        ),
    ],
)
def test_constructors_create_layers_of_hfseq(translate, constructor, body, expected):
    result = translate(body, constructor)
    assert not result.markers
    assert expected in normalized(result.text)


def test_ports_of_audio_models_count_frames():
    from hfseq.cli.port.translation import translate

    text = translate("hubert", ["ForCTC"]).text
    (model_class,) = (
        node
        for node in ast.parse(text).body
        if isinstance(node, ast.ClassDef) and node.name == "FlaxHubertModel"
    )
    method = next(
        node
        for node in model_class.body
        if isinstance(node, ast.FunctionDef) and "output_lengths" in node.name
    )
    namespace: dict = {}
    exec(ast.unparse(method), namespace)
    config = SimpleNamespace(conv_kernel=(10, 3), conv_stride=(5, 2))
    model = SimpleNamespace(config=config)
    assert namespace[method.name](model, 1000) == ((1000 - 10) // 5 + 1 - 3) // 2 + 1
