"""Interpreting one actor's program of one graph."""

from __future__ import annotations

import inspect
from collections.abc import Callable
from typing import TYPE_CHECKING, Any

from conveyor import _core
from conveyor.channel import encode_error
from conveyor.exceptions import ArenaFullError, GraphError
from conveyor.plan import fill
from conveyor.plan.model import Argument, Call, Const, Recv, Reg, Send, Step, Task
from conveyor.runtime.layout import Assignment

if TYPE_CHECKING:
    from conveyor.runtime.worker import Worker

EMPTY = _core.EMPTY
ErrorFrame = _core.ErrorFrame

#: Executions after which a program lets others on the same actor have a turn.
_TURN = 16

#: A step's answers: go on, input is missing.
_GO, _STOP = True, False

StepFunction = Callable[[], bool]


class Program:
    """Runs the steps of its assignment, one execution after the other, as far as input is there.

    A failed step leaves an ``ErrorFrame`` in its registers; whoever needs one of those passes it on
    instead of running, so an error reaches the driver on the same path as a value.
    """

    def __init__(self, worker: Worker, assignment: Assignment, segment: _core.Segment) -> None:
        process = worker.process
        self._worker = worker
        self._inbox = process.inbox
        self._graph = assignment.graph
        self._actor_name = assignment.actor_name
        self.bit = assignment.bit
        self._execution = 0
        self._pc = 0
        self._suspended = False
        self._regs: list[Any] = [None] * assignment.program.registers
        self._blank = [None] * assignment.program.registers
        self._readers = {e.edge: e.open(process, segment) for e in assignment.reads}
        self._writers = {e.edge: e.open(process, segment) for e in assignment.writes}
        for writer in self._writers.values():
            writer.moved_refs = _MOVED_REFS
        self._tasks = assignment.tasks
        steps = assignment.program.steps
        self._steps = [self._step(step, steps[i + 1 :]) for i, step in enumerate(steps)]

    def advance(self) -> None:
        """Run until input is missing, or for a turn; then ask for another turn."""
        if self._suspended:
            return
        steps = self._steps
        count = len(steps)
        pc = self._pc
        for _ in range(_TURN):
            while pc < count:
                if not steps[pc]():
                    self._pc = pc
                    return
                pc += 1
                if self._waits_for_coroutine():
                    self._pc = pc
                    return
            pc = 0
            self._regs[:] = self._blank  # values live no longer than their execution
            self._execution += 1
        self._pc = 0
        self._worker.process.board.ring(self._inbox.slot, self.bit)

    def _waits_for_coroutine(self) -> bool:
        return self._suspended

    def _resume(self) -> None:
        self._suspended = False
        self.advance()

    # Steps, as closures: what can be decided once is decided here.

    def _step(self, step: Step, later: tuple[Step, ...]) -> StepFunction:
        if isinstance(step, Recv):
            return self._recv_spread(step) if step.spread is not None else self._recv(step)
        if isinstance(step, Call):
            return self._call(step)
        return self._send(step, last=all(step.reg not in self._uses(other) for other in later))

    def _uses(self, step: Step) -> set[int]:
        """The registers that ``step`` reads."""
        if isinstance(step, Send):
            return {step.reg}
        if isinstance(step, Call):
            used = _Watch(self._blank)
            for argument in _arguments(self._tasks[step.task]):
                _value(argument, used)
            return used.indexes
        return set()

    def _recv(self, step: Recv) -> StepFunction:
        receive = self._readers[step.edge].receive
        regs, reg = self._regs, step.reg
        assert reg is not None

        def recv() -> bool:
            try:
                value = receive()
            except Exception as error:
                regs[reg] = self._error(error, self._actor_name)
                return _GO
            if value is EMPTY:
                return _STOP
            regs[reg] = value
            return _GO

        return recv

    def _recv_spread(self, step: Recv) -> StepFunction:
        receive = self._readers[step.edge].receive
        regs = self._regs
        assert step.spread is not None
        places = [(i, reg) for i, reg in enumerate(step.spread) if reg is not None]

        def recv() -> bool:
            try:
                value = receive()
            except Exception as error:
                value = self._error(error, self._actor_name)
            if value is EMPTY:
                return _STOP
            if type(value) is ErrorFrame:
                for _, reg in places:
                    regs[reg] = value
            else:
                for i, reg in places:
                    regs[reg] = value[i]
            return _GO

        return recv

    def _send(self, step: Send, *, last: bool) -> StepFunction:
        writer = self._writers[step.edge]
        send, send_error = writer.send, writer.send_error
        regs, reg = self._regs, step.reg
        actor_name = self._actor_name

        def send_step() -> bool:
            value = regs[reg]
            if last:
                regs[reg] = None  # nobody else holds it now: a value made in place can move
            if type(value) is ErrorFrame:
                send_error(value.meta, self._execution)
                return _GO
            try:
                send(value, self._execution)
            except Exception as error:
                send_error(self._error(error, actor_name).meta, self._execution)
            return _GO

        return send_step

    def _call(self, step: Call) -> StepFunction:
        task = self._tasks[step.task]
        method, is_async = self._worker.method(task.method)
        regs, inbox, graph, number = self._regs, self._inbox, self._graph, step.task
        needed = [a.index for a in _arguments(task) if isinstance(a, Reg)]
        nested = any(not isinstance(a, (Reg, Const)) for a in _arguments(task))
        store = self._store(step, task)
        label = task.label

        def gather() -> tuple[list[Any], dict[str, Any]]:
            args = [_value(a, regs) for a in task.args]
            kwargs = {name: _value(a, regs) for name, a in task.kwargs}
            return args, kwargs

        def call() -> bool:
            for index in needed:
                if type(regs[index]) is ErrorFrame:
                    store(regs[index])
                    return _GO
            if nested:
                failed = _first_error(task, regs)
                if failed is not None:
                    store(failed)
                    return _GO
            inbox.running(graph, number, self._execution)
            try:
                args, kwargs = gather()
                store(method(*args, **kwargs))
            except SystemExit:
                raise  # the actor ends
            except BaseException as error:
                store(self._error(error, label))
            return _GO

        def call_one() -> bool:
            value = regs[only]
            if type(value) is ErrorFrame:
                store(value)
                return _GO
            inbox.running(graph, number, self._execution)
            try:
                store(method(value))
            except SystemExit:
                raise  # the actor ends
            except BaseException as error:
                store(self._error(error, label))
            return _GO

        def call_async() -> bool:
            failed = _first_error(task, regs)
            if failed is not None:
                store(failed)
                return _GO
            args, kwargs = gather()
            self._suspended = True
            self._worker.start_coroutine(method(*args, **kwargs), finish)
            return _GO

        def finish(value: Any, error: BaseException | None) -> None:
            store(value if error is None else self._error(error, label))
            self._resume()

        if is_async:
            return call_async
        if len(task.args) == 1 and not task.kwargs and isinstance(task.args[0], Reg):
            only = task.args[0].index
            return call_one
        return call

    def _store(self, step: Call, task: Task) -> Callable[[Any], None]:
        regs, out, outs = self._regs, step.out, step.outs
        if task.num_returns is None:
            if out is None:
                return lambda value: None

            def store(value: Any) -> None:
                regs[out] = value

            return store

        def store_elements(value: Any) -> None:
            if type(value) is not ErrorFrame and not (
                isinstance(value, (tuple, list)) and len(value) == task.num_returns
            ):
                value = self._error(
                    ValueError(
                        f"{task.label} has num_returns={task.num_returns} and must return a "
                        f"sequence of that length, but returned {_shape(value)}"
                    ),
                    task.label,
                )
            if out is not None:
                regs[out] = value
            for i, reg in enumerate(outs):
                if reg is not None:
                    regs[reg] = value if type(value) is ErrorFrame else value[i]

        return store_elements

    def _error(self, error: BaseException, label: str) -> Any:
        if isinstance(error, _core.ArenaFull):
            error = ArenaFullError(f"{label}: {error}")
        return ErrorFrame(encode_error(error, self._actor_name, label))


