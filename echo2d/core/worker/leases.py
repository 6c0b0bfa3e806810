"""Tracks the leases of one worker, from the grant until the coordinator has answered every result.

    LeaseGranted --> waiting --(slots free)--> generating --(sample finished)--> result
         |              |                          |               result --(SampleAnswered)--> gone
     LeaseFailed        +--------------------------+
    (refused)           --(LeaseCancelled, not kept by Welcome, revoked, engine fault, stop)--> gone

The engines never have more samples than slots, unless a single lease alone is larger. A span names only a version that
this worker itself loaded (I2). It never names a version that is older than the lease allows, or older than the version
of the previous span (I1). If a lease names a version, this version alone writes its tokens: the worker must hold it,
and need not serve it. A version is *confirmed* once all engines serve it and the coordinator was told so. A result
is sent only when every version in its spans is confirmed, and progress only up to the first unconfirmed span. When a
lease is given back, its progress is reported first, so that another worker can continue it. Leases and results outlive
the control link: after a Welcome, every kept sample is reported again from its first token.

Not here: which version is served (`versions`), and the engines.
"""

from collections.abc import Collection, Iterator, Mapping
from dataclasses import dataclass, field

from echo2d.core.base.bounded_dict import keep_newest
from echo2d.core.protocol.columns import (
    TOKEN_BYTES,
    Columns,
    columns_bytes,
    columns_fault,
    cut_columns,
    join_columns,
)
from echo2d.core.protocol.control_messages import (
    PROGRESS_S,
    Finish,
    HeldLease,
    LeaseFailed,
    LeaseGranted,
    LeaseProgress,
    SampleAnswered,
    SampleDelta,
    SampleFinished,
    VersionKey,
    VersionSpan,
    Welcome,
)
from echo2d.core.protocol.result_check import LOGPROB_MAX, LOGPROB_MIN
from echo2d.core.protocol.trajectory import pack_logprobs, pack_tokens
from echo2d.core.worker.events import (
    AbortGeneration,
    LeaseAction,
    SampleProgressed,
    SendControl,
    StartGeneration,
)

# A running lease that gets no token for this long is given back (I6). A refit restarts the clock.
ENGINE_STALL_S = 120.0
# A worker holds at most max(WORKER_LEASES_MAX, 2 * slots) leases. The coordinator grants about as many
# samples as there are slots.
WORKER_LEASES_MAX = 256
# At most this many results are unanswered: several steps' worth of one worker's results while the
# coordinator is away.
RESULTS_MAX = 1024
CONFIRMED_MAX = 80  # versions; with adapters, results may name S + 1 of them
_SAMPLES_MAX = 1024  # samples of one lease; a group is rarely over 64
# The most tokens of a prompt, or of the output of one sample: 8 bytes each, so every message stays
# below 4 MiB.
_TOKENS_MAX = 1 << 18
STOP_STRINGS_MAX = 64


@dataclass(slots=True)
class _Output:
    """One sample's output so far."""

    tokens: list[int] = field(default_factory=list)
    logprobs: list[float] = field(default_factory=list)
    spans: list[VersionSpan] = field(default_factory=list)
    # How many tokens this connection's progress messages have carried already.
    sent: int = 0
    # The columns of each event, with the number of its tokens. They are joined only when they are
    # needed, because events come every few tokens.
    parts: list[tuple[int, Columns]] = field(default_factory=list)

    def extend(self, event: SampleProgressed, spans: list[VersionSpan]) -> None:
        """Append new output; adjacent spans of one version become one span."""
        if event.columns or self.parts:
            # Tokens that came before the first columns have none.
            self.parts = self.parts or [(len(self.tokens), ())]
            self.parts.append((len(event.tokens), event.columns))
        self.tokens += event.tokens
        self.logprobs += event.logprobs
        for span in spans:
            last = self.spans[-1] if self.spans else None
            if last is not None and last.key == span.key:
                self.spans[-1] = VersionSpan(last.start, span.end, span.version, span.digest)
            else:
                self.spans.append(span)

    def columns(self) -> Columns:
        """The columns that all tokens so far have."""
        joined = join_columns(self.parts)
        self.parts = [(len(self.tokens), joined)] if self.parts else []
        return joined

    def confirmed(self, versions: Collection[VersionKey]) -> int:
        """How many tokens, counted from the first, these versions wrote without a gap."""
        return next(
            (span.start for span in self.spans if span.key not in versions), len(self.tokens)
        )

    def take_unsent(self, sample: int, end: int) -> SampleDelta:
        """Take the tokens from `sent` to `end`, which count as sent from now on."""
        start, self.sent = self.sent, end
        spans = (
            VersionSpan(max(s.start, start), s.end, s.version, s.digest)
            for s in self.spans
            if start < s.end <= end
        )
        tokens, logprobs = self.tokens[start:end], self.logprobs[start:end]
        columns = cut_columns(self.columns(), start, end)
        return SampleDelta(
            sample, pack_tokens(tokens), pack_logprobs(logprobs), tuple(spans), columns
        )


