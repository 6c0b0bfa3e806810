"""The meaning of cold and warm, for echo2d and its rivals.

Cold is the first version of programs that have just started: they have no link, session or measured rate yet. Warm are
the versions after it and after those that warm up: a program has kept everything that it can keep from version to
version. Figures are compared only with figures of the same kind.
"""

from typing import Literal

RoundKind = Literal["cold", "warming up", "warm"]
