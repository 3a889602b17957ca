"""How much of a prompt a step may read beside answers that are being written, measured while it runs.

Who writes waits for the whole step. So beside decodes, a step reads as many prompt tokens as make it take about
`STRETCH` times as long as the decodes alone took lately at best, when one prompt is read. With several, what is added
grows with the square of their number: each waits for those before it as well, and small pieces would cost all of them.

At best, because answers grow while a long prompt is read, and the later steps of it, which are the slower ones for
their position, too, would become slower with them. Both times are measured: that of steps that only decode, where two
of them follow each other, and what a prompt token has added to the others. A few tokens on both sides of a block's end
cost twice as much as within it, because the earlier blocks are unpacked for each, so pieces end there.
"""

from __future__ import annotations

import statistics
from collections import deque

from octavo.spec import BLOCK_SIZE, cdiv

STRETCH = 2.75
"""Of the time of a step that only decodes: what a step takes that reads prompts, too."""

_REFRESH = 64
"""After so many steps that read prompts, two decode only, so that the time of the second is known: the first one finds
its data gone from the CPU's caches."""

_FIRST, _LEAST = BLOCK_SIZE, 4


class Pace:
    """The prompt tokens of a step.

    Args:
        max_tokens: of a step.
    """

    def __init__(self, max_tokens: int) -> None:
        self._max_tokens = max_tokens
        self._alone: deque[tuple[int, float]] = deque(maxlen=17)  # of such steps: sequences, and seconds
        self._token_s: float | None = None
        self._num_mixed = 0
        self._decoded_only = False  # the last step

    def allowed(self, num_decodes: int, num_prompts: int) -> int:
        """Prompt tokens that the next step may read; 0 where it should show how long decoding alone takes.

        `num_prompts` are being read or can be taken in.
        """
        room = self._max_tokens - num_decodes
        if not num_decodes or room <= 0:
            return max(0, room)
        if not self._alone or self._num_mixed >= _REFRESH:
            return 0
        if self._token_s is None:
            return min(_FIRST, room)
        alone_s = self._alone_s()
        best_s = min((s for number, s in self._alone if number >= num_decodes), default=alone_s)
        spare_s = max(STRETCH * best_s - alone_s, alone_s / 4)
        wanted = int(num_prompts**2 * spare_s / self._token_s)
        if wanted >= BLOCK_SIZE:
            wanted -= wanted % BLOCK_SIZE
        else:  # equal parts of a block
            wanted = cdiv(BLOCK_SIZE, cdiv(BLOCK_SIZE, max(wanted, _LEAST)))
        return min(wanted, room)

    def computed(self, num_decodes: int, num_read: int, seconds: float) -> None:
        """A step has decoded for so many sequences and read so many tokens of prompts."""
        if not num_read:
            if self._decoded_only:
                self._num_mixed = 0
                self._alone.append((num_decodes, seconds))
        elif num_decodes and self._alone:
            self._num_mixed += 1
            added_s = max(seconds - self._alone_s(), seconds / 16)
            token_s = added_s / num_read
            self._token_s = token_s if self._token_s is None else 0.6 * self._token_s + 0.4 * token_s
        self._decoded_only = not num_read

    def _alone_s(self) -> float:
        """A step now, if it only decoded."""
        return statistics.median_low(s for _, s in list(self._alone)[-3:])
