"""TensorDicts that stay on their actor: rollouts, as reinforcement learning passes them on."""

import pytest
from integration_helpers import get

import conveyor
from conveyor.experimental import wait_tensor_freed

torch = pytest.importorskip("torch")
tensordict = pytest.importorskip("tensordict")

PRELOAD = ["torch", "tensordict"]
pytestmark = [pytest.mark.torch, pytest.mark.filterwarnings("ignore:a value is being passed back")]

SHAPE = (4, 5000)


def rollout(scale=1.0):
    rows, columns = SHAPE
    return tensordict.TensorDict(
        {
            "observation": scale * torch.arange(rows * columns).reshape(rows, columns),
            "next": tensordict.TensorDict(
                {"reward": torch.full(SHAPE, 2.0 * scale)}, batch_size=SHAPE
            ),
        },
        batch_size=SHAPE,
    )


@conveyor.remote
class Sampler:
    @conveyor.method(tensor_transport="auto")
    def sample(self):
        self.kept = rollout()
        return self.kept

    def add(self, amount):
        wait_tensor_freed(self.kept["observation"], timeout=30)
        self.kept["next", "reward"] += amount

    def is_own(self, value):
        return value["observation"].data_ptr() == self.kept["observation"].data_ptr()


@conveyor.remote
class Learner:
    def totals(self, value):
        assert type(value) is tensordict.TensorDict
        assert value.batch_size == torch.Size(SHAPE)
        return value["observation"].sum().item(), value["next", "reward"].sum().item()

    def totals_of(self, batch):
        return [self.totals(conveyor.get(ref)) for ref in batch["refs"]]


def totals(value):
    return value["observation"].sum().item(), value["next", "reward"].sum().item()


@pytest.fixture(scope="module")
def sampler(session):
    made = Sampler.remote()
    yield made
    conveyor.kill(made)


@pytest.fixture(scope="module")
def learner(session):
    made = Learner.remote()
    yield made
    conveyor.kill(made)


def test_it_stays_and_comes_as_what_it_was(sampler, learner):
    ref = sampler.sample.remote()
    got = get(ref)
    assert (got == rollout()).all()
    assert get(learner.totals.remote(ref)) == totals(rollout())
    assert get(learner.totals_of.remote({"refs": [ref, ref]})) == [totals(rollout())] * 2
    assert get(sampler.is_own.remote(ref))
    [kept] = [one for one in conveyor.objects() if one.id == ref.value_id()]
    assert kept.nbytes == sum(one.nbytes for one in rollout().values(True, True))


def test_its_memory_may_be_written_to_when_all_have_let_go(sampler, learner):
    ref = sampler.sample.remote()
    assert get(learner.totals.remote(ref)) == totals(rollout())
    adding = sampler.add.remote(1.0)
    assert not conveyor.wait([adding], timeout=0.05)[0]
    del ref
    get(adding)


def test_it_is_put_and_received_into_another(sampler, learner):
    ref = conveyor.put(rollout(3.0), tensor_transport="auto")
    assert get(learner.totals.remote(ref)) == totals(rollout(3.0))
    target = rollout(0.0)
    got = conveyor.get(sampler.sample.remote(), into=target, timeout=60)
    assert (target == rollout()).all()
    assert got["observation"] is target["observation"]
    assert got["next", "reward"] is target["next", "reward"]


def test_what_does_not_fit_is_left_as_it_is(sampler):
    target = rollout(0.0)
    del target["next", "reward"]
    with pytest.raises(ValueError, match="reward"):
        conveyor.get(sampler.sample.remote(), into=target, timeout=60)
    assert not target["observation"].any()
