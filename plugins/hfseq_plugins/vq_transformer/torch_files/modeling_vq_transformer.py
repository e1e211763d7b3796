"""The VQ Transformer (Lingle, 2024, Transformer-VQ: Linear-Time Transformers via VQ) in PyTorch.

The modules in this folder are sufficient to load the checkpoint without hfseq:
`AutoModelForCausalLM.from_pretrained(folder, trust_remote_code=True)`. Shapes use these symbols: B
batch size, T tokens, D hidden size.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, cast

import torch
import torch.nn.functional as F
from torch import nn
from transformers import GenerationMixin, PreTrainedModel
from transformers.utils import ModelOutput

from .attention_vq_transformer import TokenMasks, VQTransformerAttention, sinusoids
from .codebook_vq_transformer import VQTransformerCodebook, VQTransformerRMSNorm
from .configuration_vq_transformer import VQTransformerConfig
from .layers_vq_transformer import VQTransformerLayer, find_token_order, gather_tokens, token_masks
from .state_vq_transformer import VQTransformerState

# The name of the state in outputs. It is `past_key_values` up to Transformers 5.23, and `cache` in
# later versions.
CACHE = "cache" if hasattr(ModelOutput, "past_key_values") else "past_key_values"


@dataclass
class VQTransformerOutput(ModelOutput):
    """The output of the models. `auxiliary_loss` is the sum of the commitment cost over tokens."""

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
    """Base class of the VQ Transformer models."""

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
            # The variance is 1 / (heads * codes), as in the reference.
            nn.init.normal_(module.sums, std=(config.key_heads * config.num_codes) ** -0.5)
            nn.init.ones_(module.counts)
        for name in ("position_scale", "lm_head_bias"):
            if getattr(module, name, None) is not None:
                nn.init.zeros_(getattr(module, name))

    def init_cache(self, batch_size: int) -> VQTransformerState:
        """Returns the state of `batch_size` rows before their first token."""
        state = VQTransformerState()
        config = cast(VQTransformerConfig, self.config)
        state.fill(config, batch_size, self.device, self.dtype)
        return state

    def update_codebooks(self) -> None:
        """Updates the codebooks with the keys of the forward passes in training mode.

        Call this method once after each `optimizer.step()`. Without it, the codebooks do not
        change. It adds the keys of all forward passes since the last call, and of all processes, to
        the moving averages with the decay rate `ema_decay`.
        """
        for module in self.modules():
            if isinstance(module, VQTransformerCodebook):
                module.update(self.config.ema_decay)


class VQTransformerModel(VQTransformerPreTrainedModel):
    """The VQ Transformer without a head."""

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

    def set_input_embeddings(self, value: nn.Module) -> None:
        self.embed_tokens = value  # type: ignore[assignment]  # an nn.Embedding

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
        """Computes the hidden states of the tokens after those in `past_key_values`.

        Args:
            input_ids: Tokens, `(B, T)`.
            attention_mask: `(B, T)`, or `(B, columns + T)` with the columns of all earlier calls.
                It is 0 for tokens that are treated as if they were removed from the text. The
                output of such a token is that of the token before it.
            past_key_values: The state, which is updated in place.
            inputs_embeds: Token embeddings, `(B, T, D)`, instead of `input_ids`.
            use_cache: Whether to return the state.
            output_hidden_states: Whether to return the hidden states of all layers.
            return_dict: Whether to return an output object. `False` returns a tuple.
            code_mask: `(B, T)`, 0 for tokens that are excluded from the commitment cost and the
                statistics of the codebooks in training.
            cache: The same as `past_key_values`. Transformers uses this name since version 5.24.

        Raises:
            ValueError: The state belongs to another batch size or another model.
        """
        if (input_ids is None) == (inputs_embeds is None):
            raise ValueError("pass either input_ids or inputs_embeds")
        past_key_values = cache if past_key_values is None else past_key_values
        hidden = self.embed_tokens(input_ids) if inputs_embeds is None else inputs_embeds
        if use_cache is None:
            use_cache = past_key_values is not None or (self.config.use_cache and not self.training)
        keep = output_hidden_states
        keep = bool(self.config.output_hidden_states if keep is None else keep)
        state = self._state(past_key_values, use_cache, hidden)
        rows = find_token_order(attention_mask, hidden, 0 if state is None else state.columns)
        tokens = token_masks(rows, code_mask)
        position = hidden.new_zeros(hidden.shape[0], dtype=torch.int32)
        position = position if state is None else state.position
        hidden = self._embed(
            hidden if rows is None else gather_tokens(hidden, rows.order), position
        )
        hidden, inputs, errors = self._layers(hidden, position, tokens, state, keep)
        hidden = self.norm(hidden) if self.config.final_norm else hidden
        hidden = hidden if rows is None else gather_tokens(hidden, rows.back)
        inputs = inputs if rows is None else [gather_tokens(values, rows.back) for values in inputs]
        output = VQTransformerOutput(
            last_hidden_state=hidden,
            hidden_states=(*inputs, hidden) if keep else None,
            auxiliary_loss=self.config.commitment_cost * errors if self.training else None,
            **{CACHE: state if use_cache else None},
        )
        return output if return_dict is not False else output.to_tuple()

    def _state(
        self, state: VQTransformerState | None, use_cache: bool, hidden: torch.Tensor
    ) -> Any:
        """Returns the state before this call, or `None` if the call uses no state."""
        if state is None and (not use_cache or self.config.attention_type == "full"):
            return None
        if self.config.attention_type == "full":
            raise ValueError(
                "attention_type='full' has no state of fixed size. Call it without "
                "past_key_values, with the whole text"
            )
        if state is None:
            state = VQTransformerState()
        if not isinstance(state, VQTransformerState):
            raise ValueError(
                f"past_key_values is a {type(state).__name__}, but this model needs the "
                "VQTransformerState of an earlier output"
            )
        config = cast(VQTransformerConfig, self.config)
        if state.is_initialized:
            state.check(config, hidden.shape[0])
        else:
            state.fill(config, hidden.shape[0], hidden.device, hidden.dtype)
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
        tokens: TokenMasks,
        state: VQTransformerState | None,
        keep: bool,
    ) -> tuple[torch.Tensor, list[torch.Tensor], torch.Tensor]:
        """Runs all layers.

        Returns:
            The hidden states, the inputs of all layers if `keep` is true, and the sum of the
            quantization errors.
        """
        stepping = state is not None and hidden.shape[1] == 1 and self.config.window_size > 0
        stepping = stepping and not (self.training or torch.is_grad_enabled())
        run: Any = self._step if stepping else self._run
        errors, inputs = hidden.new_zeros((), dtype=torch.float32), []
        for index in range(len(self.layers)):
            inputs += [hidden] if keep else []
            hidden, error = run(index, hidden, position, tokens, state)
            errors = errors + error
        if state is not None:
            lengths = hidden.shape[1] if tokens.valid is None else tokens.valid.sum(1)
            state.position = (position + lengths).int()
            state.columns += hidden.shape[1]
        return hidden, inputs, errors

    def _run(
        self,
        index: int,
        hidden: torch.Tensor,
        position: torch.Tensor,
        tokens: TokenMasks,
        state: VQTransformerState | None,
    ) -> tuple[torch.Tensor, torch.Tensor]:
        layer: Any = self.layers[index]
        part = self._part(index)
        states = None if state is None else state.attentions[part]
        hidden, error, states, all_statistics = layer(hidden, position, tokens, states)
        if state is not None:
            state.attentions[part], state.rows[part] = states, [None] * len(states)
        for attention, statistics in zip(layer.attentions, all_statistics, strict=True):
            if statistics is not None:
                attention.codebook.collect(statistics)
        return hidden, error

    def _step(
        self,
        index: int,
        hidden: torch.Tensor,
        position: torch.Tensor,
        tokens: TokenMasks,
        state: VQTransformerState,
    ) -> tuple[torch.Tensor, float]:
        layer: Any = self.layers[index]
        part = self._part(index)
        for number, attention in zip(range(part.start, part.stop), layer.attentions, strict=True):
            if state.rows[number] is None:
                state.rows[number] = attention.relative(self.config.window_size)
        rows = state.rows[part]
        return layer.step(hidden, position, tokens.valid, state.attentions[part], rows), 0.0

    def _part(self, index: int) -> slice:
        """Returns the indices of the attention modules of a layer, as a slice."""
        count = 2 if self.config.gated else 1
        return slice(index * count, (index + 1) * count)


class VQTransformerForCausalLM(VQTransformerPreTrainedModel, GenerationMixin):
    """The VQ Transformer with a language modeling head."""

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
        """Computes logits, `(B, T, vocab_size)`, and the loss if `labels`, `(B, T)`, are passed.

        The loss is the mean cross-entropy of the labels that are not -100. Each label is predicted
        from the token before it. In training, the commitment cost divided by the number of these
        labels is added.
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
        result = VQTransformerOutput(**output)
        return result if return_dict is not False else result.to_tuple()

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

    # -- generation
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
    """The VQ Transformer with a classification or regression head for the last token."""

    def __init__(self, config: VQTransformerConfig):
        super().__init__(config)
        self.num_labels = config.num_labels
        self.model = VQTransformerModel(config)
        self.score = nn.Linear(config.hidden_size, cast(int, config.num_labels), bias=False)
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
        """Computes logits, `(B, num_labels)`, from the last token that is not padding.

        If `labels` are passed, it also computes the loss.
        """
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
        last = self._last(input_ids, attention_mask, hidden)
        batch = torch.arange(hidden.shape[0], device=hidden.device)
        output["logits"] = logits = self.score(hidden[batch, last]).float()
        if labels is not None:
            loss = self.loss_function(
                labels=labels, logits=logits, pooled_logits=logits, config=self.config
            )
            if "auxiliary_loss" in output:
                loss = loss + output["auxiliary_loss"] / hidden[..., 0].numel()
            output["loss"] = loss
        result = VQTransformerOutput(**output)
        return result if return_dict is not False else result.to_tuple()

    def _last(
        self, input_ids: torch.Tensor | None, mask: torch.Tensor | None, hidden: torch.Tensor
    ) -> torch.Tensor:
        """Returns the index of the last token of each row that is not padding, `(B,)`.

        Padding is found by the mask, or without a mask by `pad_token_id`.
        """
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
