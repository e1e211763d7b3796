"""Conversations with a language model that has a chat template."""

from __future__ import annotations

from collections.abc import Generator, Mapping, Sequence
from typing import Any

import numpy as np

from hfseq.errors import HfseqError, UsageError
from hfseq.pipelines.generation import TextGeneration, message_problem

#: Default of the maximum number of tokens per answer.
DEFAULT_MAX_NEW_TOKENS = 512


class Chat:
    """A conversation with a language model.

    A turn is a message of the user and the model's answer. If the conversation exceeds the model's
    maximum length, the oldest turns are dropped. The system message is never dropped.

    Attributes:
        messages: The conversation so far, with ``role`` and ``content`` per message. If the
            tokenizer has a ``response_template``, answers may also have ``reasoning_content`` and
            ``tool_calls``.
        dropped_turns: Number of turns that have been dropped.

    Args:
        generator: The pipeline that generates the answers.
        system: System message.
        max_new_tokens: Maximum tokens per answer.
        chat_template: Replaces the tokenizer's chat template.
        tools: JSON schemas or functions that the chat template describes to the model.
        chat_template_kwargs: Variables of the chat template, such as ``enable_thinking``.
        seed: Seed for sampling.
        **options: Options of ``generate``.

    Raises:
        UsageError: The model is an encoder-decoder, or has no chat template.
    """

    def __init__(
        self,
        generator: TextGeneration,
        *,
        system: str | None = None,
        max_new_tokens: int = DEFAULT_MAX_NEW_TOKENS,
        chat_template: str | None = None,
        tools: Sequence[Any] | None = None,
        chat_template_kwargs: Mapping[str, Any] | None = None,
        seed: int = 0,
        **options: Any,
    ):
        self.generator, self.max_new_tokens = generator, max_new_tokens
        self._template = {"tools": tools, **(chat_template_kwargs or {})}
        if chat_template is not None:
            generator.tokenizer.chat_template = chat_template
        self.name = generator.model.name_or_path or "the model"
        if not generator.tokenizer.chat_template:
            raise UsageError(
                f"{self.name} has no chat template. Set --chat_template FILE, or continue a prompt "
                "with `hfseq generate`."
            )
        config_ends = generator.model.generation_config.eos_token_id
        ends = {
            generator.tokenizer.eos_token_id,
            *np.ravel([] if config_ends is None else config_ends).tolist(),
        }
        self._options = {"eos_token_id": sorted(ends - {None}) or None, **options}
        if generator.parses_responses:  # which needs the special tokens
            self._options["skip_special_tokens"] = False
        self._first: list[dict[str, Any]] = (
            [] if system is None else [{"role": "system", "content": system}]
        )
        self._seed, self._turns = seed, 0
        self.messages = list(self._first)
        self.dropped_turns = 0

    @classmethod
    def from_pretrained(cls, name: str, *, precision: str = "float32", **options: Any) -> Chat:
        """Loads a directory, Hub checkpoint or adapter with its tokenizer.

        Args:
            name: Directory or Hub name.
            precision: Precision recipe, such as "float32" or "bfloat16".
            **options: Arguments of :class:`Chat`.

        Raises:
            CheckpointError: The checkpoint cannot be read.
            UsageError: The model cannot generate text, has no tokenizer or no chat template.
        """
        from hfseq.pipelines.factory import generation_task, pipeline

        if generation_task(name) != "text-generation":
            raise UsageError(f"{name} is an encoder-decoder. Chat requires a causal model.")
        generator = pipeline("text-generation", name, precision=precision)
        assert isinstance(generator, TextGeneration)
        return cls(generator, **options)

    def clear(self) -> None:
        """Removes all messages except the system message."""
        self.messages = list(self._first)

    def reply(self, message: str | Mapping[str, Any]) -> Generator[str, None, None]:
        """Yields the answer to a message in pieces, which consist of complete characters.

        If the caller closes the iterator or is interrupted, the pieces so far are stored as the
        answer. Special tokens are part of the pieces if the tokenizer needs them to parse answers.

        Args:
            message: A text of the user, or a message such as ``{"role": "tool", "content": "21"}``.

        Raises:
            UsageError: The message is too long, or the chat template rejects it. The conversation
                does not change.
        """
        import jax

        if isinstance(message, str):
            message = {"role": "user", "content": message}
        elif problem := message_problem(message):
            raise UsageError(f"{problem}: {message!r:.60}")
        previous_messages = self.messages
        ids = self._fit([*previous_messages, dict(message)])
        max_positions = self.generator.model.max_length()
        max_new_tokens = (
            self.max_new_tokens
            if max_positions is None
            else min(self.max_new_tokens, max_positions - len(ids))
        )
        key = jax.random.fold_in(jax.random.PRNGKey(self._seed), self._turns)
        self._turns += 1
        answer = ""
        try:
            for chunk in self.generator.stream_text(
                ids,
                max_new_tokens=max_new_tokens,
                prng_key=key,
                **self._options,
            ):
                answer += chunk
                yield chunk
        except HfseqError:
            self.messages = previous_messages
            raise
        finally:
            if self.messages is not previous_messages:
                parsed = self.generator.parse_answer(ids, answer, self._template["tools"])
                self.messages.append(parsed)

    def _fit(self, messages: list[dict[str, Any]]) -> list[int]:
        """Sets ``self.messages`` to the turns that fit, and returns their token IDs.

        A quarter of the model's maximum length is reserved for the answer, or ``max_new_tokens`` if
        that is less.
        """
        max_positions, dropped = self.generator.model.max_length(), 0
        ids = self._ids(messages)
        while (
            max_positions is not None
            and len(ids) + min(self.max_new_tokens, max_positions // 4) > max_positions
        ):
            user_turns = [
                index for index, message in enumerate(messages) if message["role"] == "user"
            ]
            if len(user_turns) == 1 and len(ids) < max_positions:
                break
            if len(user_turns) == 1:
                raise UsageError(
                    f"the message has {len(ids)} tokens, but {self.name} supports "
                    f"{max_positions} including the answer. Shorten the message."
                )
            messages = messages[: user_turns[0]] + messages[user_turns[1] :]
            dropped += 1
            ids = self._ids(messages)
        self.messages = messages
        self.dropped_turns += dropped
        return ids

    def _ids(self, messages: list[dict[str, Any]]) -> list[int]:
        return self.generator.chat_ids(messages, False, **self._template)
