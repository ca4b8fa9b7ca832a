"""``ray.experimental.channel``."""

from conveyor.experimental.channel import *  # noqa: F403
