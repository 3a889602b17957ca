"""The documentation is true: code runs, commands print what is shown, options and references exist."""

from __future__ import annotations

import contextlib
import io
import os
import re
import shlex
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
import typer.main

from octavo.cli.commands import NAMES
from octavo.cli.main import app, invoke

ROOT = Path(__file__).parents[2]
README = ROOT / "README.md"
PAGES = [README, *sorted((ROOT / "docs").glob("*.md"))]
PROGRAM: Any = typer.main.get_command(app)

_BLOCK = re.compile(r"^```(\w*)\n(.*?)^```$", re.MULTILINE | re.DOTALL)
_MEASURED = re.compile(r"\d[\d.,]* ?([KMGT]iB|B|bytes|ms|s|tok/s)\b|\d{1,3}(,\d{3})+")


def blocks(page: Path) -> list[tuple[str, str]]:
    """Language and text of each fenced block."""
    return [(match[1], match[2]) for match in _BLOCK.finditer(page.read_text(encoding="utf-8"))]


def prose(page: Path) -> str:
    """The page without its fenced blocks."""
    return _BLOCK.sub("", page.read_text(encoding="utf-8"))


def shape(text: str) -> list[str]:
    """The lines with # for times, speeds and bytes, which are examples of one machine; counts of tokens stay."""
    return [" ".join(_MEASURED.sub("#", line).split()) for line in text.rstrip().splitlines()]


def python_examples() -> list[Any]:
    """The Python blocks, each with the text block behind it, which shows what it prints."""
    examples = []
    for page in PAGES:
        found = blocks(page)
        for index, (language, code) in enumerate(found):
            if language == "python":
                after = found[index + 1 : index + 2]
                printed = after[0][1] if after and after[0][0] == "text" else None
                examples.append(pytest.param(code, printed, id=f"{page.name}-{index}"))
    return examples


def typed_commands(block: str) -> list[tuple[str, str]]:
    """Each line behind a `$` of a console block, and what is shown below it."""
    return [
        (part.partition("\n")[0], part.partition("\n")[2])
        for part in re.split(r"^\$ ", block, flags=re.M)[1:]
    ]


def commands() -> list[str]:
    """Every command line of `octavo` in a block of a page."""
    found = [block for page in PAGES for block in blocks(page)]
    shown = [line for language, text in found if language == "sh" for line in text.splitlines()]
    shown += [line for language, text in found if language == "console" for line, _ in typed_commands(text)]
    return [line for line in shown if line.startswith("octavo ")]


@pytest.mark.bundled
@pytest.mark.parametrize(("code", "printed"), python_examples())
def test_python_runs_and_prints_what_is_shown(code: str, printed: str | None) -> None:
    output = io.StringIO()
    with contextlib.redirect_stdout(output):
        exec(compile(code, "<documentation>", "exec"), {"__name__": "__main__"})
    if printed is not None:
        assert shape(output.getvalue()) == shape(printed)


