"""`areal-hpc proxy` as a process of its own."""

from collections.abc import Sequence
from pathlib import Path

import httpx

from tests.support.chatml import write_model_dir
from tests.support.deadlines import scaled
from tests.support.forked_processes import fork_module


class LoneProxy:
    def __init__(self, folder: Path, *urls: str, arguments: Sequence[str] = ()) -> None:
        self.key_file = folder / "admin.key"
        self.log = folder / "proxy.log"
        self._argv = [
            *("areal_hpc", "proxy", "--port", "0"),
            *(word for url in urls for word in ("--upstream", url)),
            *("--tokenizer", str(write_model_dir(folder / "model"))),
            *("--admin-key-file", str(self.key_file), "--context-length", "2048", *arguments),
        ]
        self.start()

    def start(self) -> None:
        with self.log.open("ab") as log:
            self.process, self.stdout = fork_module(self._argv, log)
        first = self.stdout.readline()
        assert first, self.log.read_text()
        self.url = first.split("listens on ")[1].split(",")[0]
        self.welcome = first + "".join(self.stdout.readline() for _ in range(3))

    def kill(self) -> None:
        self.process.kill()  # nothing, if it has ended
        self.process.wait()
        self.stdout.close()

    close = kill

    def post(self, route: str, body: object, key: str | None = None) -> httpx.Response:
        key = key or self.key_file.read_text()
        headers = {"authorization": f"Bearer {key}"}
        return httpx.post(f"{self.url}{route}", json=body, headers=headers, timeout=scaled(60))

    def open_session(self) -> tuple[str, str]:
        opened = self.post("/rl/start_session", {"task_id": "try", "rights": "all"})
        assert opened.status_code == 200, opened.text
        return opened.json()["session_id"], opened.json()["api_key"]
