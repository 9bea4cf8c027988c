"""Run the command line for `python -m kvcore`."""

from kvcore.cli.main import main

main()
