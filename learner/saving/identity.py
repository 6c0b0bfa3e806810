"""The identity of a learner: who it is to the coordinator, after restarts too.

    out_dir/learner.id      the name of the host that began, and a random number
    out_dir/learner.lock    held by the one process that runs on this directory

A learner that is started again on its directory goes on with its run. Another one has to be told to
take the run over.
"""

import fcntl
import re
import secrets
import socket
from contextlib import ExitStack
from pathlib import Path

from echo2d.client import OperatorFault
from learner.saving.files import make_directory, store_faults

ID_FILE, LOCK_FILE = "learner.id", "learner.lock"
HOST_CHARS_MAX = 64
ID_CHARS_MAX = 128  # as many as the coordinator takes


def own(out_dir: Path, stack: ExitStack, *, take_over: bool = False) -> str:
    """The identity of the learner of this directory, which no other process gets until `stack` ends.

    OperatorFault: another one runs on this directory, and it is not to be taken over. StoreFault: the
    identity cannot be written.
    """
    make_directory("out_dir", out_dir)
    with store_faults("cannot write the learner's identity in", out_dir):
        lock = stack.enter_context((out_dir / LOCK_FILE).open("a"))
        try:
            fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError as error:
            # Whom it takes the run from ends at its next call.
            if not take_over:
                raise OperatorFault(
                    f"learner.out_dir: another learner runs on {out_dir}; stop it, or start this one "
                    "with --take-over"
                ) from error
        path = out_dir / ID_FILE
        if not path.exists():
            host = re.sub(r"[^A-Za-z0-9.-]", "-", socket.gethostname())[:HOST_CHARS_MAX]
            scratch = path.with_suffix(".new")
            scratch.write_text(f"{host}-{secrets.token_hex(4)}\n")
            scratch.rename(path)
        found = path.read_text().strip()
    if not found or len(found) > ID_CHARS_MAX or not found.isprintable():
        raise OperatorFault(f"{path}: expected the identity of a learner; delete the damaged file")
    return found
