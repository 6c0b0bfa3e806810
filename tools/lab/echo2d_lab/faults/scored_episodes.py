"""The invariants of an evaluation's episodes: one version writes all turns, each after all turns before it.

These episodes are not durable, so they are judged where they are granted and where the environment gets their turns.
"""

from collections.abc import Callable

from echo2d.core.base.ids import GroupId, PeerId
from echo2d.core.protocol.control_messages import LeaseGranted, VersionKey
from echo2d.core.protocol.trajectory import unpack_tokens
from echo2d.core.work.events import StepEnvironment
from echo2d_lab.faults.engine import STOP, mark
from echo2d_lab.faults.environment import given_after


class ScoredEpisodes:
    """See the module docstring. turns: number of judged turns after the first ones.

    honest(peer): whether the peer never lies. published(): all versions.
    """

    def __init__(
        self, honest: Callable[[PeerId], bool], published: Callable[[], list[VersionKey]]
    ) -> None:
        self._honest, self._published = honest, published
        self.turns = 0
        # For each group and sample, the last lease, and the last turn.
        self._leases: dict[tuple[GroupId, int], tuple[PeerId, LeaseGranted]] = {}
        self._told: dict[tuple[GroupId, int], StepEnvironment] = {}
        # For each question and sample, the seed of the environment.
        self._seeds: dict[tuple[int, int], int] = {}

    def restarted(self) -> None:
        """Record that another coordinator process begins, which plays its episodes again."""
        self._leases.clear()
        self._told.clear()

    def granted(self, peer: PeerId, lease: LeaseGranted) -> None:
        assert lease.hold_s, "a lease of an evaluation that holds no version"
        assert not lease.written, "unfinished turns are not kept"
        for sample in lease.samples:
            at = lease.group, sample
            told = self._told.get(at)
            assert (told is not None) == (lease.earlier > 0), (
                "an episode begins twice, or not with its first turn"
            )
            if told is not None:
                assert len(lease.samples) == 1
                before = told.prompt + told.output.tokens + given_after(told.turn)
                assert lease.prompt == before, "a turn does not continue the turns before it"
                assert lease.oldest == self._leases[at][1].oldest, (
                    "another version continues the episode"
                )
            self._leases[at] = peer, lease

    def stepped(self, order: StepEnvironment) -> None:
        at = order.group, order.sample
        (worker, lease), told = self._leases[at], self._told.get(at)
        assert order.turn == (1 if told is None else told.turn + 1)
        assert not order.again
        seed = self._seeds.setdefault((order.cursor, order.sample), order.rng_seed)
        assert order.rng_seed == seed, "versions play environments with different seeds"
        whole = order.prompt + order.output.tokens
        assert whole.startswith(lease.prompt)
        assert len(order.prompt) + 4 * order.output.turn_start == len(lease.prompt)
        start, tokens = len(lease.prompt) // 4, unpack_tokens(whole).tolist()
        wrote = tokens[start:-1] if tokens[-1] == STOP else tokens[start:]
        assert not self._honest(worker) or any(
            wrote == [mark(key, *at, start + place) for place in range(len(wrote))]
            for key in self._published()
            if key.version == lease.oldest
        ), "another version wrote this turn"
        self._told[at] = order
        self.turns += order.turn > 1
