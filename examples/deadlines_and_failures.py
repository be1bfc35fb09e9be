"""A careful client: deadlines, retries, errors, early cancellation.

Run as `python examples/deadlines_and_failures.py localhost:50051`.
"""

import os
import sys
import time

import octavo

ATTEMPTS = 5
DEFAULT_WAIT = 1.0


def first_sentence(client: octavo.Client, topic: str) -> str:
    """Read an answer up to its first full stop, then cancel."""
    text = ""
    question = [octavo.Message("user", f"Tell me a long story about {topic}.")]
    for delta in client.generate(question, max_tokens=500, temperature=0):
        text += delta.text
        if "." in text:
            break  # cancels the call and frees its blocks
    return text.partition(".")[0] + "."


def patient(client: octavo.Client, prompt: str, timeout: float) -> octavo.Completion:
    """Complete a prompt; retry when a full or restarting server says when.

    Raises:
        octavo.Error: A retry would not help, or did not.
    """
    options: octavo.GenerateOptions = {"max_tokens": 16, "temperature": 0}
    for _ in range(ATTEMPTS - 1):
        try:
            return client.generate(prompt, timeout=timeout, **options).complete()
        except (octavo.ResourceExhaustedError, octavo.UnavailableError) as error:
            time.sleep(error.retry_after or DEFAULT_WAIT)
    return client.generate(prompt, timeout=timeout, **options).complete()


def main() -> None:
    """Show each in turn."""
    address = sys.argv[1] if len(sys.argv) > 1 else "localhost:50051"
    with octavo.Client(address, api_key=os.environ.get("OCTAVO_API_KEY")) as client:
        print(first_sentence(client, "the sea"))
        print(patient(client, "1, 2, 3,", timeout=60).text)
        try:
            client.generate("Hello", temperature=-1).complete()
        except octavo.InvalidArgumentError as error:
            for violation in error.violations:
                print(f"invalid: {violation.field}: {violation.description}")
        try:
            client.generate("Hello", max_tokens=500, ignore_eos=True, timeout=0.05).complete()
        except (octavo.DeadlineExceededError, octavo.ResourceExhaustedError) as error:
            # RESOURCE_EXHAUSTED if the server sees at once that the deadline is too short.
            print(f"deadline: {error.code.name}")


if __name__ == "__main__":
    main()
