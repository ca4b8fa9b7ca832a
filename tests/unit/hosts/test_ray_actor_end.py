"""What an actor of Ray's is told where its Ray is not the one that is known."""

from types import SimpleNamespace

from conveyor.engine.ray import actor_end


def test_a_ray_whose_methods_cannot_be_found_is_told_of(monkeypatch, caplog):
    def unknown():
        raise LookupError("no such thing")

    monkeypatch.setattr(actor_end, "calls_of_ray", unknown)
    exit_of_ray = type("AsyncioActorExit", (Exception,), {})
    actor = SimpleNamespace(
        AsyncioActorExit=exit_of_ray, raise_sys_exit_with_custom_error_message=None
    )
    end = actor_end.ActorEnd(SimpleNamespace(actor=actor), lambda: None)
    end.begin()
    assert "no such thing" in caplog.text
    end.cancel()
    assert actor.AsyncioActorExit is exit_of_ray
