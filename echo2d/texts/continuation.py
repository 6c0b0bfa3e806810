"""Why a conversation of tokens cannot go on."""

from echo2d.errors import Fault


class NoContinuation(Fault):
    """New messages cannot be put behind the tokens so far. reason: one short word, for a counter."""

    def __init__(self, reason: str, detail: str) -> None:
        super().__init__(f"the conversation cannot go on: {detail}")
        self.reason, self.detail = reason, detail
