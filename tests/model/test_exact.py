"""Promise 1 by bytes: a token's logits do not depend on how its prefix came into the cache."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
from cache_driver import CacheDriver
from families import FAMILIES, VOCAB, tiny_loaded
from gguf_files import TOKENS, T
from packed_files import save_folder, write_packed
from variants import Prompt, chunked, compute, every_variant, uncached

from octavo.models.load import load_model
from octavo.models.packed import PACKED_TYPES

DTYPES = {"fp32": torch.float32, "bf16": torch.bfloat16}
CASES = [
    *((family, kv_format) for kv_format in ("raw", "int8") for family in FAMILIES),
    *((family, kv_format) for kv_format in ("k8v4", "int4") for family in ("llama", "gemma2")),
]


def random_ids(count: int) -> list[int]:
    return torch.randint(5, VOCAB, (count,), generator=torch.Generator().manual_seed(1)).tolist()


def check_all(driver: CacheDriver, prompt: Prompt) -> None:
    for name, variant in every_variant(prompt).items():
        try:
            variant(driver, prompt)
        except AssertionError as error:
            error.add_note(name)
            raise


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize(("family", "kv_format"), CASES)
def test_families(family: str, kv_format: str, dtype: str) -> None:
    driver = CacheDriver(tiny_loaded(family, DTYPES[dtype]), kv_format=kv_format)
    prompt = compute(driver, random_ids(101))
    uncached(driver, prompt, (1, 2, 31, 32, 33, 64, 101))
    chunked(driver, prompt, 1)
    check_all(driver, prompt)


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("held", [*sorted(PACKED_TYPES), "int8", "int4"])
def test_packed_weights(held: str, dtype: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """However weights are packed: a file's types as they are, and dense weights quantised when loaded."""
    monkeypatch.setenv("OCTAVO_CACHE", str(tmp_path / "cache"))
    if held in PACKED_TYPES:
        loaded = load_model(write_packed(tmp_path / "tiny.gguf", T[held]), dtype=dtype)
    else:
        loaded = load_model(save_folder(tmp_path / "tiny"), dtype=dtype, weights=held)
    driver = CacheDriver(loaded, kv_format="int8")
    prompt = compute(
        driver, torch.randint(5, len(TOKENS), (101,), generator=torch.Generator().manual_seed(1)).tolist()
    )
    uncached(driver, prompt, (1, 2, 33, 101))
    chunked(driver, prompt, 1)
    check_all(driver, prompt)


@pytest.mark.bundled
@pytest.mark.parametrize(
    ("dtype", "weights", "kv_format"),
    [("bf16", "auto", "int8"), ("bf16", "bf16", "bf16"), ("fp32", "auto", "int8"), ("fp32", "fp32", "int8")],
)
def test_smollm2(dtype: str, weights: str, kv_format: str) -> None:
    """A few tokens of the model that `make exact` takes many of: its layers are as wide as real ones."""
    loaded = load_model("smollm2", dtype=dtype, weights=weights)
    text = "<|im_start|>user\nHow was paper made before machines, and who made it?<|im_end|>\n" * 5
    driver = CacheDriver(loaded, kv_format=kv_format, budget_bytes=256 << 20)
    prompt = compute(driver, loaded.tokenizer.encode(text)[:70])
    uncached(driver, prompt, (1, 2, 33))
    chunked(driver, prompt, 1)
    check_all(driver, prompt)


def test_a_deliberate_violation_is_seen() -> None:
    """Attending to an earlier block raw where the rule says sealed must fail the comparison."""
    driver = CacheDriver(tiny_loaded("llama"))
    prompt = compute(driver, random_ids(101))
    table = driver.start(prompt.token_ids)
    driver.step((table, prompt.token_ids[:64]))
    page = driver.runner.sealed.layers[0][driver.runner.sealed.offset(table.block_ids[1]) :]
    page[:4].view(torch.float32).mul_(1 + 2**-20)  # one key, by a few units in the last place
    logits = driver.step((table, prompt.token_ids[64:]))
    with pytest.raises(AssertionError, match="token 100 has other logits"):
        prompt.check(100, logits)
