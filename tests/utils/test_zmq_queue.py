"""The queues between processes: delivery, order, bad frames, subscriptions, and who may hold an address."""

from __future__ import annotations

import asyncio
import os
import shutil
import socket
import stat
import subprocess
import sys
import tempfile
import time
from pathlib import Path

import pytest

from minisgl.errors import ClosedError, ConfigError, WorkerError
from minisgl.utils import (
    ZmqAsyncPullQueue,
    ZmqPubQueue,
    ZmqPullQueue,
    ZmqPushQueue,
    ZmqSubQueue,
    ipc_address,
    make_private_directory,
    run_directory,
    wait_any,
)

DEADLINE_S = 20.0


def encode(text: str) -> bytes:
    return text.encode()


def decode(frame: bytes) -> str:
    return frame.decode("ascii")


@pytest.fixture
def directory():
    """Short, so that a socket's path fits whatever the machine calls its temporary directory."""
    path = Path(tempfile.mkdtemp(dir="/tmp"))
    yield path
    shutil.rmtree(path)


@pytest.fixture
def addr(directory):
    return f"ipc://{directory}/queue"


def run_python(program: str, *arguments: str) -> subprocess.CompletedProcess[str]:
    return subprocess.run([sys.executable, "-c", program, *arguments], capture_output=True, text=True, timeout=60, check=False)


@pytest.mark.parametrize("receiver_creates", [True, False])
def test_messages_arrive_in_order(addr, receiver_creates):
    with (
        ZmqPushQueue[str](addr, create=not receiver_creates, encoder=encode) as push,
        ZmqPullQueue[str](addr, create=receiver_creates, decoder=decode) as pull,
    ):
        for number in range(100):
            push.put(str(number))
        assert [pull.get(DEADLINE_S) for _ in range(100)] == [str(number) for number in range(100)]
        assert pull.empty()


def test_what_is_sent_before_the_receiver_exists_arrives(directory):
    addr = f"ipc://{directory}/later/queue"
    with ZmqPushQueue[str](addr, create=False, encoder=encode) as push:
        push.put("early")
        with ZmqPullQueue[str](addr, create=True, decoder=decode) as pull:
            assert pull.get(DEADLINE_S) == "early"


def test_raw_bytes_pass_untouched_and_decode_apart(addr):
    with ZmqPullQueue[str](addr, create=True, decoder=decode) as pull, ZmqPushQueue[str](addr, create=False, encoder=encode) as push:
        push.put_raw(b"\x00\xff")
        push.put("text")
        assert pull.get_raw(DEADLINE_S) == b"\x00\xff"
        assert pull.decode(pull.get_raw(DEADLINE_S)) == "text"
        with pytest.raises(UnicodeDecodeError):
            pull.decode(b"\xff")


def test_a_frame_that_does_not_decode_is_logged_by_length_and_the_next_one_is_taken(addr, caplog):
    with ZmqPullQueue[str](addr, create=True, decoder=decode) as pull, ZmqPushQueue[str](addr, create=False, encoder=encode) as push:
        push.put_raw(b"\xff\nERROR forged line")
        push.put("good")
        assert pull.get(DEADLINE_S) == "good"
    (record,) = caplog.records
    assert "19 bytes" in record.getMessage()
    assert "forged" not in caplog.text


def test_empty_turns_false_when_something_arrives_and_true_when_it_is_taken(addr):
    with ZmqPullQueue[str](addr, create=True, decoder=decode) as pull, ZmqPushQueue[str](addr, create=False, encoder=encode) as push:
        assert pull.empty()
        push.put("a")
        assert wait_any([pull], DEADLINE_S) == [0]
        assert not pull.empty()
        pull.get()
        assert pull.empty()


def test_get_gives_up_after_its_timeout(addr):
    with ZmqPullQueue[str](addr, create=True, decoder=decode) as pull, ZmqPushQueue[str](addr, create=False, encoder=encode) as push:
        with pytest.raises(TimeoutError, match="queue"):
            pull.get(0.01)
        with pytest.raises(TimeoutError):
            pull.get_raw(0)
        push.put_raw(b"\xff")  # a dropped frame does not count as an answer, and does not start the time anew
        with pytest.raises(TimeoutError):
            pull.get(0.2)


def test_wait_any_names_the_queues_that_hold_something(directory):
    first, second = f"ipc://{directory}/first", f"ipc://{directory}/second"
    with (
        ZmqPullQueue[str](first, create=True, decoder=decode) as one,
        ZmqPullQueue[str](second, create=True, decoder=decode) as two,
        ZmqPushQueue[str](second, create=False, encoder=encode) as push,
    ):
        assert wait_any([one, two], 0) == []
        push.put("b")
        assert wait_any([one, two], DEADLINE_S) == [1]