@pytest.mark.bundled
def test_blocks_of_commands_do_what_is_shown(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Lines of `sh` blocks have to succeed, and those of `console` blocks to print what stands below them."""
    monkeypatch.chdir(tmp_path)
    found = [block for page in PAGES for block in blocks(page)]
    assert {language for language, _ in found} == {"sh", "console", "python", "text"}
    shown = [pair for language, text in found if language == "console" for pair in typed_commands(text)]
    alone = [
        (line.partition(" #")[0], None)
        for language, text in found
        if language == "sh"
        for line in text.splitlines()
    ]
    assert shown
    code = 0
    for line, printed in [*shown, *alone]:
        words = shlex.split(line)
        if printed is None and (words[0] == "make" or words[1] == "serve"):
            continue  # the first are run by whoever runs this, the second by the tests of the server
        if printed is not None and words[0] == "cat":
            (tmp_path / words[1]).write_text(printed)
        elif printed is not None and line == "echo $?":
            assert printed.strip() == str(code)
        elif words[0] != "curl":  # those are sent by server/test_readme.py
            assert words[0] == "octavo"
            output = io.StringIO()
            with contextlib.redirect_stdout(output), contextlib.redirect_stderr(output):
                code = invoke(words[1:])
            assert code == 0 if printed is None else shape(output.getvalue()) == shape(printed)


@pytest.mark.parametrize("line", commands())
def test_commands_parse(line: str) -> None:
    name, *arguments = shlex.split(line)[1:]
    PROGRAM.commands[name].make_context(name, arguments)


def test_the_readme_names_every_command_and_no_other() -> None:
    assert set(re.findall(r"`octavo (\w+)", prose(README))) == set(PROGRAM.commands)


def test_options_in_the_readme_exist_and_none_of_the_programs_is_left_out() -> None:
    options = {
        name
        for command in PROGRAM.commands.values()
        for part in (command, *getattr(command, "commands", {}).values())
        for parameter in part.params
        for name in parameter.opts
    }
    named = set(re.findall(r"(?<![\w-])--[a-z][\w-]*", README.read_text(encoding="utf-8")))
    assert named - {"--help"} == {name for name in options if name.startswith("--")} - {"--help"}


def test_the_readme_names_every_command_of_a_chat() -> None:
    assert set(re.findall(r"`(/[a-z]+)`", prose(README))) == set(NAMES)


def test_the_two_commands_are_targets_of_the_makefile() -> None:
    first = next(text for language, text in blocks(README) if language == "sh")
    targets = re.findall(r"^(\w+):", (ROOT / "Makefile").read_text(), flags=re.M)
    wanted = re.findall(r"^make (\w+)", first, flags=re.M)
    assert wanted == ["run", "test"]
    assert set(wanted) <= set(targets)


@pytest.mark.parametrize("page", PAGES, ids=lambda page: page.name)
def test_references_lead_somewhere(page: Path) -> None:
    text = prose(page)
    for path, test in re.findall(r"`((?:src/octavo|native|tests|docs)/[\w./-]*?)/?(?:::(\w+))?`", text):
        assert (ROOT / path).exists(), path
        assert not test or re.search(rf"^ *(async )?def {test}\b", (ROOT / path).read_text(), re.M), test
    for link in re.findall(r"\]\(([^)#]+)[^)]*\)", text):
        assert (page.parent / link).exists(), link


def test_the_site_builds_and_nothing_is_missing(tmp_path: Path) -> None:
    """As `make docs`: broken links and anchors, pages outside the navigation and missing sections are errors."""
    command = [sys.executable, "-m", "mkdocs", "build", "--strict", "--site-dir", str(tmp_path / "site")]
    environment = {**os.environ, "NO_MKDOCS_2_WARNING": "1"}
    result = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, timeout=300, env=environment)
    assert result.returncode == 0, result.stderr
    pages = {page.name: page.read_text(encoding="utf-8") for page in (tmp_path / "site").glob("*.html")}
    assert "Histories are exact." in pages["server.html"], "the README's section is in the page"
    assert not any("<!-- include" in text for text in pages.values())
    assert (tmp_path / "site" / "img" / "compare-smollm2.png").exists()


def test_the_api_is_described_from_docstrings(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.syspath_prepend(str(ROOT / "docs"))
    from hooks import described

    engine = described("src/octavo/engine/engine.py", "TokenEngine")
    assert "#### `TokenEngine.recent(limit=None, *, tenant=None)`" in engine
    assert "- `kv_memory`: budget of the cache" in engine
    assert "_events" not in engine
    usage = described("src/octavo/engine/messages.py", "Usage")
    assert "- `loaded_tokens: int = 0`" in usage
    with pytest.raises(LookupError):
        described("src/octavo/engine/messages.py", "Nothing")


def test_sections_are_cut_out_whole(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.syspath_prepend(str(ROOT / "docs"))
    from hooks import linked, section  # type: ignore[import-not-found]

    text = "# Title\nfirst\n## A\none\n```\n## not one\n```\n### B\ntwo\n## C\nthree\n"
    assert section(text, "Title") == "first"
    assert section(text, "A") == "one\n```\n## not one\n```\n### B\ntwo"
    assert section(text, "B") == "two"
    assert section(text, "C") == "three"
    with pytest.raises(LookupError):
        section(text, "not one")
    assert linked("[a](#server) [b](docs/design.md) ![c](docs/img/x.png) [d](LICENSE) [e](https://f)") == (
        "[a](server.md) [b](design.md) ![c](img/x.png) `LICENSE` [e](https://f)"
    )
