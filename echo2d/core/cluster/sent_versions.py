"""What versions weigh, and what the seed has sent of them."""

from echo2d.core.base.bounded_dict import keep_newest

# Versions whose bytes and seed_copies are kept.
VERSIONS_MEASURED_MAX = 64


class SentVersions:
    """Bytes since the coordinator started; by version, of the newest ones."""

    def __init__(self) -> None:
        # Of all encoded versions, each counted once; and of the snapshots from which they were encoded.
        self.wire_bytes = self.full_bytes = 0
        # By version: as encoded, and in full.
        self.by_version: dict[int, tuple[int, int]] = {}
        # By version: bytes that the seed sent per byte of it. The newest measured is last.
        self.seed_copies: dict[int, float] = {}
        # Of any encoding.
        self.seed_bytes = 0

    def encoded(self, version: int, wire_bytes: int, full_bytes: int) -> None:
        """The encoding of a version that spreads is whole at the seed."""
        self.wire_bytes += wire_bytes
        self.full_bytes += full_bytes
        self.by_version.pop(version, None)
        self.by_version[version] = wire_bytes, full_bytes
        keep_newest(self.by_version, VERSIONS_MEASURED_MAX)

    def seed_sent(self, version: int, copies: float) -> None:
        """The seed has sent this many copies of the version's wire bytes."""
        self.seed_copies.pop(version, None)
        self.seed_copies[version] = copies
        keep_newest(self.seed_copies, VERSIONS_MEASURED_MAX)

    def check(self) -> None:
        assert max(len(self.seed_copies), len(self.by_version)) <= VERSIONS_MEASURED_MAX
