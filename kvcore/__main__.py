"""Let `python -m kvcore` be the command line."""

from kvcore.cli.main import main

main()
