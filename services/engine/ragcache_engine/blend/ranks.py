"""The ranks of a tensor parallel engine: what a worker needs of the others.

Each rank computes its own heads in the same pass, and the pass waits for all of them. So all ranks
must run the same passes in the same order. What orders a pass is therefore equal on all ranks: the
scheduler's jobs, or a number that the ranks have agreed on here. All methods are collective: each
rank calls them in the same order, on the worker's main thread.
"""

from __future__ import annotations

import logging
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import torch

log = logging.getLogger("vllm.ragcache")


class PassInterrupted(Exception):
    """A pass was ended between two layers, because other work is waiting."""


class Ranks:
    """This worker's rank, and the others.

    Args:
        group: vLLM's group of the tensor parallel ranks (``GroupCoordinator``). None: there is one
            rank.
    """

    def __init__(self, group: Any = None) -> None:
        self._group = group if group is not None and group.world_size > 1 else None
        self.rank: int = self._group.rank_in_group if self._group is not None else 0
        self.num_ranks: int = self._group.world_size if self._group is not None else 1

    @property
    def is_first(self) -> bool:
        """Whether this rank speaks for all where one has to."""
        return self.rank == 0

    def sum(self, tensor: torch.Tensor) -> torch.Tensor:
        """Return the sum of the ranks' tensors, with the same bits on all of them."""
        if self._group is None:
            return tensor
        # A sum may depend on the order, and the ranks choose tokens by it.
        total: torch.Tensor = self._group.all_reduce(tensor.contiguous())
        return self._group.broadcast(total, src=0)  # type: ignore[no-any-return]

    def mean(self, tensor: torch.Tensor) -> torch.Tensor:
        """Return the mean of the ranks' tensors, which are means over as many heads each."""
        return self.sum(tensor) / self.num_ranks if self._group is not None else tensor

    def slowest(self, seconds: float) -> float:
        """Return the largest of the ranks' seconds."""
        return self._reduced(seconds, torch.distributed.ReduceOp.MAX)

    def all_agree(self, ok: bool) -> bool:
        """Tell whether all ranks say yes."""
        return bool(self._reduced(float(ok), torch.distributed.ReduceOp.MIN))

    @contextmanager
    def in_pass(self) -> Iterator[None]:
        """End this process if a pass inside the context fails while other ranks wait in it.

        vLLM then ends the engine, which starts again. Otherwise it would hang.

        Raises:
            SystemExit: There are other ranks, and the pass failed.
        """
        try:
            yield
        except PassInterrupted:
            raise
        except Exception as error:
            if self._group is None:
                raise
            log.exception("worker: pass failed on one of several ranks, ending rank=%d", self.rank)
            raise SystemExit(1) from error

    def _reduced(self, number: float, operation: Any) -> float:
        if self._group is None:
            return number
        tensor = torch.tensor(number, dtype=torch.float64)
        torch.distributed.all_reduce(tensor, op=operation, group=self._group.cpu_group)
        return float(tensor)


ONE_RANK = Ranks()
