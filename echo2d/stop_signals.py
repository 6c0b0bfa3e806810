"""A program is told to stop once, though several signals may say so.

    first SIGTERM or SIGINT --ignored for SAME_STOP_S--> the next one ends the process at once

Not here: what the program does when it is told.
"""

import ctypes
import signal
import threading

# A service manager signals each process of a service, and torchrun then its own once more.
SAME_STOP_S = 1.0
SIGNALS = (signal.SIGTERM, signal.SIGINT)


def stop_told() -> None:
    """Call this at the first signal, in the main thread."""
    for each in SIGNALS:
        signal.signal(each, signal.SIG_IGN)
    timer = threading.Timer(SAME_STOP_S, _give_back)
    timer.daemon = True
    timer.start()


def _give_back() -> None:
    # signal.signal works in the main thread alone, which may hang.
    libc_signal = ctypes.CDLL(None).signal
    libc_signal.argtypes, libc_signal.restype = (ctypes.c_int, ctypes.c_void_p), ctypes.c_void_p
    for each in SIGNALS:
        libc_signal(each, None)
