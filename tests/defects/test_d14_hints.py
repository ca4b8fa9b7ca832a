"""Hints how tensors travel."""

import copy
import itertools
import pickle

import pytest
from defect_actors import single

from conveyor.dag import TransportHint
from conveyor.dag.hints import DEVICES, TRANSPORTS

pytestmark = pytest.mark.usefixtures("session")


@pytest.mark.parametrize(
    "copied",
    [copy.copy, copy.deepcopy, lambda hint: pickle.loads(pickle.dumps(hint))],
    ids=["copy", "deepcopy", "pickle"],
)
def test_d14_a_copy_of_a_hint_says_the_same(copied):
    """Elsewhere a deep copy of a hint about tensors forgets the device. Here a copy must keep
    everything that the hint says, whatever it is."""
    for transport, device, static, direct in itertools.product(
        TRANSPORTS, DEVICES, (False, True), (False, True)
    ):
        again = copied(TransportHint(transport, device, static, direct))
        assert (again.transport, again.device) == (transport, device)
        assert (again.static_shape, again.direct_return) == (static, direct)
        assert again == TransportHint(transport, device, static, direct)


@pytest.mark.parametrize("copied", [copy.copy, copy.deepcopy])
def test_d14_a_copy_of_a_hinted_node_is_planned_the_same(a, copied):
    """And a copy of a node must keep its hint: the plan follows it as it follows the original's."""
    with copied(single(a.take)).compile() as graph:
        assert "asked for by with_tensor_transport" not in graph.explain()
    hinted = single(a.take).with_tensor_transport("shm", device="cpu")
    with copied(hinted).compile() as graph, hinted.compile() as original:
        assert "asked for by with_tensor_transport" in graph.explain()
        numbers, originals = graph.get_id(), original.get_id()
        assert numbers != originals
        assert graph.explain().partition(":")[2] == original.explain().partition(":")[2]
