"""The hello of a worker that connects for the first time."""

from echo2d.core.base.ids import RunId
from echo2d.core.protocol.builds import OURS
from echo2d.core.protocol.control_messages import Address, Hello

HELLO = Hello(
    OURS, RunId("r"), "worker", "box", "boot", 4, Address("h", 1), None, (), (), ()
)  # fmt: skip
