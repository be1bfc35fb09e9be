"""A careful client: deadlines, failures, leaving when enough was said.

Run as `python examples/deadlines_and_failures.py localhost:50051`.
"""

import os
import sys
import time

import octavo

ATTEMPTS = 5
DEFAULT_WAIT = 1.0


def first_sentence(client: octavo.Client, topic: str) -> str:
    """Reads an answer as far as its first full stop."""
    text = ""
    question = [octavo.Message("user", f"Tell me a long story about {topic}.")]
    for delta in client.generate(question, max_tokens=500, temperature=0):
        text += delta.text
        if "." in text:
            break  # cancels the call: the model stops, and its memory is free
    return text.partition(".")[0] + "."


def patient(client: octavo.Client, prompt: str, timeout: float) -> octavo.Completion:
    """Completes a prompt; comes back when a full or restarting server says to.

    Raises:
        octavo.Error: Trying again would not help, or did not.
    """
    options: octavo.GenerateOptions = {"max_tokens": 16, "temperature": 0}
    for _ in range(ATTEMPTS - 1):
        try:
            return client.generate(prompt, timeout=timeout, **options).complete()
        except (octavo.ResourceExhaustedError, octavo.UnavailableError) as error:
            time.sleep(error.retry_after or DEFAULT_WAIT)
    return client.generate(prompt, timeout=timeout, **options).complete()


def main() -> None:
    """Shows each in turn."""
    address = sys.argv[1] if len(sys.argv) > 1 else "localhost:50051"
    with octavo.Client(address, api_key=os.environ.get("OCTAVO_API_KEY")) as client:
        print(first_sentence(client, "the sea"))
        print(patient(client, "1, 2, 3,", timeout=60).text)
        try:
            client.generate("Hello", temperature=-1).complete()
        except octavo.InvalidArgumentError as error:
            for violation in error.violations:
                print(f"wrong: {violation.field}: {violation.description}")
        try:
            client.generate("Hello", max_tokens=500, ignore_eos=True, timeout=0.05).complete()
        except (octavo.DeadlineExceededError, octavo.ResourceExhaustedError) as error:
            # RESOURCE_EXHAUSTED where the server sees at once that there is not the time.
            print(f"too late: {error.code.name}")


if __name__ == "__main__":
    main()
