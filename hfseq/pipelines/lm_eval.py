"""The model type ``hfseq`` for EleutherAI's lm-evaluation-harness.

The harness only finds models that are registered in its process. Import this module before an
evaluation, or run ``python -m hfseq.pipelines.lm_eval`` in place of the harness's command.
"""

from __future__ import annotations

import functools
import logging
from collections.abc import Callable, Iterator, Sequence
from typing import TYPE_CHECKING, Any

import jax
import jax.numpy as jnp
import lm_eval.models  # noqa: F401  # the harness registers its own models only while none is registered
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

#: Maximum length if neither the model nor the tokenizer defines one.
DEFAULT_LENGTH = 2048

#: Tokenizer limits of at least this value mean that the tokenizer has no limit.
UNLIMITED = 10**9

#: Names under which tasks of the harness set the maximum number of new tokens, in the order of
#: precedence.
MAX_TOKENS_KEYS = ("max_gen_toks", "max_new_tokens", "max_tokens", "max_completion_tokens")

#: The harness's cache key, the token IDs of the context, and those of the continuation.
ScoringRequest = tuple[Any, list[int], list[int]]


@register_model("hfseq")
class HfseqLM(TemplateLM):
    """A causal language model for lm-evaluation-harness, which behaves like its ``hf`` model.

    Requests are sorted by length, and one program is compiled per bucket of lengths.

    Args:
        pretrained: A directory (also of an adapter), a Hub name, or a model. A model requires
            ``tokenizer``.
        dtype: Precision recipe, such as "float32" or "bfloat16".
        batch_size: Rows per batch.
        max_length: Maximum number of tokens of context and continuation. Default: the number of
            positions of the model. Longer contexts are truncated at the beginning.
        revision: Revision of a Hub repository.
        peft: An adapter to add to the model.
        tokenizer: The tokenizer, or its directory or Hub name. Default: the tokenizer in
            ``pretrained``.
        max_gen_toks: Maximum number of new tokens for tasks that do not set it.
        device: Ignored; the harness passes it.
        max_batch_size: Ignored; the harness passes it.
        disable_tqdm: Whether to hide the progress bars.

    Raises:
        UsageError: The model is not causal, its tokenizer has no end token, or a size is invalid.
        CheckpointError: The checkpoint cannot be loaded.
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
        disable_tqdm: bool = False,
    ):
        super().__init__()
        if disable_tqdm:  # the harness calls these methods without the argument
            for name in ("loglikelihood", "loglikelihood_rolling", "generate_until"):
                setattr(self, name, functools.partial(getattr(self, name), disable_tqdm=True))
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
            raise UsageError(f"batch_size must be at least 1, not {batch_size}")
        self.batch_size = int(batch_size)
        if getattr(self.model.config, "is_encoder_decoder", False):
            raise UsageError(
                f"{self.name} is an encoder-decoder. The harness requires causal models"
            )
        if self.tokenizer.eos_token_id is None:
            raise UsageError(f"the tokenizer of {self.name} has no end token. Set eos_token.")
        num_positions = self.model.max_length()
        tokenizer_limit = self.tokenizer.model_max_length  # 1e30 if not configured
        default_length = num_positions or (
            tokenizer_limit if tokenizer_limit < UNLIMITED else DEFAULT_LENGTH
        )
        self.max_length = default_length if max_length is None else max_length
        if self.max_length < 1 or num_positions is not None and self.max_length > num_positions:
            raise UsageError(
                f"max_length {max_length} must be between 1 and the {num_positions} positions of "
                f"{self.name}"
            )

    # -- tokens

    @property
    def eot_token_id(self) -> int:
        """The token that ends a text."""
        return self.tokenizer.eos_token_id

    @property
    def prefix_token_id(self) -> int:
        """The token for an empty context: begin-of-text, or else end-of-text."""
        start = self.tokenizer.bos_token_id
        return self.eot_token_id if start is None else start

    def tok_encode(
        self, string: str, add_special_tokens: bool | None = None, **kwargs: Any
    ) -> list[int]:
        """Tokenizes a text without adding a second begin token."""
        if add_special_tokens is None and string.startswith(
            str(self.tokenizer.decode(self.prefix_token_id))
        ):
            add_special_tokens = False
        special = {} if add_special_tokens is None else {"add_special_tokens": add_special_tokens}
        return self.tokenizer.encode(string, **special)

    @property
    def tokenizer_name(self) -> str:
        """The name of the tokenizer in the keys of lm-evaluation-harness's cache of requests."""
        return self.tokenizer.name_or_path.replace("/", "__")

    def apply_chat_template(
        self, chat_history: list[dict[str, str]], add_generation_prompt: bool = True
    ) -> str:
        """Returns a conversation as text in the model's chat format."""
        if self.tokenizer.chat_template is None:
            raise UsageError(f"{self.name} has no chat template. Omit --apply_chat_template.")

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
            without_system = [message for message in chat_history if message["role"] != "system"]
            if len(without_system) == len(chat_history):
                raise
            logger.warning(
                "dropping the system message, which the chat template does not support: %s", error
            )
            return applied(without_system)

    # -- likelihoods

    @functools.cached_property
    def _score(self) -> Callable[..., tuple[jax.Array, jax.Array]]:
        """The compiled function that scores the continuations in a batch.

        ``counted`` marks the target tokens that belong to a continuation. For each row, the
        function returns the sum of their log-probabilities, and whether all of them are the most
        probable tokens.
        """

        def score(
            params: Any, ids: jax.Array, mask: jax.Array, targets: jax.Array, counted: jax.Array
        ) -> tuple[jax.Array, jax.Array]:
            logits = self.model(ids, attention_mask=mask, params=params).logits.astype(jnp.float32)
            label_logits = jnp.take_along_axis(logits, targets[..., None], axis=-1)[..., 0]
            scores = label_logits - jax.nn.logsumexp(logits, axis=-1)
            likeliest = logits.argmax(axis=-1) == targets
            return jnp.where(counted, scores, 0).sum(axis=-1), (likeliest | ~counted).all(axis=-1)

        return jax.jit(score)

    def _loglikelihood_tokens(
        self, requests: Sequence[ScoringRequest], disable_tqdm: bool = False, **kwargs: Any
    ) -> list[tuple[float, bool]]:
        """Returns each continuation's log-probability, and whether greedy search generates it."""
        answers: list[tuple[float, bool]] = [(0.0, True)] * len(requests)
        lengths = [len(context) + len(continuation) for _, context, continuation in requests]
        bar = tqdm(total=len(requests), desc="loglikelihood", disable=disable_tqdm)
        for indices in self._batches(lengths):
            width = bucket_length(min(lengths[indices[0]] - 1, self.max_length), self.max_length)
            ids = np.zeros((min(self.batch_size, len(requests)), width), np.int32)
            mask = np.zeros_like(ids)
            targets = np.zeros_like(ids)
            counted = np.zeros(ids.shape, bool)
            mask[:, 0] = 1  # padding rows need a visible token
            for row, index in enumerate(indices):
                _, context, continuation = requests[index]
                if len(continuation) > self.max_length:
                    raise DataError(
                        f"a continuation has {len(continuation)} tokens, which exceeds max_length "
                        f"{self.max_length}: {str(requests[index][0])[:60]!r}"
                    )
                tokens = [*context, *continuation][-self.max_length - 1 :]
                end = len(tokens) - 1
                ids[row, :end], targets[row, :end], mask[row, :end] = tokens[:-1], tokens[1:], 1
                counted[row, end - len(continuation) : end] = True
            sums, likeliest = self._score(self.model.params, ids, mask, targets, counted)
            for index, total, all_likeliest in zip(
                indices, np.asarray(sums).tolist(), np.asarray(likeliest).tolist(), strict=False
            ):
                answers[index] = total, all_likeliest
                if requests[index][0] is not None:  # requests of loglikelihood_rolling have no key
                    self.cache_hook.add_partial("loglikelihood", requests[index][0], answers[index])
            bar.update(len(indices))
        bar.close()
        return answers

    def loglikelihood_rolling(
        self, requests: Sequence[Instance], disable_tqdm: bool = False
    ) -> list[float]:
        """Returns the log-probability of each text. Long texts are read in windows.

        As in the harness, each token is predicted in exactly one window. The last window also reads
        the tokens before it, as additional context.
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
        """Returns the generated text after each context, up to the first stop string."""
        answers = [""] * len(requests)
        groups: dict[str, list[int]] = {}
        for number, request in enumerate(requests):
            groups.setdefault(repr(request.args[1]), []).append(number)
        bar = tqdm(total=len(requests), desc="generate_until", disable=disable_tqdm)
        for group in groups.values():
            options = dict(requests[group[0]].args[1])
            until = options.pop("until", None) or []
            until = [text for text in ([until] if isinstance(until, str) else until) if text]
            limits = [options.pop(name, None) for name in MAX_TOKENS_KEYS]
            max_new_tokens = int(
                next((count for count in limits if count is not None), self.max_gen_toks)
            )
            max_context = self.max_length - max_new_tokens
            if max_context < 1:
                raise UsageError(
                    f"{max_new_tokens} new tokens leave no space for the context within max_length "
                    f"{self.max_length}. Lower max_gen_toks in the task's generation_kwargs."
                )
            contexts = [self.tok_encode(requests[index].args[0])[-max_context:] for index in group]
            if not options.setdefault("do_sample", options.get("temperature", 0) > 0):
                options.pop("temperature", None)  # 0 means greedy search in the harness
            for indices in self._batches([len(context) for context in contexts]):
                rows = [contexts[index] or [self.prefix_token_id] for index in indices]
                # Use the same number of rows in each batch, to compile only one program.
                num_padding = min(self.batch_size, len(group)) - len(rows)
                texts = self._write(rows + rows[-1:] * num_padding, max_new_tokens, until, options)
                for index, text in zip(indices, texts, strict=False):
                    number = group[index]
                    answers[number] = text
                    self.cache_hook.add_partial("generate_until", requests[number].args, text)
                bar.update(len(indices))
        bar.close()
        return answers

    def _write(
        self,
        rows: list[list[int]],
        max_new_tokens: int,
        until: list[str],
        options: dict[str, Any],
        use_stop_strings: bool = True,
    ) -> list[str]:
        """Continues ``rows``, and truncates the texts at the stop strings ``until``.

        With ``use_stop_strings``, generation also stops at a stop string.
        """
        width = bucket_length(max(map(len, rows)), self.max_length - max_new_tokens)
        ids = np.zeros((len(rows), width), np.int32)
        mask = np.zeros_like(ids)
        for index, row in enumerate(rows):
            ids[index, width - len(row) :], mask[index, width - len(row) :] = row, 1
        config_ends = self.model.generation_config.eos_token_id
        ends = sorted(
            {self.eot_token_id, *np.ravel([] if config_ends is None else config_ends).tolist()}
        )
        # The padding token differs from all end tokens, so that padding without an end token shows
        # that a row has ended with a stop string.
        pad = next(token for token in range(len(ends) + 1) if token not in ends)
        stop_options: dict[str, Any] = {}
        if until and use_stop_strings:
            stop_options = {"stop_strings": until, "tokenizer": self.tokenizer}
        output = self.model.generate(
            ids,
            attention_mask=mask,
            max_length=width + max_new_tokens,
            max_new_tokens=None,
            eos_token_id=ends,
            pad_token_id=pad,
            **stop_options,
            **options,
        )
        texts, stopped_early = [], []
        for index, tokens in enumerate(np.asarray(output.sequences)[:, width:]):
            end_positions = np.flatnonzero(np.isin(tokens, ends))
            full_text = str(
                self.tokenizer.decode(tokens[: [*end_positions, None][0]], skip_special_tokens=True)
            )
            texts.append(functools.reduce(lambda text, stop: text.split(stop)[0], until, full_text))
            if (
                stop_options
                and not len(end_positions)
                and tokens[-1] == pad
                and texts[-1] == full_text
            ):
                stopped_early.append(index)
        # These rows stopped at a string that begins in the context. The harness only searches the
        # generated text for stop strings, so continue these rows without stopping at them.
        if stopped_early:
            retried = self._write(
                [rows[index] for index in stopped_early], max_new_tokens, until, options, False
            )
            for index, text in zip(stopped_early, retried, strict=True):
                texts[index] = text
        return texts

    def _batches(self, lengths: Sequence[int]) -> Iterator[list[int]]:
        """Yields the indices of rows of similar length for each batch.

        The longest rows come first, so that a lack of memory becomes apparent early.
        """
        order = sorted(range(len(lengths)), key=lambda index: -lengths[index])
        for start in range(0, len(order), self.batch_size):
            yield order[start : start + self.batch_size]


if __name__ == "__main__":
    from lm_eval.__main__ import cli_evaluate

    cli_evaluate()
