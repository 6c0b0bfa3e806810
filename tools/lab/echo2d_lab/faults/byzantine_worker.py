"""Makes the messages that a lying worker sends instead of a result, or in addition to it.

No forged token may become part of a batch.
"""

import random
from collections.abc import Sequence
from dataclasses import replace

from echo2d.core.base.ids import Digest, FrameId, Generation, Version
from echo2d.core.protocol.control_messages import (
    EdgeBroken,
    FrameAccused,
    LeaseFailed,
    LeaseGranted,
    LeaseProgress,
    PlanEdges,
    RefitDone,
    SampleFinished,
    ToCoordinator,
    VersionSpan,
)
from echo2d.core.protocol.trajectory import pack_logprobs, pack_tokens
from echo2d_lab.faults.engine import STOP, VOCAB

INVENTED = 0.3  # in a run with an audit, the share of lies that only the audit can recognise
FORGED = Digest(b"\xee" * 32)


def forged(result: SampleFinished, chance: random.Random) -> SampleFinished:
    """Return a result that the coordinator can recognise as wrong."""
    count, first, last = len(result.tokens) // 4, result.spans[0], result.spans[-1]
    lies = [
        replace(result, spans=(*result.spans[:-1], last._replace(end=last.end + 1))),
        replace(result, spans=(first._replace(start=1), *result.spans[1:])),
        replace(result, spans=(first._replace(digest=FORGED), *result.spans[1:])),
        replace(
            result, spans=(*result.spans[:-1], last._replace(version=Version(last.version + 1)))
        ),
        replace(result, spans=()),
        replace(
            result, spans=(*result.spans, VersionSpan(count, count, last.version, last.digest))
        ),
        replace(result, logprobs=pack_logprobs([float("nan")] * count)),
        replace(result, logprobs=pack_logprobs([0.5] * count)),
        replace(result, logprobs=result.logprobs[:-4]),
        replace(result, tokens=pack_tokens([VOCAB] * count)),
        replace(result, tokens=result.tokens[:-1]),
        replace(result, tokens=b"", logprobs=b"", spans=()),
        replace(result, logprobs=pack_logprobs([-51.0] * count)),
        replace(result, finish="context"),
        replace(result, tokens=pack_tokens([STOP] * count), finish="length"),
    ]
    return chance.choice(lies)


def forged_progress(progress: LeaseProgress, chance: random.Random) -> LeaseProgress:
    """Return progress with one wrong sample.

    If the coordinator believed it, another worker would continue from it.
    """
    delta = chance.choice(progress.samples)
    first, last = delta.spans[0], delta.spans[-1]
    count = last.end - first.start
    lies = [
        replace(delta, spans=(*delta.spans[:-1], last._replace(end=last.end + 1))),
        replace(delta, spans=(first._replace(start=first.start + 1), *delta.spans[1:])),
        replace(delta, spans=(first._replace(digest=FORGED), *delta.spans[1:])),
        replace(delta, spans=()),
        replace(delta, logprobs=pack_logprobs([float("nan")] * count)),
        replace(delta, logprobs=b""),
        replace(delta, tokens=pack_tokens([VOCAB] * count)),
        replace(delta, tokens=pack_tokens([STOP] * count)),
        replace(delta, tokens=delta.tokens[:-1]),
    ]
    return replace(progress, samples=(chance.choice(lies),))


def invented(result: SampleFinished, chance: random.Random) -> SampleFinished:
    """Return a result that only an audit can recognise as wrong."""
    count = len(result.tokens) // 4
    tokens = [chance.randrange(2, VOCAB) for _ in range(count)]
    if result.finish == "stop":
        tokens[-1] = STOP
    return replace(result, tokens=pack_tokens(tokens))


def lie(
    result: SampleFinished,
    chance: random.Random,
    foreign: Sequence[LeaseGranted],
    plan: PlanEdges | None,
) -> list[ToCoordinator]:
    """Return the messages to send instead of `result`.

    foreign: leases of any worker. plan: the newest plan.
    """
    kind = chance.choice(
        [
            "forged",
            "foreign",
            "twice",
            "contradiction",
            "sabotage",
            "boast",
            "accusation",
            "nothing",
        ]
    )
    other = chance.choice(foreign)
    match kind:
        case "forged":
            return [forged(result, chance), forged(result, chance)]
        case "foreign":
            return [
                replace(result, lease=other.lease, attempt=other.attempt, sample=s)
                for s in other.samples
            ]
        case "twice":
            return [result, result]
        case "contradiction":
            tokens = pack_tokens([3] * (len(result.tokens) // 4))
            return [result, replace(result, tokens=tokens), replace(result, finish="length")]
        case "sabotage":
            return [
                LeaseFailed(other.lease, other.attempt, "lie"),
                LeaseProgress(other.lease, other.attempt, ()),
                result,
            ]
        case "boast":
            return [RefitDone(Version(10_000), FORGED, 0.0, memory_ok=True), result]
        case "accusation" if plan is not None and plan.peers:
            accused = chance.choice(plan.peers).peer
            return [
                EdgeBroken(plan.plan, Generation(plan.generation), accused, "lie"),
                FrameAccused(plan.form, FrameId(1), accused),
                result,
            ]
        case _:
            return []
