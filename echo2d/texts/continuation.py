"""Why a conversation of tokens cannot go on."""

from typing import Literal

from echo2d.errors import Fault

NoContinuationReason = Literal["append_only", "template", "tokens", "messages", "renderer"]


class NoContinuation(Fault):
    """A conversation cannot go on as tokens. reason: one short word, for a counter.

    append_only: the template changes earlier text. template: it refuses these messages. tokens: the
    tokenizer does not return the text that was encoded in parts. messages: there are none, or one is
    an assistant's. renderer: the package `renderers` does not extend this conversation.
    """

    def __init__(self, reason: NoContinuationReason, detail: str) -> None:
        super().__init__(f"the conversation cannot go on: {detail}")
        self.reason, self.detail = reason, detail