@dataclass(slots=True)
class _Held:
    """A lease with unfinished samples."""

    grant: LeaseGranted
    outputs: dict[int, _Output]  # unfinished samples by their index within the group
    report_at: float  # when its progress is due, in monotonic seconds
    token_at: float  # when it last got a token
    since: (
        VersionKey | None
    )  # the version that was served when it came; None: the lease names its version
    started: bool = False

    @property
    def key(self) -> HeldLease:
        return HeldLease(self.grant.lease, self.grant.attempt)


class WorkerLeases:
    """The leases of one worker; see the module docstring.

    Methods return what to do; `now` is monotonic seconds.
    """

    def __init__(self, slots: int) -> None:
        assert slots >= 0
        self._slots = slots
        self._held: dict[HeldLease, _Held] = {}  # in order of arrival
        self._results: dict[tuple[HeldLease, int], SampleFinished] = {}
        # The `hold_s` of the leases of unanswered results, if it is above 0.
        self._hold_s: dict[tuple[HeldLease, int], float] = {}
        self._confirmed: dict[VersionKey, None] = {}
        self._still = False
        # The leases whose results all wait for a confirmation, and until when each is reported as alive.
        self._waiting: dict[HeldLease, float] = {}
        self._alive_at: float | None = None  # when the next such report is due

    @property
    def running(self) -> int:
        """The number of samples that the engines are generating."""
        return sum(len(held.outputs) for held in self._held.values() if held.started)

    @property
    def hold_s(self) -> float:
        """How long a newer version must wait for leases that only one version may write; 0: there are
        none.

        A result of such a lease counts until it is answered, because another turn may follow it.
        """
        of_results = [hold_s for at, hold_s in self._hold_s.items() if at in self._results]
        return max([*of_results, *[held.grant.hold_s for held in self._held.values()]], default=0.0)

    @property
    def idle(self) -> bool:
        """Whether no lease is held and no result waits for its answer."""
        return not self._held and not self._results

    def held(self) -> tuple[HeldLease, ...]:
        """The attempts that Hello lists: unfinished ones, and those with unanswered results."""
        return tuple(dict.fromkeys([*self._held, *(key for key, _ in self._results)]))

    def served(self) -> tuple[VersionKey, ...]:
        """The confirmed versions that wrote tokens of the held leases and results, or may be writing them."""
        outputs = [output.spans for held in self._held.values() for output in held.outputs.values()]
        wrote = {
            span.key
            for spans in [*outputs, *(result.spans for result in self._results.values())]
            for span in spans
        } | {held.grant.version for held in self._held.values()}
        # A request under an adapter may go on when newer versions are served already.
        order = list(self._confirmed)
        came = [order.index(h.since) for h in self._held.values() if h.since in self._confirmed]
        first = min(came, default=len(order))
        return tuple(key for place, key in enumerate(order) if place >= first or key in wrote)

    # --- from the coordinator ---

    def granted(
        self,
        grant: LeaseGranted,
        serving: VersionKey | None,
        versions: Collection[VersionKey] = (),
        *,
        now: float,
    ) -> list[LeaseAction]:
        """Take the lease, or refuse it at once; a grant that is held already is ignored.

        versions: those that all engines hold.
        """
        key = HeldLease(grant.lease, grant.attempt)
        if key in self.held():
            return []
        reason = _unusable(grant, serving, versions) or self._full()
        if reason:
            return [SendControl(LeaseFailed(grant.lease, grant.attempt, reason))]
        outputs = {sample: _Output() for sample in grant.samples}
        # Its first report goes out with the next report of another lease, because reports cost less together.
        report_at = min([now + _report_s(grant), *[each.report_at for each in self._held.values()]])
        since = serving if grant.version is None else None
        self._held[key] = _Held(grant, outputs, report_at, now, since)
        return self._start(now)

    def cancelled(self, key: HeldLease, *, now: float) -> list[LeaseAction]:
        """Drop this attempt and its results, which the coordinator no longer wants."""
        for result in [result for result in self._results if result[0] == key]:
            del self._results[result]
        return [*self._drop(key), *self._start(now)]

    def answered(self, answer: SampleAnswered) -> None:
        self._results.pop((HeldLease(answer.lease, answer.attempt), answer.sample), None)

    def welcomed(self, welcome: Welcome, *, now: float) -> list[LeaseAction]:
        """A new connection: drop the leases that it does not keep, and send the kept ones again.

        Confirmed results go at once. Progress starts again from each sample's first token.
        """
        actions: list[LeaseAction] = []
        for key in self.held():
            if key not in welcome.keep:
                actions += self.cancelled(key, now=now)
        actions += [
            SendControl(result) for result in self._results.values() if self._believed(result)
        ]
        for held in self._held.values():
            held.report_at = now
            for output in held.outputs.values():
                output.sent = 0
        return actions

    # --- from the engines ---

    def progressed(
        self, event: SampleProgressed, labels: Mapping[str, VersionKey], *, now: float
    ) -> list[LeaseAction]:
        """An engine made new output.

        `labels` are the versions that this worker loaded and may use. Output that names any other
        version fails the lease.
        """
        held = self._held.get(HeldLease(event.lease, event.attempt))
        # The lease may have been cancelled meanwhile.
        if held is None:
            return []
        output = held.outputs.get(event.sample)
        fault = (
            "an unknown sample"
            if output is None
            else _output_fault(event, output, held.grant, labels)
        )
        if output is None or fault:
            return self.failed(held.key, f"the engine reported {fault}", now=now)
        output.extend(
            event,
            [
                VersionSpan(s.start, s.end, labels[s.label].version, labels[s.label].digest)
                for s in event.spans
            ],
        )
        held.token_at = now
        return [] if event.finish is None else self._finish(held, event.sample, event.finish, now)

    def failed(self, key: HeldLease, reason: str, *, now: float) -> list[LeaseAction]:
        """Give the lease back to the coordinator; samples that are finished stay results."""
        return [*self._give_back(key, reason), *self._start(now)]

    # --- from the worker ---

    def revoked(self, keys: Collection[VersionKey], *, now: float) -> list[LeaseAction]:
        """These versions were revoked: give back leases and drop results that have their tokens."""
        actions: list[LeaseAction] = []
        for key in keys:
            self._confirmed.pop(key, None)
        for held in list(self._held.values()):
            used = any(_uses(output.spans, keys) for output in held.outputs.values())
            if used or held.grant.version in keys:
                actions += self.failed(held.key, "its version was revoked", now=now)
        for result in [result for result, sent in self._results.items() if _uses(sent.spans, keys)]:
            del self._results[result]
        return actions

    def confirmed(
        self, key: VersionKey, versions: Collection[VersionKey] = (), *, now: float
    ) -> list[LeaseAction]:
        """All engines serve this version, and the coordinator was told.

        versions: those that all engines hold, which stay confirmed. Returns the results that may be sent now.
        """
        waiting = [result for result in self._results.values() if not self._believed(result)]
        self._confirmed.pop(key, None)
        self._confirmed[key] = None
        keep_newest(self._confirmed, CONFIRMED_MAX, versions)
        # Generation paused for the refit, so this time does not count as a stall.
        for held in self._held.values():
            held.token_at = now
        return [SendControl(result) for result in waiting if self._believed(result)]

    def stand_still(self, *, still: bool, now: float) -> None:
        """The engines are paused on purpose (still=True) or continue; a pause does not count as a stall."""
        self._still = still
        for held in self._held.values():
            held.token_at = now

    def doubted(self, key: VersionKey, *, now: float) -> list[LeaseAction]:
        """A refit to this version failed: drop unsent results that have its tokens, fail their leases.

        Some engine may have written these tokens with weights of no version at all (I3).
        """
        doubtful = [at for at, result in self._results.items() if not self._believed(result)]
        doubtful = [at for at in doubtful if _uses(self._results[at].spans, {key})]
        for at in doubtful:
            del self._results[at]
        actions: list[LeaseAction] = []
        for lease in dict.fromkeys(at[0] for at in doubtful):
            actions += self._drop(lease)
            actions.append(SendControl(LeaseFailed(lease.lease, lease.attempt, "a refit failed")))
        return [*actions, *self._start(now)]

    def give_back(self, reason: str) -> list[LeaseAction]:
        """Give every lease back, because no version is served any more or the worker stops."""
        return [action for key in list(self._held) for action in self._give_back(key, reason)]

    def give_up_held(self, reason: str, *, now: float) -> list[LeaseAction]:
        """Give back the leases that only one version may write."""
        keys = [key for key, held in self._held.items() if held.grant.hold_s]
        return [action for key in keys for action in self.failed(key, reason, now=now)]

    def report(self, *, now: float) -> list[LeaseAction]:
        """Report the leases whose progress is due, and give back leases whose engine is stuck."""
        actions: list[LeaseAction] = []
        for held in list(self._held.values()):
            if held.started and not self._still and now >= held.token_at + ENGINE_STALL_S:
                actions += self.failed(held.key, f"no token for {ENGINE_STALL_S:.0f} s", now=now)
            elif now >= held.report_at:
                held.report_at = now + _report_s(held.grant)
                actions += [SendControl(message) for message in self._progress(held)]
        return [*actions, *self._alive(now)]

    def wake_at(self) -> float | None:
        """When `report` is due next, in monotonic seconds; None: there is nothing to report."""
        due = [held.report_at for held in self._held.values()]
        return min(due if self._alive_at is None else [*due, self._alive_at], default=None)

    # --- inside ---

    def _full(self) -> str:
        """Why no further lease can be taken; empty: one can."""
        if len(self._held) >= max(WORKER_LEASES_MAX, 2 * self._slots):
            return "too many leases"
        return "too many unanswered results" if len(self._results) >= RESULTS_MAX else ""

    def _start(self, now: float) -> list[LeaseAction]:
        """Start waiting leases in order of arrival while there are free slots."""
        actions: list[LeaseAction] = []
        running = self.running
        for held in self._held.values():
            if held.started:
                continue
            # Stop at the first lease that does not fit. Otherwise smaller leases that come later would
            # always overtake a large one.
            if running and running + len(held.outputs) > self._slots:
                break
            held.started, held.token_at = True, now
            running += len(held.outputs)
            actions.append(StartGeneration(held.grant))
        return actions

    def _give_back(self, key: HeldLease, reason: str) -> list[LeaseAction]:
        held = self._held.get(key)
        if held is None:
            return []
        last = [SendControl(message) for message in self._progress(held) if message.samples]
        return [*last, *self._drop(key), SendControl(LeaseFailed(key.lease, key.attempt, reason))]

    def _progress(self, held: _Held) -> Iterator[LeaseProgress]:
        """All unsent confirmed output of one lease; the last message may be empty.

        A message holds the tokens of one sample, or of several with at most the bytes of _TOKENS_MAX
        tokens without columns, so that its size stays bounded.
        """
        deltas: list[SampleDelta] = []
        room = _TOKENS_MAX * TOKEN_BYTES
        for sample, output in held.outputs.items():
            end = output.confirmed(self._confirmed)
            if end <= output.sent:
                continue
            delta = output.take_unsent(sample, end)
            size = len(delta.tokens) + len(delta.logprobs) + columns_bytes(delta.columns)
            if deltas and size > room:
                yield LeaseProgress(held.grant.lease, held.grant.attempt, tuple(deltas))
                deltas, room = [], _TOKENS_MAX * TOKEN_BYTES
            deltas.append(delta)
            room -= size
        yield LeaseProgress(held.grant.lease, held.grant.attempt, tuple(deltas))

    def _alive(self, now: float) -> list[LeaseAction]:
        """Report the leases whose samples are all finished but not confirmed yet.

        A refit of several engines may take longer than the silence after which a lease ends. If it takes
        longer than ENGINE_STALL_S, it has failed: the reports end, and another worker gets the lease.
        """
        if self._alive_at is None or now < self._alive_at:
            return []
        unconfirmed = {key for (key, _), each in self._results.items() if not self._believed(each)}
        self._waiting = {
            key: until for key, until in self._waiting.items() if key in unconfirmed and now < until
        }
        self._alive_at = now + PROGRESS_S if self._waiting else None
        return [SendControl(LeaseProgress(key.lease, key.attempt, ())) for key in self._waiting]

    def _drop(self, key: HeldLease) -> list[LeaseAction]:
        held = self._held.pop(key, None)
        return (
            [AbortGeneration(key.lease, key.attempt)] if held is not None and held.started else []
        )

    def _finish(self, held: _Held, sample: int, finish: Finish, now: float) -> list[LeaseAction]:
        output = held.outputs.pop(sample)
        tokens, logprobs = pack_tokens(output.tokens), pack_logprobs(output.logprobs)
        result = SampleFinished(
            held.grant.lease,
            held.grant.attempt,
            sample,
            tokens,
            logprobs,
            tuple(output.spans),
            finish,
            output.columns(),
        )
        self._results[held.key, sample] = result
        if held.grant.hold_s:
            self._hold_s = {at: each for at, each in self._hold_s.items() if at in self._results}
            self._hold_s[held.key, sample] = held.grant.hold_s
        if not held.outputs:
            del self._held[held.key]
        if self._believed(result):
            return [SendControl(result), *self._start(now)]
        if held.key not in self._held:
            self._waiting[held.key] = now + ENGINE_STALL_S
            self._alive_at = self._alive_at or now + PROGRESS_S
        return self._start(now)

    def _believed(self, result: SampleFinished) -> bool:
        """Whether every version in the result's spans is confirmed."""
        return all(span.key in self._confirmed for span in result.spans)

    def check(self) -> None:
        assert len(self._held) <= max(WORKER_LEASES_MAX, 2 * self._slots)
        assert len(self._confirmed) <= CONFIRMED_MAX
        assert len(self._hold_s) <= RESULTS_MAX + WORKER_LEASES_MAX * _SAMPLES_MAX
        assert len(self._waiting) <= RESULTS_MAX + WORKER_LEASES_MAX * _SAMPLES_MAX
        assert not self._waiting or self._alive_at is not None
        assert len(self._results) < RESULTS_MAX + WORKER_LEASES_MAX * _SAMPLES_MAX
        started = [held for held in self._held.values() if held.started]
        assert self.running <= self._slots or len(started) == 1
        for key, held in self._held.items():
            assert key == held.key
            assert held.outputs, "a lease without open samples is no lease"
            assert set(held.outputs) <= set(held.grant.samples)
            for output in held.outputs.values():
                _check_output(output, held.grant)
                assert held.started or not output.tokens


