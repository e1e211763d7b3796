"""Models of hfseq in EleutherAI's lm-evaluation-harness, under the name ``hfseq``.

The harness knows only models of its own: a program imports this module before it evaluates, and
``python -m hfseq.pipelines.lm_eval`` is the harness's command, which knows this one too.
"""

from __future__ import annotations

import functools
import logging
from collections.abc import Callable, Iterator, Sequence
from typing import TYPE_CHECKING, Any

import jax
import jax.numpy as jnp
import lm_eval.models  # noqa: F401  # the others: the harness finds them only while it knows none
import numpy as np
from jinja2 import TemplateError
from lm_eval.api.model import TemplateLM
from lm_eval.api.registry import register_model
from lm_eval.utils import get_rolling_token_windows, make_disjoint_window
from tqdm import tqdm

from hfseq.errors import DataError, UsageError
from hfseq.generation.request import bucket_length
from hfseq.modeling.auto import FlaxAutoModelForCausalLM
from hfseq.pipelines import load

if TYPE_CHECKING:
    from lm_eval.api.instance import Instance

    from hfseq.modeling import FlaxPreTrainedModel

logger = logging.getLogger(__name__)

#: What the harness reads at a time where nobody knows what a model can read.
DEFAULT_LENGTH = 2048

#: What no tokenizer means by the longest text.
UNLIMITED = 10**9

#: What the harness's tasks call the most tokens to write, the first that is there counts.
MAX_TOKENS_KEYS = ("max_gen_toks", "max_new_tokens", "max_tokens", "max_completion_tokens")

#: What the harness scores: whatever it is called by, its context and its continuation.
ScoringRequest = tuple[Any, list[int], list[int]]


