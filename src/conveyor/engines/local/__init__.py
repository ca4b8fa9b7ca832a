"""The local engine: actors as processes of this machine, forked by a warm fork server.

``engine`` is what the driver starts; the fork server and the actors are ``server`` and ``child``. Nothing is
imported here, since the server needs nothing of the driver.
"""
