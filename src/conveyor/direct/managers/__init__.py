"""Transports of the user's own for direct objects: what is taken out of a value, and how it is moved.

``manager`` is what the user writes, ``registry`` knows them by name in every process, ``route`` keeps values
for others and fetches theirs. Where both ends take part ``sending`` answers who asks, ``receiving`` asks, and
``wire`` is what they say, and ``ended`` tells them of their threads' ends. ``hooks`` is about errors of
the user's methods.
"""
