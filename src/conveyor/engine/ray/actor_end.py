"""A session that an actor of Ray's has begun ends before that actor leaves.

Who leaves by ``ray.actor.exit_actor()`` or ``sys.exit`` waits in Ray, without end, for all calls that the
actor has made, and our processes are such calls. Ray asks nobody before it waits. But what is raised comes
through the functions that it runs for the actor's methods, and these are changed as long as the session
lasts. So is what ``exit_actor`` raises it with, since the method that has begun the session may leave, too.
"""

from __future__ import annotations

import functools
import inspect
import logging
import traceback
import types
from collections.abc import Callable
from typing import Any

from conveyor.engine.ray.guests.turns import calls_of_ray

_log = logging.getLogger("conveyor")


class ActorEnd:
    """The end of the actor that this process is."""

    def __init__(self, ray: Any, end: Callable[[], object]) -> None:
        """``end()`` ends the session, and does nothing the second time."""
        self._actor, self._end = ray.actor, end
        self._changed: list[tuple[types.CellType, Any]] = []
        self._names: dict[str, Any] = {}

    def begin(self) -> None:
        """From now on it does."""
        leaves = (SystemExit, self._actor.AsyncioActorExit)
        try:
            found = list(calls_of_ray())
        except Exception as error:  # another Ray than this was written for
            found = []
            _log.warning(
                "what this version of Ray runs an actor's methods with is not known (%s): end the session by "
                "conveyor.shutdown() before this actor leaves by sys.exit, or Ray waits for it without end",
                error,
            )
        for cell, _, method in found:
            self._changed.append((cell, method))
            cell.cell_contents = self._watched(method, leaves)
        for name in "raise_sys_exit_with_custom_error_message", "AsyncioActorExit":
            self._names[name] = raises = getattr(self._actor, name)
            setattr(self._actor, name, self._ended_before(raises))

    def cancel(self) -> None:
        """The session has ended: all is as it was."""
        while self._changed:
            cell, method = self._changed.pop()
            cell.cell_contents = method
        while self._names:
            name, raises = self._names.popitem()
            setattr(self._actor, name, raises)

    def _watched(
        self, method: Callable[..., Any], leaves: tuple[type[BaseException], ...]
    ) -> Callable[..., Any]:
        if inspect.isgeneratorfunction(method) or inspect.isasyncgenfunction(method):
            return method  # Ray takes them apart itself
        if inspect.iscoroutinefunction(method):

            @functools.wraps(method)
            async def run_later(*args: Any, **kwargs: Any) -> Any:
                try:
                    return await method(*args, **kwargs)
                except leaves:
                    self._before_it_leaves()
                    raise

            return run_later

        @functools.wraps(method)
        def run(*args: Any, **kwargs: Any) -> Any:
            try:
                return method(*args, **kwargs)
            except leaves:
                self._before_it_leaves()
                raise

        return run

    def _ended_before(self, raises: Callable[..., Any]) -> Callable[..., Any]:
        def raise_then(*args: Any, **kwargs: Any) -> Any:
            self._before_it_leaves()
            return raises(*args, **kwargs)

        return raise_then

    def _before_it_leaves(self) -> None:
        try:
            self._end()
        except Exception:  # it leaves all the same, and Ray waits for what there is still
            traceback.print_exc()
