"""Programs and libraries that people use with OpenAI's interface, as they are installed from the package index."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest

from .conftest import PATIENCE_S, Served
from .test_tools import PARAMETERS

pytestmark = pytest.mark.bundled

QUESTION = "What is the capital of France?"


def test_llm(server: Served, tmp_path: Path) -> None:
    """Simon Willison's `llm`: an answer, and a conversation that goes on from its own log."""
    pytest.importorskip("llm")
    models = [
        {"model_id": "local", "model_name": "smollm2", "api_base": f"{server.url}/v1", "api_key_name": "none"}
    ]
    (tmp_path / "extra-openai-models.yaml").write_text(json.dumps(models))  # JSON is YAML too
    environment = {**os.environ, "LLM_USER_PATH": str(tmp_path), "OPENAI_API_KEY": "none"}

    def llm(*words: str) -> str:
        command = [sys.executable, "-m", "llm", *words]
        result = subprocess.run(command, env=environment, capture_output=True, text=True, timeout=PATIENCE_S)
        assert result.returncode == 0, result.stderr
        return result.stdout

    options = ("-o", "temperature", "0", "-o", "max_tokens", "24")
    assert "Paris" in llm("-m", "local", QUESTION, *options)
    before = len(server.lines)
    assert llm("-c", "And of Italy?", *options).strip()
    (line,) = [line for line in server.lines[before:] if line.get("path") == "/v1/chat/completions"]
    assert line["history"] == "exact"


def test_litellm(server: Served, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("LITELLM_LOCAL_MODEL_COST_MAP", "True")  # or it asks another machine for prices
    litellm = pytest.importorskip("litellm")
    options = {"api_base": f"{server.url}/v1", "api_key": "none", "temperature": 0, "max_tokens": 24}
    messages = [{"role": "user", "content": QUESTION}]
    reply = litellm.completion(model="openai/smollm2", messages=messages, **options)
    assert "Paris" in reply.choices[0].message.content
    chunks = litellm.completion(model="openai/smollm2", messages=messages, stream=True, **options)
    text = "".join(chunk.choices[0].delta.content or "" for chunk in chunks)
    assert text == reply.choices[0].message.content
    claude = {**options, "api_base": server.url}
    assert (
        litellm.completion(model="anthropic/smollm2", messages=messages, **claude).choices[0].message.content
        == text
    )
    with pytest.raises(litellm.ContextWindowExceededError):
        litellm.completion(
            model="openai/smollm2",
            messages=[{"role": "user", "content": "word " * 9000}],
            num_retries=0,
            **options,
        )


def test_langchain(server: Served) -> None:
    langchain_openai = pytest.importorskip("langchain_openai")
    chat = langchain_openai.ChatOpenAI(
        model="smollm2",
        base_url=f"{server.url}/v1",
        api_key="none",
        temperature=0,
        max_tokens=60,
        max_retries=0,
    )
    answer = chat.invoke(QUESTION)
    assert "Paris" in answer.content
    assert answer.usage_metadata["input_token_details"]["cache_read"] >= 0
    assert "".join(chunk.text for chunk in chat.stream(QUESTION)) == answer.content
    tool = {"name": "get_weather", "description": "The weather", "parameters": PARAMETERS}
    (call,) = chat.bind_tools([tool], tool_choice="get_weather").invoke("The weather in Paris?").tool_calls
    assert set(call["args"]) == {"city", "unit"}
    shaped = chat.with_structured_output(
        {"title": "place", "description": "A place", **PARAMETERS}, method="json_schema"
    )
    assert set(shaped.invoke("Paris in celsius")) == {"city", "unit"}
