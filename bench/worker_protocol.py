"""How a benchmark worker talks: one JSON object a line, commands on stdin, answers on stdout.

A worker is one engine in one process, so that load time, peak memory and threads are that engine's alone. Between commands it
blocks in a read; `cpu_idle_s` proves that nothing of it kept spinning while another engine was measured.
Only the standard library is imported here: the workers may run in different Python environments.
"""

from __future__ import annotations

import json
import os
import resource
import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any


def serve(ready: dict[str, Any], measure: Callable[..., dict[str, Any]]) -> None:
    """Announces `ready`, then answers every line of stdin with `measure(**command)`; ends at the end of stdin."""
    _answer(ready | {"peak_rss_bytes": peak_rss_bytes()})
    idle_since = time.process_time()
    for line in sys.stdin:
        idle = time.process_time() - idle_since
        result = measure(**json.loads(line))
        _answer(result | {"peak_rss_bytes": peak_rss_bytes(), "cpu_idle_s": idle})
        time.sleep(0.05)  # threads that spin for a while after work settle before the idle time starts to count
        idle_since = time.process_time()


def _answer(value: dict[str, Any]) -> None:
    os.write(_ANSWERS, json.dumps(value).encode() + b"\n")


def peak_rss_bytes() -> int:
    """Peak resident memory of this program. VmHWM, because ru_maxrss starts at the parent's size at the time of fork."""
    try:
        for line in Path("/proc/self/status").read_text().splitlines():
            if line.startswith("VmHWM:"):
                return int(line.split()[1]) * 1024
    except OSError:
        pass
    peak = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
    return peak if sys.platform == "darwin" else peak * 1024


# Native libraries print to file descriptor 1: answers get a copy of it, everything else goes to stderr.
_ANSWERS = os.dup(1)
os.dup2(2, 1)
