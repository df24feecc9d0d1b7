"""The process of an engine: how it starts, ends, and what is told when it does not behave."""

from __future__ import annotations

import gc
import os
import signal
import socket
import subprocess
import sys
import threading
import time
from concurrent.futures import Future
from pathlib import Path

import psutil
import pytest
from rollout_help import wait_until

from lifecycle.errors import EngineError
from lifecycle.rollout import local
from lifecycle.rollout.generation import build_model
from lifecycle.rollout.link import WorkerLink
from lifecycle.rollout.local import LocalEngine
from lifecycle.rollout.messages import send_message

ROOT = Path(local.__file__).parents[2]


def test_close_is_final_and_repeatable():
    """A closed engine has no process and says so; closing again does nothing."""
    engine = LocalEngine({"model_type": "llama"}, start=False)
    assert (engine.alive, engine.pid, engine.weight_version) == (False, None, None)
    with pytest.raises(EngineError, match=r"start\(\) first"):
        engine.status()
    engine.close()
    engine.close()


def bare_link():
    """The real worker program, without a model: starts in a fraction of a second."""
    return WorkerLink("bare", local.WORKER_COMMAND, local._environment(), 10.0)


def serving(link):
    with pytest.raises(EngineError, match="not been started"):
        link.call("status", {}, 20.0)
    return True


def test_close_ends_the_process():
    """After close the process is gone and collected."""
    link = bare_link()
    assert serving(link)
    link.close()
    link.close()

    assert not psutil.pid_exists(link.pid)
    with pytest.raises(EngineError, match="closed"):
        link.call("status", {}, 1.0)


def test_outlives_the_thread_that_started_it():
    """An engine started in a short-lived thread lives on when that thread has ended."""
    links = []
    thread = threading.Thread(target=lambda: links.append(bare_link()))
    thread.start()
    thread.join()
    time.sleep(0.1)

    assert serving(links[0])
    links[0].close()


def test_dies_with_its_parent():
    """The process goes when its parent is killed, even while a forked child still holds the connection."""
    script = (
        "import os, time\n"
        "from lifecycle.errors import EngineError\n"
        "from lifecycle.rollout import local\n"
        "link = local.WorkerLink('orphan', local.WORKER_COMMAND, local._environment(), 10.0)\n"
        "try: link.call('status', {}, 20.0)\n"
        "except EngineError: pass\n"
        "child = os.fork()\n"
        "if child: print(link.pid, child, flush=True)\n"
        "time.sleep(300)\n"
    )
    environment = {**os.environ, "PYTHONPATH": str(ROOT)}
    with subprocess.Popen([sys.executable, "-c", script], stdout=subprocess.PIPE, env=environment) as parent:
        worker, holder = map(int, parent.stdout.readline().split())
        assert psutil.pid_exists(worker)
        parent.kill()
        parent.wait()
        wait_until(lambda: not psutil.pid_exists(worker) or psutil.Process(worker).status() == "zombie")
        os.kill(holder, signal.SIGKILL)


def test_does_not_outlive_a_parent_that_is_gone_already():
    """When the parent died before the process could ask to be told, it ends by itself."""
    ours, theirs = socket.socketpair()
    with ours, theirs:
        stranger = 1 if os.getpid() != 1 else 2
        arguments = [*local.WORKER_COMMAND, str(theirs.fileno()), str(stranger)]
        ended = subprocess.run(
            arguments, env=local._environment(), pass_fds=(theirs.fileno(),), timeout=20, check=False
        )
    assert ended.returncode == 1


STUB = "import socket, sys, time, signal, os; s = socket.socket(fileno=int(sys.argv[1]));"


@pytest.fixture(name="stub")
def _stub(monkeypatch):
    """Starts an engine whose process runs this code instead of the worker."""

    def start(code, **options):
        monkeypatch.setattr(local, "WORKER_COMMAND", (sys.executable, "-S", "-c", STUB + code))
        return LocalEngine({"model_type": "llama"}, **options)

    return start


def test_crash_shows_the_last_words(stub):
    """When the process crashes, its exit code and the end of its stderr are in the error."""
    with pytest.raises(EngineError, match=r"(?s)exited with code 3.*out of luck"):
        stub("sys.stderr.write('out of luck'); sys.exit(3)")


