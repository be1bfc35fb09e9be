"""Requests with images that cannot be shown, sent by a process of their own."""

import base64
import json
import time
from concurrent.futures import ThreadPoolExecutor
from http.client import HTTPConnection

from tests.router.images.test_decode import BAD

JSON = {"Content-Type": "application/json"}
BAD_URLS = (
    *("", "cat.png", "//localhost/cat.png", "http://localhost/cat.png", "ftp://localhost/cat.png"),
    *("file:///etc/passwd", "https://localhost/cat.png", "https://localhost:443/cat.png"),
    *("https://localhost:22/cat.png", "https://127.0.0.1/cat.png", "https://[::1]/cat.png"),
    *("https://2130706433/cat.png", "https://169.254.169.254/latest", "https://10.0.0.1/cat.png"),
    *("https://a:b@localhost/cat.png", "https://localhost.evil.test/cat.png"),
    *("https://localhost/../cat.png", "https://unknown.invalid/cat.png", "https://[::1/cat.png"),
    *("https://localhost:x/cat.png", "javascript:alert(1)", "data:image/png,abc"),
)


def data_url(data, media_type="image/png"):
    return f"data:{media_type};base64,{base64.b64encode(data).decode()}"


def bad_bodies():
    """Return requests by name, each with one image that cannot be shown."""
    urls = {url: url for url in BAD_URLS}
    urls |= {
        name: data_url(data, kind)
        for name, (data, kind, _) in BAD.items()
        if name != "too many bytes"  # for any request
    }
    return {
        name: json.dumps(
            {
                "model": "tiny",
                "messages": [
                    {
                        "role": "user",
                        "content": [
                            {"type": "text", "text": "x"},
                            {"type": "image_url", "image_url": {"url": url}},
                        ],
                    }
                ],
            }
        )
        for name, url in urls.items()
    }


def attack(http, rounds, pause):
    """Send every bad request in each round; return how they were answered, by name."""
    connection = HTTPConnection(http.removeprefix("http://"), timeout=60)
    answers, bodies = {}, bad_bodies()
    for name, body in rounds * list(bodies.items()):
        connection.request("POST", "/v1/chat/completions", body, JSON)
        answer = connection.getresponse()
        answers[name] = answer.status, json.load(answer)["error"]
        time.sleep(pause)
    connection.close()
    return answers


def ask(http, url):
    """Ask about the image at a URL; return the status and the error."""
    body = {
        "model": "tiny",
        "messages": [
            {"role": "user", "content": [{"type": "image_url", "image_url": {"url": url}}]}
        ],
    }
    connection = HTTPConnection(http, timeout=60)
    connection.request("POST", "/v1/chat/completions", json.dumps(body), JSON)
    answer = connection.getresponse()
    return answer.status, json.load(answer)["error"]


def ask_all(http, urls):
    """Ask about the images at URLs, many at a time; return the answers by URL."""
    with ThreadPoolExecutor(len(urls)) as pool:
        return dict(zip(urls, pool.map(lambda url: ask(http, url), urls), strict=True))
