"""What the auditor, a child process of the coordinator, is told; and keeping one auditor running."""

import random
from dataclasses import dataclass

from echo2d.runtime.process.child import Handover, supervise

AUDIT_MODULE = "echo2d.runtime.audit.main"


@dataclass(frozen=True, slots=True, kw_only=True)
class AuditHandover(Handover):
    """What the coordinator tells its auditor. base_model: empty: the run has none. threads: of the
    CPU; 0: torch decides.
    """

    device: str
    dtype: str
    base_model: str
    threads: int


async def supervise_auditor(handover: AuditHandover, *, rng: random.Random) -> None:
    """Keep one auditor running until cancelled. OperatorFault: it cannot run as configured."""
    await supervise(AUDIT_MODULE, handover, rng=rng, mistakes_end=True)
