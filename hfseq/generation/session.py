"""The model as the searches see it: a first set of inputs, then the next token's logits."""

from __future__ import annotations

import copy
import inspect
from typing import Any

import jax
import jax.numpy as jnp

from hfseq.generation.plan import Operands, Plan
from hfseq.nn import kv_cache

#: Where the model keeps positions, one for each column of the prompt.
_POSITIONS = ("position_ids", "decoder_position_ids")


class Session:
    """A model with the plan and the operands of one run; everything here is traced."""

    def __init__(self, model: Any, plan: Plan, operands: Operands):
        self.plan, self.operands = plan, operands
        self.model = model
        if operands.extra:
            # The collections are operands of the compiled search, not constants in it.
            self.model = copy.copy(model)
            self.model.extra = operands.extra
        self.rows_per_input = plan.options.rows_per_input

    def first_inputs(self) -> dict[str, Any]:
        """Return the keyword arguments for decoding the last token of the prompt.

        The cache holds the tokens before it. The prompt runs once per row of the input; the rows
        of beams and samples are made of the result.
        """
        operands, times = self.operands, self.rows_per_input
        if operands.prompt.shape[1] == 1:
            mask = operands.mask
            expanded = None if mask is None else jnp.repeat(mask, times, axis=0)
            return self._prepare(jnp.repeat(operands.prompt, times, axis=0), expanded)
        last = operands.prompt_length - 1
        if self.model.fixed_state:
            inputs = self._read_into_state(last)
            return self._expand(inputs) if times > 1 else inputs
        inputs = self._prepare(operands.prompt, operands.mask)
        cache = self._call(operands.prompt, inputs).past_key_values
        # The bucket's spare columns were cached too: the next tokens overwrite them.
        inputs = {**inputs, "past_key_values": kv_cache.rewind(cache, last)}
        for name in _POSITIONS:
            if name in inputs:
                inputs[name] = jax.lax.dynamic_slice_in_dim(inputs[name], last, 1, axis=1)
        return self._expand(inputs) if times > 1 else inputs

    def _read_into_state(self, last: Any) -> dict[str, Any]:
        """Return the inputs for the column ``last``, after a state has read those before it.

        A state forgets nothing, so the column itself and the bucket's spare ones are hidden.
        """
        prompt, mask = self.operands.prompt, self.operands.mask
        mask = jnp.ones_like(prompt) if mask is None else jnp.asarray(mask)
        before = jnp.where(jnp.arange(prompt.shape[1]) < last, mask, 0)
        inputs = self._prepare(prompt, before)
        following = self.model.update_inputs_for_generation(self._call(prompt, inputs), inputs)
        own = jax.lax.dynamic_slice_in_dim(mask, last, 1, axis=1)
        return {**following, "attention_mask": own}

    def next_logits(
        self, tokens: jax.Array, inputs: dict[str, Any]
    ) -> tuple[jax.Array, dict[str, Any]]:
        """Decode ``tokens`` (rows,); return float32 logits (rows, vocabulary) and new inputs."""
        outputs = self._call(tokens[:, None], inputs)
        following = self.model.update_inputs_for_generation(outputs, inputs)
        return outputs.logits[:, -1].astype(jnp.float32), following

    def rows(self) -> jax.Array:
        """Return the token buffer (rows, width) with the prompt in its first columns."""
        prompt = jnp.repeat(self.operands.prompt, self.rows_per_input, axis=0)
        spare = self.plan.buffer - prompt.shape[1]
        sequences = jnp.pad(prompt, ((0, 0), (0, spare)), constant_values=self.plan.pad)
        real = jnp.arange(self.plan.buffer) < self.operands.prompt_length
        return jnp.where(real, sequences, self.plan.pad)

    def _prepare(self, prompt: jax.Array, mask: Any) -> dict[str, Any]:
        model, operands = self.model, self.operands
        given = dict(operands.model_kwargs)
        if not self.plan.encoder_decoder:
            given["attention_mask"] = mask
            return model.prepare_inputs_for_generation(prompt, self.plan.buffer, **given)
        given["encoder_outputs"] = self._encode()
        given["attention_mask"] = operands.encoder.get("attention_mask")
        given["decoder_attention_mask"] = mask
        parameters = inspect.signature(model.prepare_inputs_for_generation).parameters
        if "params" in parameters or any(p.kind is p.VAR_KEYWORD for p in parameters.values()):
            given["params"] = operands.params
        return model.prepare_inputs_for_generation(prompt, self.plan.buffer, **given)

    def _encode(self) -> Any:
        if self.operands.encoder_outputs is not None:
            return self.operands.encoder_outputs
        inputs = self.operands.encoder
        return self.model.encode(**inputs, params=self.operands.params, return_dict=True)

    def _call(self, tokens: jax.Array, inputs: dict[str, Any]) -> Any:
        call = self.model.decode if self.plan.encoder_decoder else self.model
        return call(tokens, **{"params": self.operands.params, "return_dict": True, **inputs})

    def _expand(self, inputs: dict[str, Any]) -> dict[str, Any]:
        """Repeat the decoder's rows; what belongs to the encoder is shared by the beams."""
        batch = self.operands.prompt.shape[0]
        rows = jnp.repeat(jnp.arange(batch), self.rows_per_input)

        def repeat(leaf: Any) -> Any:
            ours = getattr(leaf, "ndim", 0) and leaf.shape[0] == batch
            return jnp.take(leaf, rows, axis=0) if ours else leaf

        expanded = {
            name: value if name.startswith("encoder") else jax.tree.map(repeat, value)
            for name, value in inputs.items()
            if name != "past_key_values"
        }
        return expanded | {"past_key_values": kv_cache.reorder(inputs["past_key_values"], rows)}
