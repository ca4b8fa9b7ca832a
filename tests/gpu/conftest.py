"""Sessions for what needs a GPU."""

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


@pytest.fixture
def record(capsys):
    """Prints a figure for docs/gpu.md, past pytest's capture."""

    def say(what, figure):
        name = torch.cuda.get_device_name()
        with capsys.disabled():
            print(f"\n[gpu] {name}, torch {torch.__version__}: {what}: {figure}")

    return say
