"""Ordinary calls of the actor's methods: taken from its mailboxes, run, answered."""

from __future__ import annotations

import threading
from collections.abc import Callable
from contextlib import contextmanager
from functools import partial
from typing import TYPE_CHECKING, Any

from conveyor import _core
from conveyor.calls.call import MISSED, START, STOP, Call, returned
from conveyor.calls.links import link_limits, reply_offset
from conveyor.calls.pending import take_result
from conveyor.calls.unsendable import blame_result
from conveyor.codec import borrows, encode_error
from conveyor.codec.faults import NotThere
from conveyor.direct.fetching import DeferredDecoding
from conveyor.exceptions import ActorStartError, ArenaFullError, SerializationError
from conveyor.later import LaterModule
from conveyor.runtime.process import RESULT_BIT, Process, RingEnd
from conveyor.runtime.shortage import Sending
from conveyor.runtime.stored_values import others_have_values
from conveyor.runtime.wait_graph import call_of
from conveyor.worker import forked
from conveyor.worker.instance import until

if TYPE_CHECKING:
    import asyncio
    from collections.abc import Iterator
    from concurrent.futures import ThreadPoolExecutor

    from conveyor.runtime.aio import Activity
    from conveyor.worker.coroutines import Coroutines
    from conveyor.worker.instance import Instance

# It brings asyncio, which is slow to import.
aio: Any = LaterModule("conveyor.runtime.aio")


def _references_of_a_local() -> int:
    value = object()
    return _core.refcount(value)


#: Reference count that a native function sees of a value that only a local variable of its caller refers to.
#: It is measured, because it differs between versions of Python.
_REFERENCES_OF_A_LOCAL = _references_of_a_local()


class EncodedArgument:
    """An encoded value, parts of which may have to be fetched from other processes. It holds the references
    in it. If :meth:`decode` raises, it may be tried again; once it has returned, it is not called again."""

    __slots__ = ("_refs", "_snapshot")

    def __init__(self, snapshot: _core.Snapshot) -> None:
        self._snapshot = snapshot
        self._refs = borrows.take(snapshot.meta) if snapshot.has_refs else ()

    def decode(self, fetches: bool = True) -> Any:
        """Return the value. With ``fetches`` false, an ``Unfetched`` stands for each value that has stayed
        with its owner."""
        return self._snapshot.decode(fetches)


class PendingFrame:
    """A call, or an input, that is decoded while an event loop runs on: its values are still being
    fetched."""

    __slots__ = ("_call", "_decoding", "_ready")

    def __init__(self, snapshot: _core.Snapshot) -> None:
        self._call = EncodedArgument(snapshot)
        self._decoding = DeferredDecoding()
        # Whether the values that were missing the last time are here.
        self._ready: Callable[[], bool] | None = None

    def decode(self) -> Any:
        """Return the call, or ``EMPTY`` while something is missing."""
        if self._ready is not None and not self._ready():
            return _core.EMPTY
        try:
            return self._decoding.of(self._call.decode)
        except NotThere as one:
            self._ready = one.ready
            return _core.EMPTY

    def unfetched(self) -> Any:
        """Return the call without its missing values."""
        return self._call.decode(fetches=False)

    def end(self) -> None:
        """Give up fetches under way: the call is decoded, or not needed any more."""
        self._decoding.end()


