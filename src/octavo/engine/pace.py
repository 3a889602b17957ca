"""How much of a prompt a step may read beside answers that are being written, measured while it runs.

Who writes waits for the whole step. So beside decodes, a step reads as many prompt tokens as make it take about
`STRETCH` times as long as the decodes alone, when one prompt is read. With several, what is added grows with the
square of their number: each waits for those before it as well, and small pieces would cost all of them.

Both times are measured: that of steps that only decode, where two of them follow each other, and what a prompt token
has added to the others, lately, because it grows with the position. A few tokens on both sides of a block's end cost
twice as much as within it, because the earlier blocks are unpacked for each, so pieces end there.
"""

from __future__ import annotations

import statistics
from collections import deque

from octavo.spec import BLOCK_SIZE, cdiv

STRETCH = 2.25
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
        self._decode_s: deque[float] = deque(maxlen=9)
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
        if not self._decode_s or self._num_mixed >= _REFRESH:
            return 0
        if self._token_s is None:
            return min(_FIRST, room)
        wanted = int(num_prompts**2 * (STRETCH - 1) * self._decoding_s() / self._token_s)
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
                self._decode_s.append(seconds)
        elif num_decodes and self._decode_s:
            self._num_mixed += 1
            added_s = max(seconds - self._decoding_s(), seconds / 16)
            token_s = added_s / num_read
            self._token_s = token_s if self._token_s is None else 0.6 * self._token_s + 0.4 * token_s
        self._decoded_only = not num_read

    def _decoding_s(self) -> float:
        return statistics.median_low(self._decode_s)
