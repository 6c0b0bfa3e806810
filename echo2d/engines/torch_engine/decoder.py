"""The decoding loop, on the thread that owns the model.

    submit --> waiting --admit (prefill)--> running --step, step, ...--> finished
                                             ^   |
                                             +---+ swap: new weights, same tokens, KV recomputed

One turn of the loop: run the posted calls, admit the samples that fit, draw one token for every
running sample, retire finished samples, emit the output that is due, compute the next logits.

Other threads may call `post` only. They may read `policy`, `label`, `held` and `running`, because each change
assigns a new value to these attributes and never modifies the old one. A step emits once, and once
more if it fails.
"""

import logging
import queue
import time
from collections import deque
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from itertools import chain

import torch

from echo2d.core.protocol.answer_end import OutputLimit
from echo2d.core.protocol.columns import Columns
from echo2d.core.protocol.control_messages import SeedReplay
from echo2d.core.protocol.evidence import Evidence
from echo2d.core.protocol.experts import EXPERTS, column_of
from echo2d.core.protocol.seeds import Uniforms
from echo2d.engines.base import (
    AdapterBase,
    FinishReason,
    GenerateRequest,
    RefitReport,
    SampleOutput,
)
from echo2d.engines.stream import BUNDLE_S_MAX, BUNDLE_TOKENS_MAX, RequestStream, SampleBuffer
from echo2d.engines.torch_engine.adapters import AdapterTable
from echo2d.engines.torch_engine.answer_score import CheckedAnswer, score_pass
from echo2d.engines.torch_engine.batch import PREFILL_TOKENS_MAX, DecodeBatch
from echo2d.engines.torch_engine.policy import InferencePolicy, PreparedWeights, build
from echo2d.engines.torch_engine.prompt_pass import PromptPass
from echo2d.engines.torch_engine.sampling import draw
from echo2d.errors import EngineFault

log = logging.getLogger("echo2d.engines")

DecoderOutput = list[tuple[RequestStream, SampleOutput]]


@dataclass(frozen=True, slots=True)
class DecoderOptions:
    """What the operator chose for one decoder."""

    device: torch.device
    dtype: torch.dtype
    slots_max: int  # how many samples run at once
    tokens_per_s_max: float | None  # limit of all samples together; None: no limit
    threads: int | None  # CPU threads of torch; None: torch decides
    int8: bool = False  # linear layers compute in int8, and everything else in dtype


class DecodedSample:
    """One sample: its request, its output so far, and a buffer of the output not yet emitted. label: of the version
    that writes its next token, once it runs.
    """

    __slots__ = ("_limit", "_stop", "_uniforms", "buffer", "label", "output", "request", "stream")

    def __init__(
        self,
        request: GenerateRequest,
        stream: RequestStream,
        index: int,
        seed: int,
        limit: OutputLimit,
    ) -> None:
        self.request = request
        self.stream = stream
        self.buffer = SampleBuffer(index)
        self.output: list[int] = []
        self.label = ""
        self._limit = limit
        self._stop = frozenset(request.stop_token_ids)
        self._uniforms = Uniforms(seed, request.written)

    @property
    def context(self) -> list[int]:
        return [*self.request.prompt, *self.output]

    def uniform(self) -> float:
        """Return the number in [0, 1) that decides the next token.

        It depends on the sample's seed and position only, so other samples cannot change a draw.
        """
        return self._uniforms.draw()

    def stays(self, base: AdapterBase, newest: str) -> bool:
        """Whether it goes on under its adapter when this one is the newest."""
        return self.request.label is not None or not base.outdated(self.label, newest)

    def append(self, token: int, logprob: float, columns: Columns) -> FinishReason | None:
        self.output.append(token)
        self.buffer.add(token, logprob, self.label, columns)
        if token in self._stop:
            return "stop"
        return self._limit.finish if len(self.output) == self._limit.tokens else None


