"""OpenAI's own client with Octavo: `octavo serve demo --http-port 8000`.

Run as `python examples/openai_chat.py http://localhost:8000/v1`.
"""

import os
import sys

import openai


def main() -> None:
    """Ask one question; print the streamed answer and the token count."""
    base_url = sys.argv[1] if len(sys.argv) > 1 else "http://localhost:8000/v1"
    # The library requires a key even if the router does not.
    client = openai.OpenAI(base_url=base_url, api_key=os.environ.get("OCTAVO_API_KEY", "none"))
    model = client.models.list().data[0].id
    stream = client.chat.completions.create(
        model=model,
        messages=[{"role": "user", "content": "What is the capital of France?"}],
        temperature=0,
        stream=True,
        stream_options={"include_usage": True},
        extra_body={"top_k": 40},  # parameters that OpenAI's API does not have
    )
    for chunk in stream:
        if chunk.choices:
            print(chunk.choices[0].delta.content or "", end="", flush=True)
        elif chunk.usage:
            print(f"\n{chunk.usage.completion_tokens} tokens by {model}")


if __name__ == "__main__":
    main()
