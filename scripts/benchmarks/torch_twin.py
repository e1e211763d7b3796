"""PyTorch's class trained as hfseq trains: same weights, batches, masks, AdamW and schedule.

What hfseq says with segment ids PyTorch is told with masks of four dimensions (batch, 1, queries,
keys) and with positions that begin again in every document, so packed rows stay packed.
"""

from __future__ import annotations

import functools
import math
import time
from collections.abc import Callable, Iterable
from typing import Any

import numpy as np
import torch
from torch import nn

Batch = dict[str, np.ndarray]
IGNORED = -100


def positions(segments: np.ndarray) -> np.ndarray:
    """Return 0, 1, 2 … in every document of ``segments`` (rows, length)."""
    places = np.broadcast_to(np.arange(segments.shape[1]), segments.shape)
    begins = np.ones(segments.shape, bool)
    begins[:, 1:] = segments[:, 1:] != segments[:, :-1]
    return places - np.maximum.accumulate(np.where(begins, places, 0), axis=1)


def additive_mask(queries: np.ndarray, keys: np.ndarray, causal: bool = False) -> torch.Tensor:
    """Return 0 where a query may see a key, else the least number: (rows, 1, queries, keys).

    Both are segment ids (rows, length). Padding sees padding, so no row of weights is empty.
    """
    same = queries[:, :, None] == keys[:, None, :]
    if causal:
        same = same & np.tril(np.ones(same.shape[1:], bool))
    lowest = np.finfo(np.float32).min
    return torch.from_numpy(np.where(same, np.float32(0), lowest)[:, None])


def ids(array: np.ndarray) -> torch.Tensor:
    """Return integers as PyTorch wants them."""
    return torch.from_numpy(np.ascontiguousarray(array)).long()


def smoothed_entropy(smoothing: float, size: int) -> float:
    """Return the loss of a perfect prediction of smoothed labels, which hfseq subtracts."""
    if not smoothing:
        return 0.0
    rest = smoothing / (size - 1)
    return -(1 - smoothing) * math.log(1 - smoothing) - smoothing * math.log(rest)


