"""Engines: the hosts of actors.

An engine is a folder here, named as ``init(engine=...)`` names it. Its ``engine.py`` has a function
``start(**options)``, which returns a ``conveyor.runtime.protocol.Runtime``. There are two ways to make one:

- An engine whose actors are processes implements ``conveyor.driver.process_engine.ProcessEngine`` and starts
  a ``Driver`` with it: ``local`` and ``ray`` do so. What ``ProcessEngine`` takes for granted is said there:
  descriptors that are passed when a process is spawned, a pid, a wait status; and who gives that to
  processes of other machines.
- Any other engine implements all of ``Runtime``, as ``inline`` does.
"""
