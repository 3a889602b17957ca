"""Takes sections of files into pages of the site: `<!-- include README.md: Server -->`, or a whole file without a name.

A section is taken without its heading, up to the next one of its level. Links of the README are made links of the site.
"""

from __future__ import annotations

import re
from pathlib import Path
from typing import Any

ROOT = Path(__file__).parents[1]
_INCLUDE = re.compile(r"^<!-- include ([\w./-]+)(?:: ([^>]+?))? -->$", re.M)
_FENCE = re.compile(r"^```.*?^```$", re.M | re.S)
_PAGES = {
    "server": "server.md",
    "why": "python.md#why",
    "what-fits": "formats.md#what-fits",
    "on-disk": "operations.md#on-disk",
}


def on_page_markdown(markdown: str, **_: Any) -> str:
    """mkdocs calls it with a page's text."""
    return _INCLUDE.sub(lambda match: included(match[1], match[2]), markdown)


def included(path: str, heading: str | None) -> str:
    """A file's text, or that of one section.

    Raises:
        LookupError: there is no such section.
    """
    text = (ROOT / path).read_text(encoding="utf-8")
    return linked(text if heading is None else section(text, heading))


def section(text: str, heading: str) -> str:
    """What stands under a heading; fenced code that looks like one is none."""
    masked = _FENCE.sub(lambda match: "`" * len(match[0]), text)
    begin = re.search(rf"^(#+) {re.escape(heading)}\n", masked, re.M)
    if begin is None:
        raise LookupError(f"There is no section {heading!r}.")
    level = max(len(begin[1]), 2)  # under the title stands what comes before the first section
    end = re.compile(rf"^#{{1,{level}}} ", re.M).search(masked, begin.end())
    return text[begin.end() : end.start() if end else len(text)].strip()


def linked(text: str) -> str:
    """Links as the site has them; those to files that are not part of it become plain text."""

    def link(match: re.Match[str]) -> str:
        mark, shown, target = match.groups()
        if target.startswith("#"):
            target = _PAGES.get(target[1:], target)
        elif target.startswith("docs/"):
            target = target.removeprefix("docs/")
        elif "://" not in target:
            return f"`{target}`"
        return f"{mark}[{shown}]({target})"

    return re.sub(r"(!?)\[([^\]\n]*)\]\(([^)\s]+)\)", link, text)
