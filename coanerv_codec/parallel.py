"""Work side by side: whole pieces of work on one core each, instead of every small operation on all cores.

The operations of a pass take microseconds. Splitting each over the cores would make all of them wait for the slowest many
thousand times a second, and much longer when the video encoder is using one of them.
"""

from collections import deque
from collections.abc import Callable, Generator, Iterable
from concurrent.futures import Future, ThreadPoolExecutor
from typing import TypeVar

import torch

T = TypeVar("T")


def run_parallel(
    work: Callable[..., T], pieces: Iterable[tuple], count: int, device: torch.device
) -> Generator[T]:
    """Yield work(*piece) of `count` pieces, in order; as many are begun ahead as there are cores (a GPU does one at a time)."""
    threads = torch.get_num_threads()
    workers = min(threads, count) if device.type == "cpu" else 1
    if workers == 1:
        yield from (work(*piece) for piece in pieces)
        return
    pool = ThreadPoolExecutor(workers, "coanerv-cell", initializer=torch.set_num_threads, initargs=(1,))
    waiting: deque[Future[T]] = deque()
    try:
        for piece in pieces:
            waiting.append(pool.submit(work, *piece))
            if len(waiting) > workers:
                yield waiting.popleft().result()
        while waiting:
            yield waiting.popleft().result()
    finally:
        pool.shutdown(cancel_futures=True)
        torch.set_num_threads(threads)  # the workers' setting is everyone's
