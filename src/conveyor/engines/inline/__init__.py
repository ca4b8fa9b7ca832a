"""The inline engine: actors in the driver's own process, for the debugger.

``conveyor.init(engine="inline")``. The program stays as it is; what differs is where and when:

- A call runs at ``.remote()``, on the thread of its caller, and a graph at ``execute``; when they
  return, the refs are done. Breakpoints work, and a traceback leads through the caller. Ctrl-C and
  the debugger's "quit" reach the program as they are.
- Every value passes through a channel: what arrives is a copy, and what cannot be pickled fails as
  it does between processes. Values between tasks of one actor are passed as they are, as there.
- Errors are the same ``TaskError``s. Their ``__cause__`` is the exception itself with its live
  traceback, for ``pdb.post_mortem``.
- An actor with async methods has a thread of its own, with its event loop; all of it runs there. Its
  caller waits until the call is done or cannot go on by itself (it sleeps, or waits for I/O or for
  an event); then it goes on, and the ref is pending. What such an actor's coroutines call runs on
  threads of its own.
- Actors that wait for each other in a cycle are refused with ``DeadlockError``, and so is a thread
  that waits for a call which only it could run. A call to an actor that its caller is inside of runs
  when that actor comes free.

It cannot show what only processes have: globals and class attributes are shared by all actors,
``num_cpus``, ``num_gpus`` and ``env_vars`` have no effect, and a plain method that waits for a later
call of the same thread waits for ever (this is logged after 10 s). What ends a process from inside
(``os._exit``, a fatal signal) ends the program; ``sys.exit`` ends only the actor.
"""