def test_an_event_loop_receives_and_drops_bad_frames(addr):
    async def receive() -> list[str]:
        queue = ZmqAsyncPullQueue[str](addr, create=True, decoder=decode)
        with queue, ZmqPushQueue[str](addr, create=False, encoder=encode) as push:
            waiting = asyncio.ensure_future(queue.get())
            await asyncio.sleep(0)
            for frame in (b"\xff", b"one", b"two"):
                push.put_raw(frame)
            return [await asyncio.wait_for(waiting, DEADLINE_S), await asyncio.wait_for(queue.get(), DEADLINE_S)]

    assert asyncio.run(receive()) == ["one", "two"]


def test_a_cancelled_wait_of_the_event_loop_loses_no_message(addr):
    async def receive() -> str:
        queue = ZmqAsyncPullQueue[str](addr, create=True, decoder=decode)
        with queue, ZmqPushQueue[str](addr, create=False, encoder=encode) as push:
            with pytest.raises(asyncio.TimeoutError):
                await asyncio.wait_for(queue.get(), 0.01)
            push.put("kept")
            return await asyncio.wait_for(queue.get(), DEADLINE_S)

    assert asyncio.run(receive()) == "kept"


def test_what_has_arrived_is_had_without_waiting_and_the_event_loop_hears_of_what_comes_later(addr):
    async def receive() -> list[str | None]:
        queue = ZmqAsyncPullQueue[str](addr, create=True, decoder=decode)
        with queue, ZmqPushQueue[str](addr, create=False, encoder=encode) as push:
            found = [queue.get_waiting()]
            for frame in (b"one", b"\xff", b"two", b"three"):
                push.put_raw(frame)
            found.append(await asyncio.wait_for(queue.get(), DEADLINE_S))
            deadline = time.monotonic() + DEADLINE_S
            while len(found) < 4 and time.monotonic() < deadline:
                found += filter(None, [queue.get_waiting()])
            later = asyncio.ensure_future(queue.get())
            await asyncio.sleep(0)
            push.put("four")
            return [*found, queue.get_waiting() if later.done() else None, await asyncio.wait_for(later, DEADLINE_S)]

    assert asyncio.run(receive()) == [None, "one", "two", "three", None, "four"]


def test_the_publisher_sees_three_equal_subscriptions_and_each_subscriber_gets_everything(addr):
    with ZmqPubQueue[str](addr, create=True, encoder=encode) as pub:
        subs = [ZmqSubQueue[str](addr, create=False, decoder=decode) for _ in range(3)]
        pub.wait_for_subscribers(3, DEADLINE_S)
        for number in range(3000):  # beyond ZeroMQ's default high-water marks of 1000 on each side
            pub.put(str(number))
        for sub in subs:
            assert [sub.get(DEADLINE_S) for _ in range(3000)] == [str(number) for number in range(3000)]
            sub.stop()


def test_a_missing_subscriber_is_reported_with_both_counts(addr):
    with (
        ZmqPubQueue[str](addr, create=True, encoder=encode) as pub,
        ZmqSubQueue[str](addr, create=False, decoder=decode),
        ZmqSubQueue[str](addr, create=False, decoder=decode),
    ):
        pub.wait_for_subscribers(2, DEADLINE_S)
        with pytest.raises(WorkerError, match="2 of 3 subscribers"):
            pub.wait_for_subscribers(3, 0.05)
        with ZmqSubQueue[str](addr, create=False, decoder=decode):
            pub.wait_for_subscribers(3, DEADLINE_S)


def test_a_burst_beyond_every_default_buffer_is_kept(addr):
    with ZmqPullQueue[str](addr, create=True, decoder=decode) as pull, ZmqPushQueue[str](addr, create=False, encoder=encode) as push:
        for number in range(5000):
            push.put(str(number))
        assert [pull.get(DEADLINE_S) for _ in range(5000)] == [str(number) for number in range(5000)]


SEND_AND_END = """
import sys
from minisgl.utils import ZmqPushQueue
queue = ZmqPushQueue(sys.argv[1], create=False, encoder=str.encode)
for number in range(1000):
    queue.put(str(number))
"""


@pytest.mark.parametrize("ending", ["", "queue.stop()", "import builtins; builtins.kept = queue"])
def test_what_a_process_sent_before_it_ended_arrives(addr, ending):
    program = (SEND_AND_END + ending).replace("str(number)", "str(number) * 10_000")  # more than a socket's buffers hold
    with ZmqPullQueue[str](addr, create=True, decoder=decode) as pull:
        result = run_python(program, addr)
        assert result.returncode == 0, result.stderr
        assert all(pull.get(DEADLINE_S) == str(number) * 10_000 for number in range(1000))


def test_a_process_whose_messages_nobody_takes_still_ends(addr):
    start = time.monotonic()
    result = run_python(SEND_AND_END, addr)
    assert result.returncode == 0, result.stderr
    assert time.monotonic() - start < 20


def test_after_stop_the_file_is_gone_and_use_is_an_error(addr, directory):
    pull = ZmqPullQueue[str](addr, create=True, decoder=decode)
    assert (directory / "queue").is_socket()
    pull.stop()
    pull.stop()
    assert not (directory / "queue").exists()
    for use in (pull.get, pull.get_raw, pull.empty):
        with pytest.raises(ClosedError, match=r"after stop\(\)"):
            use()
    push = ZmqPushQueue[str](addr, create=False, encoder=encode)
    push.stop()
    with pytest.raises(ClosedError):
        push.put("late")


