"""`python -m echo2d` is the `echo2d` command."""

from echo2d.cli import main

main()
