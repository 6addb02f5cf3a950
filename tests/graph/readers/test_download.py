"""Downloads from a server on this machine: whole files arrive, everything else leaves nothing behind."""

from __future__ import annotations

import http.server
import io
import threading
import zipfile
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest

from megagraph_cli.errors import EXIT_USAGE, MgraphError
from megagraph_cli.graph import datasets
from megagraph_cli.graph.prepare import load_graph
from megagraph_cli.graph.readers.download import Remote


def archive(*names: str) -> bytes:
    rng = np.random.default_rng(0)
    own = io.BytesIO()
    np.savez(own, edge_index=rng.integers(0, 30, (2, 90)), y=rng.integers(0, 3, 30))
    packed = io.BytesIO()
    with zipfile.ZipFile(packed, "w") as file:
        for name in names:
            file.writestr(name, own.getvalue())
    return packed.getvalue()


class Handler(http.server.BaseHTTPRequestHandler):
    def do_GET(self) -> None:
        if self.path == "/missing":
            self.send_error(404)
            return
        body = {"/other.zip": archive("other/a.npz"), "/damaged.zip": b"not a zip"}.get(
            self.path, archive("toy/a.npz", "toy/b.npz")
        )
        self.send_response(200)
        self.send_header("Content-Type", "text/html" if self.path == "/page" else "application/octet-stream")
        self.send_header("Content-Length", str(len(body) + (1000 if self.path == "/cut" else 0)))
        self.end_headers()
        self.wfile.write(body)

    def log_message(self, format: str, *args: object) -> None:
        pass


@pytest.fixture
def server() -> Iterator[str]:
    with http.server.ThreadingHTTPServer(("127.0.0.1", 0), Handler) as running:
        thread = threading.Thread(target=running.serve_forever, daemon=True)
        thread.start()
        yield f"http://127.0.0.1:{running.server_address[1]}"
        running.shutdown()
        thread.join()


def register(monkeypatch: pytest.MonkeyPatch, url: str) -> None:
    members = (("toy/a.npz", "raw/a.npz"), ("toy/b.npz", "raw/b.npz"))
    read = datasets.USER_READERS[".npz"]
    toy = replace(
        datasets.REGISTRY["computers"],
        name="toy",
        files=("raw/a.npz", "raw/b.npz"),
        read=lambda folder, _report: read(folder / "raw/a.npz"),
        remotes=(Remote(url, members),),
    )
    monkeypatch.setitem(datasets.REGISTRY, "toy", toy)


def test_missing_files_arrive_whole(server: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    register(monkeypatch, f"{server}/toy.zip")
    root = tmp_path / "deep" / "root"
    with pytest.raises(MgraphError, match="--yes"):
        load_graph("toy", root, tmp_path / "cache")
    assert not (tmp_path / "deep").exists()
    assert load_graph("toy", root, tmp_path / "cache", accept_download=True).num_nodes == 30
    files = [path.relative_to(root).as_posix() for path in sorted(root.rglob("*"))]
    assert files == ["toy", "toy/raw", "toy/raw/a.npz", "toy/raw/b.npz"]


@pytest.mark.parametrize("path", ["/missing", "/cut", "/page", "/damaged.zip", "/other.zip"])
def test_failed_download_leaves_nothing(
    path: str, server: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    register(monkeypatch, server + path)
    with pytest.raises(MgraphError, match="toy") as caught:
        load_graph("toy", tmp_path / "root", tmp_path / "cache", accept_download=True)
    assert caught.value.exit_code == EXIT_USAGE
    assert "\n" not in caught.value.message
    assert list(tmp_path.iterdir()) == []


def test_no_network_is_one_sentence(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    register(monkeypatch, "http://127.0.0.1:9/toy.zip")
    with pytest.raises(MgraphError, match=r"check the network or put raw/a\.npz into") as caught:
        load_graph("toy", tmp_path / "root", tmp_path / "cache", accept_download=True)
    assert caught.value.exit_code == EXIT_USAGE
    assert list(tmp_path.iterdir()) == []


def test_root_that_cannot_be_written(server: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    register(monkeypatch, f"{server}/toy.zip")
    (tmp_path / "file").write_text("")
    with pytest.raises(MgraphError, match="writable --root"):
        load_graph("toy", tmp_path / "file" / "root", tmp_path / "cache", accept_download=True)
