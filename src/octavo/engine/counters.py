"""What an engine has done since its start, in numbers that cost nothing to keep."""

from __future__ import annotations

from bisect import bisect_left
from collections import Counter
from collections.abc import Sequence as SequenceOf
from dataclasses import dataclass, field, replace
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from octavo.engine.scheduler import Scheduled
    from octavo.engine.sequence import Sequence

GAP_BOUNDS_S = (0.001, 0.0025, 0.005, 0.01, 0.025, 0.05, 0.1, 0.25, 0.5, 1.0, 2.5)
"""Upper bounds of the histogram of gaps; one more bucket has those above."""


@dataclass(slots=True)
class Counters:
    """Sums since the start.

    Attributes:
        num_read_tokens, num_decoded_tokens: computed for prompts, and for answers.
        num_drafted_tokens: guessed, of those that were computed beside them.
        refused: requests by the error they got at once.
        ended: answers by finish reason.
        failed: requests by their error.
        gaps: times between two tokens of an answer, counted by bucket; `gap_s` is their sum.
        num_preempted, num_evicted, num_demoted, num_restored: places given up; blocks whose memory was taken, that
            went to the tier below, that came from it.
        usage: share of each tier's budget in use.
    """

    num_steps: int = 0
    num_failed_steps: int = 0
    step_s: float = 0.0
    num_read_tokens: int = 0
    num_decoded_tokens: int = 0
    num_drafted_tokens: int = 0
    refused: Counter[str] = field(default_factory=Counter)
    ended: Counter[str] = field(default_factory=Counter)
    failed: Counter[str] = field(default_factory=Counter)
    gaps: list[int] = field(default_factory=lambda: [0] * (len(GAP_BOUNDS_S) + 1))
    gap_s: float = 0.0
    num_preempted: int = 0
    num_evicted: int = 0
    num_demoted: int = 0
    num_restored: int = 0
    usage: dict[str, float] = field(default_factory=dict)

    def stepped(self, scheduled: SequenceOf[Scheduled], seconds: float) -> None:
        """A step is done."""
        self.num_steps += 1
        self.step_s += seconds
        for item in scheduled:
            count = len(item.chunk.token_ids) - item.chunk.num_drafted
            self.num_drafted_tokens += item.chunk.num_drafted
            if item.sequence.state.first_token_s is None or count > 1:
                self.num_read_tokens += count
            else:
                self.num_decoded_tokens += count

    def told(self, sequence: Sequence, now_s: float) -> None:
        """A token of an answer is there."""
        last_s, sequence.told_s = sequence.told_s, now_s
        if last_s is not None:
            gap_s = now_s - last_s
            self.gap_s += gap_s
            self.gaps[bisect_left(GAP_BOUNDS_S, gap_s)] += 1

    def copy(self) -> Counters:
        """As they are now."""
        return replace(
            self,
            refused=Counter(self.refused),
            ended=Counter(self.ended),
            failed=Counter(self.failed),
            gaps=list(self.gaps),
            usage=dict(self.usage),
        )
