"""The VQ Transformer (Lingle, 2024, Transformer-VQ: Linear-Time Transformers via VQ) in PyTorch.

Everything that is needed lies in the files beside this one; load them with
``AutoModelForCausalLM.from_pretrained(folder, trust_remote_code=True)``.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import torch
import torch.nn.functional as F
from torch import nn
from transformers import GenerationMixin, PreTrainedModel
from transformers.utils import ModelOutput

from .attention_vq_transformer import Tokens, VQTransformerAttention, sinusoids
from .codebook_vq_transformer import VQTransformerCodebook, VQTransformerRMSNorm
from .configuration_vq_transformer import VQTransformerConfig
from .layers_vq_transformer import VQTransformerLayer, find_rows, move, name_tokens
from .state_vq_transformer import VQTransformerState

# What Transformers calls the cache of a model: ``past_key_values`` until 5.23, ``cache`` since.
CACHE = "cache" if hasattr(ModelOutput, "past_key_values") else "past_key_values"


@dataclass
class VQTransformerOutput(ModelOutput):
    """What the models return; ``auxiliary_loss`` is the commitment cost, summed over tokens."""

    loss: torch.Tensor | None = None
    logits: torch.Tensor | None = None
    last_hidden_state: torch.Tensor | None = None
    if CACHE == "cache":
        cache: VQTransformerState | None = None
    else:
        past_key_values: VQTransformerState | None = None
    hidden_states: tuple[torch.Tensor, ...] | None = None
    auxiliary_loss: torch.Tensor | None = None


class VQTransformerPreTrainedModel(PreTrainedModel):
    """Initialisation, and what all heads share."""

    config_class = VQTransformerConfig
    base_model_prefix = "model"
    supports_gradient_checkpointing = True
    _no_split_modules = ["VQTransformerLayer"]
    _skip_keys_device_placement = ["past_key_values", "cache"]
    _keep_in_fp32_modules_strict = ["codebook"]
    _is_stateful = True

    @torch.no_grad()
    def _init_weights(self, module: nn.Module) -> None:
        config = self.config
        if isinstance(module, nn.Linear):
            nn.init.normal_(
                module.weight, std=(config.initializer_scale / module.in_features) ** 0.5
            )
        elif isinstance(module, nn.Embedding):
            nn.init.normal_(module.weight, std=config.embedding_initializer_range)
        elif isinstance(module, VQTransformerRMSNorm):
            if module.weight is not None and module.bias is not None:
                nn.init.ones_(module.weight)
                nn.init.zeros_(module.bias)
        elif isinstance(module, VQTransformerAttention):
            nn.init.zeros_(module.content_bias)
            nn.init.zeros_(module.position_bias)
        elif isinstance(module, VQTransformerCodebook):
            # One over the fan-in, which counts the heads: rows start short.
            nn.init.normal_(module.sums, std=(config.key_heads * config.num_codes) ** -0.5)
            nn.init.ones_(module.counts)
        for name in ("position_scale", "lm_head_bias"):
            if getattr(module, name, None) is not None:
                nn.init.zeros_(getattr(module, name))

    def init_cache(self, batch_size: int) -> VQTransformerState:
        """Return the state of ``batch_size`` rows before their first token."""
        state = VQTransformerState()
        state.fill(self.config, batch_size, self.device, self.dtype)
        return state

    def update_codebooks(self) -> None:
        """Move the codebooks towards the keys seen in training mode since the last call.

        Call it once after each ``optimizer.step()``: one moving average with ``ema_decay`` over
        the sums of all forward passes in between, of all processes. Without it codebooks stay as
        they are.
        """
        for module in self.modules():
            if isinstance(module, VQTransformerCodebook):
                module.update(self.config.ema_decay)


class VQTransformerModel(VQTransformerPreTrainedModel):
    """The stack without a head."""

    def __init__(self, config: VQTransformerConfig):
        super().__init__(config)
        self.embed_tokens = nn.Embedding(config.vocab_size, config.hidden_size)
        if config.absolute_positions:
            self.position_scale = nn.Parameter(torch.zeros(()))
        layers = [VQTransformerLayer(config) for _ in range(config.num_hidden_layers)]
        self.layers = nn.ModuleList(layers)
        if config.final_norm:
            self.norm = VQTransformerRMSNorm(config)
        self.post_init()

    def get_input_embeddings(self) -> nn.Module:
        return self.embed_tokens

    def set_input_embeddings(self, value: torch.nn.Embedding) -> None:
        self.embed_tokens = value

    def forward(
        self,
        input_ids: torch.Tensor | None = None,
        attention_mask: torch.Tensor | None = None,
        past_key_values: VQTransformerState | None = None,
        inputs_embeds: torch.Tensor | None = None,
        use_cache: bool | None = None,
        output_hidden_states: bool | None = None,
        return_dict: bool | None = None,
        code_mask: torch.Tensor | None = None,
        cache: VQTransformerState | None = None,
        **kwargs: Any,
    ) -> Any:
        """Compute the stream of (B, T) tokens that follow those in ``past_key_values``.

        **Arguments:** ``attention_mask`` (B, T), or with the columns of all calls before: tokens
        where it is 0 are never seen, on whichever side; what is returned at their place is that of
        the token before. ``past_key_values`` is changed; ``cache`` is its name since Transformers
        5.24. ``code_mask`` (B, T): which tokens count for commitment and codebooks in training, if
        not all that are there.

        **Raises:** ValueError for a state of other rows or another model.
        """
        if (input_ids is None) == (inputs_embeds is None):
            raise ValueError("give either input_ids or inputs_embeds")
        past_key_values = cache if past_key_values is None else past_key_values
        hidden = self.embed_tokens(input_ids) if inputs_embeds is None else inputs_embeds
        if use_cache is None:
            use_cache = past_key_values is not None or (self.config.use_cache and not self.training)
        keep = output_hidden_states
        keep = bool(self.config.output_hidden_states if keep is None else keep)
        state = self._state(past_key_values, use_cache, hidden)
        rows = find_rows(attention_mask, hidden, 0 if state is None else state.columns)
        tokens = name_tokens(rows, code_mask)
        position = hidden.new_zeros(hidden.shape[0], dtype=torch.int32)
        position = position if state is None else state.position
        hidden = self._embed(hidden if rows is None else move(hidden, rows.order), position)
        hidden, seen, errors = self._layers(hidden, position, tokens, state, keep)
        hidden = self.norm(hidden) if self.config.final_norm else hidden
        hidden = hidden if rows is None else move(hidden, rows.back)
        seen = seen if rows is None else [move(values, rows.back) for values in seen]
        output = VQTransformerOutput(
            last_hidden_state=hidden,
            hidden_states=(*seen, hidden) if keep else None,
            auxiliary_loss=self.config.commitment_cost * errors if self.training else None,
            **{CACHE: state if use_cache else None},
        )
        return output if return_dict is not False else output.to_tuple()

    def _state(
        self, state: VQTransformerState | None, use_cache: bool, hidden: torch.Tensor
    ) -> Any:
        """Return the state to begin with, if there is any."""
        if state is None and (not use_cache or self.config.attention_type == "full"):
            return None
        if self.config.attention_type == "full":
            raise ValueError(
                "attention_type='full' has no state of a fixed size: call it without "
                "past_key_values, on the whole text"
            )
        if state is None:
            state = VQTransformerState()
        if not isinstance(state, VQTransformerState):
            raise ValueError(
                f"past_key_values is a {type(state).__name__}; this model takes what it returned as"
                " past_key_values, a VQTransformerState"
            )
        if state.is_initialized:
            state.check(self.config, hidden.shape[0])
        else:
            state.fill(self.config, hidden.shape[0], hidden.device, hidden.dtype)
        return state

    def _embed(self, hidden: torch.Tensor, position: torch.Tensor) -> torch.Tensor:
        if self.config.absolute_positions:
            index = position[:, None] + torch.arange(hidden.shape[1], device=hidden.device)
            waves = sinusoids(index, self.config.hidden_size, self.config.sinusoid_base)
            hidden = hidden + (self.position_scale.float() * waves).to(hidden.dtype)
        return F.dropout(hidden, self.config.embedding_dropout, self.training)

    def _layers(
        self,
        hidden: torch.Tensor,
        position: torch.Tensor,
        tokens: Tokens,
        state: VQTransformerState | None,
        keep: bool,
    ) -> tuple[torch.Tensor, list[torch.Tensor], torch.Tensor]:
        """Run all layers; return the stream, that before each layer, and the keys' errors."""
        stepping = state is not None and hidden.shape[1] == 1 and self.config.window_size > 0
        stepping = stepping and not (self.training or torch.is_grad_enabled())
        run = self._step if stepping else self._run
        errors, seen = hidden.new_zeros((), dtype=torch.float32), []
        for index in range(len(self.layers)):
            seen += [hidden] if keep else []
            hidden, error = run(index, hidden, position, tokens, state)
            errors = errors + error
        if state is not None:
            read = hidden.shape[1] if tokens.there is None else tokens.there.sum(1)
            state.position = (position + read).int()
            state.columns += hidden.shape[1]
        return hidden, seen, errors

    def _run(
        self,
        index: int,
        hidden: torch.Tensor,
        position: torch.Tensor,
        tokens: Tokens,
        state: VQTransformerState | None,
    ) -> tuple[torch.Tensor, torch.Tensor]:
        layer: Any = self.layers[index]
        part = self._part(index)
        states = None if state is None else state.attentions[part]
        hidden, error, states, tallies = layer(hidden, position, tokens, states)
        if state is not None:
            state.attentions[part], state.rows[part] = states, [None] * len(states)
        for attention, tally in zip(layer.attentions, tallies, strict=True):
            if tally is not None:
                attention.codebook.collect(tally)
        return hidden, error

    def _step(
        self,
        index: int,
        hidden: torch.Tensor,
        position: torch.Tensor,
        tokens: Tokens,
        state: VQTransformerState | None,
    ) -> tuple[torch.Tensor, float]:
        layer: Any = self.layers[index]
        part = self._part(index)
        for number, attention in zip(range(part.start, part.stop), layer.attentions, strict=True):
            if state.rows[number] is None:
                state.rows[number] = attention.relative(self.config.window_size)
        rows = state.rows[part]
        return layer.step(hidden, position, tokens.there, state.attentions[part], rows), 0.0

    def _part(self, index: int) -> slice:
        """Return which attentions are those of a layer."""
        count = 2 if self.config.gated else 1
        return slice(index * count, (index + 1) * count)


