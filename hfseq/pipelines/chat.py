"""Conversations with a language model that has a chat template."""

from __future__ import annotations

from collections.abc import Generator
from typing import Any

import numpy as np

from hfseq.errors import HfseqError, UsageError, first_line
from hfseq.pipelines.text_generation import TextGenerator

#: The longest answer where nobody says anything.
DEFAULT_MAX_NEW_TOKENS = 512


class Chat:
    """A conversation: ``messages`` with a ``role`` and ``content`` each, and who answers them.

    **Arguments:** ``generator`` writes the answers, of at most ``max_new_tokens``; ``system`` is
    what it is told first; ``chat_template`` is used instead of the tokenizer's own; ``seed`` is of
    sampling. Other keywords go to ``generate``.

    When the model's length is full the oldest turns are left out, a question with its answer at a
    time and never ``system``; ``dropped`` counts them.

    **Raises:** UsageError for an encoder-decoder, and where there is no chat template.
    """

    def __init__(
        self,
        generator: TextGenerator,
        *,
        system: str | None = None,
        max_new_tokens: int = DEFAULT_MAX_NEW_TOKENS,
        chat_template: str | None = None,
        seed: int = 0,
        **options: Any,
    ):
        self.generator, self.max_new_tokens = generator, max_new_tokens
        if not generator.is_decoder_only:
            raise UsageError(f"{generator.name} is an encoder-decoder: it holds no conversations")
        if chat_template is not None:
            generator.tokenizer.chat_template = chat_template
        if not generator.tokenizer.chat_template:
            raise UsageError(
                f"{generator.name} has no chat template, so it was hardly trained to answer: give "
                "one by --chat_template FILE, or let it write on by `hfseq generate`"
            )
        own = generator.model.generation_config.eos_token_id
        ends = {generator.tokenizer.eos_token_id, *np.ravel([] if own is None else own).tolist()}
        self._options = {"eos_token_id": sorted(ends - {None}) or None, **options}
        self._first = [] if system is None else [{"role": "system", "content": system}]
        self._seed, self._turns = seed, 0
        self.messages = list(self._first)
        self.dropped_turns = 0

    @classmethod
    def from_pretrained(cls, name: str, *, precision: str = "float32", **options: Any) -> Chat:
        """Load a directory or a model on the Hub, an adapter too, with its tokenizer.

        **Raises:** as :meth:`TextGenerator.from_pretrained`, and as the class itself.
        """
        return cls(TextGenerator.from_pretrained(name, precision), **options)

    def clear(self) -> None:
        """Begin anew: nothing but ``system`` was said."""
        self.messages = list(self._first)

    def reply(self, text: str) -> Generator[str, None, None]:
        """Yield the answer to ``text`` piece by piece, whole characters each.

        Where the caller closes the iterator, or is interrupted, the answer is what has come.

        **Raises:** UsageError for a text that is too long, or that the template refuses; then it
        was not said.
        """
        import jax

        before = self.messages
        ids = self._fit([*before, {"role": "user", "content": text}])
        room = self.generator.model.max_length()
        new = self.max_new_tokens if room is None else min(self.max_new_tokens, room - len(ids))
        key = jax.random.fold_in(jax.random.PRNGKey(self._seed), self._turns)
        self._turns += 1
        answer = ""
        try:
            for piece in self.generator.stream(
                ids, max_length=len(ids) + new, max_new_tokens=None, prng_key=key, **self._options
            ):
                answer += piece
                yield piece
        except HfseqError:
            self.messages = before
            raise
        finally:
            if self.messages is not before:
                self.messages.append({"role": "assistant", "content": answer})

    def _fit(self, messages: list[dict[str, str]]) -> list[int]:
        """Set ``self.messages`` to what there is room for, and return its tokens.

        A quarter of the model's length is left for the answer, if it may become so long.
        """
        room, dropped = self.generator.model.max_length(), 0
        ids = self._ids(messages)
        while room is not None and len(ids) + min(self.max_new_tokens, room // 4) > room:
            asked = [place for place, one in enumerate(messages) if one["role"] == "user"]
            if len(asked) == 1 and len(ids) < room:
                break
            if len(asked) == 1:
                raise UsageError(
                    f"this makes {len(ids)} tokens, and {self.generator.name} reads {room} with "
                    "the answer: say it shorter"
                )
            messages = messages[: asked[0]] + messages[asked[1] :]
            dropped += 1
            ids = self._ids(messages)
        self.messages = messages
        self.dropped_turns += dropped
        return ids

    def _ids(self, messages: list[dict[str, str]]) -> list[int]:
        from jinja2 import TemplateError

        try:
            encoded: Any = self.generator.tokenizer.apply_chat_template(
                messages, add_generation_prompt=True, return_dict=True
            )
        except TemplateError as error:
            raise UsageError(
                f"the chat template of {self.generator.name} fails: {first_line(error)}"
            ) from error
        return list(encoded["input_ids"])
