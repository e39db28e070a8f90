"""Work in parallel: in processes on this machine (joblib), or on a Ray cluster.

Outcomes arrive as soon as they exist, in any order. Ctrl-C interrupts only the main
process. It ends the others immediately and silently."""

import os
import signal
import threading
import warnings
from collections.abc import Callable, Generator, Iterator, Sequence
from concurrent.futures.process import BrokenProcessPool
from contextlib import closing, contextmanager
from functools import partial
from itertools import islice
from typing import TypeVar

import joblib

from fedbudget.errors import UserError

Item = TypeVar("Item")
Output = TypeVar("Output")


def check_jobs(jobs: int | None) -> None:
    if jobs is not None and jobs < 1:
        raise UserError(f"jobs must be at least 1, not {jobs}")


def unordered(
    work: Callable[[Item], Output], items: Sequence[Item], *, jobs: int | None
) -> Generator[tuple[Item, Output], None, None]:
    """Yield every item with its outcome. Closing the generator ends unfinished work.

    Args:
      work: must be picklable, as must items and outcomes.
      jobs: items in parallel; one per core by default. With 1, this process does the work.
    """
    if jobs == 1 or not items:
        yield from ((item, work(item)) for item in items)
        return
    # With batches, an outcome would wait for the others of its batch, and be lost with
    # them.
    processes = min(joblib.effective_n_jobs(jobs or -1), len(items))
    parallel = joblib.Parallel(processes, return_as="generator_unordered", batch_size=1)
    with _ignored_interrupts(), _quiet_tracker():
        numbered = parallel(
            joblib.delayed(_numbered)(work, index, item) for index, item in enumerate(items)
        )
    with warnings.catch_warnings(), closing(numbered):
        try:
            for index, outcome in numbered:
                yield items[index], outcome
        except BrokenProcessPool:
            raise ChildProcessError(
                "a process was killed, perhaps because memory ran out; finished runs are "
                "kept; use fewer jobs"
            ) from None
        finally:
            warnings.simplefilter("ignore")  # joblib warns if outcomes are left


def unordered_on_ray(
    work: Callable[[Item], Output],
    items: Sequence[Item],
    *,
    jobs: int | None,
    address: str | None,
) -> Generator[tuple[Item, Output], None, None]:
    """Yield every item with its outcome from a Ray cluster, with one core per item.

    If a process is lost, its item is processed again.

    Args:
      address: of the cluster; this machine by default.
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
        running = [start(*each) for each in islice(waiting, limit)]
        try:
            while running:
                [done], running = ray.wait(running, num_returns=1)
                running += [start(*each) for each in islice(waiting, 1)]
                index, outcome = ray.get(done)
                yield items[index], outcome
        finally:
            # The cluster may be shared: abandoned work must not continue.
            for task in running:
                ray.cancel(task, force=True)


def _numbered(work: Callable[[Item], Output], index: int, item: Item) -> tuple[int, Output]:
    return index, work(item)


@contextmanager
def _ignored_interrupts() -> Iterator[None]:
    """Ignore Ctrl-C. Processes started meanwhile inherit this for good.

    Only the main thread may change signals; other threads leave them as they are.
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
def _quiet_tracker() -> Iterator[None]:
    """Silence joblib's resource tracker, started meanwhile, about files that are gone."""
    before = os.environ.get("PYTHONWARNINGS")
    quiet = "ignore:resource_tracker"
    os.environ["PYTHONWARNINGS"] = f"{before},{quiet}" if before else quiet
    try:
        yield
    finally:
        if before is None:
            del os.environ["PYTHONWARNINGS"]
        else:
            os.environ["PYTHONWARNINGS"] = before
