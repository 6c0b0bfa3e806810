"""An owner of held forms that only notes what it hears."""

from typing import Any

from echo2d.core.base.ids import FormId


class NotingOwner:
    """events: for the relay, in their order. failed: the forms given up, with the reason. No engine, no base."""

    def __init__(self) -> None:
        self.events: list[Any] = []
        self.failed: list[tuple[FormId, str]] = []

    def emit(self, event: Any) -> None:
        self.events.append(event)

    def tell(self, message: Any) -> None:
        pass

    def fail(self, form: FormId, reason: str) -> None:
        self.failed.append((form, reason))

    def serving_version(self) -> None:
        return None

    def base_of(self, form: FormId) -> None:
        return None