class Twin:
    """A PyTorch model that trains on hfseq's batches.

    ``decayed`` tells by PyTorch name which parameters decay; ``schedule`` gives the learning rate
    of a step; ``training`` holds AdamW's flags and ``max_grad_norm``. ``smoothing`` is the
    probability that training spreads over all labels but the right one.
    """

    def __init__(
        self,
        model: nn.Module,
        decayed: Callable[[str], bool],
        schedule: Callable[[int], Any],
        training: Any,
        smoothing: float = 0.0,
    ):
        self.model, self.schedule, self.training = model, schedule, training
        self.smoothing, self.moments = smoothing, list[float]()
        named = [(n, p) for n, p in model.named_parameters() if p.requires_grad]
        groups = [
            {"params": [p for n, p in named if decayed(n)], "weight_decay": training.weight_decay},
            {"params": [p for n, p in named if not decayed(n)], "weight_decay": 0.0},
        ]
        betas = (training.adam_beta1, training.adam_beta2)
        self.optimizer = torch.optim.AdamW(groups, lr=0.0, betas=betas, eps=training.adam_epsilon)
        self._places: dict[str, torch.Tensor] = {}
        for name, module in model.named_modules():
            if isinstance(module, nn.Embedding) and "position" not in name:
                # The padding token starts translations: like hfseq's, its vector is trained.
                module.padding_idx = None
            # BART and its kin take no positions from outside: their tables are told directly.
            if name.endswith("embed_positions"):
                side = "decoder" if "decoder" in name.split(".") else "encoder"
                module.register_forward_hook(functools.partial(self._replace, side))

    def _replace(self, side: str, module: Any, given: Any, found: torch.Tensor) -> torch.Tensor:
        if side not in self._places:
            return found
        return nn.functional.embedding(
            self._places[side] + getattr(module, "offset", 0), module.weight
        )

    def train(self, batches: Iterable[Batch]) -> list[float]:
        """Take a step on each batch; returns the losses."""
        self.model.train()
        return [self._step(number, batch) for number, batch in enumerate(batches)]

    def _step(self, number: int, batch: Batch) -> float:
        for group in self.optimizer.param_groups:
            group["lr"] = float(self.schedule(number))
        total, count = self.loss(batch)
        loss = total / max(count, 1)
        self.optimizer.zero_grad()
        loss.backward()
        self._clip(self.training.max_grad_norm)
        self.optimizer.step()
        found = loss.item()
        self.moments.append(time.perf_counter())
        return found

    def _clip(self, most: float) -> None:
        """Scale gradients to the norm ``most``, exactly as optax does (PyTorch adds 1e-6)."""
        if most <= 0:
            return
        grads = [p.grad for p in self.model.parameters() if p.grad is not None]
        norm = torch.linalg.vector_norm(torch.stack([torch.linalg.vector_norm(g) for g in grads]))
        if norm > most:
            for grad in grads:
                grad.mul_(most / norm)

    @torch.no_grad()
    def evaluate(self, batches: Iterable[Batch]) -> float:
        """Return the loss over all targets of the batches."""
        self.model.eval()
        total = count = 0.0
        for batch in batches:
            part, targets = self.loss(batch)
            total, count = total + part.item(), count + targets
        return total / max(count, 1)

    def loss(self, batch: Batch) -> tuple[torch.Tensor, int]:
        """Return the sum of the cross-entropies, and how many there are."""
        logits, labels = self._logits(batch), ids(batch["labels"])
        if "masked_positions" in batch:
            chosen = ids(batch["masked_positions"])
            flat = logits.reshape(len(chosen), -1, logits.shape[-1])
            logits = flat[torch.arange(len(chosen))[:, None], chosen]
        smoothing = self.smoothing if self.model.training else 0.0
        size, count = logits.shape[-1], int((labels != IGNORED).sum())
        total = nn.functional.cross_entropy(
            logits.reshape(-1, size).float(), labels.reshape(-1), ignore_index=IGNORED,
            # PyTorch spreads over all labels, the right one too.
            reduction="sum", label_smoothing=smoothing * size / (size - 1),
        )  # fmt: skip
        return total - count * smoothed_entropy(smoothing, size), count

    # -- the forward pass of each kind of batch

    def _logits(self, batch: Batch) -> torch.Tensor:
        if "decoder_segment_ids" in batch:
            return self._packed_pairs(batch)
        if "decoder_input_ids" in batch:
            return self._pairs(batch)
        segments = batch["segment_ids"]
        causal = "masked_positions" not in batch
        kwargs = {"use_cache": False} if causal else {}
        return self.model(
            input_ids=ids(batch["input_ids"]),
            attention_mask=additive_mask(segments, segments, causal),
            position_ids=ids(positions(segments) + self._first_position), **kwargs,
        ).logits  # fmt: skip

    @functools.cached_property
    def _first_position(self) -> int:
        """RoBERTa's positions begin after the padding id, with which it pads their table."""
        for name, module in self.model.named_modules():
            if name.endswith("position_embeddings"):
                padding = getattr(module, "padding_idx", None)
                return 0 if padding is None else padding + 1
        return 0

    def _pairs(self, batch: Batch) -> torch.Tensor:
        """One pair a row: padding is all that must be hidden."""
        return self.model(
            input_ids=ids(batch["input_ids"]), attention_mask=ids(batch["segment_ids"] > 0),
            decoder_input_ids=ids(batch["decoder_input_ids"]), use_cache=False,
        ).logits  # fmt: skip

    def _packed_pairs(self, batch: Batch) -> torch.Tensor:
        """Several pairs a row: the encoder apart, since its mask is not that of the source."""
        source, target = batch["segment_ids"], batch["decoder_segment_ids"]
        self._places = {"encoder": ids(positions(source)), "decoder": ids(positions(target))}
        encoded = self.model.get_encoder()(
            input_ids=ids(batch["input_ids"]), attention_mask=additive_mask(source, source)
        )
        logits = self.model(
            encoder_outputs=encoded, attention_mask=additive_mask(target, source),
            decoder_input_ids=ids(batch["decoder_input_ids"]),
            decoder_attention_mask=additive_mask(target, target, causal=True), use_cache=False,
        ).logits  # fmt: skip
        self._places = {}
        return logits
