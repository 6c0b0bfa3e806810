"""The public Python API of a run, for any trainer.

    with Coordinator(url, token_file=path) as coordinator:
        session = coordinator.open_session(resume_step=0)
        coordinator.publish(0, directory)
        for step in range(1, 101):
            batch = coordinator.take_batch(step)
            ...                                             # train
            coordinator.commit(batch, t_train_s=seconds)
            coordinator.publish(step, directory)

To the trainer, a restart of the coordinator is only a pause: every call is retried with growing
waits until the coordinator has been unreachable for `timeout_s`. `AsyncCoordinator` is the same for
asyncio.

A call raises Fenced when a newer learner has taken the run, NotResumable when the run cannot
continue at the step asked for, PromptsOver when no batch will come any more, OperatorFault for a
wrong credential or URL, PeerFault when the coordinator refuses (with its code and reason), and
IntegrityFault when a batch's bytes do not have its digest.

A trajectory may have *given* tokens, such as the result of a tool: no version wrote them, so they are
context and have no share of the loss. `Trajectory.written` is the mask of all others:

    loss = -(advantage * logprobs)[torch.from_numpy(trajectory.written)].sum()

A published directory may hold a LoRA adapter as PEFT writes it, without its README.md. Call
`pin_base` on it first: it records to which base model the adapter belongs.
"""

import asyncio
import base64
import contextlib
import json
import logging
import random
import threading
import time
from collections.abc import AsyncIterator, Coroutine, Mapping, Sequence
from concurrent.futures import CancelledError, wait
from dataclasses import dataclass, field, replace
from http import HTTPStatus
from itertools import pairwise
from pathlib import Path
from types import TracebackType
from typing import Any, Self, TypeVar
from urllib.parse import quote, urlsplit

import aiohttp
import numpy as np
from numpy.typing import NDArray

from echo2d.adapters import base_digest, base_pin, pin_base
from echo2d.core.base.canonical import digest_of
from echo2d.core.protocol.builds import (
    BUILD_HEADER,
    OURS_AS_LEARNER_API,
    from_header,
    to_header,
)
from echo2d.core.protocol.columns import columns_fault
from echo2d.core.protocol.sampling import WHOLE, Sampling
from echo2d.core.protocol.trajectory import (
    Attachment,
    TrajectoryRecord,
    TrajectoryScore,
    batch_digest,
    unpack_batch,
    unpack_logprobs,
    unpack_tokens,
)
from echo2d.core.weights.manifest import BASE_PIN
from echo2d.errors import IntegrityFault, OperatorFault, PeerFault, StoreFault
from echo2d.net.control.client import Backoff
from echo2d.net.learner_api.routes import (
    BODY_BYTES_MAX,
    DIGEST_HEADER,
    SCORE_MAX,
    SCORES_MAX,
    STALENESS_HEADER,
)
from echo2d.net.security.auth import read_token_file
from echo2d.net.security.tls import Tls, in_words, is_for_good, to_coordinator
from echo2d.net.security.urls import coordinator_url, is_loopback
from echo2d.snapshot_writer import SnapshotFile, write_snapshot
from echo2d.this_build import THIS_BUILD

__all__ = [
    "BASE_PIN", "AsyncCoordinator", "Attachment", "Batch", "Coordinator", "Evaluation", "Fenced", "Group",
    "IntegrityFault", "NotResumable", "OperatorFault", "PeerFault", "PromptsOver", "Published",
    "Sampling", "Session", "SnapshotFile", "Span", "StoreFault", "TokenRefused", "Trajectory", "TrajectoryScore",
    "Unanswered", "Unreachable", "base_digest", "base_pin", "pin_base", "read_batch",
    "write_snapshot",
]  # fmt: skip

