"""`python -m converter` is the command `converter`."""

from converter.cli.main import main

main()
