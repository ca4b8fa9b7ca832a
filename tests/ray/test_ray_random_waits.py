"""Random plans of who waits for whom, with actors on two nodes."""

import pytest
from wait_plans import Pool, random_plan

pytestmark = pytest.mark.usefixtures("far")

#: The actors that are on the driver's node; all others, and who lends references, are on the other one.
HERE = "adm"


@pytest.fixture(scope="module")
def pool(far):
    made = Pool(lambda name: {"resources": {"first" if name in HERE else "second": 0.01}})
    yield made
    made.close()


@pytest.mark.parametrize("seed", range(180, 190))
def test_cycles_are_found_and_nothing_else(pool, seed, tmp_path):
    pool.run(random_plan(seed), tmp_path / "plan")
