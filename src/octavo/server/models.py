"""The models that a server answers with."""

from __future__ import annotations

import logging
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import AbstractAsyncContextManager
from functools import cached_property, partial
from typing import TYPE_CHECKING

from octavo.errors import ModelNotFound, OctavoError
from octavo.kv.storage.tier import NullTier, Tier
from octavo.server.chat.transcripts import DurableTranscripts, MemoryTranscripts, TranscriptStore
from octavo.server.engines import ServedEngine
from octavo.server.infill.prompt import FimPrompts
from octavo.server.infill.tokens import find_fim_tokens
from octavo.server.log import log
from octavo.server.places import Loading, Places
from octavo.server.problems import Problem
from octavo.server.settings import ServerSettings
from octavo.server.tokens import TokenTexts
from octavo.server.tools.formats import ToolFormat, format_of
from octavo.sessions.history import common_length

if TYPE_CHECKING:
    from octavo.server.gate import Visit


class Model:
    """A loaded model, and what the server derives from it.

    Attributes:
        transcripts: None where exact histories are switched off.
        fim: how it writes text with a gap; None if it cannot.
    """

    def __init__(
        self, engine: ServedEngine, transcripts: TranscriptStore | None, settings: ServerSettings
    ) -> None:
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

    def forget(self, namespace: str, token_ids: Sequence[int], keys: Sequence[bytes]) -> None:
        """Drops a tenant's transcripts, and what was computed of a sequence that nothing goes on from."""
        if token_ids:  # the last one was never computed
            self.engine.forget_sequence(token_ids[:-1], cache_namespace=namespace)
        if self.transcripts is not None:
            for key in keys:
                self.transcripts.remove(namespace, key)
        self.engine.settle(30.0)  # when this is told, it is so

    def warm(self, system: str, namespace: str, pin: str | None = None) -> int:
        """Reads a system prompt, so that the first request with it finds it read; `pin` as in `Retention`.

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
        self.engine.generate(ids, max_tokens=1, cache_namespace=namespace, pin=pin)
        return len(ids)


class Models:
    """Models by name, loaded when they are asked for.

    Args:
        engines: that are loaded; the first one is asked for by nobody in particular.
        more: models that can be loaded besides. One of an engine's name says how that is loaded again.
        disk: where transcripts, responses and conversations outlive the process.
        warm: called with each model when it has been loaded, beside the event loop.
    """

    def __init__(
        self,
        engines: Sequence[ServedEngine],
        settings: ServerSettings,
        *,
        more: Sequence[Loading[ServedEngine]] = (),
        disk: Tier | None = None,
        warm: Callable[[Model], None] = lambda _: None,
    ) -> None:
        self.disk = NullTier() if disk is None else disk
        self.created = int(time.time())
        self.on_cleared: list[Callable[[], None]] = []
        self._settings = settings
        self._warm = warm
        self._transcripts = MemoryTranscripts(settings.transcript_bytes)
        known = {one.name for one in more}
        loadings: list[Loading[Model]] = [
            *(Loading(engine.name, 0, _gone) for engine in engines if engine.name not in known),
            *(Loading(one.name, one.num_bytes, partial(self._load, one.name, one.load)) for one in more),
        ]
        self._places = Places(
            loadings,
            unload=_unload,
            size_of=_size_of,
            limit_bytes=settings.max_loaded_bytes,
            keep_alive_s=settings.keep_alive_s,
        )
        for engine in engines:
            self._places.put(engine.name, self._made(engine))

    @property
    def names(self) -> list[str]:
        """The models that can be asked for."""
        return self._places.names

    def __iter__(self) -> Iterator[Model]:
        """The models that are loaded."""
        return iter(self._places.loaded().values())

    def unchanging(self) -> AbstractAsyncContextManager[None]:
        """No engine is loaded or unloaded meanwhile."""
        return self._places.unchanging()

    def engines(self) -> dict[str, ServedEngine]:
        """The engines that are loaded, by name."""
        return {name: model.engine for name, model in self._places.loaded().items()}

    def forget(self, namespace: str) -> int:
        """Drops what was computed by models that are not loaded, and the transcripts, of a tenant.

        Returns:
            How many transcripts there were in memory.
        """
        self.disk.clear(tenant=namespace)
        num_transcripts = DurableTranscripts(self._transcripts, self.disk, b"").forget(namespace)
        self.disk.flush(60.0)  # when this is told, it is so
        return num_transcripts

    def check(self) -> None:
        """Raises EngineStopped unless every engine runs."""
        for engine in self.engines().values():
            engine.check()

    def check_cleared(self) -> None:
        """Forgets what is kept in memory if the user has cleared the store since (`octavo cache clear`)."""
        if self.disk.was_cleared():
            self._transcripts.clear()
            for forget in self.on_cleared:
                forget()

    async def hold(self, name: str | None, visit: Visit) -> Model:
        """The model of a name, or the first one without a name, loaded first if need be. It stays loaded until the
        request has been answered.

        Raises:
            ModelNotFound: it is not served here.
            OctavoError: it could not be loaded.
        """
        name = name or self.names[0]
        self.check_name(name)
        self.check_cleared()
        model = await self._places.take(name)
        visit.releases.append(partial(self._places.give, name))
        return model

    def check_name(self, name: str) -> None:
        """Raises ModelNotFound unless there is a model of this name."""
        if name not in self._places:
            raise ModelNotFound(f"The server has no model {name!r}. It has {', '.join(self.names)}.")

    def loaded(self, name: str) -> Model | None:
        """The model of a name if it is loaded."""
        return self._places.loaded().get(name)

    def close(self) -> None:
        """Closes all engines."""
        self._places.close()

    def _load(self, name: str, load: Callable[[], ServedEngine]) -> Model:
        try:
            return self._made(load())
        except OctavoError:
            raise
        except Exception as error:
            log("loading failed", logging.ERROR, error=error, model=name)
            said = f"{name} could not be loaded: {type(error).__name__}. The server's log has the cause."
            raise Problem(503, said, "model_unavailable", "model") from error

    def _made(self, engine: ServedEngine) -> Model:
        transcripts = None
        if self._settings.exact_history:
            disk = engine.disk if isinstance(self.disk, NullTier) else self.disk
            transcripts = DurableTranscripts(self._transcripts, disk, engine.fingerprint)
        try:
            model = Model(engine, transcripts, self._settings)
            self._warm(model)
        except BaseException:
            engine.close()
            raise
        return model


def _size_of(model: Model) -> int:
    report = model.engine.memory()
    return report.weights_bytes + report.kv_budget_bytes


def _unload(model: Model) -> None:
    model.engine.close()


def _gone() -> Model:
    raise AssertionError("an engine that cannot be loaded again is never unloaded")
