"""OpenVINO GenAI with continuous batching. Options: `model` (an exported folder), `threads`, `cache_gb`."""

import time

from protocol import options, serve

chosen = options()
import numpy as np  # noqa: E402
import openvino  # noqa: E402
import openvino_genai as genai  # noqa: E402

scheduler = genai.SchedulerConfig()
scheduler.cache_size = chosen["cache_gb"]
scheduler.max_num_seqs = 32
scheduler.max_num_batched_tokens = 2048
scheduler.enable_prefix_caching = True
pipe = genai.ContinuousBatchingPipeline(
    chosen["model"], scheduler, "CPU", {"INFERENCE_NUM_THREADS": chosen["threads"]}
)
numbers = iter(range(1 << 62))


def generate(prompts, tokens):
    configs = []
    for number in tokens:
        configs.append(genai.GenerationConfig())
        configs[-1].max_new_tokens = number
        configs[-1].ignore_eos = True
        configs[-1].do_sample = False
    start = time.perf_counter()
    handles = [
        pipe.add_request(next(numbers), openvino.Tensor(np.array([prompt], dtype=np.int64)), config)
        for prompt, config in zip(prompts, configs, strict=True)
    ]
    stamps = [[] for _ in prompts]
    while pipe.has_non_finished_requests():
        pipe.step()
        now = time.perf_counter() - start
        for handle, answer in zip(handles, stamps, strict=True):
            while handle.can_read():
                answer += [now for made in handle.read().values() for _ in made.generated_ids]
    if [len(answer) for answer in stamps] != tokens:
        raise SystemExit(f"OpenVINO made {[len(answer) for answer in stamps]} tokens instead of {tokens}")
    return stamps


serve(generate, {"openvino-genai": genai.__version__, "openvino": openvino.__version__})
