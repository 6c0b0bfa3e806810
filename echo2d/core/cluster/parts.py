"""What every part of the coordinator reads: its rules, who is here, what was published, and what was measured."""

from dataclasses import dataclass

from echo2d.core.cluster.membership import Membership
from echo2d.core.cluster.statistics import Statistics
from echo2d.core.cluster.versions import PublishedVersions
from echo2d.core.rules.run import RunRules


@dataclass(frozen=True, slots=True)
class RunParts:
    """Of one run. Every holder may count in `statistics`; only their owners write the others."""

    rules: RunRules
    members: Membership
    versions: PublishedVersions
    statistics: Statistics
