"""`python -m echo2d` is the `echo2d` command. If its packages are not installed, it prints one line that says so."""

import sys

try:
    from echo2d.cli import main
except ModuleNotFoundError as error:
    if (error.name or "echo2d").startswith("echo2d"):
        raise
    sys.stderr.write(
        f"echo2d: {sys.executable} has no package {error.name}: use the Python in whose environment echo2d is "
        "installed, such as .venv/bin/python\n"
    )
    sys.exit(2)

main()
