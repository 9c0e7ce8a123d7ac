"""Helper of engine.py, run by vLLM's own interpreter: embeds token id lists and answers with seconds, line by line."""

import json
import os
import sys
import time


def main() -> None:
    path, max_batch_tokens = sys.argv[1], int(sys.argv[2])
    # vLLM and its child processes print; the answers keep the pipe to themselves.
    answers = os.fdopen(os.dup(1), "w")
    os.dup2(2, 1)
    from vllm import LLM

    model = LLM(
        model=path,
        runner="pooling",
        dtype="bfloat16",
        max_model_len=2048,
        max_num_batched_tokens=max_batch_tokens,
        enable_prefix_caching=False,
        disable_log_stats=True,
    )
    print(json.dumps({"ready": True}), file=answers, flush=True)
    for line in sys.stdin:
        prompts = [{"prompt_token_ids": ids} for ids in json.loads(line)]
        start = time.perf_counter()
        outputs = model.embed(prompts, use_tqdm=False)
        seconds = time.perf_counter() - start
        vectors = [output.outputs.embedding for output in outputs]
        print(json.dumps({"seconds": seconds, "vectors": vectors}), file=answers, flush=True)


if __name__ == "__main__":
    main()
