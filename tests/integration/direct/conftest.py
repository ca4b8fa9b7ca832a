"""What tests of direct objects share."""

import pytest


@pytest.fixture(scope="module")
def simulated():
    """The simulated accelerator, in this process, for modules whose objects may be on it."""
    torch = pytest.importorskip("torch")
    import accelerator

    accelerator.install()
    torch.zeros(1, device="sim")  # it keeps what its memory takes
