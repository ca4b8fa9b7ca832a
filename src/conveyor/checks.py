"""Checks of settings and times that users give: they come before anything is done, and the error names the
setting."""

from __future__ import annotations

import math
import operator
import os
from collections.abc import Iterable, Mapping
from numbers import Real
from typing import Any

from conveyor import _core

#: Longer times are as good as none, and fit no clock in nanoseconds.
MOST_SECONDS = 1e9
#: Files hold a multiple of it.
MOST_BYTES = 1 << 50
_MOST_UNITS = 1_000_000


def check_timeout(value: Any, name: str = "timeout") -> float | None:
    """Return the limit of a wait, in seconds from 0. ``None``: none is given, so another setting may hold.

    -1, as in Ray's programs, and what is beyond all clocks are no limit: ``inf``. Any other negative number
    is a budget that is used up: 0.

    Raises:
        TypeError: it is neither a number nor ``None``.
        ValueError: it is not a number of seconds (NaN).
    """
    if value is None:
        return None
    if not _is_number(value):
        raise TypeError(f"{name} must be a number of seconds or None, not {value!r}")
    if value != value:
        raise ValueError(f"{name} must be a number of seconds or None, not nan")
    if value == -1 or value > MOST_SECONDS:  # an integer may fit no float
        return math.inf
    return float(value) if value > 0 else 0.0


def deadline_of(timeout: Any) -> float | None:
    """Return when a wait with that timeout is over, by ``_core.monotonic``; ``inf``: never. ``None``: no
    timeout is given. Raises as ``check_timeout``."""
    seconds = check_timeout(timeout)
    return None if seconds is None else _core.monotonic() + seconds


def left_until(deadline: float | None) -> float | None:
    """Return the time left until ``deadline``, as a timeout for another wait."""
    return None if deadline is None else max(deadline - _core.monotonic(), 0.0)


def in_seconds(seconds: float | None) -> str:
    """How a limit is told: ``"1.5 s"``, to three digits. What is left of one has many more."""
    if seconds is None:
        return "no time at all"
    return f"{seconds:.0f} s" if seconds >= 100 else f"{round(seconds, 6):.3g} s"


#: The least time that an execution can have: that of a budget that is used up.
_USED_UP = 1e-9


def deadline_in_words(seconds: float | None) -> str:
    """Describe the deadline that was given, for an error. A budget that was used up has no number of its
    own."""
    used_up = seconds is not None and seconds <= _USED_UP
    return "deadline (no time was left)" if used_up else f"deadline of {in_seconds(seconds)}"


def check_deadline(value: Any, name: str = "deadline") -> float | None:
    """Check the time that an execution has and return it; ``None``: it has no limit. The rest of a budget may
    be nothing, or less (-1 as well): such a deadline is missed at once.

    Raises:
        TypeError: it is neither a number nor ``None``.
        ValueError: it is not a number of seconds (NaN).
    """
    seconds = check_timeout(value, name)
    if seconds is None or value > MOST_SECONDS:
        return None
    return max(seconds, _USED_UP) if value > 0 else _USED_UP


def check_bytes(value: Any, name: str) -> int:
    """Return ``value``, which must be a number of bytes.

    Raises:
        TypeError: it is no number.
        ValueError: it is not from 1 to 2**50.
    """
    if not _is_number(value):
        raise TypeError(f"{name} must be a number of bytes, such as 2 << 30, not {value!r}")
    if not 1 <= value <= MOST_BYTES:
        raise ValueError(f"{name} must be a number of bytes from 1 to 2**50, not {value!r}")
    return int(value)


def bytes_of_environment(name: str) -> int | None:
    """Return the number of bytes that the environment variable ``name`` says, or ``None`` if it is unset or
    empty.

    Raises:
        ValueError: the variable is no number of bytes.
    """
    text = os.environ.get(name)
    if not text:
        return None
    return check_bytes(_number(name, text, "a number of bytes, such as 2000000000 or 2e9"), name)


def check_spin(text: str) -> float:
    """Return ``CONVEYOR_SPIN_US`` as microseconds.

    Raises:
        ValueError: it is no number, or less than 0.
    """
    wanted = "a number of microseconds from 0 to a million"
    microseconds = _number("CONVEYOR_SPIN_US", text, wanted)
    if not 0 <= microseconds <= 1e6:
        raise ValueError(f"CONVEYOR_SPIN_US must be {wanted}, not {text!r}")
    return microseconds


def spin_of_environment() -> float | None:
    """Return what the environment variable ``CONVEYOR_SPIN_US`` says, or ``None`` if it is unset or empty.
    Raises as ``check_spin``."""
    text = os.environ.get("CONVEYOR_SPIN_US")
    return check_spin(text) if text else None


