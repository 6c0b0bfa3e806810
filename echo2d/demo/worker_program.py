"""Start a worker beside a coordinator of this machine, with a credential of its own."""

from pathlib import Path

from echo2d.demo.processes import Program, Programs
from echo2d.runtime.run_dir.tokens import create_token


def start_worker(
    programs: Programs, name: str, run: Path, url: str, *flags: str, module: str = "echo2d"
) -> Program:
    """Start `echo2d join` with these flags.

    run: has the coordinator's run directory as `coordinator`; it gets the worker's token, the first
    time, and its state. module: takes the place of echo2d.
    """
    token = run / f"{name}.token"
    if not token.exists():
        create_token(
            run / "coordinator",
            name,
            role="worker",
            url=url,
            out=token,
            max_workers=1,
            expires="7d",
        )
    own = (f"--token-file={token}", f"--state-dir={run / name}", f"--name={name}")
    return programs.start(name, "-m", module, "join", url, *own, *flags)
