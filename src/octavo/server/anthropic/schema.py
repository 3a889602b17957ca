"""Requests and answers of `/v1/messages`. Fields that are not named here are passed over."""

from __future__ import annotations

from typing import Annotated, Any, Literal

from pydantic import Field

from octavo.server.schema import MAX_STOPS, MAX_TOOLS, JsonSchema, Name, OctavoOptions, OctavoReport, Schema


class CacheControl(Schema):
    type: Literal["ephemeral"]
    ttl: Literal["5m", "1h"] | None = None


class _Cached(Schema):
    """Something that may carry a mark of how long it is worth keeping."""

    cache_control: CacheControl | None = None


class TextBlock(_Cached):
    type: Literal["text"]
    text: str


class ThinkingBlock(Schema):
    """Passed over: these models do not think apart from their answer."""

    type: Literal["thinking", "redacted_thinking"]


class ToolUseBlock(_Cached):
    type: Literal["tool_use"]
    id: str
    name: Name
    input: dict[str, Any]


class ToolResultBlock(_Cached):
    type: Literal["tool_result"]
    tool_use_id: str
    content: str | list[TextBlock] | None = None
    is_error: bool | None = None


UserBlock = Annotated[TextBlock | ToolResultBlock, Field(discriminator="type")]
AssistantBlock = Annotated[TextBlock | ThinkingBlock | ToolUseBlock, Field(discriminator="type")]


class UserMessage(Schema):
    role: Literal["user"]
    content: str | list[UserBlock]


class SystemMessage(Schema):
    """Instructions between other messages, where the model's template takes them."""

    role: Literal["system"]
    content: str | list[TextBlock]


class AssistantMessage(Schema):
    role: Literal["assistant"]
    content: str | list[AssistantBlock]


Message = Annotated[UserMessage | AssistantMessage | SystemMessage, Field(discriminator="role")]


class Tool(_Cached):
    """A function. Tools that Anthropic itself runs are refused."""

    name: Name
    description: str | None = None
    input_schema: JsonSchema
    type: Literal["custom"] | None = None
    strict: bool | None = None


class ToolChoiceAuto(Schema):
    type: Literal["auto", "any"]
    disable_parallel_tool_use: bool | None = None


class ToolChoiceNone(Schema):
    type: Literal["none"]


class ToolChoiceTool(Schema):
    type: Literal["tool"]
    name: Name
    disable_parallel_tool_use: bool | None = None


ToolChoice = Annotated[ToolChoiceAuto | ToolChoiceNone | ToolChoiceTool, Field(discriminator="type")]


class JsonFormat(Schema):
    type: Literal["json_schema"]
    schema_: JsonSchema = Field(alias="schema")


class OutputConfig(Schema):
    format: JsonFormat | None = None


class CountRequest(Schema):
    """A list of messages whose tokens are counted."""

    model: str
    messages: list[Message] = Field(min_length=1)
    system: str | list[TextBlock] | None = None
    tools: Annotated[list[Tool], Field(max_length=MAX_TOOLS)] | None = None
    tool_choice: ToolChoice | None = None
    cache_control: CacheControl | None = None
    octavo: OctavoOptions | None = None


class MessagesRequest(CountRequest):
    """A list of messages to be answered. `max_tokens` 0 reads them, so that the next request finds them read.

    The fields from `metadata` on are accepted and change nothing of an answer.
    """

    max_tokens: Annotated[int, Field(ge=0, lt=2**31)]
    stream: bool | None = None
    stop_sequences: Annotated[list[str], Field(max_length=MAX_STOPS)] | None = None
    temperature: Annotated[float, Field(ge=0, le=1)] | None = None
    top_p: Annotated[float, Field(gt=0, le=1)] | None = None
    top_k: Annotated[int, Field(ge=0, lt=2**31)] | None = None
    output_config: OutputConfig | None = None
    metadata: dict[str, Any] | None = None
    service_tier: str | None = None
    thinking: dict[str, Any] | None = None


class CacheCreation(Schema):
    ephemeral_5m_input_tokens: int
    ephemeral_1h_input_tokens: int


class Usage(Schema):
    """Tokens. The prompt has the sum of the three kinds of input tokens."""

    input_tokens: int
    cache_creation_input_tokens: int
    cache_read_input_tokens: int
    cache_creation: CacheCreation
    output_tokens: int
    service_tier: Literal["standard"] = "standard"


class AnswerText(Schema):
    type: Literal["text"]
    text: str
    citations: None = None


class AnswerToolUse(Schema):
    type: Literal["tool_use"]
    id: str
    name: str
    input: dict[str, Any]


StopReason = Literal["end_turn", "max_tokens", "stop_sequence", "tool_use", "model_context_window_exceeded"]


class AnswerMessage(Schema):
    """The answer. `octavo` is there if the request asked for it."""

    id: str
    type: Literal["message"] = "message"
    role: Literal["assistant"] = "assistant"
    model: str
    content: list[Annotated[AnswerText | AnswerToolUse, Field(discriminator="type")]]
    stop_reason: StopReason | None
    stop_sequence: str | None
    usage: Usage
    octavo: OctavoReport | None = None


class TokenCount(Schema):
    input_tokens: int


class ErrorObject(Schema):
    type: str
    message: str


class ErrorBody(Schema):
    """What went wrong, and what to do."""

    type: Literal["error"]
    error: ErrorObject
    request_id: str