CONNECT_TIMEOUT_S = 10.0
# How often a client tells that its learner lives, from opening a session until it is closed.
ALIVE_EVERY_S = 5.0
ALIVE_API = 2  # the first learner API that has the call
# Without a byte of the answer. The coordinator answers a request for a batch within 30 s, with or
# without a batch, and everything else at once.
BRANCH_SAMPLES = 1 << 16  # more than a group has samples
ANSWER_S_MAX = 120.0
# The same for publishing: without a manifest the coordinator first hashes the version, for minutes if
# it is large and the disk slow.
TAKE_S_MAX = 3600.0
UPLOAD_PART_BYTES = 1 << 20
# As base64 it fits into a request. The manifest of a version of more than about 190 GB does not, and
# the coordinator hashes the files.
MANIFEST_SENT_MAX = BODY_BYTES_MAX * 3 // 4 - (16 << 10)
# A coordinator that is there answers a call within this time.
HURRY_S = 10.0
WAKE_S = 0.5  # a waiting call notices `hurry` after this time

_Result = TypeVar("_Result")

log = logging.getLogger("echo2d.client")


class Fenced(PeerFault):
    """A newer learner session has taken the run; this one is over."""


class Unreachable(OperatorFault):
    """No coordinator ever answered at this URL."""


class TokenRefused(OperatorFault):
    """A coordinator answers, and does not accept the token."""


class NotResumable(OperatorFault):
    """The run cannot continue at this step.

    The step lies before the last durable checkpoint, or beyond the steps of the run.
    """


class PromptsOver(PeerFault):
    """A task's prompts have ended, so this batch can never be filled: the run is over."""


class Unanswered(PeerFault):
    """A call was not answered in time after `hurry`. It may still have had its effect."""


class _Unreachable(Exception):  # noqa: N818 - not an error yet
    """No usable answer; a retry may help."""


@dataclass(frozen=True, slots=True)
class Session:
    """The rules of a learner session.

    publish_every: train steps per publish at first; each commit returns the current number.
    group_min: a group may have fewer trajectories than group_size, but at least so many. checkpoint:
    the last durable step. over_stale: "drop", or "mask": then a group may hold tokens
    that are too old, which the learner must leave out of the loss. samplings: how each task's answers
    are drawn; a group says so too. evaluations: the names of what versions are scored on.
    """

    epoch: int
    run_id: str
    staleness_max: int
    publish_every: int
    trajectories_per_step: int
    group_size: int
    group_min: int
    checkpoint: int = 0
    over_stale: str = "drop"
    samplings: Mapping[str, Sampling] = field(default_factory=dict)
    evaluations: Sequence[str] = ()


@dataclass(frozen=True, slots=True)
class Published:
    version: int
    digest: str


@dataclass(frozen=True, slots=True)
class Span:
    """This version wrote output tokens [start, end), at worker `author` (its peer id).

    digest: of its snapshot, hex.
    """

    start: int
    end: int
    version: int
    digest: str
    author: str = ""


@dataclass(frozen=True, slots=True, eq=False)
class Trajectory:
    """One answer, or one branch of an episode. sample: its number in its group; that of branch b is
    b * BRANCH_SAMPLES above that of its episode.

    tokens: int32 [n]. logprobs: float32 [n], natural log, of the distribution that they were
    sampled from. worker: the peer id of the worker that finished it. finish: "stop" at a stop token,
    "length" at the most tokens that it may have, "context" where the model's context was full.
    reward_parts: named numbers that the reward was made of. given: [start, end) of output tokens that
    no version wrote; spans cover all others, and their logprobs are 0. turns: how often the policy
    wrote. task, row: where its prompt comes from. episode, branch: as in `Group.episodes`. columns: by
    name, numbers of each token [n, ...], read-only, that every engine which wrote for it has written, such
    as experts; of given tokens they are 0. attachments: what belongs to its prompt, such as pictures; see
    `Coordinator.attachment`.
    """

    tokens: NDArray[np.int32]
    logprobs: NDArray[np.float32]
    spans: tuple[Span, ...]
    reward: float
    worker: str
    finish: str = "stop"
    reward_parts: Mapping[str, float] = field(default_factory=dict)
    given: tuple[tuple[int, int], ...] = ()
    turns: int = 1
    task: str = ""
    row: str = ""
    episode: int = 0
    branch: int = 0
    sample: int = 0
    columns: Mapping[str, NDArray[Any]] = field(default_factory=dict)
    attachments: tuple[Attachment, ...] = ()

    @property
    def written(self) -> NDArray[np.bool_]:
        """Which of the tokens a version wrote [n]; only these count in the loss and in means over tokens."""
        mask = np.ones(len(self.tokens), dtype=np.bool_)
        for start, end in self.given:
            mask[start:end] = False
        return mask


