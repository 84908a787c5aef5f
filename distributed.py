"""Many processes that do the work of one: ranks, set-up and tear-down, sums and gathering.

PyTorch's own launcher, torchrun, starts them; without it there is one, and nothing here does anything. All run the
same program on the same data with the same draws, and two functions split their rows between them: `sample.generate`,
which writes, and `model.token_log_probs`, which scores. Each process computes its share and is given the others', so
that what follows (advantages, losses, metrics) sees whole batches: no formula knows of processes, no mean is a share's.

The gradient flows through a process's own rows only, and the sum over processes is that of the whole batch. A sum in
one flat buffer, as DistributedDataParallel averages the gradients of shares, which is right only where each share has
as many tokens as every other.
"""

import contextlib
import functools
import os
import platform
import signal
import sys
from collections.abc import Iterable, Iterator, Sequence
from types import FrameType
from typing import Any, NoReturn, TypeVar

import torch
import torch.distributed as dist
from torch import Tensor
from torch.distributed.rendezvous import rendezvous

ItemT = TypeVar("ItemT")


class Lost(Exception):
    """Another process of the run is gone, so that this one waits for it in vain."""


def size() -> int:
    """Processes of this run."""
    return dist.get_world_size() if dist.is_initialized() else 1


def rank() -> int:
    """Number of this process, from 0 on."""
    return dist.get_rank() if dist.is_initialized() else 0


def leads() -> bool:
    """Whether this process is the one that prints, logs and saves."""
    return rank() == 0


def lost(_signal: int, _frame: FrameType | None) -> NoReturn:
    """What torchrun's signal does where nothing else handles it: it ends all processes when one of them is gone."""
    raise Lost


@functools.cache
def store() -> Any:
    """What the launcher keeps for all processes."""
    return next(rendezvous("env://"))[0]


@contextlib.contextmanager
def group() -> Iterator[None]:
    """Context in which the processes that torchrun started are one group."""
    if not dist.is_torchelastic_launched():
        yield
        return
    backend = "cpu:gloo,cuda:nccl" if torch.cuda.is_available() else "gloo"
    number, count = int(os.environ["RANK"]), int(os.environ["WORLD_SIZE"])
    dist.init_process_group(backend, store=store(), rank=number, world_size=count)
    signal.signal(signal.SIGTERM, lost)
    yield
    highest(0)  # the launcher takes a process that is gone for a failure as long as another still works
    dist.destroy_process_group()  # not after a fault: NCCL might wait for a process that is gone


@contextlib.contextmanager
def silence() -> Iterator[None]:
    """Context in which all processes but the leading one print nothing."""
    if leads():
        yield
        return
    with contextlib.ExitStack() as stack:
        nowhere = stack.enter_context(open(os.devnull, "w", encoding="utf-8"))
        stack.enter_context(contextlib.redirect_stdout(nowhere))
        stack.enter_context(contextlib.redirect_stderr(nowhere))
        yield


def say(fault: str) -> None:
    """Prints a fault on the error stream, if this process is the first of all to say one.

    Not the leading process, as that may not meet it, may be slower and ended by then, or may be the one that is gone.
    """
    if size() > 1:
        signal.signal(
            signal.SIGTERM, signal.SIG_IGN
        )  # torchrun's, which may come at the same time as a lost connection
    try:
        first = size() == 1 or store().add("faults", 1) == 1
    except RuntimeError:  # the launcher is gone
        first = leads()
    if first:
        print(fault, file=sys.stderr if leads() else sys.__stderr__, flush=True)


@contextlib.contextmanager
def connected() -> Iterator[None]:
    """Context of what needs the others. Raises: Lost where one of them is gone."""
    try:
        yield
    except RuntimeError as error:
        raise Lost from error


def share(rows: int) -> slice:
    """This process's part of so many rows: in the order of the processes, of sizes that differ by one at most."""
    return slice(rows * rank() // size(), rows * (rank() + 1) // size())


def whole(mine: Tensor, rows: int) -> Tensor:
    """(rows, ...) what all processes computed, given this one's share; the gradient is that of its own rows alone."""
    if size() == 1:
        return mine
    own = share(rows)
    assert len(mine) == own.stop - own.start, (mine.shape, own, rows)
    told = torch.zeros(rows, *mine.shape[1:], dtype=mine.dtype, device=mine.device)
    told[own] = mine.detach()
    with connected():
        dist.all_reduce(told)
    return torch.cat([told[: own.start], mine, told[own.stop :]])


def gathered(mine: Sequence[ItemT]) -> list[ItemT]:
    """What all processes have, in their order; any objects."""
    if size() == 1:
        return list(mine)
    parts: list[Sequence[ItemT]] = [mine] * size()
    with connected():
        dist.all_gather_object(parts, mine)
    return [item for part in parts for item in part]


def highest(number: float) -> float:
    """The highest of the processes' numbers, for what all must decide alike; none goes on before all have asked."""
    if size() == 1:
        return number
    told = torch.tensor(number, dtype=torch.float64)
    with connected():
        dist.all_reduce(told, dist.ReduceOp.MAX)
    return told.item()


def add_gradients(weights: Iterable[Tensor]) -> None:
    """Replaces each weight's gradient by its sum over the processes, in place."""
    grads = [weight.grad for weight in weights if weight.grad is not None]
    if size() == 1 or not grads:
        return
    flat = torch.cat([grad.flatten() for grad in grads])
    with connected():
        dist.all_reduce(flat)
    for grad, total in zip(grads, torch.split(flat, [grad.numel() for grad in grads]), strict=True):
        grad.copy_(total.view_as(grad))


def neighbours() -> list[int]:
    """Process ids of the others on this machine."""
    told = gathered([(platform.node(), os.getpid())])
    return [pid for node, pid in told if node == platform.node() and pid != os.getpid()]


def alive(pids: Iterable[int]) -> bool:
    """Whether all of these processes are there."""
    try:
        for pid in pids:
            os.kill(pid, 0)
    except ProcessLookupError:
        return False
    return True


def launcher() -> list[str]:
    """The words that start a script as this run was started."""
    if size() == 1:
        return ["python"]
    machines = size() // int(os.environ["LOCAL_WORLD_SIZE"])
    several = ["--nnodes", str(machines), "--rdzv-endpoint", "HOST:29500"] if machines > 1 else []
    return ["torchrun", *several, "--nproc-per-node", os.environ["LOCAL_WORLD_SIZE"]]
