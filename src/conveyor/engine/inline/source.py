"""Where the refs of a graph in the driver's process come from."""

from __future__ import annotations

from typing import Any

from conveyor.engine.inline.account import InlineAccount
from conveyor.runtime.graph.results import Results
from conveyor.runtime.graph.source import describe_result, execution_of
from conveyor.runtime.refs.ref import Ref, cancelled_error
from conveyor.runtime.waiting.works import Blockers


class InlineSource:
    """The source of refs that are done when one gets them; see ``refs.ref.Source``."""

    #: Nothing is taken out of a channel.
    gate: Any = None

    def __init__(self, account: InlineAccount, results: Results) -> None:
        self.account = account
        self.cancel_with_await = account.config.cancel_with_await
        self.get_timeout = account.config.get_timeout
        self._results = results

    def wait_for(self, ref: Ref, timeout: float | None) -> Any:
        raise AssertionError("a ref that execute() has returned has its outcome")

    def blockers(self, ref: Ref, question: int) -> Blockers | None:
        return ()  # lines find cycles themselves

    def is_ready(self, ref: Ref) -> bool:
        return True

    def has_failed(self, ref: Ref) -> bool:
        return False  # one that has has its outcome

    def cancel(self, ref: Ref) -> bool:
        return False

    def stopped(self, ref: Ref, overdue: bool) -> BaseException:
        return cancelled_error(execution_of(self.account.name, ref))

    def describe(self, ref: Ref) -> str:
        return describe_result(self.account.name, self.account.plan, self._results, ref)

    def doing(self) -> str:
        return "everything runs in this process"
