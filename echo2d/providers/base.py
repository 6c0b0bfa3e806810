"""The interface of a provider, which rents boxes.

`start` and `stop` report only that a command succeeded; only `list` reports which boxes exist. A
label names one box for ever: the provider keeps it with the box, as a tag or a name, and `list`
returns it.

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
    """A box to be started."""

    label: Label
    offer: str  # the operator's name for this kind of box
    url: str  # URL of the coordinator
    token_file: Path  # lets one worker join until the box's life is over
    life_s: float  # the box must end by itself after this time


@dataclass(frozen=True, slots=True, kw_only=True)
class ProviderOptions:
    """What the operator chose for one provider. Its factory reads what concerns it."""

    # Argument lists; empty for a kind that runs no commands.
    start: tuple[str, ...]
    stop: tuple[str, ...]
    list: tuple[str, ...]
    timeout_s: float  # seconds for one call of the provider
    options: Mapping[str, Any]  # `provider.options`, which only this kind understands
    prefix: str  # every label of this run begins with it
    environment: Mapping[str, str]  # variables for the commands


class Provider(Protocol):
    """Every method may raise ProviderFault: the call failed, and what it did is unknown."""

    async def start(self, order: BoxOrder) -> None:
        """Start a box and label it."""

    async def stop(self, label: Label, ids: tuple[str, ...]) -> None:
        """Stop a box. It also succeeds if the box does not exist or was stopped before.

        ids: the provider's own names for the box, if a list has shown any.
        """

    async def list(self) -> tuple[Instance, ...]:
        """All boxes that exist or are starting, with the labels of any run."""
