"""How many sequences to run at once when nobody says: what memory holds, within what the device makes use of."""

from __future__ import annotations

import os
from pathlib import Path

from m40llm.config import ModelConfig, RuntimeOptions
from m40llm.device.choose import choose_device
from m40llm.gguf import GGUFFile
from m40llm.kv import KVLayout

_MOST_ON_CPU = 4  # a CPU gains little from more rows in a step, and its memory is wanted for other things too
_MOST_ON_CARD = 16
_SHARE = 0.5  # of what is left beside the weights


def default_slots(path: Path, options: RuntimeOptions) -> int:
    """Slots whose KV takes at most half of the memory that the weights leave; 1 to 4 on the CPU, 1 to 16 on a card.

    On the CPU memory is what the system calls available (within the control group's limit), on a card its whole size less a
    tenth. The weights count once. Whether one slot fits is for the session to find out: it names the numbers.

    Raises:
        GGUFError, ConfigError, DeviceError: what `Model.open` raises for this file and these options.
    """
    choice = choose_device(options.device, require_sm52=options.require_sm52)
    with GGUFFile.open(path) as file:
        config = ModelConfig.from_gguf(file)
        weights = sum(info.nbytes for info in file.tensors.values())
    one = KVLayout.for_model(config, 1, options.context_for(config), options.kv_dtype).nbytes
    if choice.card is not None:
        memory, most = int(choice.card.memory_bytes * 0.9), _MOST_ON_CARD
    else:
        memory, most = available_memory(), _MOST_ON_CPU
    most = min(most, options.token_budget)
    return max(1, min(most, int((memory - weights) * _SHARE) // one))


def available_memory() -> int:
    """Bytes that a process could use now without swapping."""
    free = os.sysconf("SC_PHYS_PAGES") * os.sysconf("SC_PAGE_SIZE") // 2
    meminfo = Path("/proc/meminfo")
    if meminfo.exists():
        for line in meminfo.read_text().splitlines():
            if line.startswith("MemAvailable:"):
                free = int(line.split()[1]) * 1024
    limit, used = Path("/sys/fs/cgroup/memory.max"), Path("/sys/fs/cgroup/memory.current")
    if limit.exists() and used.exists() and (text := limit.read_text().strip()).isdigit():
        free = min(free, max(0, int(text) - int(used.read_text())))
    return free