@dataclass(frozen=True, slots=True, eq=False)
class Group:
    """The trajectories of one prompt. prompt: int32 [p].

    left_out: the samples that it lacks, because nobody could compute their reward, or because others
    contrast more (`task.sampler = "pairs"`). sampling: as all
    its tokens were drawn. tags: facts about the prompt by which rewards are compared.
    """

    group_id: int
    prompt: NDArray[np.int32]
    trajectories: tuple[Trajectory, ...]
    left_out: tuple[int, ...] = ()
    sampling: Sampling = WHOLE
    tags: Mapping[str, str] = field(default_factory=dict)

    @property
    def episodes(self) -> list[int]:
        """The number of each trajectory's episode. Trajectories of one episode are its branches 0, 1, ...
        and share its reward. In a group without branches each trajectory is an episode of its own.
        """
        if any(each.branch for each in self.trajectories):
            return [each.episode for each in self.trajectories]
        return [each.sample for each in self.trajectories]


@dataclass(frozen=True, slots=True, eq=False)
class Batch:
    """The data of one train step. digest: of the batch's bytes as they were sent, hex. staleness_max: S
    as the coordinator has it now; the operator may change it in mid-run. None: it does not say.
    """

    step: int
    epoch: int
    digest: str
    groups: tuple[Group, ...]
    staleness_max: int | None = None


@dataclass(frozen=True, slots=True)
class Evaluation:
    """What a version scored on held-out questions.

    number: in the run, from 1. rows: the questions that it is about, of `of`. samples: answers to
    each. mean: reward; se: its standard error; None where there is no such number. pass_at: share of
    the questions that have a right answer among k. parts: means of named numbers. truncated: share
    of the answers that were cut off. tokens: of an answer.
    """

    number: int
    name: str
    version: int
    digest: str
    rows: int
    of: int
    samples: int
    mean: float | None
    se: float | None
    pass_at: Mapping[str, float]
    parts: Mapping[str, float]
    truncated: float | None
    tokens: float | None
    seconds: float


