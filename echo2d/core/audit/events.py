"""What the audit tells the other parts of the coordinator: records and actions."""

from dataclasses import dataclass

from echo2d.core.base.ids import GroupId, PeerId
from echo2d.core.cluster.events import Note, Persist, Send
from echo2d.core.protocol.evidence import Evidence


@dataclass(frozen=True, slots=True)
class LimitsLearnt:
    """The limits of this class were learnt; see `baseline.HonestLimits`."""

    engine_class: str
    k: float
    misses: float
    tolerance: int
    rerouted: float


@dataclass(frozen=True, slots=True)
class AuditTold:
    """An entry of the audit log: what an audit found about one worker's part of one sample."""

    worker: PeerId
    name: str
    group: GroupId
    sample: int
    versions: tuple[int, ...]
    found: Evidence
    # Why the part is flagged; empty: it is not.
    reasons: tuple[str, ...]
    # Why the worker is convicted; empty: it is not.
    verdict: str


@dataclass(frozen=True, slots=True)
class Convict:
    """Refuse this worker from now on, also after a restart, until a person pardons it."""

    worker: PeerId
    reason: str


AuditRecord = LimitsLearnt
AuditAction = Persist[AuditRecord] | Send | AuditTold | Convict | Note
