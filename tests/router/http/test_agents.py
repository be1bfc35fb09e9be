"""Agents as their registries have them finish a turn: the engine's text is scripted.

They need not be in the project's environment: `pip install aider-chat` anywhere on PATH.
"""

import asyncio
import os
import shutil

import pytest

pytestmark = [pytest.mark.slow, pytest.mark.timeout(300)]
FILE = "greeting.txt"
WHOLE = f"Here it is.\n\n{FILE}\n```\nhello\n```\n"


async def run(program: str, *arguments: str, cwd, **environment: str) -> str:
    path = shutil.which(program)
    if path is None:
        pytest.skip(f"needs {program} on PATH")
    process = await asyncio.create_subprocess_exec(
        path, *arguments, cwd=cwd, stdin=asyncio.subprocess.DEVNULL,
        stdout=asyncio.subprocess.PIPE, stderr=asyncio.subprocess.STDOUT,
        env={**os.environ, "HOME": str(cwd), **environment},
    )  # fmt: skip
    try:
        output, _ = await asyncio.wait_for(process.communicate(), 240)
    finally:
        if process.returncode is None:
            process.kill()
    assert process.returncode == 0, output.decode()
    return output.decode()


async def test_aider_writes_a_file(frontend, scripted, tmp_path):
    engine = scripted(WHOLE, eos=True, max_model_len=65536)
    async with frontend(engine) as (app, _):
        output = await run(
            *("aider", "--model", "openai/tiny", "--edit-format", "whole", "--no-git"),
            *("--analytics-disable", "--yes-always", "--no-check-update"),
            *("--no-show-model-warnings", "--message", f"Write hello into {FILE}.", FILE),
            cwd=tmp_path, OPENAI_API_BASE=f"{app.url}/v1", OPENAI_API_KEY="none",
        )  # fmt: skip
        await app.clean()
    assert (tmp_path / FILE).read_text() == "hello\n", output
