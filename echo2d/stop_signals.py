"""Counts several stop signals that arrive together as one.

    first SIGTERM or SIGINT --others are ignored for SAME_STOP_S--> the next one ends the process at once

Not here: how the program stops.
"""

import ctypes
import signal
import threading

# In seconds. A service manager signals every process of a service, and then torchrun signals its processes again.
SAME_STOP_S = 1.0
SIGNALS = (signal.SIGTERM, signal.SIGINT)


def stop_told() -> None:
    """Call this at the first stop signal, in the main thread."""
    for each in SIGNALS:
        signal.signal(each, signal.SIG_IGN)
    timer = threading.Timer(SAME_STOP_S, _restore_defaults)
    timer.daemon = True
    timer.start()


def _restore_defaults() -> None:
    # signal.signal works only in the main thread, which may hang, so libc is called.
    libc_signal = ctypes.CDLL(None).signal
    libc_signal.argtypes, libc_signal.restype = (ctypes.c_int, ctypes.c_void_p), ctypes.c_void_p
    for each in SIGNALS:
        libc_signal(each, None)
