"""The memory that a process holds, and where a run notes it."""

from pathlib import Path

MEMORY = "SOAK_MEMORY"
"""The variable that names the file to which the first rank adds a line after each micro-batch."""


def held_bytes(process_id: int | str = "self") -> int:
    """The bytes that a process has resident, but for the pages of files.

    Those are libraries above all; more of them come in when Python ends and calls what the libraries have registered.

    Raises:
        OSError: there is no such process.
    """
    lines = (line.split() for line in Path(f"/proc/{process_id}/status").read_text().splitlines())
    return sum(1024 * int(words[1]) for words in lines if words and words[0] in ("RssAnon:", "RssShmem:"))
