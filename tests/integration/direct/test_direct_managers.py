"""Transports of the user's own for values that stay with their actors."""

import fcntl
import gc
import itertools
import os
import signal
import subprocess
import sys
import threading
import time

import inside
import numpy as np
import pytest
from integration_helpers import WAIT, get, hold
from integration_managers import (
    DIES,
    FAILS_TO_EXTRACT,
    FAILS_TO_RECEIVE,
    FAILS_TO_SEND,
    KILLS,
    NEVER_SENDS,
    OTHER_SHAPE,
    REMOTE,
    TOO_FEW,
    Files,
    Sockets,
    Started,
    Stubborn,
)

import conveyor
import conveyor.compat.ray as ray
import conveyor.direct.listing as freeing
from conveyor.dag import InputNode
from conveyor.direct.managers.registry import route
from conveyor.direct.managers.transfers import readable
from conveyor.exceptions import (
    ActorDiedError,
    SerializationError,
    TaskError,
    TransportError,
    WaitTimeoutError,
)
from conveyor.experimental import (
    TensorTransportManager,
    register_tensor_transport,
    wait_tensor_freed,
)
from conveyor.testing import check_tensor_transport_manager

torch = pytest.importorskip("torch")

pytestmark = [pytest.mark.torch, pytest.mark.filterwarnings("ignore::UserWarning")]

PRELOAD = ["torch"]


class Thing:
    """Of a type that nobody knows."""

    def __init__(self, number):
        self.number = number
        self.shape = ()


@conveyor.remote
class Peer:
    def __init__(self):
        self.kept = None

    def tensor(self, mark=1.0, size=4):
        self.kept = torch.full((size,), float(mark))
        return self.kept

    def mixed(self):
        base = torch.arange(12.0).reshape(3, 4)
        array = np.arange(4.0)
        return {
            "views": [base, base[1], base.t()],
            "again": base,
            "arrays": [array, array],
            "empty": torch.empty(0, 3),
            "parameter": torch.nn.Parameter(torch.ones(2)),
            "things": [Thing(1)],
        }

    def two(self, mark):
        return torch.ones(2), torch.full((2,), float(mark))

    def items(self, count):
        for i in range(count):
            yield torch.full((2,), float(i))

    def none(self):
        return "nothing to move"

    def array(self, mark=1.0):
        self.kept = np.full(4, float(mark))
        return [self.kept, {"again": self.kept}]

    def things(self):
        return [Thing(1), Thing(2)]

    def read(self, value):
        return repr(value)

    def sum(self, value):
        return float(value.sum())

    def put(self, transport):
        self.kept = conveyor.put(torch.ones(3), tensor_transport=transport)
        return [self.kept]

    def drop(self):
        self.kept = None

    def counted(self, transport, what):
        found = getattr(route(transport).manager, what)
        return len(found) if isinstance(found, list) else found

    def once(self, transport, what, number):
        manager = route(transport).manager
        with manager.changed:
            assert manager.changed.wait_for(lambda: len(getattr(manager, what)) >= number, WAIT)
        return len(getattr(manager, what))

    def is_kept(self):
        return inside.kept_values()

    def register(self, name, manager):
        register_tensor_transport(name, ["cpu"], manager)

    def ask(self, other, transport):
        return get(other.tensor.options(tensor_transport=transport).remote(5))

    def wait_freed(self, timeout):
        wait_tensor_freed(self.kept, timeout)

    def wait_freed_by_a_thread(self, transport, timeout):
        """How long it takes, if what still has the value goes on when the wait has begun."""
        manager, looked = route(transport).manager, threading.Event()
        look = freeing._values_in

        def looking(storages):
            found = look(storages)
            looked.set()
            return found

        def go_on():
            assert looked.wait(timeout)
            manager.note(manager.aborted, "by hand")

        freeing._values_in = looking
        thread = threading.Thread(target=go_on)
        began = time.monotonic()
        try:
            thread.start()
            wait_tensor_freed(self.kept, timeout)
        finally:
            freeing._values_in = look
            thread.join()
        return time.monotonic() - began

    def hold(self, path):
        hold(path)

    def ping(self):
        return os.getpid()


