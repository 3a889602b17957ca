"""Tokenizers trained on a few sentences, real chat templates, and an engine that follows a script."""

from __future__ import annotations

import inspect
from collections.abc import Callable, Generator, Iterator, Sequence
from functools import cache
from typing import Any

import pytest
from tokenizers import Tokenizer, decoders, models, pre_tokenizers, trainers
from transformers import PreTrainedTokenizerFast

from octavo.config import SamplingParams
from octavo.engine.messages import Choice, Delta, Event, MemoryReport, Reply, Timings, Usage
from octavo.sessions.template import ChatTemplate

SPECIAL = [
    "<|endoftext|>",
    "<|im_start|>",
    "<|im_end|>",
    "<s>",
    "</s>",
    "<|begin_of_text|>",
    "<|start_header_id|>",
    "<|end_header_id|>",
    "<|eot_id|>",
    "<start_of_turn>",
    "<end_of_turn>",
]
ADDED = ["<think>", "</think>"]  # as in Qwen3: whole tokens, yet not special
CORPUS = [
    "Hello there! How are you today? I am fine, thank you.",
    "The quick brown fox jumps over the lazy dog, and then it rests.",
    "user assistant system User: Assistant: You are a helpful assistant.",
    "What is the capital of France? The capital of France is Paris.",
]

TEMPLATES = {
    # SmolLM2: a system prompt of its own.
    "chatml": (
        "{% for message in messages %}{% if loop.first and messages[0]['role'] != 'system' %}"
        "{{ '<|im_start|>system\nYou are a helpful assistant.<|im_end|>\n' }}{% endif %}"
        "{{ '<|im_start|>' + message['role'] + '\n' + message['content'] + '<|im_end|>' + '\n' }}{% endfor %}"
        "{% if add_generation_prompt %}{{ '<|im_start|>assistant\n' }}{% endif %}"
    ),
    # Llama 3.1: writes BOS and the date, trims contents.
    "llama3": (
        "{{ bos_token }}{{ '<|start_header_id|>system<|end_header_id|>\n\n' }}"
        "{{ 'Today Date: ' + strftime_now('%d %b %Y') + '\n\n' }}"
        "{% if messages[0]['role'] == 'system' %}{{ messages[0]['content'] | trim }}"
        "{% set messages = messages[1:] %}{% endif %}{{ '<|eot_id|>' }}"
        "{% for message in messages %}{{ '<|start_header_id|>' + message['role'] + '<|end_header_id|>\n\n'"
        " + message['content'] | trim + '<|eot_id|>' }}{% endfor %}"
        "{% if add_generation_prompt %}{{ '<|start_header_id|>assistant<|end_header_id|>\n\n' }}{% endif %}"
    ),
    # Qwen3: leaves out the reasoning of turns before the last.
    "qwen3": (
        "{%- for message in messages %}"
        "{%- if message.role == 'assistant' %}"
        "{%- set content = message.content %}"
        "{%- if '</think>' in content %}"
        "{%- set content = content.split('</think>')[-1].lstrip('\n') %}{%- endif %}"
        "{{- '<|im_start|>assistant\n' + content + '<|im_end|>\n' }}"
        "{%- else %}{{- '<|im_start|>' + message.role + '\n' + message.content + '<|im_end|>\n' }}"
        "{%- endif %}{%- endfor %}{%- if add_generation_prompt %}{{- '<|im_start|>assistant\n' }}{%- endif %}"
    ),
    # Mistral 0.1: no system role, and roles must alternate.
    "mistral": (
        "{{ bos_token }}{% for message in messages %}"
        "{% if (message['role'] == 'user') != (loop.index0 % 2 == 0) %}"
        "{{ raise_exception('Conversation roles must alternate user/assistant/user/assistant/...') }}"
        "{% endif %}"
        "{% if message['role'] == 'user' %}{{ '[INST] ' + message['content'] + ' [/INST]' }}"
        "{% elif message['role'] == 'assistant' %}{{ message['content'] + eos_token + ' ' }}"
        "{% else %}{{ raise_exception('Only user and assistant roles are supported!') }}"
        "{% endif %}{% endfor %}"
    ),
    # Llama 2: trims, and puts a space between the answer and its end token.
    "llama2": (
        "{% for message in messages %}{% if message['role'] == 'user' %}"
        "{{ bos_token + '[INST] ' + message['content'].strip() + ' [/INST]' }}"
        "{% else %}{{ ' ' + message['content'].strip() + ' ' + eos_token }}{% endif %}{% endfor %}"
    ),
    # Gemma: trims every content.
    "gemma": (
        "{{ bos_token }}{% for message in messages %}"
        "{% set role = 'model' if message['role'] == 'assistant' else message['role'] %}"
        "{{ '<start_of_turn>' + role + '\n' + message['content'] | trim + '<end_of_turn>\n' }}{% endfor %}"
        "{% if add_generation_prompt %}{{ '<start_of_turn>model\n' }}{% endif %}"
    ),
    "none": None,
}
SPECIALS_OF = {
    "chatml": ("<|im_start|>", "<|im_end|>"),
    "llama3": ("<|begin_of_text|>", "<|eot_id|>"),
    "qwen3": ("<|endoftext|>", "<|im_end|>"),
    "mistral": ("<s>", "</s>"),
    "llama2": ("<s>", "</s>"),
    "gemma": ("<s>", "<end_of_turn>"),
    "none": ("<|endoftext|>", "<|endoftext|>"),
}


