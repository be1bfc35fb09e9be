"""Agents as their registries have them finish a turn, connected as docs/connect.md says.

They need not be in the project's environment: `pip install aider-chat` and `npm install
opencode-ai @anthropic-ai/claude-code @openai/codex`, with their programs on PATH. The engine's text
is scripted.
"""

import asyncio
import json
import os
import re
import shutil
import signal
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

import pytest

from tests.router.conftest import byte_level_tokenizer

pytestmark = [pytest.mark.slow, pytest.mark.timeout(300)]
CONNECT = (Path(__file__).parents[3] / "docs" / "connect.md").read_text()
FILE = "greeting.txt"
WHOLE = f"Here it is.\n\n{FILE}\n```\nhello\n```\n"
DONE = "It is written."
CONTEXT = 1 << 18
"""Tokens. Each is a byte, so agents' instructions have some 30,000 to 100,000."""


@dataclass
class Agent:
    """A program, and how it calls the tool that writes a file.

    Attributes:
        program: Its command.
        title: Its section of docs/connect.md.
        arguments: Its arguments for one turn without questions.
        config: The file for the section's lines, relative to the project; empty: run them.
        tool: The tool's name.
        call: Makes the tool's arguments from the file's path.
    """

    program: str
    title: str
    arguments: str
    config: str = ""
    tool: str = ""
    call: Callable[[str], dict] = dict


AIDER = Agent(
    "aider",
    "Aider",
    "--edit-format whole --no-git --analytics-disable --yes-always --no-check-update "
    f"--no-show-model-warnings --message 'Write hello.' {FILE}",
)
AGENTS = [
    Agent("claude", "Claude Code", "-p 'Write hello.' --allowedTools Write", "", "Write",
          lambda path: {"file_path": path, "content": "hello\n"}),
    Agent("codex", "Codex",
          "exec --skip-git-repo-check --dangerously-bypass-approvals-and-sandbox 'Write hello.'",
          "../.codex/config.toml", "exec_command", lambda path: {"cmd": f"echo hello > {path}"}),
    Agent("opencode", "opencode", "run --model octavo/tiny 'Write hello.'", "opencode.json",
          "write", lambda path: {"filePath": path, "content": "hello\n"}),
]  # fmt: skip


@pytest.fixture
def project(tmp_path):
    """An empty folder, in an empty home."""
    path = tmp_path / "project"
    path.mkdir()
    return path


async def finish(agent: Agent, app, project: Path) -> str:
    """Run an agent without the caller's environment variables; return its output."""
    if shutil.which(agent.program) is None:
        pytest.skip(f"needs {agent.program} on PATH")
    section = re.search(rf"^## {agent.title}\n(.*?)^## ", CONNECT, re.DOTALL | re.MULTILINE)
    (lines,) = re.findall(r"```\w+\n(.*?)\n```", section[1], re.DOTALL)
    lines = lines.replace("http://localhost:8000", app.url).replace("demo", "tiny")
    lines = lines.replace("32768", str(CONTEXT))
    if agent.config:
        (project / agent.config).parent.mkdir(exist_ok=True)
        (project / agent.config).write_text(lines)
        lines = agent.program
    process = await asyncio.create_subprocess_exec(
        "bash", "-c", f"{lines} {agent.arguments}", cwd=project, start_new_session=True,
        stdin=asyncio.subprocess.DEVNULL, stdout=asyncio.subprocess.PIPE,
        stderr=asyncio.subprocess.STDOUT,
        env={"PATH": os.environ["PATH"], "HOME": str(project.parent), "OCTAVO_API_KEY": "none"},
    )  # fmt: skip
    try:
        output, _ = await asyncio.wait_for(process.communicate(), 240)
    finally:
        if process.returncode is None:
            os.killpg(process.pid, signal.SIGKILL)
    assert process.returncode == 0, output.decode()
    return output.decode()


async def test_aider_writes_a_file(frontend, scripted, project):
    engine = scripted(WHOLE, eos=True, max_model_len=65536)
    async with frontend(engine) as (app, _):
        output = await finish(AIDER, app, project)
        await app.clean()
    assert (project / FILE).read_text() == "hello\n", output


@pytest.mark.parametrize("agent", AGENTS, ids=lambda agent: agent.program)
async def test_an_agent_calls_a_tool(frontend, scripted, project, encode, agent):
    text = byte_level_tokenizer()
    path = str(project / FILE)
    call = json.dumps({"name": agent.tool, "arguments": agent.call(path)})

    def answer(submit, _):
        prompt = text.decode(list(submit.prompt_token_ids), skip_special_tokens=False)
        calls = f'"{agent.tool}"' in prompt and path not in prompt
        return [*encode(f"<tool_call>\n{call}\n</tool_call>" if calls else DONE), 256]

    engine = scripted(script=answer, max_model_len=CONTEXT, features={"constraints": True})
    engine.info.load.total_blocks = engine.info.load.free_blocks = CONTEXT // 8
    async with frontend(engine, tool_parser="hermes") as (app, _):
        output = await finish(agent, app, project)
        await app.clean()
    assert (project / FILE).read_text() == "hello\n", output
    assert DONE in output
