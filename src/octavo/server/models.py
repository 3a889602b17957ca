"""The models that a server answers with."""

from __future__ import annotations

import time
from collections.abc import Iterator
from functools import cached_property

from octavo.errors import ModelNotFound
from octavo.server.chat.transcripts import DurableTranscripts, MemoryTranscripts, TranscriptStore
from octavo.server.infill.prompt import FimPrompts
from octavo.server.infill.tokens import find_fim_tokens
from octavo.server.settings import ServerSettings
from octavo.server.tokens import TokenTexts
from octavo.server.tools.formats import ToolFormat, format_of
from octavo.sessions.engine import Engine
from octavo.sessions.history import common_length


class Model:
    """A loaded model, and what the server derives from it.

    Attributes:
        transcripts: None where exact histories are switched off.
        fim: how it writes text with a gap; None if it cannot.
    """

    def __init__(self, engine: Engine, transcripts: TranscriptStore | None, settings: ServerSettings) -> None:
        self.engine = engine
        self.name = engine.name
        self.transcripts = transcripts
        self.created = int(time.time())
        self.vocab_size = engine.vocab_size
        self.texts = TokenTexts(engine.tokenizer)
        self.fingerprint = f"fp_{engine.fingerprint.hex()[:16]}"
        marks = find_fim_tokens(engine.tokenizer, settings.fim_tokens, settings.fim_order)
        self.fim = None if marks is None else FimPrompts(engine.tokenizer, marks)

    def encode(self, text: str) -> list[int]:
        """Token ids of a raw prompt, in which special tokens and the marks of a gap are written out."""
        return self.engine.encode(text) if self.fim is None else self.fim.raw(text)

    @property
    def scope(self) -> str:
        """Keeps transcripts of different models apart."""
        return self.engine.fingerprint.hex()

    @cached_property
    def tool_format(self) -> ToolFormat:
        return format_of(self.engine.chat_template)

    @cached_property
    def specials(self) -> dict[str, int]:
        """Special tokens that belong to the format of calls."""
        written = self.tool_format
        text = written.begin + written.between + written.after_name + written.optional
        return {
            str(token.content): id_
            for id_, token in self.engine.tokenizer.added_tokens_decoder.items()
            if token.special and str(token.content) in text
        }

    def warm(self, system: str, namespace: str) -> int:
        """Reads a system prompt, so that the first request with it finds it read.

        Returns:
            How many tokens it is: what all prompts with it begin with.

        Raises:
            InvalidRequest: the template has no place for it, or it does not fit.
        """
        template = self.engine.chat_template
        begin = {"role": "system", "content": system}
        first, second = (
            template.prompt([begin, {"role": "user", "content": text}]).ids for text in ("a", "(")
        )
        ids = first[: common_length(first, second)]
        self.engine.generate(ids, max_tokens=1, cache_namespace=namespace)
        return len(ids)


class Models:
    """Models by name.

    Args:
        engines: the first one is asked for by nobody in particular.
    """

    def __init__(self, engines: list[Engine], settings: ServerSettings) -> None:
        memory = MemoryTranscripts(settings.transcript_bytes)

        def store(engine: Engine) -> TranscriptStore | None:
            if not settings.exact_history:
                return None
            return DurableTranscripts(memory, engine.disk, engine.fingerprint)

        self._models = {engine.name: Model(engine, store(engine), settings) for engine in engines}

    def __iter__(self) -> Iterator[Model]:
        return iter(self._models.values())

    def engines(self) -> dict[str, Engine]:
        """The engines that are loaded, by name."""
        return {name: model.engine for name, model in self._models.items()}

    def forget(self, namespace: str) -> int:
        """Drops the transcripts of a tenant; how many there were."""
        stores = [model.transcripts for model in self]
        return sum(store.forget(namespace) for store in stores if store is not None)

    def check(self) -> None:
        """Raises EngineStopped unless every engine runs."""
        for model in self._models.values():
            model.engine.check()

    def find(self, name: str) -> Model:
        """The model of a name.

        Raises:
            ModelNotFound: it is not served here.
        """
        model = self._models.get(name)
        if model is None:
            raise ModelNotFound(f"The server has no model {name!r}. It has {', '.join(self._models)}.")
        return model

    def asked(self, name: str | None) -> Model:
        """The model of a name, or the first one if a request names none.

        Raises:
            ModelNotFound: it is not served here.
        """
        return self.find(name) if name else next(iter(self))