@cache
def backend(kind: str) -> str:
    """A tokenizer as JSON: `bytes` is byte-level BPE, `pieces` marks words as SentencePiece does."""
    tokenizer = Tokenizer(models.BPE(unk_token=None if kind == "bytes" else "<unk>"))
    if kind == "bytes":
        tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
        tokenizer.decoder = decoders.ByteLevel()
        alphabet = pre_tokenizers.ByteLevel.alphabet()
    else:
        tokenizer.pre_tokenizer = pre_tokenizers.Metaspace(prepend_scheme="first")
        tokenizer.decoder = decoders.Metaspace(prepend_scheme="first")
        alphabet = sorted({chr(code) for code in range(32, 127)} | {"\n", "▁"})
    specials = SPECIAL if kind == "bytes" else ["<unk>", *SPECIAL]
    trainer = trainers.BpeTrainer(
        vocab_size=500, special_tokens=specials, initial_alphabet=alphabet, show_progress=False
    )
    tokenizer.train_from_iterator(CORPUS, trainer)
    tokenizer.add_tokens(ADDED)
    return str(tokenizer.to_str())


@cache
def tokenizer_for(template: str, kind: str = "bytes") -> Any:
    bos, eos = SPECIALS_OF[template]
    tokenizer = PreTrainedTokenizerFast(
        tokenizer_object=Tokenizer.from_str(backend(kind)), bos_token=bos, eos_token=eos
    )
    tokenizer.chat_template = TEMPLATES[template]
    return tokenizer


class ScriptedEngine:
    """Answers each prompt with the next of `answers`: token ids, an exception to raise among them.

    An answer ends with `finish_reason` `stop` at an end token or a stop string, else with `length`.
    """

    def __init__(self, template: str = "chatml", kind: str = "bytes", context: int = 4096) -> None:
        self.name = f"toy-{template}"
        self.context = context
        self.tokenizer = tokenizer_for(template, kind)
        self.eos_token_ids = frozenset({self.tokenizer.eos_token_id})
        self.chat_template = ChatTemplate(self.tokenizer, self.eos_token_ids)
        self.answers: list[list[int | BaseException]] = []
        self.prompts: list[list[int]] = []
        self.params: list[SamplingParams] = []
        self.options: list[dict[str, Any]] = []
        self.streams: list[Generator[Event]] = []

    def ids(self, text: str) -> list[int]:
        return list(self.tokenizer.encode(text, add_special_tokens=False))

    def text(self, ids: Sequence[int]) -> str:
        return str(self.tokenizer.decode(list(ids), clean_up_tokenization_spaces=False))

    def will_say(self, *answers: str, end: bool = True) -> None:
        """Scripts answers of these texts, each with the end token."""
        for text in answers:
            self.answers.append([*self.ids(text), *([self.tokenizer.eos_token_id] if end else [])])

    def stream(
        self, prompt: Sequence[int], params: SamplingParams | None = None, **options: Any
    ) -> Iterator[Event]:
        self.options.append(options)
        params = params or SamplingParams()
        self.prompts.append(list(prompt))
        self.params.append(params)
        answer = self.answers.pop(0)
        self.streams.append(self._events(list(prompt), answer, params))
        return self.streams[-1]

    @property
    def num_open(self) -> int:
        return sum(inspect.getgeneratorstate(stream) != inspect.GEN_CLOSED for stream in self.streams)

    def _events(
        self, prompt: list[int], answer: list[int | BaseException], params: SamplingParams
    ) -> Generator[Event]:
        ids: list[int] = []
        text = ""
        stop: str | int | None = None
        for item in answer:
            if isinstance(item, BaseException):
                raise item
            ids.append(item)
            full = self.tokenizer.decode(ids, skip_special_tokens=True, clean_up_tokenization_spaces=False)
            found = [full.index(end) for end in params.stop if end in full]
            full = full[: min(found)] if found else full
            stop = item if item in self.eos_token_ids else "stop" if found else None
            delta, text = full[len(text) :], full
            room = self.context - len(prompt) - len(ids)
            if stop is not None or not room or len(ids) in (len(answer), params.max_tokens):
                reason = "stop" if stop is not None else "length"
                reply = self._reply(prompt, ids, Choice(0, text, tuple(ids), reason, stop))
                yield Delta("r", 0, delta, (item,), finish_reason=reason, reply=reply)
                return
            yield Delta("r", 0, delta, (item,))

    def _reply(self, prompt: list[int], ids: list[int], choice: Choice) -> Reply:
        usage = Usage(len(prompt), 0, len(prompt), len(ids))
        memory = MemoryReport(0, 0, 0, 0, 0, 0, 0, "raw")
        return Reply("r", (choice,), usage, Timings(0.0, 0.0, 0.0, 0.0, 0.0), memory, seed=0)


@pytest.fixture(scope="session")
def make_engine() -> Callable[..., ScriptedEngine]:
    return ScriptedEngine


@pytest.fixture(scope="session")
def make_tokenizer() -> Callable[..., Any]:
    return tokenizer_for