@conveyor.remote
class AsyncPeer:
    async def tensor(self, number):
        return torch.full((2,), float(number))

    async def sum(self, value):
        return float(value.sum())


numbers = iter(range(10**6))


@pytest.fixture
def named(tmp_path):
    """Registers a manager by a name that nobody has."""

    def register(manager, devices=("cpu",), **options):
        manager = type(manager.__name__, (manager,), {"folder": str(tmp_path)})
        name = f"test{os.getpid()}-{next(numbers)}"
        register_tensor_transport(name, list(devices), manager, **options)
        return name

    return register


@pytest.fixture
def peers(session):
    made = [Peer.remote(), Peer.remote()]
    get([one.ping.remote() for one in made])
    return made


@pytest.fixture(params=[Files, Started, Sockets, Stubborn])
def any_name(peers, named, request):
    return named(request.param)


def freed(peer, name, number=1):
    gc.collect()
    return get(peer.once.remote(name, "freed", number))


# What goes well, with any manager. The actors lived before it was registered.


def test_a_value_goes_to_the_driver_and_to_an_actor(peers, any_name):
    maker, user = peers
    ref = maker.tensor.options(tensor_transport=any_name.upper()).remote(3)
    assert get(ref).tolist() == [3.0] * 4
    assert (ref.route(), ref.tensor_transport()) == (any_name, any_name)
    assert get(user.sum.remote(ref)) == 12.0
    assert get(user.sum.remote(value=ref)) == 12.0
    assert get(maker.sum.remote(ref)) == 12.0
    assert get(maker.counted.remote(any_name, "extracted")) == 1


def test_the_driver_is_the_producer(peers, any_name):
    ref = conveyor.put(torch.ones(5), tensor_transport=any_name)
    assert get(peers[0].sum.remote(ref)) == 5.0
    manager = route(any_name).manager
    del ref
    gc.collect()
    with manager.changed:
        assert manager.changed.wait_for(lambda: manager.freed, WAIT)


def test_an_actor_puts_and_others_read(peers, any_name):
    (inner,) = get(peers[0].put.remote(any_name))
    assert get(inner).tolist() == [1.0] * 3
    assert get(peers[1].sum.remote(inner)) == 3.0


def test_shared_memory_stays_shared(peers, any_name):
    value = get(peers[0].mixed.options(tensor_transport=any_name).remote())
    base, row, turned = value["views"]
    assert value["again"] is base
    base[1] = 7
    assert row.tolist() == [7.0] * 4
    assert turned[:, 1].tolist() == [7.0] * 4
    assert value["arrays"][0] is value["arrays"][1]
    assert value["empty"].shape == (0, 3)
    assert value["things"][0].number == 1
    assert isinstance(value["parameter"], torch.nn.Parameter)


def test_several_results_and_streams(peers, any_name):
    maker = peers[0]
    one, other = maker.two.options(tensor_transport=any_name, num_returns=2).remote(5)
    assert get(one).tolist() == [1.0, 1.0]
    assert get(other).tolist() == [5.0, 5.0]
    stream = maker.items.options(tensor_transport=any_name).remote(3)
    assert [item.tolist() for item in stream] == [[0.0, 0.0], [1.0, 1.0], [2.0, 2.0]]


def test_a_value_without_tensors_travels(peers, any_name):
    ref = peers[0].none.options(tensor_transport=any_name).remote()
    assert get(ref) == "nothing to move"
    assert ref.route() == "frame"
    assert get(peers[0].counted.remote(any_name, "extracted")) == 0


def test_it_is_collected_once_when_nobody_needs_it(peers, any_name):
    maker, user = peers
    ref = maker.tensor.options(tensor_transport=any_name).remote()
    assert get(user.sum.remote(ref)) == 4.0
    other = maker.tensor.options(tensor_transport=any_name).remote()
    get(other)
    assert get(maker.counted.remote(any_name, "freed")) == 0
    del ref, other
    assert freed(maker, any_name, 2) == 2
    assert get(maker.is_kept.remote()) == 0


def test_a_snapshot_stays_as_it_was(peers, any_name):
    maker = peers[0]
    ref = maker.tensor.options(tensor_transport=any_name, snapshot=True).remote()
    get(ref)
    get(maker.__ray_call__.remote(lambda self: self.kept.fill_(9).sum()))
    assert get(ref).tolist() == [1.0] * 4
    assert get(maker.sum.remote(ref)) == 4.0


