"""Mistakes that the user can mend, told in one line."""

import os
import sys
from collections.abc import Callable
from functools import wraps

EXIT_CODE = 2
MAX_LINE = 1200  # characters
INTERRUPTED_EXIT_CODE = 130  # what a shell reports of a program that Ctrl-C ended
CLOSED_PIPE_EXIT_CODE = 141  # and of one whose reader, such as `head`, has seen enough


class UserError(Exception):
    """A mistake in a configuration, a file or a checkpoint. The message says in one line what, where and what to do."""


class NothingLeft(UserError):
    """A run to go on with is at its end."""


def print_error(message: str) -> None:
    """Print a message as one line on stderr that a terminal can show, whatever a file has put into it."""
    line = " ".join(message.split())
    if len(line) > MAX_LINE:  # the beginning says what and where, the end what to do
        line = f"{line[: MAX_LINE * 2 // 3]} .. {line[-MAX_LINE // 3 :]}"
    shown = "".join(c if c.isprintable() else c.encode("unicode_escape").decode() for c in line)
    print(f"error: {shown}", file=sys.stderr)


def command(main: Callable[..., None]) -> Callable[..., None]:
    """Wrap the entry point of a command: a `UserError` becomes one line on stderr and exit code 2."""

    @wraps(main)
    def run(*args, **kwargs) -> None:
        try:
            main(*args, **kwargs)
        except UserError as error:
            print_error(str(error))
            sys.exit(EXIT_CODE)
        except KeyboardInterrupt:
            print("interrupted", file=sys.stderr)
            sys.exit(INTERRUPTED_EXIT_CODE)
        except BrokenPipeError:
            os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())  # Python flushes it once more at its end
            sys.exit(CLOSED_PIPE_EXIT_CODE)
        except OSError as error:  # what the system refuses, wherever it is asked: permissions, too long a name, no room
            print_error(f"{error.filename or 'the system'}: {error.strerror or error}")
            sys.exit(EXIT_CODE)

    return run
