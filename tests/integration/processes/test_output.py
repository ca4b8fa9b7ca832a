"""What actors print, in the driver's own output."""

import re

PROGRAM = """
    import sys, time
    import conveyor

    @conveyor.remote
    class Talker:
        def say(self, text):
            print(text)
        def complain(self, text):
            print(text, file=sys.stderr)
        def write(self, *pieces):
            for piece in pieces:
                sys.stdout.write(piece)
                sys.stdout.flush()
        def log(self, text):
            import logging
            logging.getLogger("mine").warning(text)
        def native(self):
            import os
            os.write(1, b"from descriptor 1\\n")
            os.system("echo from a subprocess")
        def die(self):
            import os
            print("last words", flush=True)
            os._exit(1)
        def many(self, n):
            for i in range(n):
                print("line", i)

    BODY
"""


def program(body):
    lines = body.strip("\n").splitlines()
    indent = len(lines[0]) - len(lines[0].lstrip())
    return PROGRAM.replace("BODY", "\n".join("    " + x[indent:] for x in lines).lstrip())


def plain(text):
    return re.sub(r"pid=\d+", "pid=N", text).splitlines()


def test_each_line_has_the_actors_name(scripts):
    out = scripts.run(
        program(
            """
            a, b = Talker.remote(), Talker.options(name="Second").remote()
            conveyor.get([a.say.remote("one\\ntwo"), a.complain.remote("to stderr")])
            conveyor.get(b.say.remote("three"))
            conveyor.get(b.log.remote("a log line"))
            """
        )
    )
    assert sorted(plain(out)) == [
        "(Second pid=N) three",
        "(Talker pid=N) one",
        "(Talker pid=N) two",
    ]
    err = plain(scripts.stderr)
    assert "(Talker pid=N) to stderr" in err
    assert "(Second pid=N) a log line" in err
    assert len(err) == 2


def test_output_before_the_end_of_the_program_is_not_lost(scripts):
    out = scripts.run(
        program(
            """
            a = Talker.remote()
            conveyor.get(a.many.remote(5000))
            """
        )
    )
    assert plain(out) == [f"(Talker pid=N) line {i}" for i in range(5000)]


def test_output_of_native_code_and_subprocesses(scripts):
    out = scripts.run(program("conveyor.get(Talker.remote().native.remote())"))
    assert plain(out) == ["(Talker pid=N) from descriptor 1", "(Talker pid=N) from a subprocess"]


def test_output_of_a_dying_actor(scripts):
    out = scripts.run(
        program(
            """
            try:
                conveyor.get(Talker.remote().die.remote())
            except conveyor.exceptions.ActorDiedError:
                print("died")
            """
        )
    )
    assert sorted(plain(out)) == ["(Talker pid=N) last words", "died"]


def test_output_of_a_graph(scripts):
    out = scripts.run(
        program(
            """
            a = Talker.remote()
            with conveyor.dag.InputNode() as inp:
                graph = a.say.bind(inp).compile()
            conveyor.get([graph.execute(f"execution {i}") for i in range(3)])
            graph.teardown()
            """
        )
    )
    assert plain(out) == [f"(Talker pid=N) execution {i}" for i in range(3)]


def test_a_part_of_a_line_waits_for_its_end(scripts):
    out = scripts.run(
        program(
            """
            conveyor.get(Talker.remote().write.remote("half ", "a line\\n", "no end"))
            """
        )
    )
    assert plain(out) == ["(Talker pid=N) half a line", "(Talker pid=N) no end"]


def test_log_to_driver_false_is_silent(scripts):
    out = scripts.run(
        program(
            """
            conveyor.init(log_to_driver=False)
            a = Talker.remote()
            conveyor.get([a.say.remote("x"), a.complain.remote("y")])
            print("done")
            """
        )
    )
    assert out == "done\n"
    assert scripts.stderr == ""


def test_a_quiet_program_prints_nothing_of_its_own(scripts):
    out = scripts.run(
        program(
            """
            a = Talker.remote()
            with conveyor.dag.InputNode() as inp:
                graph = a.write.bind(inp).compile()
            conveyor.get(graph.execute(""))
            """
        )
    )
    assert (out, scripts.stderr) == ("", "")


def test_actors_go_on_while_nobody_reads_what_they_print(scripts):
    """The program's stdout is a pipe that is read when it has ended."""
    process = scripts.start(
        program(
            """
            a = Talker.remote()
            conveyor.get([a.many.remote(20000) for _ in range(3)], timeout=60)
            conveyor.get(Talker.remote().say.remote("another"), timeout=60)
            print("DONE", file=sys.stderr, flush=True)
            sys.stdin.read()
            """
        )
    )
    assert any(line == "DONE\n" for line in process.stderr)
    out, _ = process.communicate(timeout=200)
    assert process.returncode == 0
    assert plain(out).count("(Talker pid=N) line 19999") == 3
