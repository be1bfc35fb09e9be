"""Image URLs that are slow or never end leave other requests be, and take no memory."""

import multiprocessing
import time
from concurrent.futures import ProcessPoolExecutor

import psutil
import pytest

import octavo
from octavo.common.ports import free_port
from tests.integration import image_site
from tests.integration.image_attack import ask_all
from tests.vision_models import save_vision_model

AT_A_TIME, ROUNDS = 20, 2
LONGEST = 1.25
"""Maximum p99 of the times between tokens beside such URLs, as a share of what it is without."""


@pytest.fixture
def site(authority):
    """Serve images from a process of its own; return the port."""
    pem, key = authority.issue("server", "dns:localhost")
    port = free_port()
    process = multiprocessing.get_context("spawn").Process(
        target=image_site.serve, args=(pem, key, port), daemon=True
    )
    process.start()
    yield port
    process.kill()
    process.join()


@pytest.fixture
def server(site, authority, launch, tmp_path):
    save_vision_model("smolvlm", tmp_path / "model")
    port = free_port()
    made = launch(
        *("serve", "--model", str(tmp_path / "model"), "--served-model-name", "tiny"),
        *("--num-blocks", "128", "--swap-space", "0.01", "--http-port", str(port)),
        *("--allow-image-urls", f"https://localhost:{site}/*"),
        module=("tests.integration.image_site", str(authority.ca)),
    )
    made.http = f"127.0.0.1:{port}"
    return made.wait_ready()


def p99(address, running):
    """Return the 99th percentile of the times between tokens of a stream, in seconds."""
    gaps = []
    with octavo.Client(address) as client:
        while running():
            last = None
            for _ in client.generate("abc", max_tokens=400, ignore_eos=True):
                now = time.perf_counter()
                gaps += [] if last is None else [now - last]
                last = now
    return sorted(gaps)[int(0.99 * len(gaps))]


@pytest.mark.slow
def test_urls_that_are_slow_or_never_end_leave_others_be(server, site):
    """Ask about such URLs beside a stream; -s prints the times between the stream's tokens."""
    processes = [psutil.Process(server.pid), *server.children()]

    def resident():
        return sum(each.memory_info().rss for each in processes) / (1 << 20)

    paths = [path for path in image_site.WAYS if path != "/endless"]
    urls = [f"https://localhost:{site}{paths[i % len(paths)]}#{i}" for i in range(AT_A_TIME)]
    shares, grown = [], []
    with ProcessPoolExecutor(1, multiprocessing.get_context("spawn")) as pool:
        answers = pool.submit(ask_all, server.http, urls).result()
        before = resident()
        for _ in range(ROUNDS):
            end = time.monotonic() + 10
            alone = p99(server.address, lambda until=end: time.monotonic() < until)
            attack = pool.submit(ask_all, server.http, urls)
            beside = p99(server.address, lambda running=attack: not running.done())
            answers |= attack.result()
            shares.append(beside / alone)
            grown.append(resident() - before)
        endless = f"https://localhost:{site}/endless"
        answers |= pool.submit(ask_all, server.http, [f"{endless}#{i}" for i in range(8)]).result()
        grown.append(resident() - before)
    print(f"p99 between tokens beside such URLs, of that alone: {shares}; MiB more: {grown}")
    for url, (status, error) in answers.items():
        assert (status, error["param"]) == (400, "messages[0].content[0].image_url.url"), url
    assert min(shares) < LONGEST
    assert max(grown) < 150
