"""What `docs/tools/pages.py` makes of a page."""

import sys
import textwrap
from pathlib import Path

import pytest

sys.path.insert(0, str(Path(__file__).parents[2] / "docs" / "tools"))

import pages

PAGE = """\
# Title

```python
x = [1]
```

<!-- python
x.append(2)
-->

<!-- not run: it would not end -->
```python
while True: pass
```

- in a list:

  ```python
  print(x)  # [1, 2]
  ```

```sh
echo no
```
"""


@pytest.fixture
def page(tmp_path):
    def write(text):
        path = tmp_path / "page.md"
        path.write_text(textwrap.dedent(text))
        return path

    return write


def test_blocks_and_what_is_hidden_are_one_program(page):
    written = page(PAGE)
    lines = pages.program(written).splitlines()
    assert {number: line for number, line in enumerate(lines, 1) if line} == {
        4: "x = [1]",
        8: "x.append(2)",
        19: "print(x)  # [1, 2]",
    }
    assert [(block.shown, block.runs) for block in pages.blocks(written)] == [
        (True, True),
        (False, True),
        (True, False),
        (True, True),
    ]


def test_it_runs_and_prints(page, scripts):
    assert scripts.run(pages.runnable(page(PAGE))) == "[1, 2]\n"


def test_a_page_without_code_has_no_program(page):
    assert pages.runnable(page("# Title\n\n```sh\nls\n```\n")) == ""


@pytest.mark.parametrize(
    ("line", "good"),
    [
        ("print(1)  # 1", True),
        ("print('actor A#3 died')  # actor A... died", True),
        ("print(1, 2)  # 1 2", True),
        ("print(1)", True),
        ("if True:\n    print(1)  # 1", True),
        ("print(1)  # 2", False),
        ("print('a1')  # a", False),
        ("if True:\n    print(1)  # 10", False),
    ],
)
def test_what_is_printed_is_compared_with_the_comment(page, scripts, line, good):
    written = page(f"# Title\n\n```python\n{line}\n```\n")
    scripts.run(pages.runnable(written), code=0 if good else 1)
    assert good or ("AssertionError" in scripts.stderr and "prints" in scripts.stderr)


def test_a_traceback_has_the_pages_lines(page, scripts):
    scripts.run(pages.runnable(page("# Title\n\nText.\n\n```python\n1 / 0\n```\n")), code=1)
    assert "line 6, in <module>" in scripts.stderr
