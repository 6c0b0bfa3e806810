"""The client for asyncio: a session, versions, batches, evaluations, the status."""

import asyncio
import base64
import contextlib
import math
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass, field, replace
from http import HTTPStatus
from pathlib import Path
from typing import Any, Self
from urllib.parse import quote, urlsplit

from echo2d.client.batches import Batch, read_batch
from echo2d.client.connection import ApiConnection
from echo2d.client.faults import Fenced, NoAnswer
from echo2d.client.http import (
    ALIVE_PATH,
    ATTACHMENT_PATH,
    BATCH_PATH,
    BODY_BYTES_MAX,
    CHECKPOINT_PATH,
    COMMIT_PATH,
    DIGEST_HEADER,
    EVALUATIONS_PATH,
    FILES_PATH,
    OPERATION_PATH,
    OWN_STATUS_PATH,
    REFUSE_PATH,
    RESULT_PATH,
    SAMPLES_PATH,
    SCORE_MAX,
    SCORES_MAX,
    SESSION_PATH,
    STALENESS_HEADER,
    STATUS_PATH,
    VERSIONS_PATH,
    WORKER_ORDER_PATH,
)
from echo2d.client.tinker import OperationFailed, OperationResult, TinkerOperation, read_operation
from echo2d.core.base.canonical import digest_of
from echo2d.core.protocol.sampling import Sampling
from echo2d.core.protocol.trajectory import Attachment, StepFigures, TrajectoryScore
from echo2d.errors import IntegrityFault, OperatorFault, PeerFault
from echo2d.net.security.urls import is_loopback
from echo2d.this_build import THIS_BUILD

# Seconds between two reports that the learner lives, from opening a session until it is closed.
ALIVE_EVERY_S = 5.0
# A manifest of at most this size fits into a request as base64. The manifest of a version above about 190 GB
# does not fit; then the coordinator hashes the files.
MANIFEST_SENT_MAX = BODY_BYTES_MAX * 3 // 4 - (16 << 10)


@dataclass(frozen=True, slots=True)
class Session:
    """The rules of a learner session."""

    epoch: int
    run_id: str
    staleness_max: int
    publish_every: int  # train steps per publish at first; each commit returns the current number
    trajectories_per_step: int
    group_size: int
    group_min: int  # a group may have fewer trajectories than group_size, but at least this many
    checkpoint: int = 0  # the last durable step
    # "drop", or "mask": then a group may hold tokens that are too old, which the learner must leave
    # out of the loss.
    over_stale: str = "drop"
    # How each task's answers are drawn; `Group.sampling` has it too.
    samplings: Mapping[str, Sampling] = field(default_factory=dict)
    answer_tokens: int = 0  # the most that a task allows after a prompt; 0: not known
    evaluations: Sequence[str] = ()  # names
    filter_zero_variance: bool = False  # whether groups whose rewards are all equal are replaced


@dataclass(frozen=True, slots=True)
class Published:
    version: int
    digest: str


@dataclass(frozen=True, slots=True)
class Evaluation:
    """What a version scored on held-out questions. None: there is no such number."""

    number: int  # counted in the run, from 1
    name: str
    version: int
    digest: str
    rows: int  # questions that were scored
    of: int  # all questions of the evaluation
    samples: int  # answers to each question
    mean: float | None  # reward
    se: float | None  # standard error of the mean
    pass_at: Mapping[str, float]  # k: share of the questions with a right answer among k
    parts: Mapping[str, float]  # means of the rewards' named components
    truncated: float | None  # share of the answers that were cut off
    tokens: float | None  # mean length of an answer
    seconds: float


