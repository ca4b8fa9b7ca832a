"""Ray's process-wide settings of compiled graphs."""

from __future__ import annotations

from dataclasses import dataclass

from conveyor.config import ConfigOptions


@dataclass
class DAGContext:
    """Ray's ``DAGContext``, for programs that set it. Other programs use ``Config``.

    submit_timeout, get_timeout: seconds; our settings of the same names for graphs that are compiled
        later with ``experimental_compile``. -1 or ``None``: no limit, which is the default here.
    max_inflight_executions: our ``depth``; ``None``: the default of ``Config``.
    overlap_gpu_communication: our ``overlap``; ``None``: the default of ``Config``.
    teardown_timeout, read_iteration_timeout, buffer_size_bytes, max_buffered_results: accepted, and nothing
        depends on them.
    """

    submit_timeout: float | None = None
    get_timeout: float | None = None
    teardown_timeout: float | None = None
    read_iteration_timeout: float | None = None
    buffer_size_bytes: int | None = None
    max_inflight_executions: int | None = None
    max_buffered_results: int | None = None
    overlap_gpu_communication: bool | None = None

    @staticmethod
    def get_current() -> DAGContext:
        """The settings of this process, to be changed in place."""
        return _current

    def options(self) -> ConfigOptions:
        """Return the settings that ``compile`` has too, by our names."""
        options: ConfigOptions = {}
        if self.submit_timeout is not None and self.submit_timeout >= 0:
            options["submit_timeout"] = self.submit_timeout
        if self.get_timeout is not None and self.get_timeout >= 0:
            options["get_timeout"] = self.get_timeout
        if self.max_inflight_executions is not None:
            options["depth"] = self.max_inflight_executions
        if self.overlap_gpu_communication is not None:
            options["overlap"] = self.overlap_gpu_communication
        return options


_current = DAGContext()
