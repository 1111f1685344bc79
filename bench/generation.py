"""Text generation: GPT-2 with two layers, step by step, against eager PyTorch.

    python -m bench.generation            # needs transformers; weights are random

Loops of greedy decoding. "growing": the whole sequence is passed in each step, so that its length is another each time (`compile` with a free
length). "static cache": `generate()` with keys and values in a cache of fixed size (`torch.compile`), that of the sequence or the model's whole
context. The first pass compiles. Further passes of eager and compiled are timed in turns; for each step the median over the passes counts. The tokens
of both must agree.
"""

from __future__ import annotations

import argparse
import statistics
import time
from collections.abc import Callable
from functools import partial
from typing import Any

import torch

import tilewright
from bench.common import write_results

FIRST_COUNTED = 10
"""Steps before this one are not compared."""


class Logits(torch.nn.Module):
    """The model on a whole sequence, without a cache."""

    def __init__(self, model: torch.nn.Module) -> None:
        super().__init__()
        self.model = model

    def forward(self, tokens: torch.Tensor) -> torch.Tensor:
        logits: torch.Tensor = self.model(tokens, use_cache=False).logits
        return logits


Pass = Callable[[], tuple[torch.Tensor, list[float]]]
"""Generates once: the tokens, and the seconds of each step."""


def growing(run: Callable[[torch.Tensor], torch.Tensor], prompt: torch.Tensor, steps: int) -> tuple[torch.Tensor, list[float]]:
    tokens, seconds = prompt, []
    for _ in range(steps):
        start = time.perf_counter()
        logits = run(tokens)
        seconds.append(time.perf_counter() - start)
        tokens = torch.cat([tokens, logits[:, -1:].argmax(-1)], 1)
    return tokens, seconds


def generated(model: Any, forward: Callable[..., Any], prompt: torch.Tensor, steps: int, positions: int) -> tuple[torch.Tensor, list[float]]:
    """`generate()` with a static cache for that many positions, whose calls of the model are `forward`."""
    from transformers import StaticCache

    seconds = []

    def timed(*inputs: Any, **keywords: Any) -> Any:
        start = time.perf_counter()
        result = forward(*inputs, **keywords)
        seconds.append(time.perf_counter() - start)
        return result

    original = model.forward
    model.forward = timed
    try:
        options = {"do_sample": False, "pad_token_id": 0, "disable_compile": True}
        cache = StaticCache(config=model.config, max_cache_len=positions)
        tokens = model.generate(prompt, max_new_tokens=steps, min_new_tokens=steps, past_key_values=cache, **options)
    finally:
        model.forward = original
    return tokens, seconds


def measured(name: str, eager: Pass, ours: Pass, passes: int) -> dict[str, Any]:
    start = time.perf_counter()
    tokens, first = ours()
    compiling = time.perf_counter() - start
    wanted, _ = eager()
    if not torch.equal(tokens, wanted):
        raise SystemExit(f"{name}: the tokens differ from those of eager PyTorch")
    runs: dict[str, list[list[float]]] = {"eager": [], "tilewright": []}
    for _ in range(passes):
        for contender, one in (("eager", eager), ("tilewright", ours)):
            runs[contender].append(one()[1])
    steps = {contender: [statistics.median(step) for step in zip(*seconds, strict=True)] for contender, seconds in runs.items()}
    counted = range(FIRST_COUNTED, len(steps["eager"]))
    ratios = [steps["eager"][k] / steps["tilewright"][k] for k in counted]
    return {
        "loop": name,
        "first_pass_seconds": compiling,
        "first_pass_step_seconds": first,
        "step_seconds": steps,
        "eager_ms": statistics.median(steps["eager"][k] for k in counted) * 1e3,
        "tilewright_ms": statistics.median(steps["tilewright"][k] for k in counted) * 1e3,
        "speed_up": statistics.geometric_mean(ratios),
        "least_speed_up_of_a_step": min(ratios),
        "longest_step_ms": max(max(seconds) for seconds in runs["tilewright"]) * 1e3,
    }


def main() -> None:
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--steps", type=int, default=48)
    parser.add_argument("--passes", type=int, default=5)
    parser.add_argument("--prompt", type=int, default=8, help="tokens given")
    parser.add_argument("--name", default="generation")
    options = parser.parse_args()
    from transformers import GPT2Config, GPT2LMHeadModel

    torch.manual_seed(0)
    model = GPT2LMHeadModel(GPT2Config(n_layer=2)).eval()
    prompt = torch.randint(0, model.config.vocab_size, (1, options.prompt))
    whole = Logits(model)
    with torch.no_grad():
        grown = tilewright.compile(whole, prompt, dynamic={"tokens": {1: "length"}}, wait=True)
        results = [measured("growing", lambda: growing(whole, prompt, options.steps), lambda: growing(grown, prompt, options.steps), options.passes)]
        results[0]["programs"] = len(grown.sizes)
        forward = model.forward
        for positions in (options.prompt + options.steps, model.config.n_positions):
            torch.compiler.reset()
            fast = torch.compile(forward, backend="tilewright")
            eager, ours = (partial(generated, model, run, prompt, options.steps, positions) for run in (forward, fast))
            results.append(measured(f"static cache of {positions:,} positions", eager, ours, options.passes))
    print(write_results(options.name, vars(options), results))
    for row in results:
        print({key: value for key, value in row.items() if not isinstance(value, (list, dict))})


if __name__ == "__main__":
    main()
