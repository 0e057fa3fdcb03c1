"""What runs below a process, read from /proc."""

import os
from pathlib import Path


def descendants(pid):
    """The process ids of all children, their children and so on."""
    found = [child for child, (parent, _) in _processes().items() if parent == pid]
    return found + [below for child in found for below in descendants(child)]


def children_of(root, parent_name, child_name):
    """Below `root`: child -> parent, for processes with these words in their command lines."""
    everyone, below = _processes(), set(descendants(root))
    return {
        pid: parent
        for pid, (parent, line) in everyone.items()
        if pid in below and child_name in line and parent_name in everyone.get(parent, (0, ""))[1]
    }


def cpu_seconds(pid):
    """Seconds of work of a process so far."""
    fields = Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()
    return (int(fields[11]) + int(fields[12])) / os.sysconf("SC_CLK_TCK")


def _processes():
    """Process -> (parent, command line)."""
    found = {}
    for entry in Path("/proc").iterdir():
        if entry.name.isdecimal():
            try:
                stat = (entry / "stat").read_text().rpartition(")")[2].split()
                line = (entry / "cmdline").read_bytes().replace(b"\0", b" ").decode()
            except (FileNotFoundError, ProcessLookupError):
                continue  # it ended just now
            found[int(entry.name)] = (int(stat[1]), line)
    return found
