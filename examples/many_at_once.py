"""Many requests at once over one connection: `octavo serve demo`.

Run as `python examples/many_at_once.py localhost:50051`.
"""

import asyncio
import os
import sys

import octavo

QUESTIONS = ("What is the capital of France?", "What is 2 + 2?", "Name a primary colour.")
OPENING = "Once upon a time, in a house by the sea,"


async def ask(client: octavo.AsyncClient, question: str) -> None:
    """Print a question with its whole answer."""
    answer = await client.generate(
        [octavo.Message("user", question)], max_tokens=64, temperature=0
    ).complete()
    print(f"{question} {answer.text!r}, {answer.usage.output_tokens} tokens")


async def main() -> None:
    """Ask everything at once, then continue one prompt in four ways."""
    address = sys.argv[1] if len(sys.argv) > 1 else "localhost:50051"
    async with octavo.AsyncClient(address, api_key=os.environ.get("OCTAVO_API_KEY")) as client:
        # The engine batches them: a step takes hardly longer for three than for one.
        await asyncio.gather(*(ask(client, question) for question in QUESTIONS))

        # The four outputs share the prompt's blocks. The seed makes them repeatable.
        drafts = await client.generate(OPENING, n=4, seed=7, max_tokens=16).complete()
        for output in drafts.outputs:
            print(f"draft {output.index}: {output.text!r} ({output.reason})")


if __name__ == "__main__":
    asyncio.run(main())
