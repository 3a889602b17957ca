"""What the schemas of all interfaces have in common."""

from __future__ import annotations

from typing import Annotated, Any, Literal

from pydantic import BaseModel, ConfigDict, Field

from octavo.engine.messages import MAX_URGENCY

MAX_STOPS = 64
MAX_TOOLS = 512


class Schema(BaseModel):
    """A part of a request or an answer. Values are not converted: `"1"` is no number."""

    model_config = ConfigDict(strict=True, allow_inf_nan=False, protected_namespaces=())


class OctavoOptions(Schema):
    """What only Octavo knows.

    `why` adds the field `octavo` to the answer: what was reused, why not more was, how long it took.
    `exact_history` set to false tokenises answers that come back as the text they are. `reuse` set to `approximate`
    takes text behind an edit over without computing it again, and adds the field `octavo` too. `timeout_s` ends the
    answer after so many seconds, as if it had its full length. `urgency` below 0 lets other requests go first, such as
    for titles and summaries beside a chat; nobody can push ahead.
    """

    why: bool = False
    exact_history: bool = True
    reuse: Literal["exact", "approximate"] = "exact"
    timeout_s: Annotated[float, Field(gt=0)] | None = None
    urgency: Annotated[int, Field(ge=-MAX_URGENCY, le=0)] = 0

    @property
    def settings(self) -> dict[str, Any]:
        """Those that the engine takes with a request."""
        return {"reuse": self.reuse, "timeout_s": self.timeout_s, "urgency": self.urgency}

    @property
    def reports(self) -> bool:
        """Whether the answer has the field `octavo`."""
        return self.why or self.reuse == "approximate"


class DifferenceReport(Schema):
    """The text around the first token in which a prompt differs from the most similar earlier one of the same key."""

    position: int
    before: str
    earlier: str
    now: str


class AdviceReport(Schema):
    """How the prompt could have been laid out to be reused; see `Advice` in octavo.engine.messages."""

    num_tokens: int
    saved_s: float
    message: str


class WhyReport(Schema):
    """Why less than everything known was reused; see `Why` in octavo.engine.messages."""

    cause: str
    position: int
    num_recomputed_tokens: int
    message: str
    cost_s: float
    difference: DifferenceReport | None
    advice: AdviceReport | None


class OctavoReport(Schema):
    """What was reused (of it, `loaded_tokens` from disk), and why not more."""

    history: Literal["exact", "retokenised"] | None
    num_history_tokens: int
    conversation: str | None
    cached_tokens: int
    loaded_tokens: int
    computed_tokens: int
    approximate_tokens: int
    why: WhyReport | None
    ttft_s: float
    queue_s: float
    total_s: float
    exact: bool
    seed: int
    notes: list[str]


class TextPart(Schema):
    """A part of a message's content."""

    type: Literal["text"]
    text: str


Name = Annotated[str, Field(pattern=r"^[a-zA-Z0-9_.-]{1,128}$")]
JsonSchema = dict[str, Any]
Seed = Annotated[int, Field(ge=-(2**63), lt=2**63)]
MaxTokens = Annotated[int, Field(ge=1, lt=2**31)]


def text_of(content: Any) -> str:
    """A content that is text or parts of text, as text."""
    if content is None:
        return ""
    if isinstance(content, str):
        return content
    return "".join(part.text for part in content)
