"""The faults of echo2d: an error says whose fault it is, and that decides the reaction.

    Fault
     +-- OperatorFault    the person running this program: one clear line, exit code 2
     +-- PeerFault        another process broke the protocol: drop that peer
     +-- IntegrityFault   bytes do not verify: drop the chunk, blame its source
     +-- EngineFault      the engine could not do it: keep serving the old version
     +-- ProviderFault    a command that rents boxes did not end well: believe what lists show, and nothing else
     +-- StoreFault       this machine's disk could not do it (full, read-only): say so, try again later

Catch one of these only where you react to it; everything else is our own bug and ends the process.
"""


class Fault(Exception):  # noqa: N818 - faults, not errors: what matters is whose
    """Base of all faults; its text is one line that a person can act on."""


class OperatorFault(Fault):
    """Wrong configuration, arguments, files or credentials."""


class PeerFault(Fault):
    """A remote process sent what the protocol does not allow."""


class IntegrityFault(Fault):
    """Bytes whose digest, signature or structure is not what was promised."""


class EngineFault(Fault):
    """An engine refused, failed or died."""


class ProviderFault(Fault):
    """A provider's command failed, hung or printed nonsense; what it did is not known."""


class StoreFault(Fault):
    """The local disk refused (no space, I/O error); nothing half-written is believed. full: space would help."""

    def __init__(self, text: str, *, full: bool = False) -> None:
        super().__init__(text)
        self.full = full


def first_fault(group: BaseExceptionGroup[Fault]) -> Fault:
    """One of the faults in the group."""
    inner = group.exceptions[0]
    return first_fault(inner) if isinstance(inner, BaseExceptionGroup) else inner
