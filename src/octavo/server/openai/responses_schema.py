"""Requests and answers of `/v1/responses` and `/v1/conversations`. Fields that are not named here are passed over."""

from __future__ import annotations

from typing import Annotated, Any, Literal

from pydantic import Discriminator, Field, Tag

from octavo.server.openai.chat_schema import JsonObjectFormat, TextFormat
from octavo.server.openai.schema import Common, Metadata
from octavo.server.schema import MAX_TOOLS, JsonSchema, MaxTokens, Name, OctavoReport, Schema

Status = Literal["queued", "in_progress", "completed", "incomplete", "failed", "cancelled"]


class InputText(Schema):
    type: Literal["input_text"]
    text: str


class OutputText(Schema):
    type: Literal["output_text", "text"]
    text: str


class Refusal(Schema):
    type: Literal["refusal"]
    refusal: str

    @property
    def text(self) -> str:
        return self.refusal


class InputMessage(Schema):
    """A message; also one of an earlier output."""

    type: Literal["message"] = "message"
    role: Literal["user", "assistant", "system", "developer"]
    content: str | list[Annotated[InputText | OutputText | Refusal, Field(discriminator="type")]]


class FunctionCallItem(Schema):
    type: Literal["function_call"]
    call_id: str
    name: Name
    arguments: str


class FunctionOutputItem(Schema):
    type: Literal["function_call_output"]
    call_id: str
    output: str | list[InputText]


class ReasoningItem(Schema):
    """Passed over: these models do not think apart from their answer."""

    type: Literal["reasoning"]


def _kind(item: Any) -> str:
    """The type of an input item; messages may come without one."""
    kind = item.get("type", "message") if isinstance(item, dict) else getattr(item, "type", "message")
    return str(kind)


InputItem = Annotated[
    Annotated[InputMessage, Tag("message")]
    | Annotated[FunctionCallItem, Tag("function_call")]
    | Annotated[FunctionOutputItem, Tag("function_call_output")]
    | Annotated[ReasoningItem, Tag("reasoning")],
    Discriminator(_kind),
]


class ResponseTool(Schema):
    """A function. Tools that OpenAI itself runs are refused."""

    type: Literal["function"]
    name: Name
    description: str | None = None
    parameters: JsonSchema | None = None
    strict: bool | None = None


class NamedFunction(Schema):
    type: Literal["function"]
    name: Name


class JsonSchemaFormat(Schema):
    type: Literal["json_schema"]
    name: Name
    schema_: JsonSchema = Field(alias="schema")
    strict: bool | None = None
    description: str | None = None


class TextConfig(Schema):
    format: (
        Annotated[TextFormat | JsonObjectFormat | JsonSchemaFormat, Field(discriminator="type")] | None
    ) = None


class ConversationId(Schema):
    id: str


class ResponseRequest(Common):
    """What is to be answered, behind an earlier response or in a conversation if one is named.

    `instructions` hold for this response alone. With `background` the response is returned at once and asked for
    later. `reasoning` and the fields from `metadata` on change nothing of an answer.
    """

    input: str | Annotated[list[InputItem], Field(min_length=1)]
    instructions: str | None = None
    previous_response_id: str | None = None
    conversation: str | ConversationId | None = None
    background: bool | None = None
    max_output_tokens: MaxTokens | None = None
    top_logprobs: Annotated[int, Field(ge=0, le=20)] | None = None
    include: list[str] | None = None
    tools: Annotated[list[ResponseTool], Field(max_length=MAX_TOOLS)] | None = None
    tool_choice: Literal["none", "auto", "required"] | NamedFunction | None = None
    parallel_tool_calls: bool | None = None
    text: TextConfig | None = None
    truncation: Literal["disabled"] | None = None
    reasoning: dict[str, Any] | None = None

    @property
    def wants_logprobs(self) -> bool:
        return self.top_logprobs is not None or "message.output_text.logprobs" in (self.include or ())


class InputTokensDetails(Schema):
    cached_tokens: int
    cache_write_tokens: int


class OutputTokensDetails(Schema):
    reasoning_tokens: int


class ResponseUsage(Schema):
    input_tokens: int
    input_tokens_details: InputTokensDetails
    output_tokens: int
    output_tokens_details: OutputTokensDetails
    total_tokens: int


class OutputItem(Schema):
    """A message of the assistant, or a call of a function."""

    id: str
    type: Literal["message", "function_call"]
    status: Literal["in_progress", "completed", "incomplete"]
    role: Literal["assistant"] | None = None
    content: list[dict[str, Any]] | None = None
    call_id: str | None = None
    name: str | None = None
    arguments: str | None = None


class ResponseError(Schema):
    code: str
    message: str


class IncompleteDetails(Schema):
    reason: Literal["max_output_tokens"]


class ResponseObject(Schema):
    """A response. `octavo` is there if the request asked for it."""

    id: str
    object: Literal["response"]
    created_at: int
    completed_at: int | None
    status: Status
    background: bool
    error: ResponseError | None
    incomplete_details: IncompleteDetails | None
    instructions: str | None
    max_output_tokens: int | None
    model: str
    output: list[OutputItem]
    parallel_tool_calls: bool
    previous_response_id: str | None
    conversation: ConversationId | None
    temperature: float
    top_p: float
    text: dict[str, Any]
    tool_choice: Literal["none", "auto", "required"] | NamedFunction
    tools: list[ResponseTool]
    truncation: Literal["disabled"]
    usage: ResponseUsage | None
    metadata: dict[str, Any] | None
    store: bool
    octavo: OctavoReport | None = None


class Deleted(Schema):
    id: str
    object: Literal["response", "conversation.deleted"]
    deleted: Literal[True]


class ItemList(Schema):
    object: Literal["list"]
    data: list[dict[str, Any]]
    first_id: str | None
    last_id: str | None
    has_more: bool


class ConversationRequest(Schema):
    """What a conversation begins with."""

    items: list[InputItem] | None = None
    metadata: Metadata | None = None


class Conversation(Schema):
    id: str
    object: Literal["conversation"]
    created_at: int
    metadata: dict[str, Any]
