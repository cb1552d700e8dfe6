"""How much memory there is."""

import os
from pathlib import Path

CGROUP_LIMITS = (Path("/sys/fs/cgroup/memory.max"), Path("/sys/fs/cgroup/memory/memory.limit_in_bytes"))


def host_memory() -> int:
    """Return the memory of this machine, or of the container that the process is confined to, in bytes."""
    limits = [os.sysconf("SC_PHYS_PAGES") * os.sysconf("SC_PAGE_SIZE")]
    for file in CGROUP_LIMITS:
        text = file.read_text().strip() if file.is_file() else ""
        if text.isdecimal():  # else "max"
            limits.append(int(text))
    return min(limits)