class Mailbox:
    """The actor's end of one caller's link."""

    def __init__(
        self,
        process: Process,
        segment: _core.Segment,
        caller: tuple[int, int],
        arena: _core.ArenaView,
        bit: int,
        one_by_one: bool = False,
    ) -> None:
        """``caller``: the slot and incarnation of the caller's process; ``arena``: the caller's.
        ``one_by_one``: the actor runs one method at a time."""
        self.bit = bit
        self.caller = caller
        there = RingEnd(*caller, RESULT_BIT)
        name = process.process_table.name(there.slot)
        self.reader = process.reader(
            segment, 0, 0, there, arena, f"calls from {name}", shared=False
        )
        self.reader.brings_work = one_by_one
        self.replies = process.writer(segment, reply_offset(segment), [there], "results of calls")
        self.replies.moved_refs = _REFERENCES_OF_A_LOCAL
        self.limits = link_limits(segment)
        # Coroutines of calls, and the number of cancellations that these have been checked for.
        self.running: dict[int, asyncio.Task[Any]] = {}
        self.cancellations = 0
        #: The next call, while parts of it are missing. Later calls wait for it.
        self.pending: PendingFrame | None = None
        #: Whether the caller is dead. The bit may be another caller's by then.
        self.hung_up = False
        # Calls that run side by side may answer side by side.
        self.reply_lock = threading.Lock()

    def receive(self, instance: Instance, waits: bool) -> Any:
        """Return the next call, or ``EMPTY``. The call's values that are stored elsewhere are fetched:
        ``waits`` says whether this waits for them, or returns ``EMPTY`` until they are here."""
        reader = self.reader
        if waits:
            return instance.receive(reader.receive)
        if self.pending is None:
            call = instance.receive(partial(reader.receive_undecoded, self._set_aside))
            if call is not self.pending:
                return call
        assert self.pending is not None
        read = self.pending.unfetched if self.limits.cancelled(reader.tag) else self.pending.decode
        try:
            call = instance.receive(read)
        except BaseException:
            self.drop_pending()
            raise
        if call is not _core.EMPTY:
            self.drop_pending()
        return call

    def _set_aside(self, snapshot: _core.Snapshot) -> PendingFrame:
        self.pending = PendingFrame(snapshot)
        return self.pending

    def drop_pending(self) -> None:
        """Forget the call that was being fetched: it is here, or not needed any more."""
        pending, self.pending = self.pending, None
        if pending is not None:
            pending.end()

    def reply_error(self, call_id: int, meta: bytes) -> None:
        with self.reply_lock:
            self.replies.send_error(meta, call_id)


EMPTY = _core.EMPTY

#: Name of a call whose arguments, and so its method's name, could not be read.
_ARGUMENTS = "arguments"

#: Calls served from one mailbox before others have a turn.
_BATCH = 16


