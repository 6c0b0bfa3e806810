"""Computes again what a sample's tokens were likely to be, with the weights and KV caches that the
spans claim: the proof that the spans are right.

A refit in place keeps the KV cache of the old weights, so no version alone gives the logprobs of
what follows. But the versions one after the other on one cache do:

    version   0 0 0 0 | 1 1 1 | 2 2        each feeds its own tokens to the cache of those before it
    token     p p a b | c d e | f g

Where a request was cut and its sample went on as a new one, the cache is that of one version again.
Nobody outside knows where that was. So at the first token that the mixed cache does not explain, a
fresh one is tried; if that explains the rest, the request was cut there.
"""

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from itertools import groupby
from pathlib import Path
from typing import Any

import torch
from transformers import AutoModelForCausalLM, DynamicCache

# Between float32 on one path and on the other, nats.
ERROR_MAX = 2e-3


@dataclass(frozen=True, slots=True)
class ReplayedSample:
    """error: the largest difference of a logprob. cuts: how often a fresh KV cache was needed.
    wrong: tokens that no version explains where the spans say so. unlike: of each token whose KV
    mixes versions, how far its logprob is from that of a clean prefill under the version of its
    span. moved: how far the clean prefill is from that of the version before.
    """

    error: float
    cuts: int
    wrong: int
    unlike: list[float]
    moved: list[float]


def load_model(snapshot: Path) -> Any:
    return AutoModelForCausalLM.from_pretrained(snapshot, dtype=torch.float32).eval()


@torch.no_grad()
def replay(
    model_of: Callable[[str], Any],
    prompt: Sequence[int],
    tokens: Sequence[int],
    logprobs: Sequence[float],
    labels: Sequence[str],
    *,
    keeps_kv: bool,
) -> ReplayedSample:
    """keeps_kv: a refit keeps the KV cache; otherwise every span starts with a fresh one."""
    context = [*prompt, *tokens]
    error, wrong, cuts = 0.0, 0, 0
    unlike: list[float] = []
    moved: list[float] = []
    cache, fed, before = DynamicCache(), 0, ""
    at = 0  # output tokens explained so far
    for label, group in groupby(labels):
        end, first = at + len(list(group)), len(prompt) + at
        here, fresh = context[: len(prompt) + end], DynamicCache()
        truth = _chosen(model_of(label), here, fresh, 0, first)
        kept = fed if keeps_kv else 0
        if kept:
            found = _chosen(model_of(label), here, cache, fed, first)
            old = _chosen(model_of(before), here, DynamicCache(), 0, first)
            moved += [abs(new - other) for new, other in zip(truth, old, strict=True)]
        else:
            found, cache = truth, fresh
        fed, before = len(here) - 1, label
        for place in range(at, end):
            off = abs(found[place - at] - logprobs[place])
            if off > ERROR_MAX and kept:
                # The request was cut here: from now on the KV is this version's.
                kept, cuts, found, cache = 0, cuts + 1, truth, fresh
                off = abs(found[place - at] - logprobs[place])
            wrong += off > ERROR_MAX
            error = max(error, off)
            if kept:
                unlike.append(abs(truth[place - at] - logprobs[place]))
        at = end
    return ReplayedSample(error, cuts, wrong, unlike, moved)


def _chosen(
    model: Any, context: Sequence[int], cache: DynamicCache, fed: int, first: int
) -> list[float]:
    """Logprobs of context[first:], when `cache` has the KV of the first `fed` tokens; it then has
    that of all but the last.
    """
    rows = torch.tensor([context[fed:-1]])
    logits = model(input_ids=rows, past_key_values=cache, use_cache=True).logits[0].float()
    logprobs = torch.log_softmax(logits, dim=-1)[first - 1 - fed :]
    wanted = torch.tensor(context[first:])[:, None]
    chosen: list[float] = logprobs.gather(1, wanted)[:, 0].tolist()
    return chosen
