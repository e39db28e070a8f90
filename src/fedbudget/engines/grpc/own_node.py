"""The node that the aggregator is itself, where it holds data: the same work as any other's, in a thread of its own."""

import asyncio
import concurrent.futures
from collections.abc import Callable
from dataclasses import replace
from typing import Any

from fedbudget.engines.remote.messages import Answer, RoundRequest, Welcome
from fedbudget.engines.remote.worker import Worker
from fedbudget.resources.usage import NodeCosts


class OwnNode:
    """A worker in this process.

    Args:
      worker: what it does.
    """

    def __init__(self, worker: Worker) -> None:
        self.worker = worker
        self.trial: NodeCosts | None = None
        self.busy = False
        self._executor = concurrent.futures.ThreadPoolExecutor(1, "fedbudget-own-node")

    @property
    def nodes(self) -> int:
        return len(self.worker.node_data.rows)

    async def start(self, welcome: Welcome) -> None:
        """Takes the task, and makes a trial round."""
        loop = asyncio.get_running_loop()
        self.trial = await loop.run_in_executor(self._executor, self.worker.start, welcome)

    def ask(self, request: RoundRequest, done: Callable[[Answer | Exception], None]) -> None:
        """Makes a round; in the event loop's thread.

        Args:
          done: called there with the answer, or with what went wrong.
        """
        self.busy = True
        work = asyncio.get_running_loop().run_in_executor(self._executor, self.worker.answer, request)

        def finished(future: "asyncio.Future[Any]") -> None:
            self.busy = False
            if future.cancelled():
                return
            error = future.exception()
            if isinstance(error, Exception):
                done(error)
            else:
                answer: Answer = future.result()
                done(Answer(answer.report, replace(answer.costs, here=True)))

        work.add_done_callback(finished)

    def close(self) -> None:
        self._executor.shutdown(wait=False, cancel_futures=True)
