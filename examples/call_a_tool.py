"""A tool that the model must call, and an answer from what it returns: `octavo serve demo`.

Run as `python examples/call_a_tool.py localhost:50051`.
"""

import json
import os
import sys

import grpc

from octavo.v1 import generation_pb2, generation_pb2_grpc

QUESTION = "What is the weather in Paris?"
PARAMETERS = {
    "type": "object",
    "properties": {"city": {"type": "string", "maxLength": 40}},
    "required": ["city"],
}
TOOL = generation_pb2.Tool(
    name="get_weather",
    description="Tell the weather in a city.",
    parameters=json.dumps(PARAMETERS),
)


def get_weather(city: str) -> str:
    """Return what the tool says."""
    return f"It is sunny in {city}, 21 degrees."


def ask(
    stub: generation_pb2_grpc.GenerationServiceStub, chat: generation_pb2.ChatPrompt
) -> tuple[str, list[generation_pb2.ToolCall]]:
    """Return an answer's text, and the calls that it makes."""
    request = generation_pb2.GenerateRequest(chat=chat)
    request.sampling.temperature = 0
    request.stop.max_tokens = 100
    key = os.environ.get("OCTAVO_API_KEY")
    metadata = (("authorization", f"Bearer {key}"),) if key else ()
    text, calls = "", list[generation_pb2.ToolCall]()
    for response in stub.Generate(request, metadata=metadata):
        text += response.delta.text
        for piece in response.delta.tool_calls:
            if piece.id:  # the first piece of a call
                calls.append(generation_pb2.ToolCall(id=piece.id, name=piece.name))
            calls[piece.index].arguments += piece.arguments
    return text, calls


def main() -> None:
    """Let the model call the tool, call it, and let the model answer."""
    address = sys.argv[1] if len(sys.argv) > 1 else "localhost:50051"
    with grpc.insecure_channel(address) as channel:
        stub = generation_pb2_grpc.GenerationServiceStub(channel)
        chat = generation_pb2.ChatPrompt(
            messages=[generation_pb2.ChatMessage(role="user", content=QUESTION)],
            tools=[TOOL],
            # Without it, the model may answer by itself.
            tool_choice=generation_pb2.ToolChoice(name=TOOL.name),
            parallel_tool_calls=False,
        )
        text, calls = ask(stub, chat)
        chat.messages.add(role="assistant", content=text, tool_calls=calls)
        for call in calls:
            print(f"{call.name}({call.arguments})")
            result = get_weather(**json.loads(call.arguments))
            chat.messages.add(role="tool", tool_call_id=call.id, content=result)
        chat.tool_choice.mode = generation_pb2.TOOL_CHOICE_MODE_NONE
        text, _ = ask(stub, chat)
        print(text)


if __name__ == "__main__":
    main()