def test_in_a_graph(peers, any_name):
    with InputNode() as inp:
        graph = peers[0].tensor.options(tensor_transport=any_name).bind(inp).compile()
    with graph:
        ref = graph.execute(6)
        assert get(ref).tolist() == [6.0] * 4
        assert ref.route() == any_name


def test_a_busy_producer_delays_nobody(peers, any_name, tmp_path):
    maker, user = peers
    refs = [maker.tensor.options(tensor_transport=any_name).remote(i) for i in range(3)]
    conveyor.wait(refs, num_returns=3, timeout=WAIT)
    held = maker.hold.remote(str(tmp_path / "go on"))
    assert [get(user.sum.remote(ref)) for ref in refs] == [0.0, 4.0, 8.0]
    assert [value[0].item() for value in get(refs)] == [0.0, 1.0, 2.0]
    assert not held.done()
    (tmp_path / "go on").touch()
    get(held)


def test_into_memory_that_is_there_and_parts(peers, any_name):
    ref = peers[0].tensor.options(tensor_transport=any_name).remote(3)
    target = torch.zeros(4)
    assert conveyor.get(ref, into=target, timeout=WAIT) is target
    assert target.tolist() == [3.0] * 4
    assert get(ref[1:3]).tolist() == [3.0] * 2


def test_who_made_it_waits_until_it_is_free(peers, any_name):
    maker = peers[0]
    ref = maker.tensor.options(tensor_transport=any_name).remote(3)
    get(ref)
    with pytest.raises(WaitTimeoutError):
        get(maker.wait_freed.remote(0.01))
    del ref
    get(maker.wait_freed.remote(WAIT))


def test_a_thread_that_sends_is_the_last_that_has_it(session, named):
    """Whoever waits for the memory is told, though no reference has ended."""
    maker, name = Peer.options(max_concurrency=2).remote(), named(Stubborn)
    ref = maker.tensor.options(tensor_transport=name).remote(NEVER_SENDS)
    conveyor.wait([ref], timeout=WAIT)
    with pytest.raises(WaitTimeoutError):
        ref.get(timeout=1)
    del ref
    gc.collect()
    assert get(maker.wait_freed_by_a_thread.remote(name, WAIT / 2)) < WAIT / 2


def test_async_actors(session, any_name):
    maker, user = AsyncPeer.remote(), AsyncPeer.remote()
    refs = [maker.tensor.options(tensor_transport=any_name).remote(i) for i in range(4)]
    assert get([user.sum.remote(ref) for ref in refs]) == [0.0, 2.0, 4.0, 6.0]


# What is moved


def test_arrays_of_numpy(peers, named):
    name = named(Sockets, data_type=np.ndarray)
    ref = peers[0].array.options(tensor_transport=name).remote(2)
    value = get(ref)
    assert ref.route() == name
    assert value[0].tolist() == [2.0] * 4
    assert value[1]["again"] is value[0]
    mixed = get(peers[0].mixed.options(tensor_transport=name).remote())
    assert mixed["arrays"][0] is mixed["arrays"][1]
    assert mixed["views"][0].shape == (3, 4)
    # Elsewhere arrays travel as ever.
    assert get(peers[0].array.remote(3))[0].tolist() == [3.0] * 4
    assert get(peers[0].read.remote(np.ones(2))) == "array([1., 1.])"


def test_a_class_of_the_user(peers, named):
    name = named(Sockets, data_type=Thing)
    ref = peers[0].things.options(tensor_transport=name).remote()
    assert [one.number for one in get(ref)] == [1, 2]
    assert ref.route() == name
    assert get(peers[0].read.remote([Thing(1)])).startswith("[<")


def test_an_actor_registers_for_all(peers):
    name = f"of-an-actor{os.getpid()}"
    get(peers[0].register.remote(name, Files))
    ref = peers[1].tensor.options(tensor_transport=name).remote()
    assert get(ref).tolist() == [1.0] * 4
    assert ref.route() == name
    late = Peer.remote()
    assert get(late.ask.remote(peers[0], name)).tolist() == [5.0] * 4
    with pytest.raises(ValueError, match="already"):
        register_tensor_transport(name, ["cpu"], Sockets)
    with pytest.raises(ValueError, match="already"):
        get(peers[1].register.remote(name, Sockets))


