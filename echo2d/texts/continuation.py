"""Why a conversation of tokens cannot go on."""


class NoContinuation(Exception):  # noqa: N818 - an outcome
    """New messages cannot be put behind the tokens so far without changing these."""
