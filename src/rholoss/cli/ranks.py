"""Commands that torchrun started on several ranks."""

from __future__ import annotations

import os
from collections.abc import Iterator
from contextlib import contextmanager

import torch
import torch.distributed as dist

from rholoss.distributed import PATIENCE, join, leave


@contextmanager
def ranks() -> Iterator[int]:
    """Join the other ranks if there are some; gives the number of this one."""
    if not dist.is_available() or not dist.is_torchelastic_launched() or dist.is_initialized():
        yield 0
        return
    if torch.cuda.is_available():
        torch.cuda.set_device(int(os.environ["LOCAL_RANK"]) % torch.cuda.device_count())
    join("gloo", PATIENCE)  # all that travels is on the host
    try:
        yield dist.get_rank()
    except BaseException:
        dist.destroy_process_group()  # without waiting for the others: torchrun ends them
        raise
    leave()