def _check_output(output: _Output, grant: LeaseGranted) -> None:
    assert len(output.tokens) == len(output.logprobs) <= grant.max_new_tokens
    assert 0 <= output.sent <= len(output.tokens)
    ends = [0, *(span.end for span in output.spans)]
    assert ends[-1] == len(output.tokens)
    assert ends[:-1] == [span.start for span in output.spans]
    assert not output.parts or sum(count for count, _ in output.parts) == len(output.tokens)
    versions = [span.version for span in output.spans]
    assert versions == sorted(versions)
    assert all(version >= grant.oldest for version in versions)


def _report_s(grant: LeaseGranted) -> float:
    # At most one report in 0.05 s: a message costs both ends something, and engines bundle tokens for
    # about as long.
    return min(PROGRESS_S, max(0.05, grant.report_s))


def _uses(spans: Collection[VersionSpan], keys: Collection[VersionKey]) -> bool:
    return any(span.key in keys for span in spans)


def _unusable(
    grant: LeaseGranted, serving: VersionKey | None, versions: Collection[VersionKey]
) -> str:
    """Why this worker must refuse the grant; empty: it can work on it."""
    if serving is None:
        return "no version is served"
    if grant.version is not None and grant.version not in versions:
        return f"it does not hold version {grant.version.version}"
    writes = (grant.version or serving).version
    if writes < grant.oldest:
        return f"version {writes} is served, {grant.oldest} or newer is needed"
    # A lease may keep a newer version waiting for at most an hour.
    if not 0 <= grant.hold_s <= 3600.0:
        return "malformed lease: hold_s"
    if grant.hold_s and writes > grant.oldest:
        return f"version {writes} is served, {grant.oldest} alone may write"
    if not 0 < len(grant.samples) <= _SAMPLES_MAX or len(set(grant.samples)) != len(grant.samples):
        return "malformed lease: samples"
    if not grant.prompt or len(grant.prompt) % 4 or len(grant.prompt) > 4 * _TOKENS_MAX:
        return "malformed lease: prompt"
    if (
        len(grant.rng_seeds) not in (0, len(grant.samples))
        or not 0 <= grant.written < len(grant.prompt) // 4
        # `earlier` may exceed the prompt, because tokens of another branch are not in the prompt.
        or not 0 <= grant.earlier <= _TOKENS_MAX
    ):
        return "malformed lease: seeds, or tokens written before"
    if not 0 < grant.max_new_tokens <= _TOKENS_MAX:
        return "malformed lease: max_new_tokens"
    if len(grant.stop_strings) > STOP_STRINGS_MAX or not all(grant.stop_strings):
        return "malformed lease: stop_strings"
    return f"malformed lease: {fault}" if (fault := grant.sampling.fault) else ""