class VQTransformerForCausalLM(VQTransformerPreTrainedModel, GenerationMixin):
    """The stack and the distribution of the next token."""

    _tied_weights_keys = {"lm_head.weight": "model.embed_tokens.weight"}

    def __init__(self, config: VQTransformerConfig):
        super().__init__(config)
        self.model = VQTransformerModel(config)
        self.lm_head = nn.Linear(config.hidden_size, config.vocab_size, bias=False)
        if config.head_bias:
            self.lm_head_bias = nn.Parameter(torch.zeros(config.vocab_size))
        self.post_init()

    def get_input_embeddings(self) -> nn.Module:
        return self.model.embed_tokens

    def set_input_embeddings(self, value: nn.Module) -> None:
        self.model.embed_tokens = value

    def get_output_embeddings(self) -> nn.Module:
        return self.lm_head

    def set_output_embeddings(self, value: nn.Module) -> None:
        self.lm_head = value

    def forward(
        self,
        input_ids: torch.Tensor | None = None,
        attention_mask: torch.Tensor | None = None,
        past_key_values: VQTransformerState | None = None,
        inputs_embeds: torch.Tensor | None = None,
        labels: torch.Tensor | None = None,
        use_cache: bool | None = None,
        output_hidden_states: bool | None = None,
        return_dict: bool | None = None,
        logits_to_keep: int | torch.Tensor = 0,
        cache: VQTransformerState | None = None,
        **kwargs: Any,
    ) -> Any:
        """Compute logits (B, T, vocabulary), and with ``labels`` (B, T) the loss.

        The loss is the mean over the labels that are not -100, each compared with the logits of the
        place before, and in training the commitment cost by the same number.
        """
        output = self.model(
            input_ids,
            attention_mask,
            past_key_values,
            inputs_embeds,
            use_cache,
            output_hidden_states,
            code_mask=kwargs.get("code_mask"),
            cache=cache,
        )
        output = dict(output)
        hidden = output.pop("last_hidden_state")
        keep = slice(-logits_to_keep, None) if isinstance(logits_to_keep, int) else logits_to_keep
        output["logits"] = logits = self._head(hidden[:, keep])
        if labels is not None:
            output["loss"] = self._loss(logits, labels, output.get("auxiliary_loss"), kwargs)
        found = VQTransformerOutput(**output)
        return found if return_dict is not False else found.to_tuple()

    def _head(self, hidden: torch.Tensor) -> torch.Tensor:
        scale, logits = self.config.logit_scale, self.lm_head(hidden).float()
        if not self.config.head_bias:
            return scale * logits
        bias = self.lm_head_bias.float()
        return scale * (logits + bias) if self.config.scale_head_bias else scale * logits + bias

    def _loss(
        self,
        logits: torch.Tensor,
        labels: torch.Tensor,
        auxiliary: torch.Tensor | None,
        kwargs: dict[str, Any],
    ) -> torch.Tensor:
        labels = labels[:, 1:].to(logits.device)
        count = kwargs.get("num_items_in_batch")
        count = (labels != -100).sum().clamp(min=1) if count is None else count
        total = F.cross_entropy(
            logits[:, :-1].flatten(0, 1), labels.flatten(), ignore_index=-100, reduction="sum"
        )
        return (total if auxiliary is None else total + auxiliary) / count

    # -- generate
    # -----------------------------------------------------------------------------------

    @classmethod
    def _supports_default_dynamic_cache(cls) -> bool:
        return False

    def _prepare_cache_for_generation(self, *args: Any, **kwargs: Any) -> Any:
        base: Any = super()
        base._prepare_cache_for_generation(*args, **kwargs)
        generation_config, model_kwargs = args[:2]
        if self.config.attention_type == "full":
            generation_config.use_cache = False
        elif generation_config.use_cache is not False and model_kwargs.get(CACHE) is None:
            model_kwargs[CACHE] = VQTransformerState()


