"""Computes the logprobs of a sample's tokens again, with the weights and KV caches that the spans claim.
This proves that the spans are right.

A refit in place keeps the KV cache of the old weights, so no version alone gives the logprobs of the
following tokens. But the versions give them if they work one after the other on one cache:

    version   0 0 0 0 | 1 1 1 | 2 2        each feeds its own tokens to the cache of those before it
    token     p p a b | c d e | f g

If a request was cut and its sample continued as a new request, the cache is that of one version again,
and the server does not report where that was. So every cache that explains the tokens so far is a
candidate: it may continue, or a fresh cache may replace it from some token on. A token is wrong if no
candidate explains it.
"""

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from itertools import groupby
from pathlib import Path
from typing import Any

import torch
from transformers import AutoModelForCausalLM, DynamicCache

# Largest difference of a logprob between the two float32 computations, nats.
ERROR_MAX = 2e-3
# After a cut near the end of a span, two caches may explain the tokens; rarely three.
CANDIDATES_MAX = 4


@dataclass(frozen=True, slots=True)
class ReplayedSample:
    """error: the largest difference of an explained logprob. cuts: the smallest number of fresh KV caches
    that explains the sample. wrong: tokens that the versions of the spans do not explain. unlike: for each
    token whose KV cache mixes versions, the difference of its logprob from that of a clean prefill under
    the version of its span. moved: the difference of that clean prefill from one under the version before.
    """

    error: float
    cuts: int
    wrong: int
    unlike: list[float]
    moved: list[float]


def load_model(snapshot: Path) -> Any:
    return AutoModelForCausalLM.from_pretrained(snapshot, dtype=torch.float32).eval()


@dataclass(slots=True)
class _Candidate:
    """A KV cache that the server may have had. fed: number of its tokens. cuts: fresh caches before it."""

    cache: DynamicCache
    fed: int
    cuts: int


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
    """Replay a sample. keeps_kv: a refit keeps the KV cache; otherwise every span starts with a fresh one."""
    context = [*prompt, *tokens]
    error, wrong = 0.0, 0
    unlike: list[float] = []
    moved: list[float] = []
    candidates: list[_Candidate] = []
    at, before = 0, ""
    for label, group in groupby(labels):
        end, first = at + len(list(group)), len(prompt) + at
        here, said = context[: len(prompt) + end], logprobs[at:end]
        # A clean prefill; the server may have made one at some token of this span.
        fresh = _Candidate(
            DynamicCache(), 0, min((each.cuts for each in candidates), default=-1) + 1
        )
        truth = _feed(model_of(label), here, fresh, first)
        clean = _off(truth, said)
        tail = next((n for n in reversed(range(len(said))) if clean[n] > ERROR_MAX), -1) + 1
        kept: list[_Candidate] = []
        best, reach = clean, 0
        for candidate in candidates if keeps_kv else []:
            off = _off(_feed(model_of(label), here, candidate, first), said)
            until = next((n for n, each in enumerate(off) if each > ERROR_MAX), len(said))
            if until == len(said):
                kept.append(candidate)
            if until > reach:
                best, reach = [*off[:until], *clean[until:]], until
        if candidates and reach:
            old = _feed(model_of(before), here, _Candidate(DynamicCache(), 0, 0), first)
            moved += _off(truth, old)[:reach]
            unlike += clean[:reach]
        if reach >= tail or not kept:
            kept.append(fresh)
        candidates = kept[:CANDIDATES_MAX]
        wrong += sum(each > ERROR_MAX for each in best)
        error = max([error, *(each for each in best if each <= ERROR_MAX)])
        at, before = end, label
    cuts = min(candidate.cuts for candidate in candidates) if candidates else 0
    return ReplayedSample(error, cuts if keeps_kv else 0, wrong, unlike, moved)


def _off(found: Sequence[float], said: Sequence[float]) -> list[float]:
    return [abs(one - other) for one, other in zip(found, said, strict=True)]


def _feed(model: Any, context: Sequence[int], candidate: _Candidate, first: int) -> list[float]:
    """Logprobs of context[first:]; afterwards the candidate has all of the context except its last token."""
    found = _chosen(model, context, candidate.cache, candidate.fed, first)
    candidate.fed = len(context) - 1
    return found


def _chosen(
    model: Any, context: Sequence[int], cache: DynamicCache, fed: int, first: int
) -> list[float]:
    """Logprobs of context[first:], with the KV of the first `fed` tokens in `cache`; afterwards it has the
    KV of all tokens except the last.
    """
    rows = torch.tensor([context[fed:-1]])
    logits = model(input_ids=rows, past_key_values=cache, use_cache=True).logits[0].float()
    logprobs = torch.log_softmax(logits, dim=-1)[first - 1 - fed :]
    wanted = torch.tensor(context[first:])[:, None]
    chosen: list[float] = logprobs.gather(1, wanted)[:, 0].tolist()
    return chosen
