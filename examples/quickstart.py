"""prefixcache in a server, in its shortest form: python examples/quickstart.py [folder for the cache]"""

from __future__ import annotations

import sys
from typing import Any

import mlx.core as mx
import smollm2

from prefixcache import Hit, PrefixCache
from prefixcache.mlx_lm import stream_generate


def answer(cache: PrefixCache, model: Any, tokenizer: Any, question: str, tenant: str) -> str:
    """One request, where mlx-lm's loop is good enough: the same call as mlx_lm.stream_generate and one argument."""

    def on_hit(hit: Hit) -> None:
        print(f"{hit.cached_tokens} tokens reused, {len(hit.remaining)} to run ({hit.reason})")

    prompt = tokenizer.apply_chat_template([{"role": "user", "content": question}], add_generation_prompt=True)
    options = {"prefix_cache": cache, "salt": tenant, "on_hit": on_hit, "max_tokens": 12}
    return "".join(response.text for response in stream_generate(model, tokenizer, prompt, **options))


def prefill(cache: PrefixCache, model: Any, tokens: list[int]) -> mx.array:
    """The same by hand, for a server with a loop of its own. Returns the logits of the next token."""
    hit = cache.fetch(tokens)  # a miss is false and holds fresh caches: no special case
    recorder, n = cache.record(tokens, hit), hit.cached_tokens
    while n < len(tokens):
        end = min(recorder.next_cut(n), len(tokens))
        logits = model(mx.array([tokens[n:end]]), cache=hit.caches)
        mx.eval(logits)
        recorder.advance(n := end)  # stores the blocks that became complete
    recorder.finish()  # and the rest
    return logits[0, -1]


def main(directory: str) -> None:
    model, tokenizer = smollm2.load(smollm2.prepare())
    with PrefixCache.open(directory, model, block_size=32, ram="1GB", disk="10GB") as cache:
        print(answer(cache, model, tokenizer, "What is the capital of France?", tenant="a"))
        print(answer(cache, model, tokenizer, "What is the capital of France?", tenant="a"))
        tokens = tokenizer.encode("The capital of Italy is")
        print("The capital of Italy is", tokenizer.decode([int(prefill(cache, model, tokens).argmax())]))


if __name__ == "__main__":
    main(sys.argv[1] if len(sys.argv) > 1 else "~/.cache/prefixcache")
