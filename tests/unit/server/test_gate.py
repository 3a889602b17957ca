"""Limits and names that the gate goes by."""

from __future__ import annotations

import time

import pytest

from octavo.errors import InvalidRequest
from octavo.server.gate import Rates, is_loopback
from octavo.server.problems import Problem
from octavo.server.settings import ServerSettings
from octavo.server.tenants import METRICS, NOBODY, Keys


def test_a_tenant_has_a_minutes_worth_which_fills_steadily(monkeypatch: pytest.MonkeyPatch) -> None:
    now = 100.0
    monkeypatch.setattr(time, "monotonic", lambda: now)
    rates = Rates(6)
    for _ in range(6):
        rates.take("ada")
    with pytest.raises(Problem) as caught:
        rates.take("ada")
    assert caught.value.status == 429
    assert caught.value.headers == {"Retry-After": "10"}
    rates.take("bob")  # who has a bucket of his own
    now += 10.5
    rates.take("ada")
    with pytest.raises(Problem):
        rates.take("ada")
    now += 1000
    for _ in range(6):  # it never holds more than a minute's worth
        rates.take("ada")
    with pytest.raises(Problem):
        rates.take("ada")


def test_without_a_limit_nothing_is_counted() -> None:
    rates = Rates(None)
    for _ in range(10_000):
        rates.take("ada")


@pytest.mark.parametrize(
    ("name", "own"),
    [
        ("localhost", True),
        ("127.0.0.1", True),
        ("127.8.8.8", True),
        ("::1", True),
        ("LOCALHOST", True),
        ("0.0.0.0", False),
        ("::", False),
        ("example.com", False),
        ("10.0.0.1", False),
        ("localhost.evil", False),
    ],
)
def test_which_names_are_this_machine(name: str, own: bool) -> None:
    assert is_loopback(name) is own


def test_keys_are_found_by_their_hash_and_only_whole() -> None:
    keys = Keys(["secret-one", "secret-two"], metrics_key="secret-three")
    one, two = keys.find("secret-one"), keys.find("secret-two")
    assert one is not None
    assert two is not None
    assert one.namespace != two.namespace
    assert keys.find("secret-three") is METRICS
    assert keys.find("secret-on") is None
    assert keys.find("") is None
    assert keys.find("\udcff") is None
    assert "secret" not in repr(vars(keys))
    assert Keys().tenants == [NOBODY]
    assert {tenant.namespace for tenant in keys.tenants} == {one.namespace, two.namespace}
    with pytest.raises(InvalidRequest, match="empty"):
        Keys([" "])


@pytest.mark.parametrize(
    "wrong",
    [
        {"port": 70_000},
        {"max_body_bytes": 0},
        {"max_requests": 0},
        {"drain_s": -1},
        {"requests_per_minute": 0},
    ],
)
def test_settings_are_checked(wrong: dict[str, int]) -> None:
    (name,) = wrong
    with pytest.raises(InvalidRequest, match=name):
        ServerSettings(**wrong)
