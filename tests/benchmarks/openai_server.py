"""A server with the least of OpenAI's API: one thread makes the tokens of all its requests.

    python openai_server.py PORT SECONDS_PER_TOKEN [TOKENS_TOO_FEW]

So its capacity is one token each SECONDS_PER_TOKEN, however many requests there are.
"""

import json
import sys
import threading
import time
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer

PORT, PAUSE = int(sys.argv[1]), float(sys.argv[2])
TOO_FEW = int(sys.argv[3]) if len(sys.argv) > 3 else 0
COMPUTING = threading.Lock()


class Handler(BaseHTTPRequestHandler):
    def do_GET(self):
        self._begin("application/json")
        self.wfile.write(b'{"data": [{"id": "m"}]}')

    def do_POST(self):
        asked = json.loads(self.rfile.read(int(self.headers["Content-Length"])))
        assert asked["ignore_eos"]
        count = asked["max_tokens"] - TOO_FEW
        self._begin("text/event-stream")
        for _ in range(count):
            with COMPUTING:
                time.sleep(PAUSE)
            self._say({"choices": [{"index": 0, "text": "a"}]})
        usage = {"prompt_tokens": len(asked["prompt"]), "completion_tokens": count}
        self._say({"choices": [], "usage": usage})
        self.wfile.write(b"data: [DONE]\n\n")

    def _begin(self, kind):
        self.send_response(200)
        self.send_header("Content-Type", kind)
        self.end_headers()

    def _say(self, chunk):
        self.wfile.write(f"data: {json.dumps(chunk)}\n\n".encode())

    def log_message(self, *arguments):
        pass


ThreadingHTTPServer(("127.0.0.1", PORT), Handler).serve_forever()
