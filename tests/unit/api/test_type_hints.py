"""What the public API is annotated with can be evaluated: tools that look at signatures do."""

import dataclasses
import importlib
import inspect
import subprocess
import sys
import typing

import pytest

import conveyor
from conveyor.api import options
from conveyor.config import ConfigOptions
from conveyor.engines.options import session_options
from conveyor.engines.ray import engine as ray_engine

ROOMS = (
    "conveyor",
    *(
        f"conveyor.{room}"
        for room in ("channel", "dag", "metrics", "observe", "testing", "transport")
    ),
)


def members(cls):
    """The methods and properties of ``cls`` that it, or a class of ours below it, defines."""
    for owner in cls.__mro__:
        if not owner.__module__.startswith("conveyor"):
            continue
        for name, value in vars(owner).items():
            function = getattr(value, "__func__", None) or getattr(value, "fget", None) or value
            if not inspect.isfunction(function) or function.__module__.startswith("namedtuple_"):
                continue  # what the standard library has made of a class
            if not name.startswith("_") or name.endswith("__"):
                yield function


def public():
    """Each once: all that a user can call, and what it is called."""
    found = {}
    for room in map(importlib.import_module, ROOMS):
        for name in room.__all__:
            value = getattr(room, name)
            for function in members(value) if inspect.isclass(value) else [value]:
                if inspect.isfunction(function):
                    found[f"{function.__module__}.{function.__qualname__}"] = function
    return found


PUBLIC = public()


@pytest.mark.parametrize("name", PUBLIC)
def test_the_hints_of_every_public_callable_can_be_had(name):
    typing.get_type_hints(PUBLIC[name])


def test_they_name_the_public_classes():
    hints = typing.get_type_hints(conveyor.CompiledGraph.stats)
    assert hints["return"] is conveyor.observe.GraphStats
    hints = typing.get_type_hints(conveyor.dag.DAGNode.compile)
    assert typing.get_origin(hints["return"]) is conveyor.CompiledGraph
    hints = typing.get_type_hints(conveyor.CompiledGraph.trace)
    assert hints["return"] is conveyor.observe.Trace


def test_the_types_of_options_name_those_that_there_are():
    settings = {field.name for field in dataclasses.fields(conveyor.Config)}
    assert set(typing.get_type_hints(ConfigOptions)) == settings

    placement, of_ray = (
        set(options.PLACEMENT_OPTIONS),
        {"runtime_env", *options.ACTOR_OPTIONS_WITHOUT_EFFECT},
    )
    actors = {*options._CHECKS, *placement, *of_ray}
    assert set(typing.get_type_hints(options.ActorOptionTypes)) == actors
    functions = {"num_cpus", "num_gpus", *options.FUNCTION_OPTIONS_WITHOUT_EFFECT}
    assert set(typing.get_type_hints(options.FunctionOptionTypes)) == functions

    named = set(inspect.signature(conveyor.init).parameters)
    engines = {
        *inspect.signature(session_options).parameters,
        *inspect.signature(ray_engine.start).parameters,
        *options.RAYS_INIT_OPTIONS,
        "local_mode",
    }
    internal = {"cluster", "given", "unknown"}
    assert set(typing.get_type_hints(options.InitOptions)) == engines - named - internal


def test_nothing_is_imported_for_them_before_they_are_requested_for():
    source = """
        import sys
        import conveyor
        late = {"numpy", "torch", "opentelemetry", "conveyor.observe", "conveyor.graph.compiled"}
        assert not late & set(sys.modules), late & set(sys.modules)
        assert {"CompiledGraph", "observe"} <= set(dir(conveyor))
    """
    subprocess.run([sys.executable, "-c", inspect.cleandoc(source)], check=True)