def _arguments(task: Task) -> list[Argument]:
    return [*task.args, *(a for _, a in task.kwargs)]


def _value(argument: Argument, regs: list[Any]) -> Any:
    if isinstance(argument, Reg):
        return regs[argument.index]
    if isinstance(argument, Const):
        return argument.value
    return fill(argument.template, regs)


class _Watch(list[Any]):
    """A register file that notes which registers are read, and the first error among them."""

    def __init__(self, regs: list[Any]) -> None:
        super().__init__(regs)
        self.indexes: set[int] = set()
        self.error: Any = None

    def __getitem__(self, index: Any) -> Any:
        value = super().__getitem__(index)
        self.indexes.add(index)
        if self.error is None and type(value) is ErrorFrame:
            self.error = value
        return value


def _first_error(task: Task, regs: list[Any]) -> Any:
    watch = _Watch(regs)
    for argument in _arguments(task):
        _value(argument, watch)
    return watch.error


def _shape(value: Any) -> str:
    if isinstance(value, (tuple, list)):
        return f"a {type(value).__name__} of {len(value)}"
    return f"a {type(value).__name__}"


def check_method(instance: Any, name: str) -> tuple[Callable[..., Any], bool]:
    """The bound method, and whether it is a coroutine function."""
    method = getattr(instance, name, None)
    if not callable(method):
        raise GraphError(f"{type(instance).__name__} has no method {name!r}")
    return method, inspect.iscoroutinefunction(method)


def _references_of_a_moved_value() -> int:
    # How many references a result has when its maker keeps none: measured, because it differs
    # between versions of Python. Same shape as send_step.
    regs: list[object] = [object()]

    def send_step() -> int:
        value = regs[0]
        regs[0] = None
        return _core.refcount(value)

    return send_step()


_MOVED_REFS = _references_of_a_moved_value()
