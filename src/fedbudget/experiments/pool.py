"""Work in parallel processes: by joblib on this machine or a cluster of dask, or on a Ray cluster.

Outcomes come as soon as there are any, in any order. Ctrl-C is for this process alone: the others do not hear of it,
and are ended by this one, at once and without a word.
"""

import os
import signal
import threading
import warnings
from collections.abc import Callable, Generator, Iterator, Sequence
from concurrent.futures.process import BrokenProcessPool
from contextlib import ExitStack, closing, contextmanager
from functools import partial
from importlib import import_module
from itertools import islice
from typing import Any, TypeVar

import joblib

from fedbudget.errors import UserError

Item = TypeVar("Item")
Output = TypeVar("Output")


def check_backend(jobs: int | None, backend: str | None) -> None:
    """Refuses what `unordered` cannot do, and makes the backend known to joblib."""
    if jobs is not None and jobs < 1:
        raise UserError(f"jobs must be at least 1, not {jobs}")
    if backend is None:
        return
    if backend in ("sequential", "threading", "multiprocessing"):
        # They have one process, or one that forks with all its threads, and then Ctrl-C may not end it.
        raise UserError(
            f"backend {backend} is not made for runs in parallel; use loky or dask"
        )
    if backend == "ray":
        raise UserError("ray is an engine and not a backend: use `engine` ray")
    try:
        if backend == "dask":
            import_module("dask.distributed")
            return
        with joblib.parallel_config(backend=backend):
            pass
    except ImportError:
        package = "dask[distributed]" if backend == "dask" else backend
        raise UserError(
            f"backend {backend} is not installed; install it with: pip install '{package}'"
        ) from None
    except ValueError:
        raise UserError(f"unknown backend {backend!r}; use loky or dask") from None


def workers(jobs: int | None, items: int) -> int:
    """How many items are worked on at a time, of so many."""
    return min(int(joblib.effective_n_jobs(jobs or -1)), items)


def unordered(
    work: Callable[[Item], Output],
    items: Sequence[Item],
    *,
    jobs: int | None,
    backend: str | None,
) -> Generator[tuple[Item, Output], None, None]:
    """Gives every item with what the work makes of it; closed before its end, it ends what is under way.

    Args:
      work: can be sent to another process, as can items and outcomes.
      jobs: how many items at a time; as many as there are cores when not given. One is worked on in this process.
      backend: of joblib; the active one when not given.
    """
    if jobs == 1 or not items:
        yield from ((item, work(item)) for item in items)
        return
    with ExitStack() as stack:
        if backend == "dask":
            _start_dask(stack)
        if backend is not None:
            stack.enter_context(joblib.parallel_config(backend=backend))
        numbered = _streamed(work, items, workers(jobs, len(items)))
        stack.enter_context(_closed_quietly(numbered))
        try:
            yield from ((items[index], outcome) for index, outcome in numbered)
        except BrokenProcessPool:
            raise ChildProcessError(
                "a process was killed, perhaps because memory ran out; what is done is kept, and fewer jobs need less"
            ) from None


def unordered_on_ray(
    work: Callable[[Item], Output],
    items: Sequence[Item],
    *,
    jobs: int | None,
    address: str | None,
) -> Generator[tuple[Item, Output], None, None]:
    """The same on the machines of a Ray cluster, each item on a core; one whose process is lost is done again.

    Args:
      address: of the cluster; this machine when not given.
    """
    try:
        import ray

        from fedbudget.engines.ray import cluster
    except ImportError:
        raise UserError(
            "Ray is not installed; install it with: pip install 'fedbudget[ray]'"
        ) from None
    if not items:
        return
    with cluster(address) as cores:
        start = partial(ray.remote(num_cpus=1)(_numbered).remote, work)
        waiting = enumerate(items)
        limit = jobs or max(1, int(cores))
        under_way = [start(*each) for each in islice(waiting, limit)]
        try:
            while under_way:
                [done], under_way = ray.wait(under_way, num_returns=1)
                under_way += [start(*each) for each in islice(waiting, 1)]
                index, outcome = ray.get(done)
                yield items[index], outcome
        finally:
            for task in (
                under_way
            ):  # on a cluster that others use, what nobody waits for must not go on
                ray.cancel(task, force=True)


def _streamed(
    work: Callable[[Item], Output], items: Sequence[Item], jobs: int
) -> Iterator[tuple[int, Output]]:
    # One item at a time, because an outcome that waits for others of its batch would be lost with them.
    parallel = joblib.Parallel(n_jobs=jobs, return_as="generator_unordered", batch_size=1)
    with _deaf_to_interrupts(), _tracked_quietly():
        numbered: Iterator[tuple[int, Output]] = parallel(
            joblib.delayed(_numbered)(work, index, item) for index, item in enumerate(items)
        )
    return numbered


def _numbered(work: Callable[[Item], Output], index: int, item: Item) -> tuple[int, Output]:
    return index, work(item)


def _start_dask(stack: ExitStack) -> None:
    """Makes a client of the cluster at DASK_SCHEDULER_ADDRESS, or of one on this machine, unless there is a client."""
    from dask.distributed import Client, get_client

    try:
        get_client()
    except ValueError:
        with _deaf_to_interrupts():
            stack.enter_context(
                Client(threads_per_worker=1)
            )  # kernels must not be called from two threads at once


@contextmanager
def _deaf_to_interrupts() -> Iterator[None]:
    """Ctrl-C is ignored for this moment, and so for good by processes that are started in it, which inherit that.

    Signals are for a program's main thread to decide on; elsewhere they stay what they are.
    """
    if threading.current_thread() is not threading.main_thread():
        yield
        return
    before = signal.signal(signal.SIGINT, signal.SIG_IGN)
    try:
        yield
    finally:
        signal.signal(signal.SIGINT, before)


@contextmanager
def _tracked_quietly() -> Iterator[None]:
    """The process that clears up after the others is started in it, and does not complain of what is gone already."""
    before = os.environ.get("PYTHONWARNINGS")
    os.environ["PYTHONWARNINGS"] = ",".join(
        [*([before] if before else []), "ignore:resource_tracker"]
    )
    try:
        yield
    finally:
        if before is None:
            del os.environ["PYTHONWARNINGS"]
        else:
            os.environ["PYTHONWARNINGS"] = before


@contextmanager
def _closed_quietly(numbered: Any) -> Iterator[None]:
    """Closes what joblib gave, without its warning that not all of it was used."""
    with warnings.catch_warnings(), closing(numbered):
        try:
            yield
        finally:
            warnings.simplefilter("ignore")
