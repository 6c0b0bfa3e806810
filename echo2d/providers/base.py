"""Where boxes come from: the protocol of a provider.

`start` and `stop` say only that a command ended well; what there is, `list` says. A label names a box for ever: the
provider keeps it with the box (a tag, a name), and shows it in its list. Implementations: `static`, `exec`.
"""

from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Protocol

from echo2d.core.renting.budget import Label
from echo2d.core.renting.events import Instance


@dataclass(frozen=True, slots=True)
class BoxOrder:
    """A box to be started. offer: the operator's name of its kind. url: of the coordinator.

    token_file: lets one worker join, until the box's time is over. life_s: after so long it has to end by itself.
    """

    label: Label
    offer: str
    url: str
    token_file: Path
    life_s: float


@dataclass(frozen=True, slots=True, kw_only=True)
class ProviderOptions:
    """What the operator chose for one provider; a factory of `registry.PROVIDERS` reads what concerns it.

    start, stop, list: argument lists; empty for a kind that runs no commands. timeout_s: for one call of the provider.
    options: the keys of `provider.options`, which only this kind understands. prefix: every label of this run begins
    with it. environment: what commands are given of this process's own.
    """

    start: tuple[str, ...]
    stop: tuple[str, ...]
    list: tuple[str, ...]
    timeout_s: float
    options: Mapping[str, Any]
    prefix: str
    environment: Mapping[str, str]


class Provider(Protocol):
    """All methods raise ProviderFault: it did not end well, and what it did is not known."""

    async def start(self, order: BoxOrder) -> None: ...

    async def stop(self, label: Label, ids: tuple[str, ...]) -> None:
        """Also of one that is not there, or was stopped before. ids: the provider's own, as far as lists showed."""

    async def list(self) -> tuple[Instance, ...]:
        """All that is there, or on its way, with the labels of any run."""
