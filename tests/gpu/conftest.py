"""Sessions for what needs a GPU."""

import signal

import pytest

import conveyor

torch = pytest.importorskip("torch")


def pytest_collection_modifyitems(items):
    if not torch.cuda.is_available():
        for item in items:
            if "/gpu/" in str(item.path):
                item.add_marker(pytest.mark.skip(reason="torch finds no GPU"))


@pytest.fixture(scope="module")
def on_gpu():
    conveyor.init()
    yield
    conveyor.shutdown()


@pytest.fixture(scope="module")
def on_gpu_preloaded():
    """For tests that start many actors."""
    conveyor.init(preload=["torch"])
    yield
    conveyor.shutdown()


@pytest.fixture
def limited():
    """Ends a test that hangs, with an error and a traceback."""

    def too_long(_signal, _frame):
        raise TimeoutError("the test has taken too long")

    before = signal.signal(signal.SIGALRM, too_long)
    signal.alarm(45)
    yield
    signal.alarm(0)
    signal.signal(signal.SIGALRM, before)


@pytest.fixture
def record(capsys):
    """Prints a figure for docs/gpu.md, past pytest's capture."""

    def say(what, figure):
        name = torch.cuda.get_device_name()
        with capsys.disabled():
            print(f"\n[gpu] {name}, torch {torch.__version__}: {what}: {figure}")

    return say