class AsyncCoordinator:
    """A connection to a coordinator, for asyncio.

    url: https://HOST:PORT. token_file: with the role learner; `status` needs only the role viewer.
    timeout_s: for how long a call retries an unreachable coordinator.
    """

    def __init__(self, url: str, *, token_file: Path, timeout_s: float = 60.0) -> None:
        self._url = coordinator_url(url)
        self._token_file = token_file
        self._headers: dict[str, str] = {}
        self._tls: Tls | None = None
        self._timeout_s = timeout_s
        self._epoch = 0
        self._answered = False
        # What the coordinator speaks, by its last answer to a learner.
        self._learner_api = OURS_AS_LEARNER_API.oldest
        self._losses = 0  # requests that were retried
        self._session: aiohttp.ClientSession | None = None
        self._telling: asyncio.Task[None] | None = None

    async def open_session(
        self, resume_step: int, *, learner: str = "", take_over: bool = False, steps: int = 0
    ) -> Session:
        """Begin a new epoch. From now on, calls of older sessions raise Fenced.

        learner: the caller's identity, printable and the same after its restarts. steps: the step
        after which it ends, for the status; 0: it does not know. OperatorFault: a
        learner of another identity has the run; with `take_over` its session ends.

        From now on a task tells the coordinator that the learner lives.
        """
        asked: dict[str, Any] = {"resume_step": resume_step}
        if learner:
            asked["learner"] = learner
        if take_over:
            asked["take_over"] = True
        if steps:
            asked["steps"] = steps
        body = await self._session_of(asked)
        found = {name: body[name] for name in Session.__slots__ if name in body}
        drawn = {task: Sampling(**each) for task, each in body.get("samplings", {}).items()}
        session = Session(**{**found, "samplings": drawn})
        self._epoch = session.epoch
        if self._telling is None:
            self._telling = asyncio.get_running_loop().create_task(self._tell_alive())
        return session

    async def publish(
        self, version: int, directory: Path, manifest: bytes | None = None
    ) -> Published:
        """Publish a model or adapter directory as this version.

        The coordinator reads the path itself when it is on this host; otherwise the files are
        uploaded. When this returns, the directory may be deleted.

        manifest: what `write_snapshot` returned for this directory. Without it the coordinator hashes
        the files before it answers. With it the version spreads at once. It is revoked if the seed
        finds other files, and if the run cannot go on without it, the run stops.
        """
        body: dict[str, Any] = {"version": version, "epoch": self._epoch}
        if manifest is not None and len(manifest) <= MANIFEST_SENT_MAX:
            body["manifest"] = base64.b64encode(manifest).decode()
        if is_loopback(urlsplit(self._url).hostname or ""):
            body["path"] = await asyncio.to_thread(lambda: str(directory.absolute()))
        else:
            body["upload"] = True
        answer = await self._publish(version, directory, body)
        return Published(version, answer["digest"])

    async def take_batch(self, step: int) -> Batch:
        """Wait for the batch of this step. Its bytes stay the same until it is refused."""
        path = f"/v1/batches/{step}?epoch={self._epoch}"
        while True:
            status, headers, body = await self._repeat("GET", path, None)
            if status != HTTPStatus.NO_CONTENT:
                batch = read_batch(self._epoch, headers.get(DIGEST_HEADER, ""), body)
                told = headers.get(STALENESS_HEADER, "")
                return replace(batch, staleness_max=int(told) if told.isdecimal() else None)

    async def attachment(self, wanted: Attachment) -> bytes:
        """The bytes of a trajectory's attachment, up to the checkpoint of its step. PeerFault: they are
        gone. IntegrityFault: they do not have its digest.
        """
        _, _, content = await self._repeat("GET", f"/v1/attachments/{wanted.digest.hex()}", None)
        if digest_of(content) != wanted.digest:
            raise IntegrityFault(f"attachment {wanted.name!r}: its bytes have another digest")
        return content

    async def commit(
        self, batch: Batch, *, t_train_s: float, scores: Sequence[TrajectoryScore] = ()
    ) -> int:
        """Report that the optimizer step was applied; returns the train steps per publish now.

        scores: what the trainer's own forward pass says about trajectories of the batch, if it is
        known; the coordinator shows it per worker. PeerFault: k or z is not a number. At most SCORES_MAX are
        sent, and no number beyond SCORE_MAX.
        """
        body: dict[str, Any] = {
            "batch_digest": batch.digest,
            "epoch": batch.epoch,
            "t_train_s": t_train_s,
        }
        if scores:
            body["scores"] = [_score_row(score) for score in scores[:SCORES_MAX]]
        answer = await self._call("POST", f"/v1/batches/{batch.step}/commit", body)
        publish_every: int = answer["publish_every"]
        return publish_every

    async def refuse(self, batch: Batch, reasons: Mapping[int, str]) -> None:
        """Have these groups replaced (id -> reason). Then take the batch again."""
        body = {"groups": list(reasons), "reasons": list(reasons.values()), "epoch": batch.epoch}
        await self._call("POST", f"/v1/batches/{batch.step}/refuse", body)

    async def checkpoint(self, step: int) -> None:
        """Report that the learner's state up to this step is durable.

        The coordinator may then delete the batches up to this step.
        """
        await self._call("POST", "/v1/learner/checkpoint", {"step": step, "epoch": self._epoch})

    async def evaluations(self, after: int = 0) -> list[Evaluation]:
        """What was evaluated, oldest first: those whose number is above `after`."""
        body = await self._call("GET", f"/v1/evaluations?after={after}", None)
        return [Evaluation(**each) for each in body["evaluations"]]

    async def evaluate(self, version: int, after: int = 0) -> tuple[list[Evaluation], list[str]]:
        """Have the newest version evaluated, if it was not. Returns what `evaluations` does, and
        the names of what is still under way.
        """
        asked = {"version": version, "epoch": self._epoch, "after": after}
        body = await self._call("POST", "/v1/evaluations", asked)
        return [Evaluation(**each) for each in body["evaluations"]], list(body["unfinished"])

    async def samples(self, step: int | None = None) -> list[dict[str, Any]]:
        """Groups that this step trained on, the worst and the best, as lines of `echo2d samples --json`;
        None: the newest step. Long texts are cut off. A viewer needs samples.viewers.
        """
        asked = "" if step is None else f"?step={step}"
        body = await self._call("GET", f"/v1/samples{asked}", None)
        return list(body["groups"])

    async def status(self) -> dict[str, Any]:
        return await self._call("GET", "/v1/status", None)

    async def role(self) -> str:
        """The role of the token file. OperatorFault: it cannot be read."""
        return (await asyncio.to_thread(read_token_file, self._token_file)).role

    async def own_status(self) -> dict[str, Any]:
        """Facts about the boxes that enrolled with this worker's token."""
        return await self._call("GET", "/v1/status/own", None)

    async def order_worker(
        self, worker: str, order: str, *, hand_over: bool = False
    ) -> dict[str, Any]:
        """Cordon, uncordon or drain the worker with this id. Needs the role operator.

        hand_over: others go on at once with what a draining worker holds.
        """
        path = f"/v1/workers/{quote(worker, safe='')}/{order}"
        return await self._call("POST", path, {"hand_over": True} if hand_over else {})

    async def close(self) -> None:
        if self._telling is not None:
            self._telling.cancel()
            await asyncio.gather(self._telling, return_exceptions=True)
        if self._session is not None:
            await self._session.close()

    async def __aenter__(self) -> Self:
        return self

    async def __aexit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        at: TracebackType | None,
    ) -> None:
        await self.close()

    async def _session_of(self, asked: dict[str, Any]) -> dict[str, Any]:
        """Open the session. A coordinator of learner API 1 (echo2d 0.1.0) refuses `steps` before it
        has named its build, and is asked again without.
        """
        path = "/v1/learner/session"
        try:
            return await self._call("POST", path, asked)
        except PeerFault as fault:
            if "steps" not in asked or "steps: unknown field" not in str(fault):
                raise
        return await self._call("POST", path, {key: asked[key] for key in asked if key != "steps"})

    async def _tell_alive(self) -> None:
        """Tell the coordinator, until cancelled, that the learner lives. Calls that fail are not
        repeated: the learner's own calls say what is wrong. A coordinator of learner API 1 does not
        want to be told.
        """
        while True:
            body = {"epoch": self._epoch, "software": THIS_BUILD.name}
            if self._learner_api >= ALIVE_API:
                with contextlib.suppress(_Unreachable, PeerFault, OperatorFault):
                    await self._ask("POST", "/v1/learner/alive", body)
            await asyncio.sleep(ALIVE_EVERY_S)

    async def _publish(
        self, version: int, directory: Path, body: Mapping[str, Any]
    ) -> dict[str, Any]:
        """Publish; if an upload's answer was lost, the retry is refused, and all is sent again."""
        while True:
            if "upload" in body:
                await self._upload(version, directory)
            losses = self._losses
            try:
                return await self._call("POST", "/v1/versions", body)
            except Fenced:
                raise
            except PeerFault:
                if "upload" not in body or self._losses == losses:
                    raise

    async def _upload(self, version: int, directory: Path) -> None:
        for file in await asyncio.to_thread(_files_in, directory):
            name = file.relative_to(directory).as_posix()
            path = f"/v1/versions/{version}/files/{name}?epoch={self._epoch}"
            await self._repeat("PUT", path, file)

    async def _call(self, method: str, path: str, body: Mapping[str, Any] | None) -> dict[str, Any]:
        _, _, answer = await self._repeat(method, path, body)
        return _object(answer)

    async def _repeat(
        self, method: str, path: str, body: Mapping[str, Any] | Path | None
    ) -> tuple[int, Mapping[str, str], bytes]:
        """Retry until there is an answer. Every call of this API may be repeated."""
        loop, backoff = asyncio.get_running_loop(), Backoff(random.Random())
        deadline = loop.time() + self._timeout_s
        while True:
            try:
                return await self._ask(method, path, body)
            except _Unreachable as lost:
                self._losses += 1
                delay_s = backoff.next_s()
                if loop.time() + delay_s > deadline:
                    # A URL that never worked is probably wrong: that is the operator's mistake.
                    fault = PeerFault if self._answered else Unreachable
                    raise fault(f"cannot reach the coordinator at {self._url}: {lost}") from lost
                log.info("unreachable url=%s reason=%s", self._url, lost)
                await asyncio.sleep(delay_s)

    async def _ask(
        self, method: str, path: str, body: Mapping[str, Any] | Path | None
    ) -> tuple[int, Mapping[str, str], bytes]:
        if not self._headers:
            token = await asyncio.to_thread(read_token_file, self._token_file)
            self._tls = Tls.of(self._url, token.authority, promised=token.url)
            build = to_header(replace(OURS_AS_LEARNER_API, name=THIS_BUILD.name))
            self._headers = {"Authorization": f"Bearer {token.secret}", BUILD_HEADER: build}
        if self._session is None:
            self._session = aiohttp.ClientSession(headers=self._headers)
        content: dict[str, Any] = (
            {"data": _parts(body)} if isinstance(body, Path) else {"json": body}
        )
        silence_s = TAKE_S_MAX if path.startswith("/v1/versions") else ANSWER_S_MAX
        timeout = aiohttp.ClientTimeout(
            total=None, sock_connect=CONNECT_TIMEOUT_S, sock_read=silence_s
        )
        try:
            async with self._session.request(
                method, self._url + path, timeout=timeout, **content, **to_coordinator(self._tls)
            ) as response:
                answer = await response.read()
        except (aiohttp.ClientError, TimeoutError, OSError) as error:
            if is_for_good(error) and not self._answered:
                raise OperatorFault(f"{self._url}: {in_words(error)}") from error
            raise _Unreachable(in_words(error)) from error
        if response.status >= HTTPStatus.BAD_REQUEST:
            raise _refusal(response.status, answer)
        self._answered = True
        if (theirs := from_header(response.headers.get(BUILD_HEADER, ""))) is not None:
            self._learner_api = theirs.protocol
        return response.status, response.headers, answer


