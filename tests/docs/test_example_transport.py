"""The transport that the guide writes is one that others can begin with: it passes the checks."""

import re
import sys
import types
from pathlib import Path

import cloudpickle
import pytest

import conveyor
from conveyor import testing, transport

PAGE = Path(__file__).parents[2] / "docs" / "guide" / "transports.md"


@pytest.fixture(scope="module")
def squeezed():
    blocks = re.findall(r"^```python\n(.*?)^```", PAGE.read_text(), re.M | re.S)
    (code,) = [block for block in blocks if "class Squeezed(" in block]
    module = sys.modules["squeezed"] = types.ModuleType("squeezed")
    module.transport = transport
    exec(code.partition("with InputNode")[0], module.__dict__)
    cloudpickle.register_pickle_by_value(module)
    with conveyor.init():
        yield "squeezed"
    transport.unregister("squeezed")
    cloudpickle.unregister_pickle_by_value(module)
    del sys.modules["squeezed"]


@pytest.mark.parametrize("check", testing.transport_checks(), ids=str)
def test_it_passes_the_checks(squeezed, check):
    pytest.importorskip("torch")
    check.run(squeezed)