def test_the_communicator_is_told_who_takes_part(peers, named):
    seen = []

    class Asking(Files):
        def get_communicator_metadata(self, src_actor, dst_actor, backend):
            seen.append((src_actor, dst_actor, backend))
            return super().get_communicator_metadata(src_actor, dst_actor, backend)

    name = named(Asking)
    get(peers[0].tensor.options(tensor_transport=name).remote())
    ((src, dst, backend),) = seen
    assert src.name.startswith("Peer")
    assert dst is None
    assert backend == name


# What is refused


def test_names_and_classes_are_checked(named):
    name = named(Files)
    for again in (name, name.upper(), "nccl", "auto", "object_store"):
        with pytest.raises(ValueError, match="already"):
            register_tensor_transport(again, ["cpu"], Files)
    for manager in (int, Files(), "Files"):
        with pytest.raises(ValueError, match="TensorTransportManager"):
            register_tensor_transport("other", ["cpu"], manager)
    with pytest.raises(ValueError, match="lacks"):
        register_tensor_transport("other", ["cpu"], TensorTransportManager)
    for devices, kind, words in (
        ([], ValueError, "names no kind of device"),
        ("cpu", ValueError, "not the text"),
        (None, TypeError, "a list of kinds of device, not None"),
        (["cpu", 5], TypeError, "names no kind of device: 5"),
    ):
        with pytest.raises(kind, match=words):
            register_tensor_transport("devices", devices, Files)

    class Unsendable(Files):
        lock = threading.Lock()

    with pytest.raises(
        SerializationError, match="manager_class Unsendable cannot be sent: its part"
    ):
        register_tensor_transport("unsendable", ["cpu"], Unsendable)
    with pytest.raises(ValueError, match="taken out"):
        register_tensor_transport("other", ["cpu"], Files, list)
    with pytest.raises(TypeError, match="type"):
        register_tensor_transport("other", ["cpu"], Files, 3)
    with pytest.raises(ValueError, match="invalid tensor transport"):
        conveyor.method(tensor_transport="nobody")


def test_an_actor_that_has_it_not(peers, named):
    class Not(Files):
        def actor_has_tensor_transport(self, actor):
            return False

    name = named(Not)
    with pytest.raises(ValueError, match="does not have tensor transport"):
        peers[0].tensor.options(tensor_transport=name).remote()
    assert get(peers[0].counted.remote(name, "extracted")) == 0


def test_another_device(peers, named):
    maker = peers[0]
    for name, mark in ((named(Files, ["cuda"]), 1), (named(Files), REMOTE)):
        with pytest.raises(ValueError, match="does not support tensor transfer on device") as info:
            get(maker.tensor.options(tensor_transport=name).remote(mark))
        assert isinstance(info.value, TaskError)
        with pytest.raises(ValueError, match="does not support tensor transfer"):
            conveyor.put(torch.full((2,), float(mark)), tensor_transport=name)
        assert get(maker.is_kept.remote()) == 0
    # What was extracted before that was known is given back.
    assert get(maker.counted.remote(name, "freed")) == 1
    assert get(maker.tensor.options(tensor_transport=name).remote(1)).tolist() == [1.0] * 4


def test_a_failed_extract_keeps_nothing(peers, any_name):
    maker = peers[0]
    with pytest.raises(KeyError, match="no room"):
        get(maker.tensor.options(tensor_transport=any_name).remote(FAILS_TO_EXTRACT))
    both = maker.two.options(tensor_transport=any_name, num_returns=2).remote(FAILS_TO_EXTRACT)
    for ref in both:
        with pytest.raises(KeyError, match="no room"):
            get(ref)
    assert freed(maker, any_name) == 1  # the first of the two
    assert get(maker.is_kept.remote()) == 0


def test_rays_get_refuses_two_sided_ones(peers, named):
    for manager, refused in ((Sockets, True), (Files, False)):
        ref = peers[0].tensor.options(tensor_transport=named(manager)).remote()
        if refused:
            with pytest.raises(ValueError, match="get"):
                ray.get(ref, timeout=WAIT)
        assert ray.get(ref, timeout=WAIT, _use_object_store=True).tolist() == [1.0] * 4