def test_an_address_can_be_taken_again_at_once(addr):
    for number in range(20):
        with ZmqPullQueue[str](addr, create=True, decoder=decode) as pull, ZmqPushQueue[str](addr, create=False, encoder=encode) as push:
            push.put(str(number))
            assert pull.get(DEADLINE_S) == str(number)


def test_a_process_removes_its_sockets_when_it_ends_without_stop(addr, directory):
    program = "import sys; from minisgl.utils import ZmqPullQueue; q = ZmqPullQueue(sys.argv[1], create=True, decoder=bytes.decode)"
    assert run_python(program, addr).returncode == 0
    assert list(directory.iterdir()) == []


def test_an_address_that_a_live_server_holds_is_refused_and_the_server_goes_on(addr):
    with ZmqPullQueue[str](addr, create=True, decoder=decode) as pull, ZmqPushQueue[str](addr, create=False, encoder=encode) as push:
        with pytest.raises(ConfigError, match="live server"):
            ZmqPullQueue[str](addr, create=True, decoder=decode)
        push.put("still here")
        assert pull.get(DEADLINE_S) == "still here"


def test_the_socket_of_a_dead_process_is_replaced(addr, directory):
    with socket.socket(socket.AF_UNIX, socket.SOCK_STREAM) as dead:
        dead.bind(str(directory / "queue"))
    assert (directory / "queue").is_socket()
    with ZmqPullQueue[str](addr, create=True, decoder=decode) as pull, ZmqPushQueue[str](addr, create=False, encoder=encode) as push:
        push.put("new")
        assert pull.get(DEADLINE_S) == "new"


def test_a_file_that_is_no_socket_is_never_removed(addr, directory):
    (directory / "queue").write_text("precious")
    with pytest.raises(ConfigError, match="no socket"):
        ZmqPullQueue[str](addr, create=True, decoder=decode)
    assert (directory / "queue").read_text() == "precious"


def test_the_directory_is_made_private_whatever_the_umask(directory):
    old = os.umask(0)
    try:
        with ZmqPullQueue[str](f"ipc://{directory}/new/queue", create=True, decoder=decode):
            assert stat.S_IMODE((directory / "new").stat().st_mode) == 0o700
    finally:
        os.umask(old)


def test_a_directory_open_to_others_or_behind_a_link_is_refused(directory):
    (directory / "open").mkdir(mode=0o755)
    with pytest.raises(ConfigError, match="chmod 700"):
        ZmqPullQueue[str](f"ipc://{directory}/open/queue", create=True, decoder=decode)
    (directory / "target").mkdir(mode=0o700)
    (directory / "link").symlink_to(directory / "target")
    with pytest.raises(ConfigError, match="link"):
        ZmqPullQueue[str](f"ipc://{directory}/link/queue", create=True, decoder=decode)


@pytest.mark.skipif(os.geteuid() != 0, reason="only root can give a directory away")
def test_a_directory_of_another_user_is_refused(directory):
    (directory / "theirs").mkdir(mode=0o700)
    os.chown(directory / "theirs", 12345, 12345)
    with pytest.raises(ConfigError, match="belongs to user 12345"):
        make_private_directory(directory / "theirs")


@pytest.mark.parametrize(
    "bad", ["tcp://127.0.0.1:5555", "tcp://*:5555", "inproc://a", "ipc://@abstract", "ipc://*", "ipc://relative", "/tmp/x"]
)
def test_only_sockets_in_the_file_system_are_allowed(bad):
    for create in (True, False):
        with pytest.raises(ConfigError, match="absolute path"):
            ZmqPullQueue[str](bad, create=create, decoder=decode)


def test_a_path_has_at_most_107_bytes(directory):
    longest = f"{directory}/".ljust(107, "x")
    with (
        ZmqPullQueue[str](f"ipc://{longest}", create=True, decoder=decode) as pull,
        ZmqPushQueue[str](f"ipc://{longest}", create=False, encoder=encode) as push,
    ):
        push.put("fits")
        assert pull.get(DEADLINE_S) == "fits"
    with pytest.raises(ConfigError, match="108 bytes"):
        ZmqPullQueue[str](f"ipc://{longest}x", create=True, decoder=decode)


def test_addresses_are_made_of_suffix_and_name_and_touch_no_disk():
    assert ipc_address("a-b.c=1", "backend") == f"ipc://{run_directory()}/a-b.c=1.backend"
    for bad in ("", "a/b", "../x", "a b", "a\n", "ä"):
        with pytest.raises(ConfigError, match="_unique_suffix"):
            ipc_address(bad, "backend")


def test_the_queues_load_neither_torch_nor_transformers():
    program = "import sys, minisgl.utils; print([name for name in ('torch', 'transformers') if name in sys.modules])"
    assert run_python(program).stdout.strip() == "[]"
