"""The thread that sends calls later, in a process that forks."""


def test_a_forked_child_does_not_take_the_timer_that_wakes_it(scripts):
    """Its copy of the timer is its parent's. What the child lets go of is none of the parent's business."""
    scripts.run("""
        import os, threading
        from conveyor import _core

        process_table = _core.ProcessTable.create(1)
        process_table.prepare(0, "it")
        process_table.alive_unwatched(0)
        event = os.eventfd(0, os.EFD_CLOEXEC | os.EFD_NONBLOCK)
        inbox = _core.Inbox(process_table, 0, event, 0)
        wait, sent = _core.PumpWait(inbox), threading.Semaphore(0)
        wait.open()

        def send():
            while wait.wait():
                wait.end(1)
                sent.release()

        thread = threading.Thread(target=send, daemon=True)
        thread.start()
        for turn in range(100):
            for _ in range(40):  # the timer is set later and later, up to some milliseconds
                wait.begin(1)
                with _core.Attending(wait, 1, True):
                    wait.end(1)
            wait.begin(1)
            child = os.fork()
            if child == 0:
                wait.end(1)
                os._exit(0)
            os.waitpid(child, 0)
            assert sent.acquire(timeout=60), f"nobody has sent it in turn {turn}"
        wait.close()
        thread.join()
        wait.release()
    """)