def test_metadata_that_are_none(peers, named):
    class Nothing(Files):
        def extract_tensor_transport_metadata(self, obj_id, tensors):
            super().extract_tensor_transport_metadata(obj_id, tensors)

        def garbage_collect(self, obj_id, meta, tensors):
            self.note(self.freed, obj_id)

    class Unsendable(Files):
        def extract_tensor_transport_metadata(self, obj_id, tensors):
            meta = super().extract_tensor_transport_metadata(obj_id, tensors)
            meta.path = threading.Lock()
            return meta

        garbage_collect = Nothing.garbage_collect

    for manager, what in ((Nothing, "not a NoneType"), (Unsendable, "cannot be sent")):
        name = named(manager)
        with pytest.raises(TypeError, match=f"{manager.__name__}.*{what}"):
            get(peers[0].tensor.options(tensor_transport=name).remote())
        assert freed(peers[0], name) == 1
        assert get(peers[0].is_kept.remote()) == 0


def test_a_manager_that_cannot_be_made(peers, named):
    class Picky(Files):
        def __init__(self):
            raise OSError("no device")

    with pytest.raises(OSError, match="no device"):
        peers[0].tensor.options(tensor_transport=named(Picky)).remote()


def test_a_communicator_that_cannot_be_sent(peers, named):
    class Unsendable(Sockets):
        def get_communicator_metadata(self, src_actor, dst_actor, backend):
            return threading.Lock()

    ref = peers[0].tensor.options(tensor_transport=named(Unsendable)).remote()
    with pytest.raises(TransportError, match="cannot be sent"):
        get(ref)


def until_aborted(maker, name, attempt):
    """A second may be over before the sender has been asked: then another attempt is needed."""
    end = time.monotonic() + WAIT
    while not get(maker.counted.remote(name, "aborted")):
        assert time.monotonic() < end
        attempt()


def test_a_signal_ends_the_drivers_wait(peers, named):
    class Interrupted(BaseException):
        pass

    def handler(*_):
        raise Interrupted

    name = named(Sockets)
    maker = peers[0]
    ref = maker.tensor.options(tensor_transport=name).remote(NEVER_SENDS)
    conveyor.wait([ref], timeout=WAIT)

    def interrupted():
        signal.setitimer(signal.ITIMER_REAL, 1)
        with pytest.raises(Interrupted):
            get(ref)

    before = signal.signal(signal.SIGALRM, handler)
    try:
        until_aborted(maker, name, interrupted)
    finally:
        signal.setitimer(signal.ITIMER_REAL, 0)
        signal.signal(signal.SIGALRM, before)
    still_works(name, maker, peers[1])


def test_an_interrupted_start_of_a_transfer_leaves_no_descriptor_to_others(
    peers, named, monkeypatch, wait_until
):
    """Ctrl-C that comes while the thread is started is raised when that is there already."""
    name, begins = named(Sockets), threading.Thread.start

    def begin(thread):
        begins(thread)
        if thread.name == "conveyor-receiving":
            threads.append(thread)
            signal.pthread_kill(threading.main_thread().ident, signal.SIGINT)

    threads, goes_on, manager = [], threading.Event(), route(name).manager
    receives = manager.recv_multiple_tensors

    def receive(*args):
        assert goes_on.wait(WAIT)
        return receives(*args)

    ref = peers[0].tensor.options(tensor_transport=name).remote(NEVER_SENDS)
    conveyor.wait([ref], timeout=WAIT)
    before = set(os.listdir("/proc/self/fd"))
    with monkeypatch.context() as patch:
        patch.setattr(threading.Thread, "start", begin)
        patch.setattr(manager, "recv_multiple_tensors", receive)
        with pytest.raises(KeyboardInterrupt):
            get(ref)
    pipes = [os.pipe(), os.pipe()]  # with the numbers of what was closed
    try:
        goes_on.set()
        [thread] = threads
        thread.join(WAIT)
        assert not thread.is_alive()
        for reads, writes in pipes:
            os.set_blocking(reads, False)
            with pytest.raises(BlockingIOError):
                os.read(reads, 1)
            os.fstat(writes)
    finally:
        for one in itertools.chain(*pipes):
            os.close(one)
    # The session's other threads open some for a moment, when they look how a process has ended.
    wait_until(lambda: set(os.listdir("/proc/self/fd")) <= before)
    still_works(name, *peers)


