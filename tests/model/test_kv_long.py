"""The random operations of the unit tests, many more of them."""

from __future__ import annotations

import pytest

from ..unit.test_kv_stateful import CacheMachine, CollidingCacheMachine, drive


@pytest.mark.parametrize(("machine", "num_steps"), [(CacheMachine, 15_000), (CollidingCacheMachine, 6_000)])
def test_over_twenty_thousand_random_operations(machine: type[CacheMachine], num_steps: int) -> None:
    drive(machine, num_steps)
    assert CacheMachine.num_steps >= num_steps
