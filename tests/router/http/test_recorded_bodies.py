"""Request bodies recorded from client packages.

Agents' bodies are the first of a turn, with most tools and texts cut. Each other package had a
conversation with a call, its result and another question, whole and streamed, and requested a
schema if it supports that.
"""

import json
from pathlib import Path

import pytest

FILES = {
    "recorded_bodies.json": "/v1/chat/completions",
    "recorded_messages.json": "/v1/messages",
    "recorded_responses.json": "/v1/responses",
}
BODIES = [
    pytest.param(path, bodies, id=package)
    for file, path in FILES.items()
    for package, bodies in json.loads(Path(__file__).with_name(file).read_text()).items()
]
CALL = '<tool_call>\n{"name": "weather", "arguments": {"city": "Rome"}}\n</tool_call>'


@pytest.mark.few(5)
@pytest.mark.parametrize(("path", "bodies"), BODIES)
async def test_no_body_is_refused(frontend, scripted, post, path, bodies):
    engine = scripted(CALL, eos=True, max_model_len=8192, features={"constraints": True})
    engine.info.load.total_blocks = engine.info.load.free_blocks = 1024
    async with frontend(engine, tool_parser="hermes") as (app, _):
        for body in bodies:
            answer = await post(f"{app.url}{path}", json.dumps(body).encode())
            assert answer.status == 200, (body, answer.body)
