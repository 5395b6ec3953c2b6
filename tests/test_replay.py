"""Record and replay: what a scheduler did is written down, and comes out the same without an engine, to the last digest."""

from __future__ import annotations

import os
import resource

import msgspec
import numpy as np
import pytest

from minisgl.cli import main
from minisgl.errors import ConfigError
from minisgl.kvcache import PageAllocator
from minisgl.llm import LLM
from minisgl.message import BaseBackendMsg, ExitMsg, FlushBackendMsg
from minisgl.replay import Difference, replay
from minisgl.scheduler.agreement import FIELDS, show_values
from minisgl.scheduler.recording import LENGTH, MAGIC, VERSION, End, Handled, Heard, Recording, refuse_recording
from tests.scheduler.fake_engine import FakeScheduler, make
from tests.scheduler.machine import run_seed

PAGE = 4


def recorded(path, **settings):
    """A scheduler that records, and its engine."""
    return make(record=str(path), **settings)


def record_small(path, **settings):
    """One short request, then one whose prefill takes three pages in one go, then an end in good order."""
    scheduler, engine = recorded(path, **settings)
    scheduler.add([1, 2, 3], max_tokens=6, ignore_eos=True)
    for _ in range(3):
        scheduler.run_step()
    scheduler.add(list(range(1, 2 * PAGE + 3)), max_tokens=4, ignore_eos=True)
    scheduler.finish()
    scheduler.end_recording()
    return engine


def records(path):
    recording = Recording(path)
    found = []
    while recording.current is not None and not isinstance(recording.current, End):
        found.append(recording.current)
        recording.advance()
    recording.close()
    return found


# What was recorded comes out again


@pytest.mark.parametrize("is_overlapped", [pytest.param(False, marks=pytest.mark.slow), True], ids=["plain", "overlapped"])
def test_random_work_is_replayed_to_the_last_digest(tmp_path, is_overlapped):
    num_retractions = num_aborts = num_evictions = 0
    for seed in range(40):
        path = tmp_path / f"{seed}"
        work = run_seed(seed, overlap=is_overlapped, record=str(path))
        work.scheduler.end_recording()
        outcome = replay(path)
        assert outcome.difference is None, (seed, outcome)
        assert (outcome.is_complete, outcome.num_ranks, outcome.num_steps) == (True, 1, len(work.engine.batches)), seed
        num_retractions += work.scheduler.num_retractions
        num_aborts += sum(client.is_aborted for client in work.scheduler.clients)
        handled = [record for record in records(path) if isinstance(record, Handled)]
        num_evictions += sum(bool(set(taken_of(record)) & set(freed_of(record))) for record in handled)
    assert min(num_retractions, num_aborts, num_evictions) > 5, (num_retractions, num_aborts, num_evictions)


def taken_of(record):
    return np.frombuffer(record.fields[FIELDS.index("pages_taken")], dtype="<i4").tolist()


def freed_of(record):
    return np.frombuffer(record.fields[FIELDS.index("pages_freed")], dtype="<i4").tolist()


def test_flushes_exits_and_frames_without_a_message_are_replayed_too(tmp_path):
    path = tmp_path / "recording"
    scheduler, _ = recorded(path)
    scheduler.add([1] * 12, max_tokens=3)
    scheduler.finish()
    scheduler.offline_send_result = lambda _: None  # the answer to a flush is no client's
    scheduler.inbox.append((FlushBackendMsg(7), None))
    scheduler.run_step()
    scheduler.note_frames([b"\xff" * 9])  # as an online transport hands over what does not decode
    scheduler.add([1] * 12, max_tokens=30)
    scheduler.run_step()
    scheduler.inbox.append((ExitMsg(), None))
    while scheduler.run_step():
        pass
    scheduler.end_recording()
    outcome = replay(path)
    assert (outcome.difference, outcome.is_complete) == (None, True)
    assert [record.frames for record in records(path) if isinstance(record, Heard)][-1] == [BaseBackendMsg.encoder(ExitMsg())]


def test_the_file_holds_messages_as_they_came_counts_tokens_and_digests_for_its_owner_alone(tmp_path):
    path = tmp_path / "recording"
    engine = record_small(path)
    assert path.stat().st_mode & 0o777 == 0o600
    found = records(path)
    heard = [record for record in found if isinstance(record, Heard)]
    assert [(record.turn, len(record.frames)) for record in heard] == [(0, 1), (3, 1)]
    assert BaseBackendMsg.decoder(heard[0].frames[0]).input_ids.tolist() == [1, 2, 3]
    handled = [record for record in found if isinstance(record, Handled)]
    assert [record.step for record in handled] == [batch.step for batch in engine.batches]
    assert all(len(record.digests) == len(record.fields) == len(FIELDS) for record in handled)
    recording = Recording(path)
    recording.close()
    header = recording.header
    assert (header.version, header.num_ranks, header.limits) == (VERSION, 1, engine.limits)
    assert path.read_bytes().startswith(MAGIC)


