"""What cold and warm mean, for echo2d and for what it is measured against.

Cold is the first version of programs that have just started: no link, session or measured rate is there. Warm are the
versions after it and after those that warm up: what a program can keep from version to version, it has kept. Figures
are compared only with figures of the same kind.
"""

from typing import Literal

RoundKind = Literal["cold", "warming up", "warm"]