class Calls:
    """The calls of one actor, from all of its mailboxes."""

    def __init__(
        self,
        process: Process,
        instance: Instance,
        started: Callable[[], object],
        stop: Callable[[], object],
        leave: Callable[[SystemExit, str, int], object],
    ) -> None:
        """``started`` is called when the constructor has run, before any call. ``stop`` is called when the
        last call has come. ``leave`` is called on the thread of a method that leaves by ``sys.exit``, with
        the method's name and its call."""
        self._process = process
        self._inbox = process.inbox
        self._instance = instance
        #: Carries out the driver's orders, which come before queued calls: one may be the end.
        self.serve_orders: Callable[[], object] = lambda: None
        self._started = started
        self._stop = stop
        self._leave = leave
        self._ending = self._stopping = False
        #: Whether the actor runs one method at a time, on its main thread.
        self.one_by_one = False
        self._mailboxes: list[Mailbox] = []
        # Calls that have overtaken the constructor's, which comes over another link.
        self._early: list[tuple[Mailbox, int, Call]] = []
        #: Called for each failed call, before its caller hears of the failure: with the method's name, and
        #: the error, or what has happened in words.
        self.on_failure: Callable[[str, BaseException | str], object] = lambda *_: None
        # If calls run one by one, the last one that has begun: its mailbox, and its number.
        self._begun: tuple[Mailbox, int] | None = None
        self._running = 0  # in threads and coroutines
        self._running_lock = threading.Lock()
        #: Where calls run, if not one by one in the main thread.
        self.coroutines: Coroutines | None = None
        self.pool: ThreadPoolExecutor | None = None
        self._has_threads = False

    def open(
        self, segment: _core.Segment, caller: tuple[int, int], arena: _core.ArenaView, bit: int
    ) -> Callable[[], None]:
        """Take calls from another caller. Return the function to call when the bit is rung."""
        mailbox = Mailbox(self._process, segment, caller, arena, bit, self.one_by_one)
        self._mailboxes.append(mailbox)
        # Frames may have come before the handler was there.
        self._process.process_table.notify(self._process.slot, bit)
        return lambda: self._serve(mailbox)

    def hang_up(self, bit: int) -> None:
        """Do the calls of a caller that is dead, then let go of its mailbox."""
        mailbox = next(m for m in self._mailboxes if m.bit == bit and not m.hung_up)
        mailbox.hung_up = True
        self._serve_last(mailbox)

    def _serve_last(self, mailbox: Mailbox) -> None:
        """Do the calls of a dead caller; calls with missing values are done later."""
        while not (self._ending or mailbox.reader.empty) and mailbox.pending is None:
            self._serve(mailbox)
        if mailbox.pending is not None:
            return
        self._mailboxes.remove(mailbox)
        self._instance.caller_gone(mailbox.caller[0])
        self._process.sources.look()  # the call that was begun last has the mailbox still
        if not self._instance.started:
            # Most likely it was the one that should have sent the constructor's call.
            name = self._instance.name
            gone = ActorStartError(f"{name} has not been started, and a caller has died")
            for waiting, call_id, call in self._early:
                self._reply_error(waiting, call_id, gone, call[0])
            self._early.clear()

    def end(self) -> None:
        """Begin nothing more."""
        self._ending = True

    def close(self) -> None:
        """Give up the values that calls still wait for: the actor ends."""
        for mailbox in self._mailboxes:
            mailbox.drop_pending()

    def look_again(self) -> None:
        """Serve the mailboxes whose calls wait for arguments: these may have come."""
        for mailbox in [one for one in self._mailboxes if one.pending is not None]:
            self._serve(mailbox)
            # An order that was served meanwhile may have let go of it.
            if mailbox.hung_up and mailbox in self._mailboxes:
                self._serve_last(mailbox)

    def takes(self, bit: int) -> bool:
        """Return whether calls come with that bit."""
        return any(mailbox.bit == bit for mailbox in self._mailboxes)

    def quiet(self) -> bool:
        """Return whether an orderly stop may end the process: nothing is queued, nothing runs, and nobody may
        ask for more of a stream or for a stored value. If not, the doorbell rings when that may have
        changed."""
        self._stopping = True
        if any(m.pending is None and not m.reader.empty for m in self._mailboxes):
            self._process.notify()
            return False
        if self._running or any(m.pending is not None for m in self._mailboxes):
            return False
        process = self._process
        if process.releasing.started and others_have_values(process.process_table, process.slot):
            return False
        return not self._instance.has_streams

    def _count(self, change: int) -> None:
        with self._running_lock:
            self._running += change
        self._inbox.count_concurrent(change)

    def _serve(self, mailbox: Mailbox) -> None:
        reader, limits = mailbox.reader, mailbox.limits
        if mailbox.running and limits.cancellations != mailbox.cancellations:
            self._cancel_running(mailbox)
        for i in range(_BATCH):
            if i:
                self.serve_orders()
            if self._ending:
                return
            try:
                # A wait on the event loop's thread would stop all of its coroutines.
                call = mailbox.receive(self._instance, waits=self.coroutines is None)
            except SystemExit:  # it ends the actor, as that of a method does
                first = reader.tag == 0 and not self._instance.started
                self._inbox.running_call("__init__" if first else _ARGUMENTS, reader.tag)
                raise
            except Exception as error:  # the call is out of the ring: this is its answer
                if reader.tag == 0 and not self._instance.started:
                    # It was the constructor's, which is the first that its sender sends: whoever waits
                    # for the actor to be started would wait for ever.
                    self._instance.fail(error)
                    self._answer_start(mailbox, 0)
                else:
                    self._reply_error(mailbox, reader.tag, error, "call", ran=False)
                continue
            if call is EMPTY:
                return
            call_id = reader.tag
            if limits.cancelled(call_id):
                self.on_failure(call[0], "was cancelled")
                mailbox.reply_error(call_id, _core.CANCELLED)
            elif self._instance.started:
                self._call(mailbox, call_id, call)
            elif call[4] == START:
                self._start(mailbox, call_id, *call[1], **(call[2] or {}))
            else:
                self._early.append((mailbox, call_id, call))
        self._process.process_table.notify(self._process.slot, mailbox.bit)

    def _start(
        self, mailbox: Mailbox, call_id: int, cls: Any, /, *args: Any, **kwargs: Any
    ) -> None:
        self._process.inbox.running_call("__init__", call_id)
        self._instance.start(cls, args, kwargs)
        self._came_back("__init__")
        self._answer_start(mailbox, call_id)

    def _answer_start(self, mailbox: Mailbox, call_id: int) -> None:
        instance = self._instance
        if instance.error is not None:
            mailbox.reply_error(call_id, instance.error)
        else:
            mailbox.replies.send(None, call_id)
        self._started()
        _core.Arena.note_given(0)  # that is not known any more
        early, self._early = self._early, []
        for waiting, number, call in early:
            self._call(waiting, number, call)

    def _answer_stop(self, mailbox: Mailbox, call_id: int) -> None:
        """Answer a stop. Nobody gets the answer: a constructor's error that nobody has got either is logged
        with it."""
        instance = self._instance
        if instance.error is not None and not instance.error_reported:
            mailbox.reply_error(call_id, instance.error)
        else:
            mailbox.replies.send(None, call_id)

    def _call(self, mailbox: Mailbox, call_id: int, call: Call) -> None:
        name, _, _, _, what = call
        if what == STOP:
            self._stop()
            self._answer_stop(mailbox, call_id)
            return
        if self._instance.error is not None:
            self._instance.error_reported = True
            mailbox.reply_error(call_id, self._instance.error)
            return
        if what == MISSED:
            self.on_failure(name, call[1][0])
            mailbox.reply_error(call_id, _core.CANCELLED)
            return
        try:
            function, is_async = self._instance.find(call)
        except Exception as error:
            self._reply_error(mailbox, call_id, error, name, ran=False)
            return
        if self.coroutines is not None and is_async:
            coroutines = self.coroutines
            self._count(1)
            does = coroutines.new_call(mailbox.caller, call_id, self._instance.name, name)
            mailbox.running[call_id] = coroutines.start_call(
                self._call_async(
                    coroutines, does, mailbox, call_id, call, function, mailbox.reader.given
                ),
                lambda task: self._ended(mailbox, call_id, task),
                does,
            )
        elif self.pool is not None:
            self._submit(mailbox, call_id, call, function)
        else:
            self._begun = mailbox, call_id
            self._process.inbox.running_call(name, call_id)
            self._call_now(mailbox, call_id, call, function)

    def until(self) -> int:
        """Return when the running call is over at the latest; see ``instance.until``."""
        if self._begun is None:
            return 0
        mailbox, call_id = self._begun
        return until(mailbox.limits, call_id)

    def _call_now(
        self, mailbox: Mailbox, call_id: int, call: Call, function: Callable[..., Any]
    ) -> None:
        name, args, kwargs, _, _ = call
        try:
            results = [function(*args, **kwargs) if kwargs else function(*args)]
        except SystemExit:
            raise
        except BaseException as error:
            self._reply_error(mailbox, call_id, error, name)
        else:
            if not self._reply(mailbox, call_id, call, results):
                with self._late_reply(mailbox, call_id, call, results) as sending:
                    self._process.shortage.finish(sending)

    def _submit(
        self, mailbox: Mailbox, call_id: int, call: Call, function: Callable[..., Any]
    ) -> None:
        assert self.pool is not None
        self._count(1)
        # If no thread can be started, the call has been queued all the same: for the threads that there are,
        # or, if there are none, for the first one, when the call has been answered already.
        unanswered = [call_id]
        try:
            given = mailbox.reader.given
            self.pool.submit(self._call_pooled, unanswered, mailbox, call_id, call, function, given)
        except RuntimeError as error:
            if not self._has_threads and _taken(unanswered):
                self._count(-1)
                self._reply_error(mailbox, call_id, error, call[0])

    def _call_pooled(
        self,
        unanswered: list[int],
        mailbox: Mailbox,
        call_id: int,
        call: Call,
        function: Callable[..., Any],
        given: int,
    ) -> None:
        self._has_threads = True
        if not _taken(unanswered):
            return
        _core.Arena.note_given(given)
        try:
            if self._ending:
                return
            if mailbox.limits.cancelled(call_id):
                mailbox.reply_error(call_id, _core.CANCELLED)
                return
            self._process.inbox.running_call(call[0], call_id)
            work = call_of(*mailbox.caller, call_id)
            with self._process.wait_registry.running(f"{self._instance.name}.{call[0]}", work):
                self._call_now(mailbox, call_id, call, function)
        except SystemExit as error:  # it would end nothing but this thread
            if self._inbox.inherited:
                forked.leave(error)
            self._leave(error, call[0], call_id)
        finally:
            self._count(-1)
            self._process.notify()

    async def _call_async(
        self,
        coroutines: Coroutines,
        does: Activity,
        mailbox: Mailbox,
        call_id: int,
        call: Call,
        function: Callable[..., Any],
        given: int,
    ) -> None:
        name, args, kwargs, _, _ = call
        try:
            async with coroutines.slots:
                coroutines.begin_call(does)
                self._process.inbox.running_call(name, call_id)
                results = [await function(*args, **(kwargs or {}))]
        except SystemExit:
            coroutines.leave(lambda: self._process.inbox.running_call(name, call_id))
            raise
        except BaseException as error:
            if coroutines.exiting:
                raise
            self._reply_error(mailbox, call_id, error, name)
        else:
            try:
                with _given(given):
                    sent = self._reply(mailbox, call_id, call, results)
                if not sent:
                    with self._late_reply(mailbox, call_id, call, results, given) as sending:
                        while not sending.try_once():
                            await aio.wait_until(sending.ready, lambda _: sending.causes())
            except SystemExit:
                coroutines.leave(lambda: self._process.inbox.running_call(name, call_id))
                raise
        finally:
            self._count(-1)

    def _ended(self, mailbox: Mailbox, call_id: int, task: asyncio.Task[Any]) -> None:
        mailbox.running.pop(call_id, None)
        assert self.coroutines is not None
        # Before its first step, or it would have answered itself; or because the actor ends.
        if task.cancelled() and not self.coroutines.exiting:
            self._count(-1)
            mailbox.reply_error(call_id, _core.CANCELLED)
        if self._stopping:
            self._process.notify()

    def _cancel_running(self, mailbox: Mailbox) -> None:
        # Before the look: a cancellation that comes meanwhile is looked for next time.
        mailbox.cancellations = mailbox.limits.cancellations
        for call_id in [
            call_id for call_id in mailbox.running if mailbox.limits.cancelled(call_id)
        ]:
            mailbox.running.pop(call_id).cancel()

    def _came_back(self, name: str) -> None:
        """End a forked child here: user code has returned, or raised, and the answer is the parent's."""
        if self._inbox.inherited:
            _core.end_forked_child(f"{self._instance.name}.{name}")

    def _reply(self, mailbox: Mailbox, call_id: int, call: Call, results: list[Any]) -> bool:
        """Answer the call. Return False if there is no memory; the result is in ``results`` again then."""
        result = results.pop()  # the only reference of ours: a value that was made in place moves
        name, _, _, result_spec, what = call
        self._came_back(name)
        try:
            if result_spec != 1:
                result = returned(result, result_spec, what, f"{self._instance.name}.{name}")
            try:
                with mailbox.reply_lock:
                    mailbox.replies.send(result, call_id)
            except ArenaFullError:
                results.append(result)
                return False
        except SerializationError as error:
            blamed = blame_result(error, self._instance.name, call, result)
            self._reply_error(mailbox, call_id, blamed, name)
        except SystemExit:
            raise
        except BaseException as error:  # of iterating over several results
            self._reply_error(mailbox, call_id, error, name)
        return True

    @contextmanager
    def _late_reply(
        self,
        mailbox: Mailbox,
        call_id: int,
        call: Call,
        results: list[Any],
        given: int | None = None,
    ) -> Iterator[Sending]:
        """Have the body answer the call as soon as there is memory. ``given``: bytes of the call's arguments,
        if this thread runs others as well."""
        process_table, name = self._process.process_table, call[0]

        def send() -> None:
            with mailbox.reply_lock:
                if given is None:
                    mailbox.replies.send(results[0], call_id)
                else:
                    with _given(given):
                        mailbox.replies.send(results[0], call_id)

        def ends() -> int:
            return -1 if process_table.gone(*mailbox.caller) else until(mailbox.limits, call_id)

        shortage = self._process.shortage
        try:
            if self.pool is not None or self.coroutines is not None:
                results[:] = take_result(results[0])
            with Sending(send, lambda: shortage.result(lambda: None, ends)) as sending:
                yield sending
        except SystemExit:
            raise
        except BaseException as error:
            if self.coroutines is not None and self.coroutines.exiting:
                raise
            # Its traceback refers to frames that have the result.
            self._reply_error(mailbox, call_id, error.with_traceback(None), name)

    def _reply_error(
        self, mailbox: Mailbox, call_id: int, error: BaseException, name: str, ran: bool = True
    ) -> None:
        self._came_back(name)
        self.on_failure(name, error)
        own = self._instance.name
        mailbox.reply_error(call_id, encode_error(error, own, f"{own}.{name}", begun=ran))


@contextmanager
def _given(bytes: int) -> Iterator[None]:
    """Have the body send the result of a coroutine whose arguments had so many bytes."""
    _core.Arena.note_given(bytes)
    try:
        yield
    finally:
        _core.Arena.note_given(0)


def _taken(unanswered: list[int]) -> bool:
    """Return True to the first caller, which answers the call."""
    try:
        unanswered.pop()
    except IndexError:
        return False
    return True
