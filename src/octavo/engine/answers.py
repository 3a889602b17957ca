"""What becomes of computed rows: tokens of answers, their text, their ends, and the reply."""

from __future__ import annotations

import time
from dataclasses import replace

import torch

from octavo.engine.beams import BeamSearches, ranked
from octavo.engine.cache import EngineCache
from octavo.engine.counters import Counters
from octavo.engine.detokenizer import Detokenizer
from octavo.engine.journal import Journal
from octavo.engine.messages import Choice, Delta, Event, Failure, FinishReason, Progress, Reply
from octavo.engine.onlooker import Onlooker
from octavo.engine.sampler import Sample, TokenSampler
from octavo.engine.scheduler import Scheduled, Scheduler
from octavo.engine.sequence import RequestState, Sequence
from octavo.engine.speculation import Speculator
from octavo.errors import EngineError
from octavo.models.check import Exactness
from octavo.models.loaded import LoadedModel
from octavo.spec import BLOCK_SIZE


class Answers:
    """The sequences of the requests that are under way, and how they grow and end.

    Args:
        exactness: what the check at the start found, which replies tell.

    Attributes:
        sequences, deadlines: by the id of their request; not all have a deadline.
        now_s: when the step under way was computed.
    """

    def __init__(
        self,
        loaded: LoadedModel,
        cache: EngineCache,
        scheduler: Scheduler,
        speculator: Speculator,
        onlooker: Onlooker,
        journal: Journal,
        counters: Counters,
        exactness: Exactness,
        *,
        context: int,
        vocab_size: int,
    ) -> None:
        self.sequences: dict[str, list[Sequence]] = {}
        self.deadlines: dict[str, float] = {}
        self.now_s = 0.0
        self._tokenizer = loaded.tokenizer
        self._eos = loaded.eos_token_ids
        self._cache, self._scheduler, self._speculator = cache, scheduler, speculator
        self._onlooker, self._journal, self._counters = onlooker, journal, counters
        self._exactness = exactness
        self._context, self._vocab_size = context, vocab_size
        self._searches = BeamSearches(
            cache.manager,
            scheduler,
            self.sequences,
            self._settle,
            eos_token_ids=loaded.eos_token_ids,
            context=context,
        )

    def sequence_of(self, state: RequestState, index: int) -> Sequence:
        """A new answer of a request, with nothing but the prompt."""
        params = state.request.params
        if state.is_ranked and params.logprobs is None:
            params = replace(params, logprobs=0)
        return Sequence(
            state=state,
            index=index,
            token_ids=list(state.request.token_ids),
            sampler=TokenSampler(
                params,
                seed=state.seed,
                sample_index=index,
                prompt_token_ids=state.request.token_ids,
                vocab_size=self._vocab_size,
                constraint=None if state.request.constraint is None else state.request.constraint.copy(),
            ),
            detokenizer=Detokenizer(self._tokenizer, params.stop, shown=state.request.shown_specials),
        )

    def advance(self, item: Scheduled, logits: torch.Tensor | None) -> list[Event]:
        """Takes a computed chunk into the cache, and samples when its sequence has nothing left to compute."""
        sequence, state = item.sequence, item.sequence.state
        table, count = item.chunk.table, len(item.chunk.token_ids)
        first_block = table.num_tokens // BLOCK_SIZE
        self._cache.manager.commit(table, item.chunk.token_ids)
        if state.request.disk:
            self._cache.tiers.committed(table, first_block, state.request.retention.ttl_s)
        caches = state.request.cache
        if not caches or state.first_token_s is None:
            state.num_computed_tokens += count
        if logits is None:
            if state.first_token_s is None:
                return [Progress(state.request.request_id, table.num_tokens, state.num_prompt_tokens)]
            return []
        self._scheduler.clear_suspicion(sequence)
        if caches and table.num_tokens == state.num_prompt_tokens:
            self._cache.manager.keep_tail(table)
        if state.first_token_s is None:
            state.first_token_s = time.perf_counter()
        if state.request.params.beams > 1:
            try:
                return self._end_search(state) if self._searches.advance(sequence, logits) else []
            except Exception as error:  # of this request alone, as below
                return self.fail(state.request.request_id, error)
        sequences = [sequence, *(self._fork(sequence) if sequence.awaits_forks else ())]
        events: list[Event] = []
        for answer in sequences:
            try:
                events += self._append(answer, answer.sampler.sample(logits, len(answer.token_ids)))
            except Exception as error:  # of this request alone: its grammar, its text, its numbers
                return events + self.fail(state.request.request_id, error)
            if not caches and answer.finish_reason is None:
                self._scheduler.forget_blocks(answer)
        return events

    def verify(self, item: Scheduled, rows: torch.Tensor) -> list[Event]:
        """Samples from the rows of a draft for as long as the token drawn is the one that was drafted.

        The token drawn where they differ is part of the answer too. The cache then drops what was computed behind it.
        """
        sequence, state, chunk = item.sequence, item.sequence.state, item.chunk
        table, num_blocks = chunk.table, len(chunk.table.block_ids)
        drafted = [*chunk.token_ids[-chunk.num_drafted :], None]
        taken: list[tuple[Sample, str, FinishReason | None]] = []
        for row, guess in zip(rows, drafted, strict=True):
            try:
                sample = sequence.sampler.sample(row, len(sequence.token_ids))
                text, reason = sequence.take(sample, eos_token_ids=self._eos, context=self._context)
            except Exception as error:  # of this request alone, as above
                return self.fail(state.request.request_id, error)
            taken.append((sample, text, reason))
            if reason is not None or sample.token_id != guess:
                break
        num_tokens = table.num_tokens + len(taken)
        self._cache.manager.commit(table, chunk.token_ids)
        left = self._cache.manager.truncate(table, num_tokens)
        if left != num_tokens or len(table.block_ids) != num_blocks:
            raise EngineError("A draft has sealed a block, which is a fault of Octavo.")
        state.num_drafted_tokens += chunk.num_drafted
        state.num_accepted_tokens += len(taken) - 1
        return [
            event for sample, text, reason in taken for event in self._tell(sequence, sample, text, reason)
        ]

    def end(self, request_id: str, reason: FinishReason) -> list[Event]:
        """Ends a request now, with what it has; unknown and finished ones are ignored, and so are finished answers."""
        events: list[Event] = []
        sequences = self.sequences.get(request_id, [])
        if sequences and sequences[0].state.request.params.beams > 1:
            self._searches.stop(sequences[0], reason)
            return self._end_search(sequences[0].state)
        for sequence in [s for s in sequences if s.finish_reason is None]:
            if sequence.awaits_forks:  # its other answers have not begun
                for index in range(1, sequence.state.request.params.width):
                    fork = self.sequence_of(sequence.state, index)
                    events += self.finish(fork, reason, "")
            events += self.finish(sequence, reason, sequence.detokenizer.finish())
        return events

    def fail(self, request_id: str, error: Exception) -> list[Event]:
        """Ends a request with an error."""
        sequences = self.sequences.pop(request_id, [])
        self.deadlines.pop(request_id, None)
        for sequence in sequences:
            self._scheduler.release(sequence)
        self._counters.failed[type(error).__name__] += 1
        if sequences and (lineage := sequences[0].state.lineage) is not None:
            self._onlooker.lineages.end(lineage, None)
        return [Failure(request_id, error)]

    def _fork(self, sequence: Sequence) -> list[Sequence]:
        forks = []
        for index in range(1, sequence.state.request.params.width):
            fork = self.sequence_of(sequence.state, index)
            if sequence.table is not None:
                fork.table = self._cache.manager.fork(sequence.table)
            forks.append(fork)
        self.sequences[sequence.state.request.request_id] += forks
        self._scheduler.add_forks(forks)
        return forks

    def _append(self, sequence: Sequence, sample: Sample) -> list[Event]:
        """Adds a sampled token to an answer, and ends it where that is due."""
        text, reason = sequence.take(sample, eos_token_ids=self._eos, context=self._context)
        return self._tell(sequence, sample, text, reason)

    def _tell(
        self, sequence: Sequence, sample: Sample, text: str, reason: FinishReason | None
    ) -> list[Event]:
        """What a token that an answer has taken adds to it."""
        state = sequence.state
        self._counters.told(sequence, self.now_s)
        if reason is not None:
            return self.finish(sequence, reason, text + sequence.detokenizer.finish(), sample)
        sequence.text += text
        if state.is_ranked:
            return []  # until it is known which answers are the best
        return [
            Delta(
                state.request.request_id,
                sequence.index,
                text,
                (sample.token_id,),
                sample.logprobs,
                num_cached_tokens=state.num_cached_tokens,
            )
        ]

    def finish(
        self, sequence: Sequence, reason: FinishReason, text: str, sample: Sample | None = None
    ) -> list[Event]:
        """Ends an answer with its last text, and with the last token if it was sampled just now."""
        state = sequence.state
        request_id = state.request.request_id
        sequence.text += text
        if reason == "length" and sequence.detokenizer.stopped is not None:
            reason = "stop"  # the text held back at the end turned out to be a stop string
        sequence.finish_reason = reason
        self._settle(sequence)
        self._scheduler.release(sequence)
        self._speculator.finished(sequence)
        choice = state.choices[sequence.index] = sequence.choice()
        if state.is_ranked:
            number = state.request.params.n
            choices = [state.choices[index] for index in sorted(state.choices)]
            return self._tell_ranked(state, ranked(choices, number)) if state.finished else []
        return [
            Delta(
                request_id,
                sequence.index,
                text,
                () if sample is None else (sample.token_id,),
                () if sample is None else sample.logprobs,
                reason,
                self._reply(state) if state.finished else None,
                choice.stop,
                state.num_cached_tokens,
            )
        ]

    def _end_search(self, state: RequestState) -> list[Event]:
        """A search is over, and its answers are told."""

        def text_of(token_ids: tuple[int, ...]) -> str:
            detokenizer = Detokenizer(self._tokenizer, shown=state.request.shown_specials)
            return "".join(map(detokenizer.push, token_ids)) + detokenizer.finish()

        return self._tell_ranked(state, self._searches.take(state, text_of))

    def _tell_ranked(self, state: RequestState, choices: list[Choice]) -> list[Event]:
        """All answers at once, the best first."""
        if state.request.params.logprobs is None:
            choices = [replace(choice, logprobs=None) for choice in choices]
        state.choices = {choice.index: choice for choice in choices}
        reply = self._reply(state)
        return [
            Delta(
                state.request.request_id,
                choice.index,
                choice.text,
                choice.token_ids,
                choice.logprobs or (),
                choice.finish_reason,
                reply if choice is choices[-1] else None,
                choice.stop,
                state.num_cached_tokens,
            )
            for choice in choices
        ]

    def _settle(self, sequence: Sequence) -> None:
        """What a sequence has computed is kept as its request says."""
        table = sequence.table
        if table is not None and table.publishes and not table.num_pending:
            self._cache.manager.keep_tail(table)
            self._cache.retain(sequence.state, table)
            self._onlooker.ended(sequence)

    def _reply(self, state: RequestState) -> Reply:
        """What a request is answered that has ended."""
        request_id = state.request.request_id
        self._counters.ended.update(choice.finish_reason for choice in state.choices.values())
        del self.sequences[request_id]
        self.deadlines.pop(request_id, None)
        if state.num_approximate_tokens:
            state.notes.append(
                f"{state.num_approximate_tokens:,} tokens of the prompt were taken over from behind an edit "
                "and not computed again, so the answer is approximate (reuse)."
            )
        complaint = self._cache.tiers.tier.take_complaint()
        if complaint is not None:
            state.notes.append(complaint)
        reply = state.reply(
            self._cache.memory(self._scheduler.running),
            self._journal.why(state),
            self._exactness.notes,
            exact=self._exactness.exact and not state.num_approximate_tokens,
        )
        self._journal.note(state, reply)
        if state.lineage is not None:
            self._onlooker.lineages.end(state.lineage, reply)
        return reply