# Transfers that fail: they alone


def still_works(name, maker, user):
    ref = maker.tensor.options(tensor_transport=name).remote(2)
    assert get(user.sum.remote(ref)) == 8.0
    assert get(ref).tolist() == [2.0] * 4


@pytest.mark.parametrize("mark", [TOO_FEW, FAILS_TO_RECEIVE])
def test_a_receiver_that_fails(peers, any_name, mark):
    maker, user = peers
    ref = maker.tensor.options(tensor_transport=any_name).remote(mark)
    what = "1 tensors were announced, and 0 came" if mark == TOO_FEW else "unplugged"
    for failing in (ref, user.sum.remote(ref)):
        with pytest.raises(TransportError, match=what) as info:
            get(failing)
        assert any_name in str(info.value)
        assert "Peer" in str(info.value)
    del info, failing
    still_works(any_name, maker, user)


def test_another_shape_than_announced(peers, named):
    name = named(Files)
    with pytest.raises(TransportError, match="announced"):
        get(peers[0].tensor.options(tensor_transport=name).remote(OTHER_SHAPE))


@pytest.mark.parametrize("manager", [Sockets, Stubborn])
def test_a_sender_that_fails(peers, named, manager):
    name = named(manager)
    maker, user = peers
    ref = maker.tensor.options(tensor_transport=name).remote(FAILS_TO_SEND)
    for failing in (ref, user.sum.remote(ref)):
        with pytest.raises(TransportError, match=r"could not send .*unplugged"):
            get(failing)
    still_works(name, maker, user)


@pytest.mark.parametrize("manager", [Started, Sockets])
def test_a_transfer_that_takes_too_long(peers, named, manager):
    name = named(manager)
    maker, user = peers
    ref = maker.tensor.options(tensor_transport=name).remote(NEVER_SENDS)
    conveyor.wait([ref], timeout=WAIT)

    def in_vain():
        with pytest.raises(WaitTimeoutError, match=name):
            conveyor.get(ref, timeout=1)

    in_vain()
    if manager is Sockets:
        until_aborted(maker, name, in_vain)
    still_works(name, maker, user)


@pytest.mark.parametrize("manager", [Sockets, Stubborn])
def test_a_producer_that_dies_while_it_sends(peers, named, manager):
    name = named(manager)
    maker, user = peers
    ref = maker.tensor.options(tensor_transport=name).remote(DIES)
    conveyor.wait([ref], timeout=WAIT)
    with pytest.raises(ActorDiedError, match="Peer"):
        get(user.sum.remote(ref))
    assert get(user.ping.remote())
    still_works(name, user, Peer.remote())


def test_a_producer_that_has_died(peers, any_name):
    maker, user = peers
    ref = maker.tensor.options(tensor_transport=any_name).remote()
    conveyor.wait([ref], timeout=WAIT)
    conveyor.kill(maker)
    for failing in (ref, user.sum.remote(ref)):
        with pytest.raises(ActorDiedError):
            get(failing)
    still_works(any_name, user, Peer.remote())


def test_a_producer_that_dies_while_its_value_is_fetched(peers, named):
    name = named(Started)
    ref = peers[0].tensor.options(tensor_transport=name).remote(NEVER_SENDS)
    reading = peers[1].sum.remote(ref)
    conveyor.wait([ref], timeout=WAIT)
    conveyor.kill(peers[0])
    with pytest.raises(ActorDiedError):
        get(reading)
    assert get(peers[1].ping.remote())


def test_a_consumer_that_dies_while_the_producer_sends(peers, named):
    name = named(Sockets)
    maker, user = peers
    ref = maker.tensor.options(tensor_transport=name).remote(KILLS)
    with pytest.raises(ActorDiedError):
        get(user.sum.remote(ref))
    assert get(maker.once.remote(name, "aborted", 1)) == 1
    del ref
    assert freed(maker, name) == 1
    still_works(name, maker, Peer.remote())


