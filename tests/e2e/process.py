"""Real servers as real processes: started on a free port, watched, and always gone afterwards."""

from __future__ import annotations

import concurrent.futures
import contextlib
import json
import os
import re
import signal
import socket
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterable, Iterator, Mapping, Sequence
from pathlib import Path
from types import TracebackType
from typing import Any

import httpx

from tests.e2e import sessions

REPOSITORY = Path(__file__).resolve().parents[2]
MODEL = str(REPOSITORY / "demo" / "model")
BASE = "demo"
TIMEOUT_S = 60.0
"""For whatever takes a moment: a guard against what hangs, far above what a slow and busy machine needs."""
START_TIMEOUT_S = 120.0

Json = dict[str, Any]


def command(*args: str) -> list[str]:
    """The command line, run by this interpreter: what the ``manylora`` script does."""
    return [sys.executable, "-m", "manylora", *args]


def environment(**changes: str) -> dict[str, str]:
    """Of a process that sees no GPU, unless the changes name some."""
    return {
        **os.environ,
        "PYTHONPATH": f"{REPOSITORY / 'src'}:{REPOSITORY / 'lab/src'}",
        "OMP_NUM_THREADS": "1",
        "CUDA_VISIBLE_DEVICES": "",
        **changes,
    }


def run_cli(*args: str, **env: str) -> subprocess.CompletedProcess[str]:
    """A command that ends by itself."""
    return subprocess.run(
        command(*args),
        env=environment(**env),
        capture_output=True,
        text=True,
        timeout=START_TIMEOUT_S,
        stdin=subprocess.DEVNULL,
    )


def free_port() -> int:
    """Below those that the system hands out by itself, so that nobody is given it meanwhile."""
    ports = range(20_000, 32_000)
    for attempt in range(len(ports)):
        with socket.socket() as sock, contextlib.suppress(OSError):
            port = ports[(os.getpid() * 7 + attempt) % len(ports)]
            sock.bind(("127.0.0.1", port))
            return port
    raise AssertionError("no port is free")


def wait_until(condition: Any, what: str, timeout_s: float = TIMEOUT_S) -> None:
    """Poll until true; fails with ``what``."""
    deadline = time.monotonic() + timeout_s
    while not condition():
        assert time.monotonic() < deadline, f"not within {timeout_s} s: {what}"
        time.sleep(0.02)


def is_running(pid: int) -> bool:
    """Whether a process exists and is no zombie."""
    try:
        stat = Path(f"/proc/{pid}/stat").read_text()
    except OSError:
        return False
    return stat.rpartition(")")[2].split()[0] != "Z"


def children_of(pid: int) -> list[int]:
    """Found by their parent: the system lists them under a process's threads as well, but loses sight of those of
    a thread that is just ending."""
    children = []
    for stat in Path("/proc").glob("[0-9]*/stat"):
        with contextlib.suppress(OSError):  # it has just ended
            parent = stat.read_text().rpartition(")")[2].split()[1]
            children += [int(stat.parent.name)] if int(parent) == pid else []
    return sorted(children)


def shared_files(pids: Iterable[int]) -> set[Path]:
    """What processes have open or mapped in /dev/shm, by names that are there."""
    found: set[str] = set()
    for pid in pids:
        with contextlib.suppress(OSError):
            found |= {*Path(f"/proc/{pid}/maps").read_text().split()}
            for link in Path(f"/proc/{pid}/fd").iterdir():
                with contextlib.suppress(OSError):
                    found.add(os.readlink(link))
    return {Path(name) for name in found if name.startswith("/dev/shm/") and Path(name).exists()}


def handles(pid: int, number: signal.Signals) -> bool:
    """Whether a process has a handler of its own for a signal."""
    try:
        caught = re.search(r"^SigCgt:\s*(\w+)$", Path(f"/proc/{pid}/status").read_text(), re.MULTILINE)
    except OSError:
        return False
    return caught is not None and bool(int(caught[1], 16) >> (number - 1) & 1)


def get(url: str, **options: Any) -> httpx.Response:
    """On a connection of its own."""
    return httpx.get(url, timeout=TIMEOUT_S, verify=False, **options)  # certificates take long to load


def post(url: str, **options: Any) -> httpx.Response:
    """On a connection of its own."""
    return httpx.post(url, timeout=TIMEOUT_S, verify=False, **options)