def check_env_vars(value: Any, name: str = "env_vars") -> Mapping[str, str]:
    """Return ``value`` as environment variables of actors; ``None`` is none.

    Raises:
        TypeError: it is no dict of str to str.
        ValueError: no variable can have that name or value, or ours cannot.
    """
    if value is None:
        return {}
    if not isinstance(value, Mapping):
        raise TypeError(f"{name} must be a dict, not {type(value).__name__}")
    for key, text in value.items():
        if not isinstance(key, str) or not isinstance(text, str):
            raise TypeError(f"{name} must be a dict of str to str, but has {key!r}: {text!r}")
        if not key or "=" in key or "\0" in key + text or not _can_be_bytes(key + text):
            raise ValueError(
                f"{name} has {key!r}: {text!r}, which cannot be in an environment: a name is not empty "
                "and has no '=' in it, and neither a name nor a value has a null character or one that "
                "cannot be encoded"
            )
        if key == "CONVEYOR_SPIN_US" and text:
            check_spin(text)
    return value


def check_modules(value: Any, name: str) -> tuple[str, ...]:
    """Return ``value`` as names of modules; ``None`` is none.

    Raises:
        TypeError: it is no list or tuple of str.
        ValueError: no module can have one of these names.
    """
    if value is None:
        return ()
    if not isinstance(value, (list, tuple)) or not all(isinstance(one, str) for one in value):
        raise TypeError(f"{name} must be a list of names of modules, not {value!r}")
    for module in value:
        if not all(part.isidentifier() for part in module.split(".")):
            raise ValueError(f"{name} has {module!r}, which is no name that a module can have")
    return tuple(value)


def check_flag(value: Any, name: str) -> bool:
    """Return ``value``, which must be ``True`` or ``False``; ``TypeError`` otherwise."""
    if not isinstance(value, bool):
        raise TypeError(f"{name} must be True or False, not {value!r}")
    return value


def check_name(value: Any, name: str) -> str:
    """Return ``value``, which must be a name that other processes can read, and that messages can have on one
    line.

    Raises:
        TypeError: it is no str.
        ValueError: it cannot be encoded, or printed.
    """
    if not isinstance(value, str):
        raise TypeError(f"{name} must be a str, not {type(value).__name__}")
    if not _is_text(value):
        raise ValueError(f"{name} must be text that can be encoded as UTF-8, not {value!r}")
    if not value.isprintable():
        raise ValueError(
            f"{name} must have printable characters only (no line break, no tab), not {value!r}"
        )
    return str(value)  # of a subclass, too: others may not know it


def check_amount(value: Any, name: str) -> float | None:
    """Return ``value`` as an amount of something that a process gets; ``None`` if nobody says.

    Raises:
        TypeError: it is neither a number nor ``None``.
        ValueError: it is less than 0, or more than any machine has.
    """
    if value is None:
        return None
    if isinstance(value, bool) or not isinstance(value, (int, float)):
        raise TypeError(f"{name} must be a number, not {type(value).__name__}")
    if not 0 <= value <= _MOST_UNITS:
        raise ValueError(f"{name} must be a number from 0 to {_MOST_UNITS}, not {value!r}")
    return value


def check_gpus(value: Any, name: str) -> float | None:
    """Return ``value`` as a number of GPUs: a fraction below 1, or a whole number. Raises as
    ``check_amount``."""
    amount = check_amount(value, name)
    if amount is not None and amount > 1 and amount != int(amount):
        raise ValueError(f"{name} must be a whole number or a fraction below 1, not {value!r}")
    return amount


def check_count(value: Any, name: str, wanted: str, least: int, most: int | None = None) -> int:
    """Return ``value``, which must be an integer from ``least`` to ``most``; ``wanted`` says so in words.

    Raises:
        TypeError: it is no integer.
        ValueError: it is less, or more.
    """
    if isinstance(value, bool) or not isinstance(value, int):
        raise TypeError(f"{name} must be an integer, not {value!r}")
    if value < least or (most is not None and value > most):
        raise ValueError(f"{name} must be {wanted}, not {value}")
    return value


def check_shape(shape: Any) -> tuple[int, ...]:
    """The sizes of an array.

    Raises:
        TypeError: ``shape`` is neither an integer nor a sequence of them.
        ValueError: one of them is negative.
    """
    try:
        whole = isinstance(shape, Iterable) and not isinstance(shape, (str, bytes))
        sizes = tuple(map(operator.index, shape)) if whole else (operator.index(shape),)
    except TypeError:
        raise TypeError(
            f"shape must be an integer or a sequence of integers, not {shape!r}"
        ) from None
    if any(size < 0 for size in sizes):
        raise ValueError(f"shape must have no negative size, not {shape!r}")
    return sizes


def _is_number(value: Any) -> bool:
    usual = type(value) in (int, float)  # asked first: `Real` is slow to ask
    return usual or (isinstance(value, Real) and not isinstance(value, bool))


def _is_text(value: str) -> bool:
    try:
        value.encode()
    except UnicodeEncodeError:
        return False
    return True


def _can_be_bytes(value: str) -> bool:
    try:
        os.fsencode(value)  # which knows of bytes that are no text
    except UnicodeEncodeError:
        return False
    return True


def _number(name: str, text: str, wanted: str) -> float:
    try:
        return float(text)
    except ValueError:
        raise ValueError(f"{name} in the environment must be {wanted}, not {text!r}") from None