class Coordinator:
    """A connection to a coordinator, for programs without asyncio.

    It runs an `AsyncCoordinator` in an event loop in a thread of its own. Threads may call it at
    the same time. The methods are those of `AsyncCoordinator`.
    """

    def __init__(self, url: str, *, token_file: Path, timeout_s: float = 60.0) -> None:
        # Reading the file now reports a wrong one before the first call.
        self.run_id: str = read_token_file(token_file).run_id
        self._inner = AsyncCoordinator(url, token_file=token_file, timeout_s=timeout_s)
        self._hurried_at = float("inf")
        # Held while a call is handed to the loop, so that `close` cancels all that were.
        self._submitting = threading.Lock()
        self._closed = False
        self._loop = asyncio.new_event_loop()
        self._thread = threading.Thread(
            target=self._loop.run_forever, name="echo2d-client", daemon=True
        )
        self._thread.start()

    def open_session(
        self, resume_step: int, *, learner: str = "", take_over: bool = False, steps: int = 0
    ) -> Session:
        opening = self._inner.open_session(
            resume_step, learner=learner, take_over=take_over, steps=steps
        )
        return self._wait(opening)

    def publish(self, version: int, directory: Path, manifest: bytes | None = None) -> Published:
        return self._wait(self._inner.publish(version, directory, manifest))

    def take_batch(self, step: int) -> Batch:
        return self._wait(self._inner.take_batch(step))

    def commit(
        self, batch: Batch, *, t_train_s: float, scores: Sequence[TrajectoryScore] = ()
    ) -> int:
        return self._wait(self._inner.commit(batch, t_train_s=t_train_s, scores=scores))

    def attachment(self, wanted: Attachment) -> bytes:
        return self._wait(self._inner.attachment(wanted))

    def refuse(self, batch: Batch, reasons: Mapping[int, str]) -> None:
        self._wait(self._inner.refuse(batch, reasons))

    def checkpoint(self, step: int) -> None:
        self._wait(self._inner.checkpoint(step))

    def evaluations(self, after: int = 0) -> list[Evaluation]:
        return self._wait(self._inner.evaluations(after))

    def evaluate(self, version: int, after: int = 0) -> tuple[list[Evaluation], list[str]]:
        return self._wait(self._inner.evaluate(version, after))

    def samples(self, step: int | None = None) -> list[dict[str, Any]]:
        return self._wait(self._inner.samples(step))

    def status(self) -> dict[str, Any]:
        return self._wait(self._inner.status())

    def role(self) -> str:
        return self._wait(self._inner.role())

    def own_status(self) -> dict[str, Any]:
        return self._wait(self._inner.own_status())

    def hurry(self) -> None:
        """Give each call, including those under way, HURRY_S before it raises Unanswered.

        A signal handler may call this.
        """
        self._hurried_at = time.monotonic()

    def close(self) -> None:
        """End the connection. Calls under way in other threads, and later ones, raise
        CancelledError.
        """
        with self._submitting:
            if self._closed:
                return
            self._closed = True
        asyncio.run_coroutine_threadsafe(self._end(), self._loop).result()
        self._loop.call_soon_threadsafe(self._loop.stop)
        self._thread.join()
        self._loop.close()

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        at: TracebackType | None,
    ) -> None:
        self.close()

    async def _end(self) -> None:
        others = asyncio.all_tasks() - {asyncio.current_task()}
        for task in others:
            task.cancel()
        await asyncio.gather(*others, return_exceptions=True)
        await self._inner.close()

    def _wait(self, call: Coroutine[Any, Any, _Result]) -> _Result:
        with self._submitting:
            if self._closed:
                call.close()
                raise CancelledError("the connection is closed")
            future = asyncio.run_coroutine_threadsafe(call, self._loop)
        started_at = time.monotonic()
        while not wait([future], WAKE_S).done:
            if time.monotonic() > max(started_at, self._hurried_at) + HURRY_S:
                future.cancel()
                raise Unanswered(f"the coordinator did not answer within {HURRY_S:g} s")
        return future.result()


