"""The engine that people use: tokens in and out, and on top of it conversations."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from functools import cached_property
from typing import Any

from octavo.config import OverflowChoice, SamplingParams
from octavo.engine.engine import TokenEngine
from octavo.engine.messages import Reply
from octavo.errors import InvalidConversation
from octavo.sessions import archive
from octavo.sessions.conversation import Conversation
from octavo.sessions.template import ChatTemplate, Message


class Engine(TokenEngine):
    """A model with its cache, ready to answer prompts and to hold conversations."""

    @cached_property
    def chat_template(self) -> ChatTemplate:
        """How messages are written for this model."""
        return ChatTemplate(self.tokenizer, self.eos_token_ids)

    def conversation(
        self,
        *,
        system: str | None = None,
        tools: list[dict[str, Any]] | None = None,
        overflow: OverflowChoice = "stop",
        **options: Any,
    ) -> Conversation:
        """A new conversation; see `Conversation` for the arguments.

        Raises:
            InvalidRequest: a parameter is invalid, or the template refuses the system prompt or the tools.
        """
        return Conversation(self, system=system, tools=tools, overflow=overflow, **options)

    def restore(self, data: Mapping[str, Any], **options: Any) -> Conversation:
        """The conversation that `Conversation.to_dict` wrote; `options` as in `Conversation.from_dict`.

        Raises:
            InvalidConversation: `data` is damaged, or was written with another tokenizer.
        """
        return Conversation.from_dict(self, data, **options)

    def keep(self, conversation: Conversation, id: str | None = None) -> str:
        """Keeps a conversation on disk, under a new id or in place of the one of `id`; returns the id.

        Raises:
            InvalidConversation: there is no disk tier, so that nothing can be kept, or it is ephemeral.
        """
        if conversation.is_ephemeral:
            raise InvalidConversation("An ephemeral conversation is not kept. Begin one without ephemeral.")
        if self.disk.report().state != "on":
            raise InvalidConversation(
                "Nothing is kept on disk (kv_disk, --kv-disk), so a conversation cannot be kept either. Write it to a "
                "file: to_dict(), or /save in a chat."
            )
        id = id or archive.new_id()
        archive.keep(
            self.disk,
            conversation.to_dict(),
            id=id,
            tenant=conversation.cache_namespace,
            fingerprint=self.fingerprint,
        )
        return id

    def resume(self, id: str, **options: Any) -> Conversation:
        """The conversation that was kept under an id; see `kept`. `options` are those of `Conversation`."""
        return self.restore(self.kept(id, str(options.get("cache_namespace", ""))).data, **options)

    def kept(self, id: str, cache_namespace: str = "") -> archive.Kept:
        """What was kept under an id, or a beginning of one, or "last".

        Raises:
            InvalidConversation: there is none, or it was held with another model.
        """
        self.disk.flush(10.0)  # it may have been kept a moment ago
        item = archive.find(self.disk, id, cache_namespace)
        archive.check_model(item, name=self.name, fingerprint=self.fingerprint)
        return item

    def chat_ids(
        self, messages: Sequence[Message], *, tools: list[dict[str, Any]] | None = None
    ) -> tuple[int, ...]:
        """The prompt of a list of messages, for `generate`, `stream` or `astream`.

        Assistant messages are tokenised as text: unlike in a conversation, the ids need not be those that
        the model once generated.

        Raises:
            InvalidRequest: a message is malformed, or the template refuses the messages.
        """
        return self.chat_template.prompt(messages, tools).ids

    def chat(
        self,
        messages: Sequence[Message],
        params: SamplingParams | None = None,
        *,
        tools: list[dict[str, Any]] | None = None,
        **sampling: Any,
    ) -> Reply:
        """The answer to a list of messages (`{"role": ..., "content": ...}`).

        Raises:
            PromptTooLong: the messages do not fit the context window.
            InvalidRequest: a message or a parameter is invalid, or the template refuses the messages.
        """
        return self.generate(self.chat_ids(messages, tools=tools), params, **sampling)
