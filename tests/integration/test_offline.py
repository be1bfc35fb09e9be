"""`octavo.LLM`: a server in child processes, over a real model."""

import itertools
import os
import signal
import subprocess
import sys
from collections import deque

import psutil
import pytest

import octavo
from octavo.offline.server import ServerError, command_line

FLAGS = {"num_blocks": 256, "max_model_len": 1024, "swap_space": 0}
OPTIONS = {"temperature": 0.0, "max_tokens": 8}


@pytest.fixture(scope="module")
def llm(demo_model):
    with octavo.LLM("demo", in_flight=4, progress=False, **FLAGS) as llm:
        yield llm


def test_results_are_in_order_whole_or_one_by_one(llm):
    prompts = [[3 + i, 40, 50 + i] for i in range(40)]
    all_at_once = llm.generate(prompts, token_ids=True, **OPTIONS)
    one_by_one = [llm.generate([prompt], token_ids=True, **OPTIONS)[0] for prompt in prompts[:5]]
    tokens = [completion.outputs[0].token_ids for completion in all_at_once]
    assert tokens[:5] == [completion.outputs[0].token_ids for completion in one_by_one]
    assert len(set(tokens)) > 20


def test_an_iterator_is_taken_as_results_are_read(llm):
    taken = itertools.count()
    prompts = ([3 + next(taken) % 400] for _ in itertools.count())  # endless
    results = llm.generate(prompts, **OPTIONS)
    for _ in range(50):
        next(results)
    assert next(taken) <= 50 + 4 * 4
    results.close()
    assert len(llm.generate([[5]], **OPTIONS)) == 1


def test_a_request_that_fails_names_its_field_and_cancels_the_rest(llm):
    with pytest.raises(octavo.InvalidArgumentError, match="temperature"):
        llm.generate([[5], [6]], temperature=-1.0)
    assert len(llm.generate([[5]], **OPTIONS)) == 1


def test_other_routers_serve_it_too(llm):
    answer = llm.chat("Name a river.", **OPTIONS)[0].text
    assert answer != llm.generate("Name a river.", **OPTIONS)[0].text
    with octavo.LLM(hosts=[llm._server.address] * 2, progress=False) as other:
        assert other.chat("Name a river.", **OPTIONS)[0].text == answer


def test_a_server_that_cannot_start_says_why(tmp_path):
    with pytest.raises(ServerError, match="no-such-model"):
        octavo.LLM(str(tmp_path / "no-such-model"))
    with pytest.raises(ServerError, match="--no-such-flag"):
        octavo.LLM("demo", no_such_flag=1)
    with pytest.raises(ValueError, match="num_blocks"):
        octavo.LLM(hosts=["127.0.0.1:1"], num_blocks=4)


def test_flags_are_those_of_the_command():
    flags = {"a_b": 1, "c": True, "d": False, "e": None, "f": ["x", "y"], "g": "z"}
    words = "--a-b 1 --c --no-d --f x --f y --g z"
    assert command_line(flags) == words.split()


PROGRAM = """
import octavo
llm = octavo.LLM("demo", progress=False, num_blocks=256, swap_space=0)
print(llm._server._process.pid, flush=True)
for _ in llm.generate(([5] for _ in iter(int, 1)), max_tokens=8, ignore_eos=True):
    pass
"""


@pytest.mark.slow
@pytest.mark.parametrize("end", [signal.SIGINT, signal.SIGKILL])
def test_nothing_is_left_when_the_program_ends(demo_model, end):
    with subprocess.Popen(
        [sys.executable, "-c", PROGRAM],
        stdout=subprocess.PIPE,
        stderr=subprocess.DEVNULL,
    ) as program:
        server = psutil.Process(int(program.stdout.readline()))
        processes = [server, *server.children(recursive=True)]
        assert len(processes) > 1
        os.kill(program.pid, end)
        program.wait(60)
    _, left = psutil.wait_procs(processes, timeout=20)
    assert not left


@pytest.mark.slow
def test_a_server_that_dies_is_named(demo_model):
    with octavo.LLM("demo", progress=False, **FLAGS) as llm:
        results = llm.generate(([5] for _ in itertools.count()), **OPTIONS)
        next(results)
        llm._server._process.kill()
        with pytest.raises(ServerError, match="code -9"):
            deque(results, maxlen=0)
