"""What is sent of a state is what differs, and it makes the new state of the old one."""

from __future__ import annotations

from copy import deepcopy
from typing import Any

from hypothesis import given
from hypothesis import strategies as st

from octavo.server.dashboard.changes import changed, take_up

LEAVES = st.integers() | st.text(max_size=3) | st.booleans() | st.lists(st.none() | st.integers(), max_size=3)
STATES = st.recursive(
    st.dictionaries(st.sampled_from("abcd"), LEAVES, max_size=4),
    lambda inner: st.dictionaries(st.sampled_from("abcd"), LEAVES | inner, max_size=4),
    max_leaves=12,
)


@given(STATES, STATES)
def test_changes_lead_from_one_state_to_the_next(before: dict[str, Any], after: dict[str, Any]) -> None:
    state = deepcopy(before)
    take_up(state, changed(before, after))
    assert state == after


@given(STATES)
def test_what_is_the_same_is_not_sent(state: dict[str, Any]) -> None:
    assert changed(state, deepcopy(state)) == {}


def test_only_the_field_that_differs_is_sent() -> None:
    before = {"a": {"b": {"c": 1, "d": [1, 2]}, "e": 3}, "f": 4}
    after = {"a": {"b": {"c": 2, "d": [1, 2]}, "e": 3}}
    assert changed(before, after) == {"a": {"b": {"c": 2}}, "f": None}
