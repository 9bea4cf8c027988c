"""The program `kvcore`, also `python -m kvcore`: loads and runs the command line."""

import gc
import os
import signal
import sys

import kvcore


def quit_at_once(*_: object) -> None:
    """End the process as Ctrl-C does; an exception could get lost in an import."""
    os.write(2, b"kvcore: interrupted\n")
    os._exit(130)


def main() -> None:
    """Run the command line and exit. Until it is loaded, Ctrl-C ends the process at once."""
    # A run makes hardly any cycles, and the search for them takes a tenth of its time.
    gc.set_threshold(50_000, 20, 20)
    if signal.getsignal(signal.SIGINT) is signal.default_int_handler:
        signal.signal(signal.SIGINT, quit_at_once)
    try:
        run = kvcore.main  # loads the command line, which Ctrl-C may interrupt
    except ModuleNotFoundError as error:
        if not str(error.name).startswith("kvcore_"):
            raise
        from kvcore.errors import PluginError  # noqa: PLC0415 - for this error alone
        from kvcore.plugins._installation import missing  # noqa: PLC0415 - as above

        sys.stderr.write(f"kvcore: error: {missing()}\n")
        sys.exit(PluginError.exit_code)
    run()


if __name__ == "__main__":
    main()