def test_transfers_that_overtake_each_other(peers, named):
    name = named(Sockets)
    maker = peers[0]
    users = [Peer.remote() for _ in Sockets.REORDERED]
    refs = [maker.tensor.options(tensor_transport=name).remote(i) for i in Sockets.REORDERED]
    sums = [user.sum.remote(ref) for user, ref in zip(users, refs, strict=True)]
    assert get(sums) == [4.0 * i for i in Sockets.REORDERED]


# Elsewhere than in a session of processes that lives


def test_a_forked_child_collects_nothing(peers, named, tmp_path):
    name = named(Files)
    ref = conveyor.put(torch.ones(3), tensor_transport=name)
    (lying,) = [entry.name for entry in os.scandir(tmp_path)]
    child = os.fork()
    if not child:
        del ref
        gc.collect()
        os._exit(0 if os.path.exists(tmp_path / lying) else 1)
    assert os.waitpid(child, 0)[1] == 0
    assert get(peers[0].sum.remote(ref)) == 3.0


PROGRAM = """
import os
import numpy as np
import conveyor
from conveyor.experimental import register_tensor_transport
from integration_managers import Sockets

class Mine(Sockets):
    sent_by_main = True

class Thing:
    def __init__(self, number):
        self.number = number

register_tensor_transport("Mine", ["cpu"], Mine, Thing)

conveyor.init(engine=os.environ["ENGINE"])

@conveyor.remote
class Actor:
    @conveyor.method(tensor_transport="mine")
    def make(self):
        return [Thing(1), np.ones(3)]
    def read(self, value):
        return value[0].number + value[1].sum()

maker, user = Actor.remote(), Actor.remote()
ref = maker.make.remote()
print(conveyor.get(user.read.remote(ref)), conveyor.get(ref)[0].number, ref.route())
"""


@pytest.mark.parametrize("engine", ["local", "inline"])
def test_classes_of_a_program_registered_before_its_session(tmp_path, engine):
    path = tmp_path / "program.py"
    path.write_text(PROGRAM)
    env = {**os.environ, "PYTHONPATH": os.path.dirname(__file__), "ENGINE": engine}
    done = subprocess.run(
        [sys.executable, path], env=env, capture_output=True, text=True, timeout=200, check=False
    )
    route = "mine" if engine == "local" else "here"
    assert done.stdout == f"4.0 1 {route}\n", done.stderr


# The checks that others run over theirs


@pytest.mark.parametrize("manager", [Files, Started, Sockets, Stubborn])
def test_the_checks_pass(session, manager, tmp_path):
    manager = type(manager.__name__, (manager,), {"folder": str(tmp_path)})
    check_tensor_transport_manager(manager)


def test_the_checks_pass_for_arrays(session):
    check_tensor_transport_manager(
        Sockets, data_type=np.ndarray, sample=lambda number: np.full(3, float(number))
    )


def test_the_checks_find_what_is_wrong(session, tmp_path):
    class Wrong(Files):
        folder = str(tmp_path)
        kept = None

        def recv_multiple_tensors(self, obj_id, meta, communicator, target_buffers=None):
            # The last one is given again.
            kept, self.kept = self.kept, super().recv_multiple_tensors(obj_id, meta, communicator)
            return kept or self.kept

    class Jammed(Files):
        folder = str(tmp_path)

        def garbage_collect(self, obj_id, meta, tensors):
            raise OSError("jammed")

    with pytest.raises(AssertionError, match="comes_to_many_at_once"):
        check_tensor_transport_manager(Wrong)
    with pytest.raises(AssertionError, match=r"fails 1 checks:\nlets_go: .*jammed"):
        check_tensor_transport_manager(Jammed)


def test_descriptors_beyond_those_of_select():
    ends, wakes = os.pipe()
    try:
        high = fcntl.fcntl(ends, fcntl.F_DUPFD, 1500)
    except OSError:
        os.close(ends), os.close(wakes)
        pytest.skip("this process may have no descriptor of that number")
    try:
        assert readable([high], 0) == []
        os.write(wakes, b".")
        assert readable([high, ends]) == [high, ends]
    finally:
        for one in (ends, wakes, high):
            os.close(one)