def _score_row(score: TrajectoryScore) -> list[float]:
    """As JSON has it: six digits are plenty, and keep the largest body below its limit."""
    # NaN stays NaN, which the coordinator refuses.
    k, z = (float(f"{max(min(each, SCORE_MAX), -SCORE_MAX):.6g}") for each in (score.k, score.z))
    return [score.group, score.sample, k, z]


def _files_in(directory: Path) -> list[Path]:
    return sorted(path for path in directory.rglob("*") if path.is_file())


async def _parts(path: Path) -> AsyncIterator[bytes]:
    file = await asyncio.to_thread(path.open, "rb")
    try:
        while part := await asyncio.to_thread(file.read, UPLOAD_PART_BYTES):
            yield part
    finally:
        await asyncio.to_thread(file.close)


def _object(answer: bytes) -> dict[str, Any]:
    try:
        body = json.loads(answer)
    except ValueError:
        body = None
    if not isinstance(body, dict):
        raise PeerFault("the coordinator's answer is not a JSON object")
    return body


def _refusal(status: int, answer: bytes) -> Exception:
    try:
        body = _object(answer)
    except PeerFault:
        body = {}
    code, detail = str(body.get("error", f"http {status}")), str(body.get("detail", ""))
    if status in (
        HTTPStatus.BAD_GATEWAY,
        HTTPStatus.SERVICE_UNAVAILABLE,
        HTTPStatus.GATEWAY_TIMEOUT,
    ):
        return _Unreachable(f"{code}: {detail}")
    if status in (HTTPStatus.UNAUTHORIZED, HTTPStatus.FORBIDDEN):
        return TokenRefused(f"the coordinator does not accept this token: {detail}")
    if code == "build":
        return OperatorFault(detail)
    if code == "fenced":
        return Fenced(detail)
    if code == "ended":
        return PromptsOver(detail)
    if code == "resume":
        return NotResumable(f"cannot resume: {detail}")
    if code == "held":
        return OperatorFault(detail)
    return PeerFault(f"{code}: {detail}")


