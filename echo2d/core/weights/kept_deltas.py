"""The kinds of forms, and which kept deltas lead from one snapshot to another.

Not here: how deltas become one (`delta_chain`), and where they are kept (`store.deltas`).
"""

from collections.abc import Iterable
from dataclasses import dataclass
from typing import Literal

from echo2d.core.base.ids import Digest

# A "delta" is made from a copy of the base, and a "composed" form from kept deltas that lead from the
# base to the version.
FormKind = Literal["full", "delta", "composed"]

# At most this many deltas are kept; each takes about half a percent of a version's bytes. Over more
# versions, most weights change.
DELTAS_KEPT_MAX = 32


@dataclass(frozen=True, slots=True)
class KeptDelta:
    """A delta that turns the snapshot `base` into the snapshot `made`."""

    base: Digest
    made: Digest
    wire_bytes: int


def shortest_chain(
    deltas: Iterable[KeptDelta], base: Digest, made: Digest
) -> tuple[KeptDelta, ...] | None:
    """Return the chain with the fewest bytes from one snapshot to the other, or None."""
    found: dict[Digest, tuple[KeptDelta, ...]] = {base: ()}
    known = list(deltas)
    # Bellman-Ford: after n rounds all chains of up to n deltas are found.
    for _ in known:
        for delta in known:
            if delta.base in found and delta.made != base:
                chain, present = (*found[delta.base], delta), found.get(delta.made)
                if present is None or chain_bytes(chain) < chain_bytes(present):
                    found[delta.made] = chain
    return found.get(made) or None


def chain_bytes(chain: Iterable[KeptDelta]) -> int:
    """The most bytes that a delta composed of these can take, without tables."""
    return sum(delta.wire_bytes for delta in chain)
