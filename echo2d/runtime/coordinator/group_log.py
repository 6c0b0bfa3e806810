"""Logs the life of every group under one id: `grep -w group=123` shows it from lease to step.

    admitted -> leased (each attempt) -> accepted, scored (each sample)
             -> buffered | dropped -> frozen -> committed

The lines are derived from actions that the coordinator performs anyway. Lines about a group or batch
have level info. Lines about a sample have level debug. So have the leases of a group except the first:
slots become free one at a time, so many leases have one sample. Workers log generation and the learner
logs training under the same id (docs/guide/operating.md). Not here: any decision.
"""

import logging
from collections.abc import Callable
from logging import DEBUG, INFO
from typing import Any

from echo2d.core.base.bounded_dict import keep_newest
from echo2d.core.base.ids import GroupId, LeaseId, PeerId, SessionId, lease_name
from echo2d.core.cluster.events import Note, Persist, Send
from echo2d.core.coordinator.events import CoordinatorAction, CoordinatorRecord
from echo2d.core.protocol.control_messages import (
    LeaseCancelled,
    LeaseGranted,
    SampleAnswered,
    ToPeer,
)
from echo2d.core.work.events import (
    BatchCommitted,
    BatchFrozen,
    GroupDropped,
    PromptTaken,
    SampleKept,
    SampleRewarded,
)
from echo2d.logs import STORY, say

# The groups of this many leases are remembered, to name the group of a refused result.
LOGGED_LEASES_MAX = 1 << 16
DIGEST_CHARS = 12

group_log = logging.getLogger(STORY)
# Lines that a peer can cause without limit go to this log, which is throttled; `group_log` is not.
log = logging.getLogger("echo2d.coordinator")


class GroupLog:
    """See the module docstring. worker: gives the peer of a session; None if it has ended."""

    def __init__(self, worker: Callable[[SessionId], PeerId | None]) -> None:
        self._worker = worker
        self._groups: dict[LeaseId, GroupId] = {}
        self._begun: dict[GroupId, None] = {}

    def tell(self, action: CoordinatorAction) -> None:
        """Log an action that is being performed. The record of a Persist is durable already."""
        match action:
            case Persist(record):
                _tell_record(record)
            case Send(session, message):
                self._tell_sent(message, session)
            case Note("buffered" as kind, text, group):
                say(group_log, INFO, kind, text, group=group)
            case Note(kind, text, group):
                say(log, INFO, kind, text, group=group)
            case _:
                pass

    def _tell_sent(self, message: ToPeer, session: SessionId) -> None:
        match message:
            case LeaseGranted(lease, attempt, group, samples=samples):
                self._groups[lease] = group
                keep_newest(self._groups, LOGGED_LEASES_MAX)
                facts: dict[str, Any] = {
                    "worker": self._worker(session),
                    "samples": ",".join(map(str, samples)),
                }
                level = DEBUG if group in self._begun else INFO
                self._begun[group] = None
                # Remember the newest groups whose first lease has been logged.
                keep_newest(self._begun, 1 << 14)
                say(
                    group_log,
                    level,
                    "leased",
                    group=group,
                    lease=lease_name(lease),
                    attempt=attempt,
                    **facts,
                )
            case LeaseCancelled(lease, attempt):
                facts = {
                    "lease": lease_name(lease),
                    "attempt": attempt,
                    "worker": self._worker(session),
                }
                say(group_log, DEBUG, "cancelled", group=self._groups.get(lease), **facts)
            case SampleAnswered(lease, attempt, sample, False, reason):
                facts = {"attempt": attempt, "sample": sample, "worker": self._worker(session)}
                say(
                    log,
                    INFO,
                    "refused",
                    reason,
                    group=self._groups.get(lease),
                    lease=lease_name(lease),
                    **facts,
                )
            case _:
                pass


def _tell_record(record: CoordinatorRecord) -> None:
    match record:
        case PromptTaken(group, cursor):
            say(group_log, DEBUG, "admitted", group=group, cursor=cursor)
        case SampleKept(group, lease, attempt, kept):
            facts: dict[str, Any] = {
                "lease": lease_name(lease),
                "attempt": attempt,
                "worker": kept.worker,
            }
            say(
                group_log,
                DEBUG,
                "accepted",
                group=group,
                sample=kept.sample,
                # Packed tokens take 4 bytes each.
                tokens=len(kept.tokens) // 4,
                **facts,
            )
        case SampleRewarded(group, sample, reward):
            say(group_log, DEBUG, "scored", group=group, sample=sample, reward=reward)
        case GroupDropped(group, reason):
            say(group_log, INFO, "dropped", reason, group=group)
        case BatchFrozen(step, digest, groups, refusals):
            facts = {"digest": digest.hex()[:DIGEST_CHARS], "refusals": refusals or None}
            say(group_log, INFO, "frozen", step=step, **facts, group=list(groups))
        case BatchCommitted(step, epoch, digest, t_train_s):
            say(
                group_log,
                INFO,
                "committed",
                step=step,
                epoch=epoch,
                digest=digest.hex()[:DIGEST_CHARS],
                t_train_s=t_train_s,
            )
        case _:
            pass