def read_batch(epoch: int, digest: str, body: bytes) -> Batch:
    """Decode a batch. IntegrityFault: its bytes do not have this digest (hex)."""
    if batch_digest(body).hex() != digest:
        raise IntegrityFault("a batch's bytes do not have the digest that was sent with them")
    found = unpack_batch(body)
    groups = tuple(
        Group(
            group.group,
            unpack_tokens(group.prompt),
            tuple(branch for kept in group.trajectories for branch in _branches(kept)),
            group.left_out,
            group.sampling,
            {tag.name: tag.value for tag in group.tags},
        )
        for group in found.groups
    )
    return Batch(found.step, epoch, digest, groups)


def _branches(kept: TrajectoryRecord) -> list[Trajectory]:
    """The trajectories of one sample: its branches, mostly one. PeerFault: its columns do not fit it."""
    if fault := columns_fault(kept.columns, kept.length):
        raise PeerFault(fault)
    columns = {column.name: column.array for column in kept.columns}
    tokens, logprobs = unpack_tokens(kept.tokens), unpack_logprobs(kept.logprobs)
    edges = (0, *kept.branches, kept.length)
    found = []
    for branch, (start, end) in enumerate(pairwise(edges)):
        given = tuple(
            (g.start - start, g.end - start) for g in kept.given if start <= g.start < end
        )
        # Each given range is followed by a turn.
        turns = len(given) + (not given or given[0][0] > 0)
        found.append(
            Trajectory(
                tokens[start:end],
                logprobs[start:end],
                tuple(
                    Span(s.start - start, s.end - start, s.version, s.digest.hex(), s.author)
                    for s in kept.spans
                    if start <= s.start < end
                ),
                kept.reward,
                kept.worker,
                # All but the last one were left at the end of a turn, for a call that does not follow it.
                kept.finish if end == kept.length else "stop",
                {part.name: part.value for part in kept.reward_parts},
                given,
                turns if kept.branches else kept.turns,
                kept.source.task,
                kept.source.row,
                kept.sample,
                branch,
                kept.sample + branch * BRANCH_SAMPLES,
                {name: array[start:end] for name, array in columns.items()},
                kept.source.attachments,
            )
        )
    return found
