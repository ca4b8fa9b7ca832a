"""Names that a user types: actors, references, and the start and end of a session.

Everything here is thin: it checks what it is given, and hands it to this process's runtime. The package has
the names.
"""

from __future__ import annotations

from conveyor.api import graphs
from conveyor.api.session import start_default
from conveyor.runtime import context

# `conveyor.init()` is optional: whatever first needs a runtime starts the default one.
context.set_default_start(start_default)
graphs.install()