class AsyncCoordinator:
    """A connection to a coordinator, for asyncio.

    url: https://HOST:PORT. token_file: with the role learner; `status` needs only the role viewer.
    timeout_s: for this long a call is retried while the coordinator is unreachable.
    """

    def __init__(self, url: str, *, token_file: Path, timeout_s: float = 60.0) -> None:
        self._api = ApiConnection(url, token_file=token_file, timeout_s=timeout_s)
        self._epoch = 0
        self._telling: asyncio.Task[None] | None = None

    async def open_session(
        self, resume_step: int, *, learner: str = "", take_over: bool = False, steps: int = 0
    ) -> Session:
        """Begin a new epoch. From now on, calls of older sessions raise Fenced.

        learner: the caller's identity, printable and the same after its restarts. steps: the step
        after which the learner ends, for the status; 0: not known. OperatorFault: a learner of another
        identity has the run. With `take_over`, that learner's session ends instead.

        From now on a background task reports to the coordinator that the learner lives.
        """
        asked: dict[str, Any] = {"resume_step": resume_step}
        if learner:
            asked["learner"] = learner
        if take_over:
            asked["take_over"] = True
        if steps:
            asked["steps"] = steps
        session = _session(await self._api.call("POST", SESSION_PATH, asked))
        self._epoch = session.epoch
        if self._telling is None:
            self._telling = asyncio.get_running_loop().create_task(self._tell_alive())
        return session

    async def rules(self) -> Session:
        """The rules of the session that is open now; of epoch 0, if none was ever opened. No session begins."""
        return _session(await self._api.call("GET", SESSION_PATH, None))

    async def publish(
        self, version: int, directory: Path, manifest: bytes | None = None
    ) -> Published:
        """Publish a model or adapter directory as this version.

        The coordinator reads the path itself when it is on this host; otherwise the files are
        uploaded. When this returns, the directory may be deleted.

        manifest: that of this directory from `build_manifest`, encoded. Without it the coordinator hashes
        the files before it answers. With it the version is sent to workers at once. If the seed then
        finds other files, the version is revoked, and the run stops if it cannot go on without it.
        """
        body: dict[str, Any] = {"version": version, "epoch": self._epoch}
        if manifest is not None and len(manifest) <= MANIFEST_SENT_MAX:
            body["manifest"] = base64.b64encode(manifest).decode()
        if is_loopback(urlsplit(self._api.url).hostname or ""):
            body["path"] = await asyncio.to_thread(lambda: str(directory.absolute()))
        else:
            body["upload"] = True
        answer = await self._publish(version, directory, body)
        return Published(version, answer["digest"])

    async def take_batch(self, step: int) -> Batch:
        """Wait for the batch of this step. Its bytes stay the same until it is refused."""
        path = f"{BATCH_PATH.format(step=step)}?epoch={self._epoch}"
        while True:
            status, headers, body = await self._api.repeat("GET", path, None)
            if status != HTTPStatus.NO_CONTENT:
                batch = read_batch(self._epoch, headers.get(DIGEST_HEADER, ""), body)
                bound = headers.get(STALENESS_HEADER, "")
                return replace(batch, staleness_max=int(bound) if bound.isdecimal() else None)

    async def attachment(self, wanted: Attachment) -> bytes:
        """The bytes of a trajectory's attachment, which are kept until the checkpoint of its step.

        PeerFault: they are deleted. IntegrityFault: they do not have the attachment's digest.
        """
        path = ATTACHMENT_PATH.format(digest=wanted.digest.hex())
        _, _, content = await self._api.repeat("GET", path, None)
        if digest_of(content) != wanted.digest:
            raise IntegrityFault(f"attachment {wanted.name!r}: its bytes have another digest")
        return content

    async def commit(
        self,
        batch: Batch,
        *,
        t_train_s: float,
        scores: Sequence[TrajectoryScore] = (),
        figures: StepFigures | None = None,
    ) -> int:
        """Report that the optimizer step was applied; returns the train steps per publish now.

        scores: what the trainer's own forward pass says about trajectories of the batch, if known; the
        coordinator shows it per worker. At most SCORES_MAX are sent, cut to at most SCORE_MAX. figures:
        shown as curves on the coordinator's page. PeerFault: k or z is not a number.
        """
        body: dict[str, Any] = {
            "batch_digest": batch.digest,
            "epoch": batch.epoch,
            "t_train_s": t_train_s,
        }
        if scores:
            body["scores"] = [_score_row(score) for score in scores[:SCORES_MAX]]
        if figures:
            body["figures"] = _measured(figures)
        answer = await self._api.call("POST", COMMIT_PATH.format(step=batch.step), body)
        publish_every: int = answer["publish_every"]
        return publish_every

    async def refuse(self, batch: Batch, reasons: Mapping[int, str]) -> None:
        """Have these groups replaced. reasons: by group id. Then take the batch again."""
        body = {"groups": list(reasons), "reasons": list(reasons.values()), "epoch": batch.epoch}
        await self._api.call("POST", REFUSE_PATH.format(step=batch.step), body)

    async def checkpoint(self, step: int) -> None:
        """Report that the learner's state up to this step is durable.

        The coordinator may then delete the batches up to this step.
        """
        await self._api.call("POST", CHECKPOINT_PATH, {"step": step, "epoch": self._epoch})

    async def evaluations(self, after: int = 0) -> list[Evaluation]:
        """The evaluations whose number is above `after`, oldest first."""
        body = await self._api.call("GET", f"{EVALUATIONS_PATH}?after={after}", None)
        return [Evaluation(**each) for each in body["evaluations"]]

    async def evaluate(self, version: int, after: int = 0) -> tuple[list[Evaluation], list[str]]:
        """Have the newest version evaluated, unless it already was. Returns the same as `evaluations`, and the
        names of the evaluations that are still under way.
        """
        asked = {"version": version, "epoch": self._epoch, "after": after}
        body = await self._api.call("POST", EVALUATIONS_PATH, asked)
        return [Evaluation(**each) for each in body["evaluations"]], list(body["unfinished"])

    async def take_operation(self, saved: Sequence[tuple[str, int]] = ()) -> TinkerOperation | None:
        """The next call of a client of the Tinker API. None: there was none within LONG_POLL_S.

        The same call comes again until `end_operation` has reported its result. saved: the optimizer steps, as (model,
        number), whose states have come to this learner's disk, at most SAVED_STEPS_MAX. They may be reported again.
        """
        body = {"epoch": self._epoch, "saved": saved}
        status, _, answer = await self._api.repeat("POST", OPERATION_PATH, body)
        return None if status == HTTPStatus.NO_CONTENT else read_operation(answer)

    async def end_operation(self, operation: TinkerOperation, result: OperationResult) -> None:
        """Report the result of a call that `take_operation` returned. It may be reported again."""
        model = quote(operation.model, safe="")
        path = f"{RESULT_PATH}?epoch={self._epoch}&model={model}&number={operation.number}"
        if isinstance(result, OperationFailed):
            await self._api.repeat("POST", path, {"failed": asdict(result)})
        else:
            body = result if isinstance(result, bytes) else {"result": result}
            await self._api.repeat("POST", path, body)

    async def samples(self, step: int | None = None) -> list[dict[str, Any]]:
        """The worst and the best groups that a step trained on, as lines of `echo2d samples --json`.

        step: None: the newest. Long texts are cut off. A viewer's token needs samples.viewers.
        """
        asked = "" if step is None else f"?step={step}"
        body = await self._api.call("GET", SAMPLES_PATH + asked, None)
        return list(body["groups"])

    async def status(self) -> dict[str, Any]:
        return await self._api.call("GET", STATUS_PATH, None)

    async def role(self) -> str:
        """The role of the token file. OperatorFault: it cannot be read."""
        return (await self._api.token()).role

    async def own_status(self) -> dict[str, Any]:
        """Facts about the boxes that enrolled with this worker's token."""
        return await self._api.call("GET", OWN_STATUS_PATH, None)

    async def order_worker(
        self, worker: str, order: str, *, hand_over: bool = False
    ) -> dict[str, Any]:
        """Cordon, uncordon or drain the worker with this id. Needs the role operator.

        hand_over: other workers continue at once what a draining worker holds.
        """
        path = WORKER_ORDER_PATH.format(peer=quote(worker, safe=""), order=order)
        return await self._api.call("POST", path, {"hand_over": True} if hand_over else {})

    async def close(self) -> None:
        if self._telling is not None:
            self._telling.cancel()
            await asyncio.gather(self._telling, return_exceptions=True)
        await self._api.close()

    async def __aenter__(self) -> Self:
        return self

    async def __aexit__(self, *_: object) -> None:
        await self.close()

    async def _tell_alive(self) -> None:
        """Report to the coordinator, until cancelled, that the learner lives. Calls that fail are not
        repeated: the learner's other calls raise the fault.
        """
        while True:
            body = {"epoch": self._epoch, "software": THIS_BUILD.name}
            with contextlib.suppress(NoAnswer, PeerFault, OperatorFault):
                await self._api.ask("POST", ALIVE_PATH, body)
            await asyncio.sleep(ALIVE_EVERY_S)

    async def _publish(
        self, version: int, directory: Path, body: Mapping[str, Any]
    ) -> dict[str, Any]:
        """Publish. If the answer to the publish of an upload was lost, the retry is refused: then upload again."""
        while True:
            if "upload" in body:
                await self._upload(version, directory)
            losses = self._api.losses
            try:
                return await self._api.call("POST", VERSIONS_PATH, body)
            except Fenced:
                raise
            except PeerFault:
                if "upload" not in body or self._api.losses == losses:
                    raise

    async def _upload(self, version: int, directory: Path) -> None:
        for file in await asyncio.to_thread(_files_in, directory):
            name = file.relative_to(directory).as_posix()
            path = f"{FILES_PATH.format(version=version)}/{name}?epoch={self._epoch}"
            await self._api.repeat("PUT", path, file)


def _session(body: Mapping[str, Any]) -> Session:
    found = {name: body[name] for name in Session.__slots__ if name in body}
    drawn = {task: Sampling(**each) for task, each in body.get("samplings", {}).items()}
    return Session(**{**found, "samplings": drawn})


def _score_row(score: TrajectoryScore) -> list[float]:
    """A score for JSON, with six digits, which keep the largest body below its limit."""
    # NaN stays NaN, and the coordinator refuses it.
    k, z = (float(f"{max(min(each, SCORE_MAX), -SCORE_MAX):.6g}") for each in (score.k, score.z))
    return [score.group, score.sample, k, z]


def _measured(figures: StepFigures) -> dict[str, float]:
    """The figures for JSON. NaN is left out, because a gap in a curve must not fail a commit."""
    found = {name: value for name, value in asdict(figures).items() if value is not None}
    return {
        name: max(min(value, SCORE_MAX), -SCORE_MAX)
        for name, value in found.items()
        if not math.isnan(value)
    }


def _files_in(directory: Path) -> list[Path]:
    return sorted(path for path in directory.rglob("*") if path.is_file())