def _output_fault(
    event: SampleProgressed, output: _Output, grant: LeaseGranted, labels: Mapping[str, VersionKey]
) -> str:
    """Return what is wrong with new output, or "" if nothing is."""
    length = len(output.tokens) + len(event.tokens)
    if len(event.logprobs) != len(event.tokens) or length > grant.max_new_tokens:
        return f"{len(event.tokens)} tokens, {len(event.logprobs)} logprobs, {length} in all"
    if not all(LOGPROB_MIN <= logprob <= LOGPROB_MAX for logprob in event.logprobs):
        return f"a logprob that is not between {LOGPROB_MIN:.0f} and 0"
    end, newest = len(output.tokens), output.spans[-1].version if output.spans else grant.oldest
    for span in event.spans:
        key = labels.get(span.label)
        if key is None:
            return f"a version it was never given: {span.label[:80]!r}"
        if key.version < newest:
            return f"tokens of version {key.version} after {newest}"
        if grant.version not in (None, key):
            return f"tokens of version {key.version}; another one alone may write"
        if grant.hold_s and key.version > grant.oldest:
            return f"tokens of version {key.version}; {grant.oldest} alone may write"
        if span.start != end or span.end <= span.start:
            return f"a span [{span.start}, {span.end}) after token {end}"
        end, newest = span.end, key.version
    if end != length:
        return f"spans up to {end} for {length} tokens"
    return columns_fault(event.columns, len(event.tokens))
