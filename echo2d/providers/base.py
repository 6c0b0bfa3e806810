"""The interface of a provider, which rents boxes.

`start` and `stop` tell only that a command succeeded; which boxes exist, only `list` tells. A label
names one box for ever: the provider keeps it with the box, as a tag or a name, and `list` returns
it.

To add a provider, write a factory (`ProviderOptions` -> `Provider`) and add it to
`registry.PROVIDERS`.
"""

from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Protocol

from echo2d.core.renting.budget import Label
from echo2d.core.renting.events import Instance


@dataclass(frozen=True, slots=True)
class BoxOrder:
    """A box to be started.

    offer: the operator's name for this kind of box. url: of the coordinator. token_file: lets one
    worker join until the box's time is over. life_s: the box must end by itself after this time.
    """

    label: Label
    offer: str
    url: str
    token_file: Path
    life_s: float


@dataclass(frozen=True, slots=True, kw_only=True)
class ProviderOptions:
    """What the operator chose for one provider. Its factory reads what concerns it.

    start, stop, list: argument lists; empty for a kind that runs no commands. timeout_s: for one
    call of the provider. options: `provider.options`, which only this kind understands. prefix:
    every label of this run begins with it. environment: variables for the commands.
    """

    start: tuple[str, ...]
    stop: tuple[str, ...]
    list: tuple[str, ...]
    timeout_s: float
    options: Mapping[str, Any]
    prefix: str
    environment: Mapping[str, str]


class Provider(Protocol):
    """Every method may raise ProviderFault: the call failed, and what it did is unknown."""

    async def start(self, order: BoxOrder) -> None:
        """Start a box and label it."""

    async def stop(self, label: Label, ids: tuple[str, ...]) -> None:
        """Stop a box. Succeeds also if there is none, or it was stopped before.

        ids: the provider's own names for the box, as far as lists have shown them.
        """

    async def list(self) -> tuple[Instance, ...]:
        """All boxes that exist or are starting, with the labels of any run."""
