"""Request bodies recorded from client packages.

Each package had a conversation with a call, its result and another question, whole and streamed,
and requested a schema if it supports that.
"""

import json
from pathlib import Path

import pytest

BODIES = json.loads(Path(__file__).with_name("recorded_bodies.json").read_text())
CALL = '<tool_call>\n{"name": "weather", "arguments": {"city": "Rome"}}\n</tool_call>'


@pytest.mark.parametrize("package", BODIES)
async def test_no_body_is_refused(frontend, scripted, post, package):
    engine = scripted(CALL, eos=True, max_model_len=8192, features={"constraints": True})
    async with frontend(engine, tool_parser="hermes") as (app, _):
        for body in BODIES[package]:
            answer = await post(f"{app.url}/v1/chat/completions", json.dumps(body).encode())
            assert answer.status == 200, (body, answer.body)