def test_malformed_request_ends_the_real_process():
    """The real program ends on nonsense, with a line that says why."""
    link = bare_link()
    assert serving(link)
    link._channel.sendall(b"\xff\xff\xff\xff")
    with pytest.raises(EngineError, match=r"(?s)exited with code 1.*malformed message"):
        wait_until(lambda: link.call("status", {}, 20.0))
    link.close()


@pytest.mark.parametrize("reply", ["b'\\0\\0\\0\\x01{'", "b'\\0\\0\\0\\x02{}'", "b'\\xff\\xff\\xff\\xff'"])
def test_nonsense_from_the_process_ends_it(stub, reply):
    """A process that does not keep to the protocol is killed, and the error says so."""
    with pytest.raises(EngineError, match="malformed message"):
        stub(f"s.recv(4); s.sendall({reply}); time.sleep(60)")


def test_start_that_takes_too_long(stub):
    """A start that does not end in time is an error, and leaves no process behind."""
    before = psutil.Process().children()
    with pytest.raises(EngineError, match=r"start: no answer within 0\.1 s"):
        stub("s.recv(10 ** 6); s.recv(1)", startup_timeout=0.1)
    assert psutil.Process().children() == before


def test_hung_process_is_killed():
    """A process that neither reads nor listens to SIGTERM is killed by close, after the grace."""
    code = STUB + "signal.signal(signal.SIGTERM, signal.SIG_IGN); os.write(2, b'deaf'); time.sleep(60)"
    link = WorkerLink("hung", (sys.executable, "-S", "-c", code), os.environ, 0.2)
    wait_until(lambda: link._tail() == "deaf")
    with pytest.raises(EngineError, match="SIGKILL"):
        link.call("status", {"text": "x" * 10_000_000}, 20.0)
    link.close(0.05)
    assert not psutil.pid_exists(link.pid)


def test_process_that_hangs_up_is_killed(stub, monkeypatch):
    """A process that closes its connection and goes on is killed: nobody could reach it any more."""
    monkeypatch.setattr("lifecycle.rollout.link._LAST_WORDS", 0.1)
    with pytest.raises(EngineError, match="SIGKILL"):
        stub("s.close(); time.sleep(60)")


READY = "n = int.from_bytes(s.recv(4), 'big'); s.recv(n); m = b'{\"id\": 1, \"result\": null}'; " + (
    "s.sendall(len(m).to_bytes(4, 'big') + m); s.recv(1)"
)


def test_forgotten_engine_ends_its_process(stub):
    """An engine that is dropped without close takes its process with it."""
    engine = stub(READY)
    pid = engine.pid
    engine.start()
    del engine
    gc.collect()
    assert not psutil.pid_exists(pid)


def test_interpreter_ends_with_an_open_engine(stub):
    """A program that ends without close ends at once and in silence, and its engine with it."""
    stub(READY).close()
    script = (
        "import sys\nfrom lifecycle.rollout import local\n"
        f"local.WORKER_COMMAND = {local.WORKER_COMMAND!r}\n"
        "engine = local.LocalEngine({'model_type': 'llama'})\nprint(engine.pid)"
    )
    environment = {**os.environ, "PYTHONPATH": str(ROOT)}
    ended = subprocess.run(
        [sys.executable, "-W", "error", "-c", script], capture_output=True, env=environment, timeout=20, check=True
    )
    assert ended.stderr == b""
    assert not psutil.pid_exists(int(ended.stdout))


def test_close_on_the_reading_thread():
    """A finalizer may close the link on its own thread, which can not wait for itself."""
    link = bare_link()
    assert serving(link)
    reply = link._waiting[0] = Future()
    reply.add_done_callback(lambda _: link.close())
    send_message(link._channel, {"id": 0, "op": "status", "args": {}})
    wait_until(lambda: not link._thread.is_alive())
    assert not psutil.pid_exists(link.pid)


def test_missing_program_is_an_error(monkeypatch):
    """Where the interpreter can not be run, the error says which program."""
    monkeypatch.setattr(local, "WORKER_COMMAND", ("/nowhere/python",))
    with pytest.raises(EngineError, match="/nowhere/python"):
        LocalEngine({})


def test_unknown_architecture_is_refused():
    """A config that transformers has no architecture for is refused; its code is not looked for anywhere."""
    for config, dtype in (({}, "float32"), ({"model_type": "x", "auto_map": {}}, "float32"), ({}, "int8")):
        with pytest.raises((ValueError, KeyError)):
            build_model(config, dtype)