class Decoder:
    """See the module docstring.

    All methods except `__init__` and `post` run on the decoder's thread. label: None while no version
    is served. held: the versions that a request may name.
    """

    def __init__(self, options: DecoderOptions, emit: Callable[[DecoderOutput], object]) -> None:
        self.policy: InferencePolicy | None = None
        self.label: str | None = None
        self.held: frozenset[str] = frozenset()
        self.running: list[DecodedSample] = []
        self._options = options
        self._emit = emit
        self._posted: queue.SimpleQueue[Callable[[], None]] = queue.SimpleQueue()
        # Each entry holds samples of one request, at least one.
        self._waiting: deque[list[DecodedSample]] = deque()
        # One row per running sample, in the order of `running`.
        self._batch: DecodeBatch | None = None
        self._output: DecoderOutput = []
        self._emitted_at = 0.0
        self._next_step_at = 0.0
        self._held = False
        self._stopping = False

    def post(self, call: Callable[[], None]) -> None:
        """Run `call` on the decoder's thread between two tokens."""
        self._posted.put(call)

    def run(self) -> None:
        """Decode until `stop`: the body of the thread."""
        if self._options.threads is not None:
            torch.set_num_threads(self._options.threads)
        with torch.inference_mode():
            while not self._stopping:
                self._do_posted()
                self._decode()

    def stop(self) -> None:
        self._abort_all()
        self._stopping = True

    def submit(
        self,
        request: GenerateRequest,
        stream: RequestStream,
        *,
        seeds: Sequence[int],
        limit: OutputLimit,
        checked: InferencePolicy,
    ) -> None:
        """Queue the samples of a request that was checked against the policy `checked`.

        If that policy was replaced in the meantime, the samples end at once: the new policy may
        have another vocabulary. So they do if the version that the request names was dropped.
        """
        if self.policy is not checked or (request.label or self.label) not in self.held:
            self._output += [
                (stream, SampleBuffer(index).take("abort")) for index in range(request.samples)
            ]
            self._emit_output()
            return
        self._waiting.append(
            [DecodedSample(request, stream, index, seed, limit) for index, seed in enumerate(seeds)]
        )

    def serving(self, label: str) -> InferencePolicy:
        """The policy, if it holds this version. EngineFault: it does not."""
        if self.policy is None or label not in self.held:
            raise EngineFault(f"version {label} is not held")
        return self.policy

    def score(
        self, together: Sequence[CheckedAnswer], label: str, replay: SeedReplay
    ) -> list[Evidence]:
        """Score answers that other engines wrote, in one forward pass."""
        return score_pass(self.serving(label), together, replay, label)

    def read_prompt(self, prompt: PromptPass, label: str) -> None:
        """Read the next part of a prompt."""
        prompt.step(self.serving(label), label)

    def abort(self, stream: RequestStream) -> None:
        self._end_where(lambda sample: sample.stream is stream)

    def swap(self, prepared: PreparedWeights, label: str) -> RefitReport:
        """Serve `prepared` as `label` from the next token on.

        EngineFault: the old version is still served, or none.
        """
        # Consumers get the tokens of the old version before the pause, not after it.
        self._emit_held()
        started = time.monotonic()
        policy, base, kept = self.policy, prepared.base, frozenset[str]()
        staying: list[DecodedSample] = []
        alone = True  # whether no version is held beside this one
        if policy is None or policy is not prepared.target:
            options = self._options
            built = build(prepared, options.dtype, options.device, label=label, int8=options.int8)
            self._replace(built)
        elif base is None or policy.adapters is None:
            self._overwrite(policy, prepared)
        else:
            self._add_adapter(policy.adapters, prepared, label)
            # The tokens of a mixture of experts do not stay in rows, so all its rows have one adapter.
            if policy.expert_shape is None:
                kept = base.kept & self.held
                staying = [each for each in self.running if each.stays(base, label)]
                alone = False
        if alone:
            self._end_where(lambda sample: sample.request.label not in (None, label))
        loaded = time.monotonic()
        tokens = self._recompute(staying, label)
        self.label, self.held = label, kept | {label}
        self._drop_adapters()
        recompute_s = time.monotonic() - loaded
        one = base is not None and self.serving(label).expert_shape is not None
        return RefitReport(label, loaded - started, tokens, recompute_s, 1 if one else None)

    def hold(self) -> None:
        self._emit_held()
        self._held = True

    def release(self) -> None:
        self._held = False

    def digests(self) -> dict[str, bytes] | None:
        if self.policy is None:
            raise EngineFault("no version is loaded")
        return self.policy.digests()

    def check(self) -> None:
        rows = 0 if self._batch is None else len(self._batch)
        assert rows == len(self.running) <= self._options.slots_max
        assert (self.policy is None) == (self._batch is None)
        assert self.policy is not None or (self.label is None and not self._waiting)
        assert (self.label is None) == (not self.held)
        if self.policy is not None and self.policy.adapters is not None:
            assert self.held | self._used <= self.policy.adapters.by_label.keys()
        assert all(self._waiting)
        if self._batch is not None:
            self._batch.check()

    # --- posted calls and pace

    def _do_posted(self) -> None:
        """Run all posted calls; wait for more while no sample can run or no step is due.

        A call that is posted meanwhile, as the next part of a prompt is, lets a due step go first.
        """
        left = self._posted.qsize()
        while not self._stopping:
            idle = self._held or not (self.running or self._waiting)
            pause_s = self._next_step_at - time.monotonic()
            if not (left > 0 or idle or pause_s > 0):
                return
            try:
                call = self._posted.get(
                    block=idle or pause_s > 0, timeout=None if idle else max(pause_s, 0.0)
                )
            except queue.Empty:
                return
            left -= 1
            call()

    def _pace(self, tokens: int) -> None:
        if self._options.tokens_per_s_max is not None:
            earliest = max(self._next_step_at, time.monotonic())
            self._next_step_at = earliest + tokens / self._options.tokens_per_s_max

    # --- decoding

    def _decode(self) -> None:
        if self._batch is None or self.label is None:
            return
        try:
            self._admit(self._batch, self.label)
            if self.running:
                self._step(self._batch)
        except RuntimeError:
            # torch raises it when memory runs out or the device is lost. The KV cache may be half
            # written, so nothing can be continued.
            log.exception("decoding failed, nothing is served until the next refit")
            self._lose_policy()

    def _admit(self, batch: DecodeBatch, label: str) -> None:
        """Fill free slots in order of arrival.

        Samples of a request that enter together share its prefill. PREFILL_TOKENS_MAX limits the
        tokens of one turn, so that running samples do not pause for long.
        """
        groups: list[list[DecodedSample]] = []
        free, tokens = self._options.slots_max - len(self.running), 0
        while self._waiting and free > 0 and tokens < PREFILL_TOKENS_MAX:
            group = self._waiting.popleft()
            if len(group) > free:
                self._waiting.appendleft(group[free:])
            groups.append(group[:free])
            free -= len(groups[-1])
            tokens += len(group[0].context)
        for sample in chain(*groups):
            sample.label = sample.request.label or label
        if groups:
            self.running = [*self.running, *chain(*groups)]
            self._add(batch, groups)

    def _step(self, batch: DecodeBatch) -> None:
        self._pace(len(self.running))
        samplings = [sample.request.sampling for sample in self.running]
        uniforms = [sample.uniform() for sample in self.running]
        tokens, logprobs = draw(batch.logits, samplings, uniforms)
        columns = self._columns(batch)
        staying = []
        for row, sample in enumerate(self.running):
            finish = sample.append(tokens[row], logprobs[row], columns[row])
            if finish is None:
                staying.append(row)
            if finish is not None or len(sample.buffer) >= BUNDLE_TOKENS_MAX:
                self._output.append((sample.stream, sample.buffer.take(finish)))
        self._retire(staying)
        self._emit_due()
        if self.running:
            batch.step([sample.output[-1] for sample in self.running])

    def _columns(self, batch: DecodeBatch) -> list[Columns]:
        """The columns of the token that each row draws now, where its request asks for them."""
        asked = [EXPERTS in sample.request.columns for sample in self.running]
        shape = None if self.policy is None else self.policy.expert_shape
        if batch.experts is None or shape is None or not any(asked):
            return [()] * len(asked)
        experts = batch.experts.cpu().numpy()
        return [
            (column_of(own[None], shape.experts),) if wanted else ()
            for own, wanted in zip(experts, asked, strict=True)
        ]

    def _retire(self, staying: list[int]) -> None:
        if self._batch is not None and len(staying) < len(self.running):
            self._batch.keep(staying)
            self.running = [self.running[row] for row in staying]

    # --- output

    def _end(self, samples: list[DecodedSample]) -> None:
        self._output += [(sample.stream, sample.buffer.take("abort")) for sample in samples]

    def _end_where(self, ends: Callable[[DecodedSample], bool]) -> None:
        """End samples; it is the same for all of a request."""
        for group in [*self._waiting, self.running]:
            self._end([sample for sample in group if ends(sample)])
        self._waiting = deque(group for group in self._waiting if not ends(group[0]))
        self._retire([row for row, sample in enumerate(self.running) if not ends(sample)])
        self._emit_output()

    def _emit_due(self) -> None:
        if time.monotonic() - self._emitted_at >= BUNDLE_S_MAX:
            self._emit_held()
        else:
            self._emit_output()

    def _emit_held(self) -> None:
        self._output += [
            (sample.stream, sample.buffer.take()) for sample in self.running if len(sample.buffer)
        ]
        self._emitted_at = time.monotonic()
        self._emit_output()

    def _emit_output(self) -> None:
        if self._output:
            self._emit(self._output)
            self._output = []

    def _abort_all(self) -> None:
        for group in [*self._waiting, self.running]:
            self._end(group)
        self._waiting.clear()
        self.running = []
        self._batch = None if self.policy is None else DecodeBatch(self.policy)
        self._emit_output()

    # --- weights

    def _replace(self, policy: InferencePolicy) -> None:
        """Use a newly built model. If it cannot continue the running samples, they end."""
        old = self.policy
        if old is not None and (old.vocab_size, old.context_max) != (
            policy.vocab_size,
            policy.context_max,
        ):
            self._abort_all()
        self.policy = policy

    def _overwrite(self, policy: InferencePolicy, prepared: PreparedWeights) -> None:
        """Give the model the version's tensors."""
        try:
            policy.copy(prepared.tensors, prepared.layout)
        except RuntimeError as error:
            self._lose_policy()
            raise EngineFault(f"the refit failed halfway, nothing is served: {error}") from error

    def _add_adapter(self, adapters: AdapterTable, prepared: PreparedWeights, label: str) -> None:
        """Add an adapter. EngineFault: it does not fit; those before it are still there."""
        self._drop_adapters()
        try:
            adapters.add(prepared.on(self._options.device), label)
        except RuntimeError as error:
            raise EngineFault(f"there is no room for another adapter: {error}") from error

    def _drop_adapters(self) -> None:
        """Drop the adapters that are neither held nor used by a request."""
        if self.policy is not None and self.policy.adapters is not None:
            self.policy.adapters.keep(self._used | self.held)

    @property
    def _used(self) -> set[str]:
        """The labels of running samples, and those that waiting ones name."""
        waiting = {group[0].request.label for group in self._waiting}
        return {each.label for each in self.running}.union(filter(None, waiting))

    def _recompute(self, staying: list[DecodedSample], label: str) -> int:
        """Compute the KV cache and next logits of every running sample under the current policy, but for those that
        stay as they are.

        Returns how many tokens these are.
        """
        assert self.policy is not None
        moved = [sample for sample in self.running if sample not in staying]
        for sample in moved:
            sample.label = label
        rows = [row for row, sample in enumerate(self.running) if sample in staying]
        before, self._batch = self._batch, None
        self.running = [*staying, *moved]
        try:
            if before is None or not staying:
                # The old batch is dropped first, because the new one needs its memory.
                before = None
                batch = DecodeBatch(self.policy)
            else:
                batch = before
                batch.keep(rows)
            if moved:
                self._add(batch, [[sample] for sample in moved], kept_bytes=0)
                # Wait for the GPU, which has only queued the work.
                batch.logits.sum().item()
        except RuntimeError as error:
            self._lose_policy()
            raise EngineFault(f"the refit failed halfway, nothing is served: {error}") from error
        self._batch = batch
        return sum(len(sample.context) for sample in moved)

    def _add(
        self, batch: DecodeBatch, groups: Sequence[Sequence[DecodedSample]], **options: int
    ) -> None:
        """Append rows for samples. Those of a group have one context and one label."""
        adapted = self.policy is not None and self.policy.adapters is not None
        batch.add(
            [group[0].context for group in groups],
            [len(group) for group in groups],
            adapters=[group[0].label for group in groups] if adapted else (),
            **options,
        )

    def _lose_policy(self) -> None:
        """Serve nothing: the weights or the KV cache may be a mixture of two versions (I3)."""
        self.label = self.policy = None
        self.held = frozenset()
        self._abort_all()
