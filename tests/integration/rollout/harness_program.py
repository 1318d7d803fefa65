"""A minimal harness: it calls the model, edits a file, and leaves a process behind."""

import json
import os
import subprocess
import sys
import time
import urllib.request
from pathlib import Path

task, how = sys.argv[1], sys.argv[2]
request = urllib.request.Request(
    os.environ["OPENAI_BASE_URL"] + "/chat/completions",
    json.dumps({"model": "default", "messages": [{"role": "user", "content": task}]}).encode(),
    {
        "Authorization": f"Bearer {os.environ['OPENAI_API_KEY']}",
        "Content-Type": "application/json",
    },
)
with urllib.request.urlopen(request, timeout=30) as reply:
    reply = json.load(reply)["choices"][0]["message"]["content"]
with Path("answer.txt").open("a") as file:
    file.write(f"{reply}\n")
(Path(os.environ["HOME"]) / "settings").write_text("mine")
subprocess.Popen(["sleep", os.environ["LEFT_BEHIND_S"]], start_new_session=True)
print("x" * 10_000 + "the end", flush=True)
if how == "hang":
    time.sleep(600)
sys.exit(3)
