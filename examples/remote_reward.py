"""A reward server of your own, with nothing but Python's library: docs/rewards.md says what it is asked and what it answers.

    RM_TOKEN=change-me python examples/remote_reward.py 8000
    scripts/quickstart.sh        # once: makes the model and the data that configs/quickstart.yaml names
    RM_TOKEN=change-me megappo train configs/quickstart.yaml run.name=remote_reward 'reward.parts=[{name: exact_match},
        {name: brief, url: "http://127.0.0.1:8000/score", weight: 0.5, remote: {token_env: RM_TOKEN}}]'

`megappo serve-reward` serves a function or a Hugging Face reward model without a line of code.
"""

from __future__ import annotations

import hmac
import json
import os
import sys
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from typing import Any

LARGEST = 64 * 2**20  # bytes of a request


def brief(sample: dict[str, Any]) -> float | None:
    """Halves with each 4 characters; undecided (null) for a response without text."""
    return 0.5 ** (len(sample["response"]) / 4) if sample["response"] else None


class Handler(BaseHTTPRequestHandler):
    protocol_version = "HTTP/1.1"  # connections stay open between requests

    def do_POST(self) -> None:
        token, length = os.environ["RM_TOKEN"], int(self.headers.get("Content-Length", 0))
        if not hmac.compare_digest(self.headers.get("Authorization", "").encode(), f"Bearer {token}".encode()):
            self.close_connection = True
            return self.answer(401, {"detail": "the token is missing or wrong"})
        if length > LARGEST:
            self.close_connection = True
            return self.answer(413, {"detail": "too large"})
        samples = json.loads(self.rfile.read(length))["samples"]
        # An empty list too: that is how a run asks, before it builds a model, if the server is there.
        return self.answer(200, {"scores": [brief(sample) for sample in samples]})

    def answer(self, status: int, content: dict[str, Any]) -> None:
        body = json.dumps(content).encode()
        self.send_response(status)
        self.send_header("Content-Type", "application/json")
        self.send_header("Content-Length", str(len(body)))
        self.end_headers()
        self.wfile.write(body)

    def log_message(self, *_: Any) -> None:
        pass


if __name__ == "__main__":
    server = ThreadingHTTPServer(("127.0.0.1", int(sys.argv[1])), Handler)
    print(f"scoring on http://127.0.0.1:{server.server_address[1]}/score", flush=True)
    server.serve_forever()
