"""What a refit of a running server is asked to do, and the steps that each kind of server has for it.

stop --> update --> identify --> go on
 |         |           |           |
 | refused +-----------+-----------+--> doubtful: weights unknown (I3)
 +--> the old version is still served
"""

from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal, Protocol

from echo2d.errors import EngineFault

RefitMode = Literal["retract", "abort", "in_place"]

Files = list[tuple[str, int, int, int]]  # name, size, time and inode

# An update may take three times as long as a disk of this rate needs to read the files, plus
# LOAD_S_MIN, because moving weights into the server's layout takes time too.
LOAD_BYTES_PER_S_MIN = 100e6
LOAD_S_MIN = 30.0


class Doubtful(EngineFault):
    """The call may or may not have had its effect, so the server's weights are unknown."""


@dataclass(frozen=True, slots=True)
class WeightUpdate:
    """An order to serve `snapshot` as `label`."""

    snapshot: Path
    label: str
    files: Files  # the snapshot's, as they were checked
    mode: RefitMode

    @property
    def timeout_s(self) -> float:
        return load_s_max(sum(size for _, size, _, _ in self.files))


def load_s_max(size: int) -> float:
    """The most seconds that a server may take to load this many bytes."""
    return 3 * size / LOAD_BYTES_PER_S_MIN + LOAD_S_MIN


class Updates(Protocol):
    """A module that refits a server of one kind."""

    async def started(self, server: Any, order: WeightUpdate) -> None:
        """Make sure that a server that has just started serves the version of `order`. Doubtful: it does not."""

    async def stop(self, server: Any, mode: RefitMode) -> None:
        """Stop generation for a refit or a hold.

        Doubtful: the server's state is unknown. Any other EngineFault: it continues as before.
        """

    async def update(self, server: Any, order: WeightUpdate) -> None:
        """Replace the weights of a stopped server. Every fault is Doubtful."""

    async def call_inside(self, server: Any, order: WeightUpdate | None = None) -> int:
        """Have the server call our module in it (`inside/echo2d_memory.py`), where nothing is generated; with an order,
        drop cached prefixes and name the weights as it says. Returns the number of processes that were called.

        Doubtful: they may have been. Other EngineFault: they were not.
        """

    async def identify(self, server: Any, order: WeightUpdate) -> None:
        """Check that the server reports the version of `order`. Doubtful: it reports another one."""

    async def go_on(self, server: Any) -> None:
        """Resume generation. Every fault is Doubtful."""
