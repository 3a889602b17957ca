"""What chat completions and responses say alike, as all interfaces mean it."""

from __future__ import annotations

from typing import Any

from octavo.server.chat.messages import Tool
from octavo.server.openai.chat_schema import FunctionDefinition, JsonObjectFormat, SchemaFormat, TextFormat
from octavo.server.openai.responses_schema import JsonSchemaFormat, ResponseTool


def tool_of(function: FunctionDefinition | ResponseTool) -> Tool:
    """A function that the model may call."""
    parameters = function.parameters or {"type": "object", "properties": {}}
    return Tool(function.name, function.description or "", parameters, bool(function.strict))


def schema_of(
    wanted: TextFormat | JsonObjectFormat | SchemaFormat | JsonSchemaFormat | None,
) -> tuple[dict[str, Any] | None, bool]:
    """The schema that the answer is JSON of, if it has to be, and whether it is held to strictly."""
    if isinstance(wanted, JsonObjectFormat):
        return {"type": "object"}, True
    if isinstance(wanted, SchemaFormat | JsonSchemaFormat):
        return wanted.schema_, wanted.strict is not False
    return None, True
