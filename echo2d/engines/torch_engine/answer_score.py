"""Scores answers in the form in which the coordinator sends them, and sums up the results of their tokens."""

from collections.abc import Iterable, Iterator, Sequence
from dataclasses import astuple, dataclass, replace
from itertools import groupby
from typing import Any

import numpy as np
from numpy.typing import NDArray

from echo2d.core.protocol.columns import columns_fault
from echo2d.core.protocol.control_messages import AnswerToScore, SeedReplay
from echo2d.core.protocol.evidence import Evidence, TokenNumbers
from echo2d.core.protocol.experts import EXPERTS
from echo2d.core.protocol.sampling import Sampling
from echo2d.core.protocol.trajectory import unpack_logprobs, unpack_tokens
from echo2d.engines.torch_engine.policy import InferencePolicy
from echo2d.engines.torch_engine.scoring import Scorable, score_all
from echo2d.errors import EngineFault, PeerFault

# Most logits of one forward pass (256 MB in float32), and most tokens, padding included.
LOGITS_MAX = 64 << 20
_TOKENS_MAX = 16384


@dataclass(frozen=True, slots=True)
class CheckedAnswer:
    """An answer, or a piece of one, whose tokens the model knows."""

    place: int  # index of the answer in the coordinator's order
    asked: Scorable
    claimed: TokenNumbers
    experts: NDArray[Any] | None  # as the worker reported them; None: it reported none
    sampling: Sampling

    @property
    def length(self) -> int:
        return len(self.asked.prompt) + len(self.asked.answer)


def passes_of(
    policy: InferencePolicy, answers: Sequence[AnswerToScore], replay: SeedReplay
) -> list[list[CheckedAnswer]]:
    """Group the answers into forward passes. A pass has answers of one sampling and of similar length, as many
    as fit. An answer whose logits do not fit is split into pieces.

    EngineFault: an answer is malformed, too long for the model, or has a token that is not in the
    vocabulary.
    """
    checked = [_checked(policy, place, each, replay) for place, each in enumerate(answers)]
    most = max(1, LOGITS_MAX // policy.vocab_size)
    pieces = [piece for each in checked for piece in _pieces(each, most)]
    pieces.sort(key=lambda each: (astuple(each.sampling), each.length))
    return [
        together
        for _, alike in groupby(pieces, key=lambda each: each.sampling)
        for together in _packed(alike, policy.vocab_size)
    ]


def score_pass(
    policy: InferencePolicy, together: Sequence[CheckedAnswer], replay: SeedReplay, adapter: str
) -> list[Evidence]:
    """Score answers that `passes_of` grouped, under the adapter of this label if the policy has any.

    EngineFault: the memory is too small.
    """
    try:
        scored = score_all(
            policy,
            [each.asked for each in together],
            sampling=together[0].sampling,
            replay="torch" if replay == "none" else replay,
            adapter=adapter,
        )
    except RuntimeError as error:
        # Usually memory ran out. On a CPU torch has no exception class for that.
        longest = max(each.length for each in together)
        reason = str(error).partition("\n")[0][:200]
        raise EngineFault(f"answers of up to {longest} tokens are not scored: {reason}") from error
    return [
        found.evidence(each.claimed, each.experts, policy.expert_shape)
        for found, each in zip(scored, together, strict=True)
    ]


def _pieces(answer: CheckedAnswer, most: int) -> Iterator[CheckedAnswer]:
    """The answer in pieces of at most `most` tokens. A piece's forward pass covers all tokens before it."""
    asked = answer.asked
    for start in range(0, len(asked.answer), most):
        part = asked.answer[start : start + most]
        prompt = [*asked.prompt, *asked.answer[:start]]
        scorable, own = (
            Scorable(prompt, part, asked.seed, asked.written + start),
            slice(start, start + most),
        )
        experts = None if answer.experts is None else answer.experts[own]
        yield replace(answer, asked=scorable, claimed=answer.claimed[own], experts=experts)


def _packed(answers: Iterable[CheckedAnswer], vocab_size: int) -> Iterator[list[CheckedAnswer]]:
    """Pack consecutive answers, sorted by length, into forward passes."""
    together: list[CheckedAnswer] = []
    for each in answers:
        rows, longest = len(together) + 1, each.length
        kept = longest - min(len(one.asked.prompt) for one in (*together, each)) + 1
        too_many = rows * kept * vocab_size > LOGITS_MAX or rows * longest > _TOKENS_MAX
        if together and too_many:
            yield together
            together = []
        together.append(each)
    if together:
        yield together


def _checked(
    policy: InferencePolicy, place: int, answer: AnswerToScore, replay: SeedReplay
) -> CheckedAnswer:
    try:
        prompt, tokens = unpack_tokens(answer.prompt), unpack_tokens(answer.tokens)
        claimed = unpack_logprobs(answer.logprobs).astype(np.float64)
    except PeerFault as fault:
        raise EngineFault(str(fault)) from fault
    if not (len(prompt) > 0 <= answer.written and len(tokens) == len(claimed) > 0):
        raise EngineFault("an answer has no tokens, or not a logprob for each token")
    if max(prompt.max(), tokens.max()) >= policy.vocab_size or min(prompt.min(), tokens.min()) < 0:
        raise EngineFault(f"a token is not below the vocabulary size of {policy.vocab_size}")
    if policy.context_max is not None and len(prompt) + len(tokens) > policy.context_max:
        raise EngineFault(
            f"{len(prompt) + len(tokens)} tokens; the context is {policy.context_max}"
        )
    if malformed := columns_fault(answer.columns, len(tokens)):
        raise EngineFault(malformed)
    seed = None if replay == "none" else answer.seed
    reported = {column.name: column.array for column in answer.columns}
    return CheckedAnswer(
        place,
        Scorable(prompt.tolist(), tokens.tolist(), seed, answer.written),
        claimed,
        reported.get(EXPERTS),
        answer.sampling,
    )