class Server:
    """``manylora serve``, or another command, in a process group of its own. Use with ``with``."""

    def __init__(
        self, *args: str, model: str = MODEL, env: Mapping[str, str] | None = None, words: Sequence[str] = ()
    ) -> None:
        """``words``: the command, where it is not to serve the model."""
        words = words or ("serve", model, "--served-model-name", BASE)
        self._log = tempfile.TemporaryFile(mode="w+b")  # noqa: SIM115  (closed by __exit__)
        self.process = sessions.started(
            command(*words, "--port", "0", *args),
            env=environment(**(env or {})),
            stdin=subprocess.DEVNULL,
            stdout=self._log,
            stderr=self._log,
        )
        self._pids = [self.process.pid]
        self.url = ""
        self.http = httpx.Client(
            timeout=TIMEOUT_S,
            verify=False,
            limits=httpx.Limits(max_connections=None),
            headers={"Content-Type": "application/json"},
        )

    @property
    def log(self) -> str:
        """All that the server has written so far."""
        size = os.fstat(self._log.fileno()).st_size
        return os.pread(self._log.fileno(), size, 0).decode(errors="replace")

    def wait_ready(self) -> Server:
        wait_until(lambda: self._found_port() or self.process.poll() is not None, "a port", START_TIMEOUT_S)
        assert self.process.poll() is None, f"the server ended with {self.process.returncode}:\n{self.log}"
        wait_until(self._is_healthy, f"health\n{self.log}", START_TIMEOUT_S)
        self._pids += children_of(self.process.pid)
        self.http.base_url = httpx.URL(self.url)
        return self

    def _found_port(self) -> bool:
        found = re.search(r"on (http://127\.0\.0\.1:\d+)", self.log)
        if found:
            self.url = found[1]
        return found is not None

    def _is_healthy(self) -> bool:
        try:
            return get(f"{self.url}/health").status_code == 200
        except httpx.HTTPError:
            return False

    @property
    def engine_pid(self) -> int:
        """The child that runs the model."""
        (child,) = children_of(self.process.pid)
        return child

    @contextlib.contextmanager
    def held(self) -> Iterator[None]:
        """The engine stands still meanwhile: what runs goes on running, however slow the test is."""
        engine = self.engine_pid
        os.kill(engine, signal.SIGSTOP)
        try:
            yield
        finally:
            os.kill(engine, signal.SIGCONT)

    def wait_exit(self) -> int:
        try:
            return self.process.wait(TIMEOUT_S)
        except subprocess.TimeoutExpired:
            raise AssertionError(f"the server did not end within {TIMEOUT_S} s:\n{self.log}") from None

    def assert_all_gone(self) -> None:
        """No process of this server is left."""
        wait_until(lambda: not any(map(is_running, self._pids)), f"processes gone\n{self.log}")

    def __enter__(self) -> Server:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        if kind is not None:
            print(f"---- log of the server, pid {self.process.pid}\n{self.log}", file=sys.stderr)
        self.http.close()
        sessions.end(self.process)
        self._log.close()

    # ------------------------------------------------------------ requests

    def post(self, path: str, body: Any, **options: Any) -> httpx.Response:
        return self.http.post(path, json=body, **options)

    def complete(self, **body: Any) -> httpx.Response:
        """POST /v1/completions: greedy, on the base, unless told otherwise."""
        return self.post("/v1/completions", completion(**body))

    def complete_all(self, bodies: Sequence[Json]) -> list[httpx.Response]:
        """All at the same time, answers in order."""
        with concurrent.futures.ThreadPoolExecutor(len(bodies)) as threads:
            return list(threads.map(lambda body: self.complete(**body), bodies))

    def text(self, **body: Any) -> str:
        """The completion's text; the request must succeed."""
        answer = self.complete(**body)
        assert answer.status_code == 200, answer.text
        return str(answer.json()["choices"][0]["text"])

    def load(self, name: str, path: str | Path) -> httpx.Response:
        return self.post("/v1/load_lora_adapter", {"lora_name": name, "lora_path": str(path)})

    def unload(self, name: str) -> httpx.Response:
        return self.post("/v1/unload_lora_adapter", {"lora_name": name})

    def metrics(self) -> dict[str, float]:
        """Every sample of /metrics by its name with labels."""
        page = self.http.get("/metrics")
        assert page.status_code == 200
        lines = [line for line in page.text.splitlines() if line and not line.startswith("#")]
        return {name: float(value) for name, _, value in (line.rpartition(" ") for line in lines)}

    def gauge(self, name: str) -> float:
        return self.metrics()[name]

    def wait_quiet(self) -> dict[str, float]:
        """Wait until nothing runs or waits and no page is held; the metrics then."""
        quiet = (RUNNING, WAITING, PAGES_RUNNING)
        found: dict[str, float] = {}

        def is_quiet() -> bool:
            found.update(self.metrics())
            return not any(found[name] for name in quiet)

        wait_until(is_quiet, "nothing running")
        return found


RUNNING = f'vllm:num_requests_running{{model_name="{BASE}"}}'
WAITING = f'vllm:num_requests_waiting{{model_name="{BASE}"}}'
PAGES_RUNNING = 'manylora:pages{tier="device",use="running"}'
PAGES_ADAPTERS = 'manylora:pages{tier="device",use="adapters"}'


def completion(**changes: Any) -> Json:
    """The body of a short greedy completion."""
    return {"model": BASE, "prompt": "Once upon a time", "max_tokens": 8, "temperature": 0, **changes}


def events(response: httpx.Response) -> Iterator[Json | str]:
    """A stream's events as they come: JSON, or "[DONE]"."""
    for line in response.iter_lines():
        if line:
            assert line.startswith("data: "), line
            data = line.removeprefix("data: ")
            yield data if data == "[DONE]" else json.loads(data)


def assert_error(response: httpx.Response, status: int, *words: str, param: str | None = None) -> Json:
    """The response is an error in OpenAI's shape that says all the words; returns the error."""
    assert response.status_code == status, f"{response.status_code} instead of {status}: {response.text}"
    body = response.json()
    assert list(body) == ["error"], body
    error: Json = body["error"]
    assert set(error) == {"message", "type", "param", "code"}, error
    assert error["code"] == status
    assert isinstance(error["type"], str)
    assert error["type"]
    for word in words:
        assert word.lower() in error["message"].lower(), f"{word!r} is not in: {error['message']}"
    if param is not None:
        assert error["param"] == param
    return error


def lines_of(text: str) -> Sequence[str]:
    return [line for line in text.splitlines() if line.strip()]
