"""Runs a program as a notebook does: in ``__main__``, inside a running event loop, with ``await`` at
the top level.

    python notebook.py program.py [another.py ...]
"""

import ast
import asyncio
import inspect
import sys
import types


def namespace_of_main():
    main = sys.modules["__main__"] = types.ModuleType("__main__")
    return main.__dict__


async def run_cell(path, namespace):
    with open(path) as file:
        code = compile(file.read(), path, "exec", flags=ast.PyCF_ALLOW_TOP_LEVEL_AWAIT)
    if code.co_flags & inspect.CO_COROUTINE:
        await eval(code, namespace)
    else:
        exec(code, namespace)


async def run_all(paths):
    namespace = namespace_of_main()
    for path in paths:
        await run_cell(path, namespace)


if __name__ == "__main__":
    asyncio.run(run_all(sys.argv[1:]))
