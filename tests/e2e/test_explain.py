"""`octavo explain` on the bundled model."""

from __future__ import annotations

import re

import pytest

from octavo.cli.main import invoke


@pytest.mark.bundled
def test_the_tour_is_told_with_its_numbers(capsys) -> None:
    assert invoke(["explain", "smollm2"]) == 0
    text = " ".join(capsys.readouterr().out.split())
    assert [int(number) for number in re.findall(r"(\d)\. [A-Z]", text)][:1] == [1]
    assert "30 layers x 3 key-value heads x (64 numbers of a key + 64 of a value) = 11,520 numbers." in text
    assert "The model chose ' Rome'." in text
    assert "are the same bits: yes." in text
    assert "38 of 39 tokens reused, 1 computed" in text
    assert "7. Why keys and values, and not the hidden state?" in text
    assert invoke(["explain", "smollm2", "--text", "word " * 40]) == 2
