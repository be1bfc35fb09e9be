"""An answer as an object, and a tool that the model must call: `octavo serve demo`.

Run as `python examples/call_a_tool.py localhost:50051`.
"""

import os
import sys
from typing import Literal

import pydantic

import octavo

QUESTION = octavo.Message("user", "What is the weather in Paris?")


class Place(pydantic.BaseModel, extra="forbid"):
    """The arguments of the tool."""

    city: Literal["Paris", "Rome", "Berlin"]


TOOL = octavo.Tool("get_weather", "Tell the weather in a city.", Place)


def get_weather(city: str) -> str:
    """Return the tool's answer."""
    return f"It is sunny in {city}, 21 degrees."


def main() -> None:
    """Get an object; let the model call the tool, call it, and let the model answer."""
    address = sys.argv[1] if len(sys.argv) > 1 else "localhost:50051"
    with octavo.Client(address, api_key=os.environ.get("OCTAVO_API_KEY")) as client:
        place = client.complete([QUESTION], schema=Place, temperature=0, max_tokens=50)
        print(f"asked about {place.city}")
        # Without tool_choice, the model may answer by itself.
        asked = client.complete(
            [QUESTION],
            tools=[TOOL],
            tool_choice=TOOL,
            parallel_tool_calls=False,
            temperature=0,
            max_tokens=100,
        )
        messages = [QUESTION, asked.message]
        for call in asked.tool_calls:
            print(f"{call.name}({call.arguments})")
            result = get_weather(**call.parse())
            messages.append(octavo.Message("tool", result, tool_call_id=call.id))
        answer = client.complete(
            messages, tools=[TOOL], tool_choice="none", temperature=0, max_tokens=100
        )
        print(answer.text)


if __name__ == "__main__":
    main()
