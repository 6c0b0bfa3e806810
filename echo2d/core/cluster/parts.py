"""What every part of the coordinator reads: the rules, the peers, the published versions, and the measurements."""

from dataclasses import dataclass

from echo2d.core.cluster.membership import Membership
from echo2d.core.cluster.statistics import Statistics
from echo2d.core.cluster.versions import PublishedVersions
from echo2d.core.rules.run import RunRules


@dataclass(frozen=True, slots=True)
class RunParts:
    """The parts of one run. Every holder may count in `statistics`; the others are written only by their owners."""

    rules: RunRules
    members: Membership
    versions: PublishedVersions
    statistics: Statistics
