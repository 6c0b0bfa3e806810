"""An owner of held forms that only records what it receives."""

from typing import Any

from echo2d.core.base.ids import FormId


class NotingOwner:
    """Has no engine and no base. events: for the relay, in order. failed: forms that were given up, with the reason."""

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
