"""Keeps one auditor running, a child process of the coordinator, and gives it its settings."""

import random
from dataclasses import dataclass

from echo2d.runtime.process.child import Handover, supervise

AUDIT_MODULE = "echo2d.runtime.audit.main"


@dataclass(frozen=True, slots=True, kw_only=True)
class AuditHandover(Handover):
    """The settings that the coordinator gives its auditor."""

    device: str
    dtype: str
    base_model: str  # empty: the run has none
    threads: int  # of the CPU; 0: torch decides


async def supervise_auditor(handover: AuditHandover, *, rng: random.Random) -> None:
    """Keep one auditor running until cancelled. OperatorFault: it cannot run as configured."""
    await supervise(AUDIT_MODULE, handover, rng=rng, mistakes_end=True)
