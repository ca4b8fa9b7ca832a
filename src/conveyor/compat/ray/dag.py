"""``ray.dag``."""

from conveyor.dag import *  # noqa: F403
