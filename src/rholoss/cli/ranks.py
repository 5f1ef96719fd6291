"""For commands that torchrun has started as several processes."""

from __future__ import annotations

import os
from collections.abc import Iterator
from contextlib import contextmanager

import torch
import torch.distributed as dist

from rholoss.distributed import PATIENCE, join, leave


@contextmanager
def ranks() -> Iterator[int]:
    """A block that joins the other ranks, if torchrun has started some; yields the number of this rank."""
    if not dist.is_available() or not dist.is_torchelastic_launched() or dist.is_initialized():
        yield 0
        return
    if torch.cuda.is_available():
        torch.cuda.set_device(int(os.environ["LOCAL_RANK"]) % torch.cuda.device_count())
    join("gloo", PATIENCE)  # what ranks exchange is on the host
    try:
        yield dist.get_rank()
    except BaseException:
        dist.destroy_process_group()  # without waiting: torchrun ends the others
        raise
    leave()
