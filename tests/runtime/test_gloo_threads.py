"""Waiting for gloo's own threads, played by one of ours under their name."""

from __future__ import annotations

import ctypes
import hashlib
import sys
import threading
import time

import pytest

from megagraph_cli.runtime.gloo_threads import settle

_SET_NAME = 15  # PR_SET_NAME
pytestmark = pytest.mark.skipif(sys.platform != "linux", reason="only Linux tells of other threads")


def test_without_such_threads_nothing_is_waited_for() -> None:
    assert settle()


def test_a_working_thread_is_waited_for_and_a_sleeping_one_is_not() -> None:
    ready, done, end = threading.Event(), threading.Event(), threading.Event()

    def work() -> None:
        ctypes.CDLL(None).prctl(_SET_NAME, b"pt_gloo_runloop", 0, 0, 0)
        ready.set()
        until = time.perf_counter() + 0.03
        while time.perf_counter() < until:
            hashlib.sha256(b"0" * (1 << 20))  # lets go of the interpreter, as gloo's threads do
        done.set()
        end.wait()

    thread = threading.Thread(target=work, daemon=True)
    thread.start()
    ready.wait()
    assert settle()
    assert done.is_set()
    end.set()
    thread.join()


def test_a_thread_that_never_sleeps_is_given_up() -> None:
    ready, end = threading.Event(), threading.Event()

    def work() -> None:
        ctypes.CDLL(None).prctl(_SET_NAME, b"pt_gloo_runloop", 0, 0, 0)
        ready.set()
        while not end.is_set():
            hashlib.sha256(b"0" * (1 << 20))

    thread = threading.Thread(target=work, daemon=True)
    thread.start()
    ready.wait()
    assert not settle()
    end.set()
    thread.join()
