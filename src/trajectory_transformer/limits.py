"""What the file of a stranger may cost: declared sizes are compared with file and memory before they are believed.

A few bytes can declare terabytes, or be decompressed to gigabytes. Every reader asks here before it allocates.
"""

import os
from pathlib import Path

GIB = 2**30
# Recorded numbers compress by a factor of 2 to 50, runs of equal numbers by more. Compression by zlib reaches 1032.
_MAX_EXPANSION = 200  # a file may become this many times larger in memory
_ALWAYS_ALLOWED = 2**28  # bytes; small files may hold very repetitive data
_SMALL = 2**24  # bytes; about what an import takes
_MEMORY_SHARE = 0.8  # of the memory that is available


def available_bytes() -> int | None:
    """Memory that this machine, or the container this process is in, can still give; None if unknown."""
    found = []
    try:
        lines = Path("/proc/meminfo").read_text().splitlines()
        found += [int(line.split()[1]) * 1024 for line in lines if line.startswith("MemAvailable:")]
        limit = Path("/sys/fs/cgroup/memory.max").read_text().strip()
        if limit != "max":
            found.append(int(limit) - int(Path("/sys/fs/cgroup/memory.current").read_text()))
    except (OSError, ValueError, IndexError):
        pass  # not Linux, or without these files
    if not found and hasattr(os, "sysconf"):
        try:
            found.append(os.sysconf("SC_PHYS_PAGES") * os.sysconf("SC_PAGE_SIZE"))
        except (OSError, ValueError):
            return None
    return min(found, default=None)


def check_size(path: str | Path, declared: int, stored: int | None = None) -> None:
    """Refuse a file whose contents would not fit into memory, or are far larger than the file.

    `declared` is the number of bytes that its contents take in memory, `stored` the size of the file if it is known.
    """
    size = Path(path).stat().st_size if stored is None else stored
    if declared > max(_MAX_EXPANSION * size, _ALWAYS_ALLOWED):
        raise ValueError(
            f"{path}: {size:,} bytes declare contents of {declared:,} bytes, more than {_MAX_EXPANSION} times as much; "
            "the file is damaged or made to exhaust memory"
        )
    available = available_bytes()
    if available is not None and declared > _MEMORY_SHARE * available:
        raise ValueError(
            f"{path}: its contents need {declared / GIB:.1f} GiB of memory, {available / GIB:.1f} GiB are available"
        )


def check_memory(needed: int, what: str) -> None:
    """Refuse something of `needed` bytes that does not fit into memory."""
    if needed < _SMALL:
        return  # asking the system takes longer than allocating it
    needed = min(needed, 2**99)  # a float for the message
    available = available_bytes()
    if available is not None and needed > available:
        raise ValueError(f"{what} needs {needed / GIB:.1f} GiB of memory, {available / GIB:.1f} GiB are available")
