"""transformers with its own cache, one sequence. Options: `model` (a folder), `threads`."""

import time

from protocol import options, serve

chosen = options()
import torch  # noqa: E402
import transformers  # noqa: E402

torch.set_num_threads(chosen["threads"])
model = transformers.AutoModelForCausalLM.from_pretrained(chosen["model"], dtype=torch.bfloat16).eval()


@torch.inference_mode()
def generate(prompts, tokens):
    (prompt,), (tokens,) = prompts, tokens
    cache = transformers.DynamicCache(config=model.config)
    ids = torch.tensor([prompt])
    stamps = []
    start = time.perf_counter()
    for _ in range(tokens):
        logits = model(ids, past_key_values=cache, use_cache=True, logits_to_keep=1).logits
        ids = logits[:, -1].argmax(-1, keepdim=True)
        stamps.append(time.perf_counter() - start)
    return [stamps]


serve(generate, {"transformers": transformers.__version__, "torch": torch.__version__})
