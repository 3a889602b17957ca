"""vLLM on the CPU, its engine in this process. Options: `model` (a folder), `threads`, `cache_gb`."""

import os
import time

from protocol import options, serve

chosen = options()
os.environ["VLLM_ENABLE_V1_MULTIPROCESSING"] = "0"
os.environ["VLLM_CPU_KVCACHE_SPACE"] = str(chosen["cache_gb"])
os.environ["VLLM_CPU_OMP_THREADS_BIND"] = f"0-{chosen['threads'] - 1}"


def main():
    import vllm

    engine = vllm.LLM(
        chosen["model"],
        dtype="bfloat16",
        max_model_len=chosen["context"],
        max_num_seqs=32,
        enable_prefix_caching=True,
    ).llm_engine
    numbers = iter(range(1 << 62))

    def generate(prompts, tokens):
        start = time.perf_counter()
        stamps = {}
        for prompt, number in zip(prompts, tokens, strict=True):
            params = vllm.SamplingParams(temperature=0, max_tokens=number, ignore_eos=True, detokenize=False)
            name = str(next(numbers))
            stamps[name] = []
            engine.add_request(name, {"prompt_token_ids": prompt}, params)
        while engine.has_unfinished_requests():
            outputs = engine.step()
            now = time.perf_counter() - start
            for output in outputs:
                answer = stamps[output.request_id]
                answer += [now] * (len(output.outputs[0].token_ids) - len(answer))
        return list(stamps.values())

    serve(generate, {"vllm": vllm.__version__})


if __name__ == "__main__":
    main()
