"""Requests and answers of `/v1/chat/completions`. Fields that are not named here are passed over."""

from __future__ import annotations

from typing import Annotated, Any, Literal, Self

from pydantic import Field, model_validator

from octavo.server.openai.schema import ChoiceLogprobs, Common, StreamOptions, Usage
from octavo.server.schema import (
    MAX_STOPS,
    MAX_TOOLS,
    JsonSchema,
    MaxTokens,
    Name,
    OctavoReport,
    Schema,
    TextPart,
)


class RefusalPart(Schema):
    type: Literal["refusal"]
    refusal: str

    @property
    def text(self) -> str:
        return self.refusal


Content = str | list[TextPart]


class SystemMessage(Schema):
    role: Literal["system", "developer"]
    content: Content


class UserMessage(Schema):
    role: Literal["user"]
    content: Content


class FunctionCall(Schema):
    name: Name
    arguments: str


class ToolCall(Schema):
    id: str
    type: Literal["function"]
    function: FunctionCall


class AssistantMessage(Schema):
    role: Literal["assistant"]
    content: str | list[TextPart | RefusalPart] | None = None
    tool_calls: list[ToolCall] | None = None


class ToolMessage(Schema):
    role: Literal["tool"]
    content: Content
    tool_call_id: str


Message = Annotated[SystemMessage | UserMessage | AssistantMessage | ToolMessage, Field(discriminator="role")]


class FunctionDefinition(Schema):
    name: Name
    description: str | None = None
    parameters: JsonSchema | None = None
    strict: bool | None = None


class FunctionTool(Schema):
    """A function. Tools of other types are refused."""

    type: Literal["function"]
    function: FunctionDefinition


class FunctionName(Schema):
    name: Name


class NamedTool(Schema):
    type: Literal["function"]
    function: FunctionName


class TextFormat(Schema):
    type: Literal["text"]


class JsonObjectFormat(Schema):
    type: Literal["json_object"]


class SchemaFormat(Schema):
    name: Name
    schema_: JsonSchema = Field(alias="schema")
    strict: bool | None = None
    description: str | None = None


class JsonSchemaFormat(Schema):
    type: Literal["json_schema"]
    json_schema: SchemaFormat


ResponseFormat = Annotated[TextFormat | JsonObjectFormat | JsonSchemaFormat, Field(discriminator="type")]


class ChatRequest(Common):
    """A list of messages to be answered."""

    messages: list[Message] = Field(min_length=1)
    n: Annotated[int, Field(ge=1, le=128)] | None = None
    stop: str | Annotated[list[str], Field(max_length=MAX_STOPS)] | None = None
    stream_options: StreamOptions | None = None
    logprobs: bool | None = None
    top_logprobs: Annotated[int, Field(ge=0, le=20)] | None = None
    max_tokens: MaxTokens | None = None
    max_completion_tokens: MaxTokens | None = None
    tools: Annotated[list[FunctionTool], Field(max_length=MAX_TOOLS)] | None = None
    tool_choice: Literal["none", "auto", "required"] | NamedTool | None = None
    parallel_tool_calls: bool | None = None
    response_format: ResponseFormat | None = None
    modalities: list[str] | None = None
    audio: dict[str, Any] | None = None

    @property
    def wants_logprobs(self) -> bool:
        return bool(self.logprobs) or self.top_logprobs is not None

    @model_validator(mode="before")
    @classmethod
    def _no_legacy(cls, data: Any) -> Any:
        if isinstance(data, dict):
            for name, instead in (("functions", "tools"), ("function_call", "tool_choice")):
                if data.get(name) is not None:
                    raise ValueError(f"{name} is not supported any more; use {instead}")
        return data

    @model_validator(mode="after")
    def _no_audio(self) -> Self:
        if self.audio is not None or "audio" in (self.modalities or ()):
            raise ValueError("audio is not supported; the models answer in text")
        return self


class AnswerMessage(Schema):
    role: Literal["assistant"] = "assistant"
    content: str | None
    refusal: str | None = None
    tool_calls: list[ToolCall] | None = None


class ChatChoice(Schema):
    index: int
    message: AnswerMessage
    logprobs: ChoiceLogprobs | None
    finish_reason: Literal["stop", "length", "tool_calls"]


class ChatCompletion(Schema):
    """The answers. `octavo` is there if the request asked for it."""

    id: str
    object: Literal["chat.completion"] = "chat.completion"
    created: int
    model: str
    system_fingerprint: str
    choices: list[ChatChoice]
    usage: Usage
    service_tier: Literal["default"] = "default"
    octavo: OctavoReport | None = None