class VQTransformerForSequenceClassification(VQTransformerPreTrainedModel):
    """The stack and scores of the last token of each row."""

    def __init__(self, config: VQTransformerConfig):
        super().__init__(config)
        self.num_labels = config.num_labels
        self.model = VQTransformerModel(config)
        self.score = nn.Linear(config.hidden_size, self.num_labels, bias=False)
        self.post_init()

    def get_input_embeddings(self) -> nn.Module:
        return self.model.embed_tokens

    def set_input_embeddings(self, value: nn.Module) -> None:
        self.model.embed_tokens = value

    def forward(
        self,
        input_ids: torch.Tensor | None = None,
        attention_mask: torch.Tensor | None = None,
        past_key_values: VQTransformerState | None = None,
        inputs_embeds: torch.Tensor | None = None,
        labels: torch.Tensor | None = None,
        use_cache: bool | None = None,
        output_hidden_states: bool | None = None,
        return_dict: bool | None = None,
        cache: VQTransformerState | None = None,
        **kwargs: Any,
    ) -> Any:
        """Compute logits (B, labels) from the last token that is no padding, and the loss."""
        output = self.model(
            input_ids,
            attention_mask,
            past_key_values,
            inputs_embeds,
            bool(use_cache),
            output_hidden_states,
            code_mask=kwargs.get("code_mask"),
            cache=cache,
        )
        output = dict(output)
        hidden = output.pop("last_hidden_state")
        places = self._last(input_ids, attention_mask, hidden)
        batch = torch.arange(hidden.shape[0], device=hidden.device)
        output["logits"] = logits = self.score(hidden[batch, places]).float()
        if labels is not None:
            loss = self.loss_function(
                labels=labels, logits=logits, pooled_logits=logits, config=self.config
            )
            if "auxiliary_loss" in output:
                loss = loss + output["auxiliary_loss"] / hidden[..., 0].numel()
            output["loss"] = loss
        found = VQTransformerOutput(**output)
        return found if return_dict is not False else found.to_tuple()

    def _last(
        self, input_ids: torch.Tensor | None, mask: torch.Tensor | None, hidden: torch.Tensor
    ) -> torch.Tensor:
        """Return the place (B,) of each row's last token, by the mask or by pad_token_id."""
        index = torch.arange(hidden.shape[1], device=hidden.device)
        if mask is None and input_ids is not None and self.config.pad_token_id is not None:
            mask = input_ids != self.config.pad_token_id
        if mask is None:
            return index[-1:].expand(hidden.shape[0])
        return (index * (mask[:, -hidden.shape[1] :] != 0)).argmax(-1)


__all__ = [
    "VQTransformerForCausalLM",
    "VQTransformerForSequenceClassification",
    "VQTransformerModel",
    "VQTransformerPreTrainedModel",
]
