"""Mistakes that the user can mend, told in one line."""

import os
import sys
from collections.abc import Callable
from functools import wraps

EXIT_CODE = 2
INTERRUPTED_EXIT_CODE = 130  # what a shell reports of a program that Ctrl-C ended
CLOSED_PIPE_EXIT_CODE = 141  # and of one whose reader, such as `head`, has seen enough


class UserError(Exception):
    """A mistake in a configuration, a file or a checkpoint. The message says in one line what, where and what to do."""


def command(main: Callable[..., None]) -> Callable[..., None]:
    """Wrap the entry point of a command: a `UserError` becomes one line on stderr and exit code 2."""

    @wraps(main)
    def run(*args, **kwargs) -> None:
        try:
            main(*args, **kwargs)
        except UserError as error:
            print(f"error: {' '.join(str(error).split())}", file=sys.stderr)
            sys.exit(EXIT_CODE)
        except KeyboardInterrupt:
            print("interrupted", file=sys.stderr)
            sys.exit(INTERRUPTED_EXIT_CODE)
        except BrokenPipeError:
            os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())  # Python flushes it once more at its end
            sys.exit(CLOSED_PIPE_EXIT_CODE)

    return run
