"""`python -m echo2d_lab.bench.liars.worker LIE SHARE BASE join ...`: `echo2d join` with an engine that lies.

An enemy for measurements: it has a valid credential and keeps the protocol. SHARE: of its samples about which it
lies. BASE: the directory of version 0.
"""

import runpy
import sys
from functools import partial
from pathlib import Path

from echo2d.engines.torch_engine import engine
from echo2d_lab.bench.liars.kinds import LIES, LieKind
from echo2d_lab.bench.liars.lying_engine import make_lying_engine


def install(lie: LieKind, share: float, base: Path) -> None:
    """Let all engines of this process lie."""
    engine.make_torch_engines = partial(make_lying_engine, lie=lie, share=share, base=base)


if __name__ == "__main__":
    lie, share, base = sys.argv.pop(1), float(sys.argv.pop(1)), Path(sys.argv.pop(1))
    assert lie in LIES
    install(lie, share, base)
    runpy.run_module("echo2d", run_name="__main__")
