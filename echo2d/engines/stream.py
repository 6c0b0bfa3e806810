"""Passes output from an engine to the consumer of a request; all engines use it.

`SampleBuffer` gathers the tokens of one sample into deltas whose spans cover exactly their tokens
(pure). `RequestStream` is the queue of one request's deltas, with one consumer on the event loop.
"""

import asyncio
from collections import deque
from collections.abc import Collection
from itertools import pairwise

from echo2d.core.protocol.answer_end import OutputLimit, output_limit
from echo2d.core.protocol.columns import Columns, join_columns
from echo2d.core.worker.events import LabelSpan
from echo2d.engines.base import FinishReason, GenerateRequest, SampleOutput
from echo2d.errors import EngineFault

# Most tokens held back per sample. To wake a consumer for each token costs more than a step of a
# small model.
BUNDLE_TOKENS_MAX = 16
# No token is held back longer than this, so that a viewer sees text appear.
BUNDLE_S_MAX = 0.05
# Running and waiting samples of one engine. A caller that asks for more has a bug.
SAMPLES_OPEN_MAX = 16_384


def check_request(
    request: GenerateRequest, *, vocab_size: int, context_max: int | None
) -> OutputLimit:
    """Check a request against an engine's vocabulary and context; return the limit of its output.

    context_max: tokens of prompt and output together; None: no limit. EngineFault: the engine could
    not run the request.
    """
    if request.samples < 1 or request.max_new_tokens < 1:
        raise EngineFault(
            f"request {request.request_id}: samples and max_new_tokens must be at least 1"
        )
    if fault := request.sampling.fault:
        raise EngineFault(f"request {request.request_id}: {fault}")
    if request.rng_seeds is not None and len(request.rng_seeds) != request.samples:
        raise EngineFault(
            f"request {request.request_id}: {len(request.rng_seeds)} seeds for {request.samples} samples"
        )
    if not request.prompt:
        raise EngineFault(f"request {request.request_id}: the prompt is empty")
    if not 0 <= min(request.prompt) <= max(request.prompt) < vocab_size:
        raise EngineFault(
            f"request {request.request_id}: a prompt token is outside the vocabulary "
            f"of {vocab_size}"
        )
    limit = output_limit(
        request.max_new_tokens, prompt_tokens=len(request.prompt), context_max=context_max
    )
    if limit.tokens < 1:
        raise EngineFault(
            f"request {request.request_id}: a prompt of {len(request.prompt)} tokens fills "
            f"the context of {context_max}"
        )
    return limit


def require_held(request: GenerateRequest, held: Collection[str]) -> None:
    """EngineFault: the request names a version that is not held."""
    if request.label is not None and request.label not in held:
        raise EngineFault(f"version {request.label} is not held")


class SampleBuffer:
    """The output of one sample that its consumer has not received yet.

    Positions count from the sample's first output token and continue from delta to delta.
    """

    __slots__ = ("_columns", "_logprobs", "_runs", "_start", "_tokens", "sample")

    def __init__(self, sample: int) -> None:
        self.sample = sample
        # The columns of each token; empty, or as many as there are tokens.
        self._columns: list[Columns] = []
        self._start = 0
        self._tokens: list[int] = []
        self._logprobs: list[float] = []
        # (first position, label) of each run of tokens that one version wrote.
        self._runs: list[tuple[int, str]] = []

    def __len__(self) -> int:
        return len(self._tokens)

    def add(self, token: int, logprob: float, label: str, columns: Columns = ()) -> None:
        if not self._runs or self._runs[-1][1] != label:
            self._runs.append((self._start + len(self._tokens), label))
        self._tokens.append(token)
        self._logprobs.append(logprob)
        if columns:
            self._columns.append(columns)

    def take(self, finish: FinishReason | None = None) -> SampleOutput:
        """Return everything held as one delta, and empty the buffer."""
        whole = len(self._columns) == len(self._tokens)
        columns = join_columns([(1, each) for each in self._columns]) if whole else ()
        delta = SampleOutput(
            self.sample, self._tokens, self._logprobs, self._spans(), finish, columns
        )
        self._start += len(self._tokens)
        self._tokens, self._logprobs, self._runs, self._columns = [], [], [], []
        return delta

    def _spans(self) -> list[LabelSpan]:
        starts = [*(start for start, _ in self._runs), self._start + len(self._tokens)]
        return [
            LabelSpan(start, end, run[1])
            for run, (start, end) in zip(self._runs, pairwise(starts), strict=True)
        ]

    def check(self) -> None:
        assert len(self._tokens) == len(self._logprobs)
        assert bool(self._runs) == bool(self._tokens)
        assert not self._runs or self._runs[0][0] == self._start
        assert all(a[0] < b[0] and a[1] != b[1] for a, b in pairwise(self._runs))


class RequestStream:
    """The deltas of one request, in order. One consumer; use it on the event loop only.

    It needs no limit of its own: an engine puts at most one delta per token and one at the end of a
    sample, so it holds at most samples * (max_new_tokens + 1) deltas.
    """

    def __init__(self, samples: int) -> None:
        self._open = set(range(samples))
        self._deltas: deque[SampleOutput] = deque()
        self._changed = asyncio.Event()

    @property
    def samples_open(self) -> int:
        """How many samples have not finished, counted where deltas are put."""
        return len(self._open)

    def put(self, delta: SampleOutput) -> None:
        """Append a delta.

        A delta after its sample's finish is dropped, so ending a sample twice is harmless.
        """
        if delta.sample not in self._open:
            return
        if delta.finish is not None:
            self._open.discard(delta.sample)
        self._deltas.append(delta)
        self._changed.set()

    def abort(self) -> None:
        """End every open sample with an empty delta."""
        for sample in sorted(self._open):
            self.put(SampleOutput(sample, (), (), (), "abort"))

    async def get(self) -> SampleOutput | None:
        """Wait for the next delta; None once every sample has finished."""
        while not self._deltas:
            if not self._open:
                return None
            self._changed.clear()
            await self._changed.wait()
        return self._deltas.popleft()

    def check(self) -> None:
        assert all(
            delta.sample not in self._open for delta in self._deltas if delta.finish is not None
        )
        assert not self._deltas or self._changed.is_set()
