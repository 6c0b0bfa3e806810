"""Boxes that join by themselves: nothing to start, to stop or to list. Those that are not needed stand by."""

from echo2d.core.renting.budget import Label
from echo2d.core.renting.events import Instance
from echo2d.errors import ProviderFault
from echo2d.providers.base import BoxOrder, ProviderOptions


def make_static_provider(options: ProviderOptions) -> "StaticProvider":  # noqa: ARG001
    return StaticProvider()


class StaticProvider:
    """See the module docstring."""

    async def start(self, order: BoxOrder) -> None:
        raise ProviderFault(f"{order.offer} joins by itself")

    async def stop(self, label: Label, ids: tuple[str, ...]) -> None:  # noqa: ARG002 - the protocol's
        raise ProviderFault(f"{label} was not started")

    async def list(self) -> tuple[Instance, ...]:
        return ()