@register_model("hfseq")
class HfseqLM(TemplateLM):
    """A causal language model that the harness evaluates, by what its own ``hf`` model computes.

    Requests are sorted by length, and a program is compiled for each bucket of lengths.

    **Arguments:** ``pretrained`` is a directory (of an adapter, too), a name on the Hub, or a model
    whose ``tokenizer`` is given; ``peft`` is an adapter to add to it, ``tokenizer`` where the
    tokenizer is if elsewhere, ``revision`` that of a repository. ``dtype`` names a precision
    recipe; ``batch_size`` rows are computed together; ``max_length`` tokens are read, by default as
    many as the model has positions: of longer contexts the end. ``max_gen_toks`` is for tasks which
    do not say how much to write. ``device`` and ``max_batch_size``, which the harness passes, are
    ignored.

    **Raises:** UsageError for a model that does not write from left to right, without an end token,
    and for sizes that cannot be; CheckpointError for what cannot be loaded.
    """

    def __init__(
        self,
        pretrained: str | FlaxPreTrainedModel,
        dtype: str = "float32",
        batch_size: int | str = 8,
        max_length: int | None = None,
        revision: str | None = None,
        peft: str | None = None,
        tokenizer: Any = None,
        max_gen_toks: int = 256,
        device: str | None = None,
        max_batch_size: int | None = None,
    ):
        super().__init__()
        self.name = pretrained if isinstance(pretrained, str) else "the model"
        if isinstance(pretrained, str):
            self.model, self.tokenizer = load(
                FlaxAutoModelForCausalLM,
                pretrained,
                tokenizer=tokenizer,
                revision=revision,
                precision="float32" if dtype == "auto" else dtype,
            )
        else:
            self.model, self.tokenizer = pretrained, tokenizer
        if peft is not None:
            self.model = self.model.load_adapter(peft)
        self.max_gen_toks = max_gen_toks
        if not str(batch_size).isdecimal() or int(batch_size) < 1:
            raise UsageError(f"batch_size {batch_size}: give a number of at least 1")
        self.batch_size = int(batch_size)
        if getattr(self.model.config, "is_encoder_decoder", False):
            raise UsageError(f"{self.name} is an encoder-decoder: the harness gets causal models")
        if self.tokenizer.eos_token_id is None:
            raise UsageError(f"the tokenizer of {self.name} has no end token: set eos_token")
        room = self.model.max_length()
        said = self.tokenizer.model_max_length  # 1e30 where nobody said anything
        known = room or (said if said < UNLIMITED else DEFAULT_LENGTH)
        self.max_length = known if max_length is None else max_length
        if self.max_length < 1 or room is not None and self.max_length > room:
            raise UsageError(f"max_length {max_length}: {self.name} has {room} positions")

    # -- tokens

    @property
    def eot_token_id(self) -> int:
        """The token that ends a text."""
        return self.tokenizer.eos_token_id

    @property
    def prefix_token_id(self) -> int:
        """What an empty context is: the token that begins a text, else the one that ends it."""
        start = self.tokenizer.bos_token_id
        return self.eot_token_id if start is None else start

    def tok_encode(
        self, string: str, add_special_tokens: bool | None = None, **kwargs: Any
    ) -> list[int]:
        """Return the ids of a text, which gets no second begin token."""
        if add_special_tokens is None and string.startswith(
            str(self.tokenizer.decode(self.prefix_token_id))
        ):
            add_special_tokens = False
        special = {} if add_special_tokens is None else {"add_special_tokens": add_special_tokens}
        return self.tokenizer.encode(string, **special)

    @property
    def tokenizer_name(self) -> str:
        """What the harness's cache of requests calls the tokenizer."""
        return self.tokenizer.name_or_path.replace("/", "__")

    def apply_chat_template(
        self, chat_history: list[dict[str, str]], add_generation_prompt: bool = True
    ) -> str:
        """Return a conversation as the text that the model was trained on."""
        if self.tokenizer.chat_template is None:
            raise UsageError(f"{self.name} has no chat template: do without --apply_chat_template")

        def applied(messages: list[dict[str, str]]) -> str:
            text = self.tokenizer.apply_chat_template(
                messages,
                tokenize=False,
                add_generation_prompt=add_generation_prompt,
                continue_final_message=not add_generation_prompt,
            )
            return str(text)

        try:
            return applied(chat_history)
        except TemplateError as error:
            others = [message for message in chat_history if message["role"] != "system"]
            if len(others) == len(chat_history):
                raise
            logger.warning("the chat template takes no system message, which is dropped: %s", error)
            return applied(others)

    # -- likelihoods

    @functools.cached_property
    def _score(self) -> Callable[..., tuple[jax.Array, jax.Array]]:
        """Sum what is counted of the targets' log-probabilities in each row; are all likeliest."""

        def score(
            params: Any, ids: jax.Array, mask: jax.Array, targets: jax.Array, counted: jax.Array
        ) -> tuple[jax.Array, jax.Array]:
            logits = self.model(ids, attention_mask=mask, params=params).logits.astype(jnp.float32)
            picked = jnp.take_along_axis(logits, targets[..., None], axis=-1)[..., 0]
            scores = picked - jax.nn.logsumexp(logits, axis=-1)
            likeliest = logits.argmax(axis=-1) == targets
            return jnp.where(counted, scores, 0).sum(axis=-1), (likeliest | ~counted).all(axis=-1)

        return jax.jit(score)

    def _loglikelihood_tokens(
        self, requests: Sequence[ScoringRequest], disable_tqdm: bool = False, **kwargs: Any
    ) -> list[tuple[float, bool]]:
        """Return the log-probability of each continuation, and whether greedy search writes it."""
        answers: list[tuple[float, bool]] = [(0.0, True)] * len(requests)
        lengths = [len(context) + len(continuation) for _, context, continuation in requests]
        bar = tqdm(total=len(requests), desc="loglikelihood", disable=disable_tqdm)
        for places in self._batches(lengths):
            width = bucket_length(min(lengths[places[0]] - 1, self.max_length), self.max_length)
            ids = np.zeros((min(self.batch_size, len(requests)), width), np.int32)
            mask, targets, counted = (
                np.zeros_like(ids),
                np.zeros_like(ids),
                np.zeros(ids.shape, bool),
            )
            mask[:, 0] = 1  # spare rows see something, too
            for row, place in enumerate(places):
                _, context, continuation = requests[place]
                if len(continuation) > self.max_length:
                    raise DataError(
                        f"a continuation has {len(continuation)} tokens, and at most "
                        f"{self.max_length} are scored at a time: {str(requests[place][0])[:60]!r}"
                    )
                tokens = [*context, *continuation][-self.max_length - 1 :]
                end = len(tokens) - 1
                ids[row, :end], targets[row, :end], mask[row, :end] = tokens[:-1], tokens[1:], 1
                counted[row, end - len(continuation) : end] = True
            sums, likeliest = self._score(self.model.params, ids, mask, targets, counted)
            for place, total, all_likeliest in zip(
                places, np.asarray(sums).tolist(), np.asarray(likeliest).tolist(), strict=False
            ):
                answers[place] = total, all_likeliest
                if requests[place][0] is not None:  # a window of a longer text has no name
                    self.cache_hook.add_partial("loglikelihood", requests[place][0], answers[place])
            bar.update(len(places))
        bar.close()
        return answers

    def loglikelihood_rolling(
        self, requests: Sequence[Instance], disable_tqdm: bool = False
    ) -> list[float]:
        """Return the log-probability of each text, of which windows are read.

        Each token is predicted once, and the last window is full, as the harness wants it.
        """
        windows: list[ScoringRequest] = []
        owners: list[int] = []
        for number, request in enumerate(requests):
            (text,) = request.args
            for window in get_rolling_token_windows(
                self.tok_encode(text), self.prefix_token_id, self.max_length, context_len=1
            ):
                windows.append((None, *make_disjoint_window(window)))
                owners.append(number)
        totals = [0.0] * len(requests)
        scored = self._loglikelihood_tokens(windows, disable_tqdm)
        for owner, (score, _) in zip(owners, scored, strict=True):
            totals[owner] += score
        for request, total in zip(requests, totals, strict=True):
            self.cache_hook.add_partial("loglikelihood_rolling", request.args, total)
        return totals

    # -- texts

    def generate_until(self, requests: Sequence[Instance], disable_tqdm: bool = False) -> list[str]:
        """Return what the model writes after each context, up to the first of its stop strings."""
        answers = [""] * len(requests)
        groups: dict[str, list[int]] = {}
        for number, request in enumerate(requests):
            groups.setdefault(repr(request.args[1]), []).append(number)
        bar = tqdm(total=len(requests), desc="generate_until", disable=disable_tqdm)
        for members in groups.values():
            options = dict(requests[members[0]].args[1])
            until = options.pop("until", None) or []
            until = [text for text in ([until] if isinstance(until, str) else until) if text]
            given = [options.pop(name, None) for name in MAX_TOKENS_KEYS]
            new = int(next((count for count in given if count is not None), self.max_gen_toks))
            room = self.max_length - new
            if room < 1:
                raise UsageError(
                    f"{new} tokens are to be written, and the model reads {self.max_length} with "
                    "the context: lower max_gen_toks in the task's generation_kwargs"
                )
            contexts = [self.tok_encode(requests[place].args[0])[-room:] for place in members]
            if not options.setdefault("do_sample", options.get("temperature", 0) > 0):
                options.pop("temperature", None)  # the harness's 0 means greedy search
            for places in self._batches([len(context) for context in contexts]):
                rows = [contexts[place] or [self.prefix_token_id] for place in places]
                # As many rows in each batch: a program is compiled for their number, too.
                spare = min(self.batch_size, len(members)) - len(rows)
                texts = self._write(rows + rows[-1:] * spare, new, until, options)
                for place, text in zip(places, texts, strict=False):
                    number = members[place]
                    answers[number] = text
                    self.cache_hook.add_partial("generate_until", requests[number].args, text)
                bar.update(len(places))
        bar.close()
        return answers

    def _write(
        self,
        rows: list[list[int]],
        new: int,
        until: list[str],
        options: dict[str, Any],
        stopping: bool = True,
    ) -> list[str]:
        """Continue ``rows`` and cut what is written; ``stopping`` ends a row at a stop string."""
        width = bucket_length(max(map(len, rows)), self.max_length - new)
        ids = np.zeros((len(rows), width), np.int32)
        mask = np.zeros_like(ids)
        for number, row in enumerate(rows):
            ids[number, width - len(row) :], mask[number, width - len(row) :] = row, 1
        own = self.model.generation_config.eos_token_id
        ends = sorted({self.eot_token_id, *np.ravel([] if own is None else own).tolist()})
        # Not one of the ends, so that rows which a stop string ended can be told from the others.
        pad = next(token for token in range(len(ends) + 1) if token not in ends)
        stops: dict[str, Any] = {}
        if until and stopping:
            stops = {"stop_strings": until, "tokenizer": self.tokenizer}
        output = self.model.generate(
            ids,
            attention_mask=mask,
            max_length=width + new,
            max_new_tokens=None,
            eos_token_id=ends,
            pad_token_id=pad,
            **stops,
            **options,
        )
        texts, early = [], []
        for number, tokens in enumerate(np.asarray(output.sequences)[:, width:]):
            ended = np.flatnonzero(np.isin(tokens, ends))
            whole = str(
                self.tokenizer.decode(tokens[: [*ended, None][0]], skip_special_tokens=True)
            )
            texts.append(functools.reduce(lambda text, stop: text.split(stop)[0], until, whole))
            if stops and not len(ended) and tokens[-1] == pad and texts[-1] == whole:
                early.append(number)
        if early:  # by a stop string that begins in the context, where the harness goes on
            again = self._write([rows[number] for number in early], new, until, options, False)
            for number, text in zip(early, again, strict=True):
                texts[number] = text
        return texts

    def _batches(self, lengths: Sequence[int]) -> Iterator[list[int]]:
        """Yield the places of rows of similar length, the longest first: memory fails early."""
        order = sorted(range(len(lengths)), key=lambda place: -lengths[place])
        for start in range(0, len(order), self.batch_size):
            yield order[start : start + self.batch_size]


if __name__ == "__main__":
    from lm_eval.__main__ import cli_evaluate

    cli_evaluate()
