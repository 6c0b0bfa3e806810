"""A provider of boxes that join by themselves: it starts, stops and lists nothing."""

from echo2d.core.renting.budget import Label
from echo2d.core.renting.events import Instance
from echo2d.errors import ProviderFault
from echo2d.providers.base import BoxOrder, ProviderOptions


def make_static_provider(options: ProviderOptions) -> "StaticProvider":  # noqa: ARG001
    return StaticProvider()


class StaticProvider:
    """A provider whose boxes are started and stopped by their owners."""

    async def start(self, order: BoxOrder) -> None:
        raise ProviderFault(f"a box of {order.offer} joins by itself and cannot be started")

    async def stop(self, label: Label, ids: tuple[str, ...]) -> None:  # noqa: ARG002
        raise ProviderFault(f"{label} was not started here and cannot be stopped")

    async def list(self) -> tuple[Instance, ...]:
        return ()
