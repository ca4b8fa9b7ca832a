"""``ray.experimental.collective``."""

from conveyor.experimental.collective import *  # noqa: F403