def test_without_record_nothing_is_written(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    scheduler, _ = make()
    scheduler.add([1, 2, 3], max_tokens=2)
    scheduler.finish()
    scheduler.end_recording()
    assert list(tmp_path.iterdir()) == []


# What differs is found


def test_another_order_of_pages_stops_the_replay_at_the_first_step_it_affects(tmp_path, monkeypatch, capsys):
    path = tmp_path / "recording"
    record_small(path)
    affected = next(record for record in records(path) if isinstance(record, Handled) and len(taken_of(record)) > 1)
    assert affected.step > 0
    alloc = PageAllocator.alloc
    monkeypatch.setattr(PageAllocator, "alloc", lambda self, num_pages: alloc(self, num_pages)[::-1].copy())
    outcome = replay(path)
    text = show_values("recorded", taken_of(affected), "replayed", taken_of(affected)[::-1])
    assert outcome.difference == Difference(affected.step, "pages_taken", text)
    assert outcome.num_steps == affected.step
    assert main(["replay", str(path)]) == 1
    assert f"error: step {affected.step} differs in pages_taken: {text}" in capsys.readouterr().err


def rewrite(path, change):
    """Change the records of a file; None leaves one out."""
    changed = [change(record) for record in records(path)]
    data, start = path.read_bytes(), len(MAGIC)
    start += LENGTH.size + LENGTH.unpack(data[start : start + LENGTH.size])[0]
    frames = [msgspec.msgpack.encode(record) for record in changed if record is not None]
    path.write_bytes(data[:start] + b"".join(LENGTH.pack(len(frame)) + frame for frame in frames))


def test_a_message_that_is_missing_is_found_where_its_request_was_planned(tmp_path):
    path = tmp_path / "recording"
    record_small(path)
    rewrite(path, lambda record: None if isinstance(record, Heard) and record.turn == 3 else record)
    affected = next(record for record in records(path) if isinstance(record, Handled) and len(taken_of(record)) > 1)
    difference = replay(path).difference
    assert (difference.step, difference.field, difference.text) == (affected.step, "uids", "recorded [1], replayed [0]")


def test_a_step_that_the_replay_does_not_have_is_found(tmp_path):
    path = tmp_path / "recording"
    record_small(path)
    rewrite(path, lambda record: None if isinstance(record, Heard) and record.turn == 0 else record)
    difference = replay(path).difference
    assert difference == Difference(0, "step", "handled in turn 0 when recorded, none in the replay")


def test_a_step_that_the_recording_does_not_have_is_found(tmp_path):
    path = tmp_path / "recording"
    record_small(path)
    rewrite(path, lambda record: None if isinstance(record, Handled) and record.step == 2 else record)
    assert replay(path).difference == Difference(2, "step", "none handled in turn 2 when recorded, step 2 in the replay")


def test_other_tokens_are_found_by_what_follows_from_them(tmp_path):
    path = tmp_path / "recording"
    record_small(path)
    at = FIELDS.index("tokens")

    def change(record):
        if not isinstance(record, Handled) or record.step != 1:
            return record
        return msgspec.structs.replace(record, fields=(*record.fields[:at], np.array([9], dtype="<i4").tobytes()))

    rewrite(path, change)
    difference = replay(path).difference
    assert (difference.step, difference.field) == (1, "tokens")


# Files that end early, or are none


def test_a_recording_that_breaks_off_anywhere_is_replayed_up_to_its_end_and_that_is_said(tmp_path, capsys):
    path = tmp_path / "recording"
    record_small(path, overlap=True, is_asynchronous=True)
    whole = path.read_bytes()
    (header_bytes,) = LENGTH.unpack(whole[len(MAGIC) : len(MAGIC) + LENGTH.size])
    first = len(MAGIC) + LENGTH.size + header_bytes
    num_steps = []
    for cut in range(first, len(whole), 3):
        path.write_bytes(whole[:cut])
        outcome = replay(path)
        assert (outcome.difference, outcome.is_complete) == (None, False), cut
        num_steps.append(outcome.num_steps)
    assert num_steps == sorted(num_steps)
    assert (num_steps[0], num_steps[-1]) == (0, replay_of(path, whole).num_steps)
    path.write_bytes(whole[:-1])
    assert main(["replay", str(path)]) == 0
    assert "breaks off here" in capsys.readouterr().out
    path.write_bytes(whole)
    assert main(["replay", str(path)]) == 0
    out = capsys.readouterr().out
    assert "every digest is as recorded" in out
    assert "breaks off" not in out


def replay_of(path, data):
    path.write_bytes(data)
    return replay(path)


@pytest.mark.parametrize(
    ("change", "found"),
    [
        (lambda _: b"", "is no recording"),
        (lambda _: b"{}" * 100, "is no recording"),
        (lambda data: data[: len(MAGIC) + 20], "before its header ends"),
        (lambda data: data.replace(b"version\x01", b"version\x63", 1), "version 99"),
        (lambda data: data[: len(data) // 2].replace(b"num_ranks", b"num_rafts", 1), "is damaged"),
        (lambda data: data + LENGTH.pack(3) + b"abc", None),
    ],
    ids=["empty", "json", "header cut", "version", "header damaged", "more behind the end"],
)
def test_what_cannot_be_replayed_is_refused_and_told(tmp_path, capsys, change, found):
    path = tmp_path / "recording"
    record_small(path)
    path.write_bytes(change(path.read_bytes()))
    status = main(["replay", str(path)])
    if found is None:
        assert status == 0
    else:
        assert status == 2
        assert found in capsys.readouterr().err


def test_a_damaged_record_and_a_missing_file_are_refused(tmp_path):
    path = tmp_path / "recording"
    record_small(path)
    data = path.read_bytes()
    (header_bytes,) = LENGTH.unpack(data[len(MAGIC) : len(MAGIC) + LENGTH.size])
    first = len(MAGIC) + 2 * LENGTH.size + header_bytes
    path.write_bytes(data[:first] + b"\xc1" + data[first + 1 :])
    with pytest.raises(ConfigError, match="damaged before byte"):
        replay(path)
    with pytest.raises(ConfigError, match="cannot be read: No such file"):
        replay(tmp_path / "nothing")


def test_a_replay_that_the_environment_would_schedule_otherwise_is_refused(tmp_path, monkeypatch):
    path = tmp_path / "recording"
    record_small(path, overlap=True, is_asynchronous=True)
    monkeypatch.setenv("MINISGL_DISABLE_OVERLAP_SCHEDULING", "1")
    with pytest.raises(ConfigError, match="unset it"):
        replay(path)


# Recordings that cannot be made


def test_a_file_that_exists_is_not_written_over(tmp_path, capsys):
    path = tmp_path / "recording"
    path.write_text("dear")
    with pytest.raises(ConfigError, match="cannot be made: File exists"):
        recorded(path)
    with pytest.raises(ConfigError, match="exists; name a new file"):
        refuse_recording(str(path))
    assert main(["serve", "no-such-model", "--record", str(path)]) == 2
    assert f"--record: {path} exists" in capsys.readouterr().err
    link = tmp_path / "link"
    link.symlink_to(tmp_path / "elsewhere")
    with pytest.raises(ConfigError, match="exists; name a new file"):
        refuse_recording(str(link))
    assert path.read_text() == "dear"


def test_a_file_without_a_directory_is_refused(tmp_path, capsys):
    path = tmp_path / "no" / "recording"
    with pytest.raises(ConfigError, match="No such file or directory"):
        recorded(path)
    assert main(["serve", "no-such-model", "--record", str(path)]) == 2
    assert "is no directory" in capsys.readouterr().err


def test_the_offline_class_records_nothing_and_says_so(tmp_path):
    with pytest.raises(ConfigError, match="no setting 'record'"):
        LLM(record=str(tmp_path / "recording"))


def test_a_full_disk_ends_the_recording_and_not_the_server(tmp_path, caplog):
    path = tmp_path / "recording"
    scheduler, _ = recorded(path)
    client = scheduler.add([1, 2, 3], max_tokens=12, ignore_eos=True)
    for _ in range(3):
        scheduler.run_step()
    limits = resource.getrlimit(resource.RLIMIT_FSIZE)
    try:
        resource.setrlimit(resource.RLIMIT_FSIZE, (path.stat().st_size + 10, limits[1]))
        scheduler.run_step()
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, limits)
    scheduler.finish()
    scheduler.end_recording()
    assert len(client.tokens) == 12
    assert [record.levelname for record in caplog.records] == ["ERROR"]
    assert "stops in turn 3" in caplog.text
    outcome = replay(path)
    assert (outcome.difference, outcome.is_complete, outcome.num_steps) == (None, False, 3)


def test_ending_a_recording_twice_writes_one_end(tmp_path):
    path = tmp_path / "recording"
    scheduler, _ = recorded(path)
    assert isinstance(scheduler, FakeScheduler)
    scheduler.end_recording()
    size = os.path.getsize(path)
    scheduler.end_recording()
    scheduler.add([1], max_tokens=1)
    scheduler.run_step()
    assert os.path.getsize(path) == size
    assert replay(path).is_complete
