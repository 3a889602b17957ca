"""Takes sections of files into pages of the site: `<!-- include README.md: Server -->`, or a whole file without a name.

A section is taken without its heading, up to the next one of its level. Links of the README are made links of the site.
`<!-- api src/octavo/...py: Name -->` describes a class by its docstrings and signatures, read without importing it.
"""

from __future__ import annotations

import ast
import re
from pathlib import Path
from typing import Any

ROOT = Path(__file__).parents[1]
_INCLUDE = re.compile(r"^<!-- include ([\w./-]+)(?:: ([^>]+?))? -->$", re.M)
_API = re.compile(r"^<!-- api ([\w./-]+): (\w+) -->$", re.M)
_FENCE = re.compile(r"^```.*?^```$", re.M | re.S)
_PAGES = {
    "server": "server.md",
    "why": "python.md#why",
    "what-fits": "formats.md#what-fits",
    "on-disk": "operations.md#on-disk",
    "edits-in-the-middle": "operations.md#edits-in-the-middle",
}


def on_page_markdown(markdown: str, **_: Any) -> str:
    """mkdocs calls it with a page's text."""
    markdown = _INCLUDE.sub(lambda match: included(match[1], match[2]), markdown)
    return _API.sub(lambda match: described(match[1], match[2]), markdown)


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


def described(path: str, name: str) -> str:
    """A class as Markdown: what it is, its fields, and its public methods.

    Raises:
        LookupError: there is no such class.
    """
    tree = ast.parse((ROOT / path).read_text(encoding="utf-8"))
    found = next((node for node in tree.body if isinstance(node, ast.ClassDef) and node.name == name), None)
    if found is None:
        raise LookupError(f"There is no class {name} in {path}.")
    parts = [f"### {name}", _prose(ast.get_docstring(found))]
    fields = [
        f"{node.target.id}: {ast.unparse(node.annotation)}{_default(node.value)}"
        for node in found.body
        if isinstance(node, ast.AnnAssign) and isinstance(node.target, ast.Name) and node.target.id[0] != "_"
    ]
    if fields:
        parts.append("\n".join(f"- `{field}`" for field in fields))
    for node in found.body:
        if not isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef):
            continue
        if node.name.startswith("_") and node.name != "__init__":
            continue
        if any(
            isinstance(mark, ast.Name) and mark.id in ("property", "cached_property")
            for mark in node.decorator_list
        ):
            parts += [f"#### `{name}.{node.name}`", _prose(ast.get_docstring(node))]
        elif node.name != "__init__" or ast.get_docstring(node):
            shown = name if node.name == "__init__" else f"{name}.{node.name}"
            parts += [f"#### `{shown}({_arguments(node)})`", _prose(ast.get_docstring(node))]
    return "\n\n".join(part for part in parts if part)


def _arguments(node: ast.FunctionDef | ast.AsyncFunctionDef) -> str:
    """A method's arguments with their defaults and without types, which the text tells."""
    arguments = node.args
    positional = [*arguments.posonlyargs, *arguments.args]
    defaults = [None] * (len(positional) - len(arguments.defaults)) + list(arguments.defaults)
    shown = [_argument(item.arg, default) for item, default in zip(positional, defaults, strict=True)][1:]
    if arguments.kwonlyargs:
        shown.append("*" if arguments.vararg is None else f"*{arguments.vararg.arg}")
    shown += [
        _argument(item.arg, default)
        for item, default in zip(arguments.kwonlyargs, arguments.kw_defaults, strict=True)
    ]
    return ", ".join([*shown, *([f"**{arguments.kwarg.arg}"] if arguments.kwarg else [])])


def _default(value: ast.expr | None) -> str:
    """A field's default, unless it is made for each one."""
    return "" if value is None or isinstance(value, ast.Call) else f" = {ast.unparse(value)}"


def _argument(name: str, default: ast.expr | None) -> str:
    return name if default is None else f"{name}={ast.unparse(default)}"


def _prose(docstring: str | None) -> str:
    """A docstring whose sections (Args, Raises and so on) are lists."""
    lines: list[str] = []
    inside = False
    for line in (docstring or "").splitlines():
        heading = re.fullmatch(r"(Args|Attributes|Returns|Raises):(.*)", line)
        if heading:
            lines += ["", f"**{heading[1]}**{':' + heading[2] if heading[2] else ''}", ""]
            inside = True
        elif inside and re.match(r"    \S", line):
            entry = line.strip()
            lines.append("- " + re.sub(r"^([\w, ]+?):", r"`\1`:", entry))
        elif inside and line.startswith("     "):
            lines[-1] += " " + line.strip()
        else:
            inside = inside and not line.strip()
            lines.append(line)
    return "\n".join(lines)
