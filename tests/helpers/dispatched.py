"""Watch the tensors that PyTorch makes. The dispatcher is watched in one thread, so the work is kept in one."""

from collections.abc import Iterator
from contextlib import contextmanager

import torch
from torch.utils._python_dispatch import TorchDispatchMode


@contextmanager
def thread_count(count: int) -> Iterator[None]:
    """As many threads for PyTorch, for a while."""
    before = torch.get_num_threads()
    torch.set_num_threads(count)
    try:
        yield
    finally:
        torch.set_num_threads(before)


@contextmanager
def largest_tensor() -> Iterator[list[int]]:
    """[bytes] of the largest storage that is made meanwhile."""
    largest = [0]

    class Watch(TorchDispatchMode):
        def __torch_dispatch__(self, func, types, args=(), kwargs=None):
            result = func(*args, **(kwargs or {}))
            for tensor in result if isinstance(result, tuple | list) else (result,):
                if isinstance(tensor, torch.Tensor):
                    largest[0] = max(largest[0], tensor.untyped_storage().nbytes())
            return result

    with thread_count(1), Watch():
        yield largest
