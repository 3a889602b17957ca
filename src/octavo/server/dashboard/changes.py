"""What differs between two states, as it is sent, and how it is taken up again."""

from __future__ import annotations

from typing import Any

Sections = dict[str, Any]


def changed(before: Sections, after: Sections) -> Sections:
    """What of `after` differs from `before`, field by field; None stands for what is gone.

    So fields of objects must not be None themselves. Lists are sent whole.
    """
    changes: Sections = {name: None for name in before if name not in after}
    for name, value in after.items():
        old = before.get(name)
        if old == value and name in before:
            continue
        if isinstance(value, dict) and isinstance(old, dict):
            changes[name] = changed(old, value)
        else:
            changes[name] = value
    return changes


def take_up(state: Sections, changes: Sections) -> None:
    """Makes of `before` what was `after`; the page does the same (`merge` in assets/live.js)."""
    for name, value in changes.items():
        old = state.get(name)
        if value is None:
            del state[name]
        elif isinstance(value, dict) and isinstance(old, dict):
            take_up(old, value)
        else:
            state[name] = value
