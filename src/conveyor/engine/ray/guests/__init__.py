"""Actors that the program has started on Ray itself, and that take part in a session as its guests.

``hosts`` is the driver's side, ``guest`` the actor's, where a thread becomes the loop of an actor of the
session; ``turns`` has Ray's calls of it and the session's exclude each other. ``visitors`` are the processes
of one machine that came so, as its driver or its agent knows them.
"""
