"""Renders chats with a model's chat template."""

from collections.abc import Mapping
from typing import Any

from transformers import PreTrainedTokenizerBase

from octavo.common import rpc
from octavo.router.text.chat_messages import changed_template, forms, template_input, text_of
from octavo.router.text.chat_template import TEMPLATE_ERRORS, template_variables
from octavo.router.text.control_tokens import Change, private_characters
from octavo.router.text.model_text import ModelText
from octavo.v1 import generation_pb2


class ChatRenderer:
    """Renders chats with a model's chat template.

    Args:
        tokenizer: The model's tokenizer.
        model: The template and markers.
        variables: Default variables of the template, which chats may override.
    """

    def __init__(
        self,
        tokenizer: PreTrainedTokenizerBase,
        model: ModelText,
        variables: Mapping[str, Any],
    ) -> None:
        self._tokenizer: Any = tokenizer
        self._model = model
        self._variables = variables

    def render(self, chat: generation_pb2.ChatPrompt, change: Change = str) -> str:
        """Render a chat; by default, the prompt ends with the start of the answer.

        Args:
            chat: The chat.
            change: Function applied to each of the caller's texts before the template runs.

        Raises:
            rpc.RpcError: FAILED_PRECONDITION if the model has no template,
                INVALID_ARGUMENT with the template's message if it refuses the chat, if its
                last message cannot be continued, or as `template_variables`.
        """
        if not self._tokenizer.chat_template:
            raise rpc.precondition(
                "chat", "the model has no chat template; send the prompt as text or tokens"
            )
        if chat.continue_final_message:
            return self._opened(chat, change) + change(text_of(chat.messages[-1]))
        opens = chat.add_generation_prompt if chat.HasField("add_generation_prompt") else True
        return self._fill(chat, change, opens=opens)

    def _opened(self, chat: generation_pb2.ChatPrompt, change: Change) -> str:
        """Return a chat's rendering up to the text of its last message.

        The template renders another text, as it may trim the one to continue.
        """
        last = chat.messages[-1]
        if last.tool_calls:
            raise rpc.invalid(
                "chat.continue_final_message",
                "chat.continue_final_message cannot continue a message with tool_calls: leave"
                " them out",
            )
        text = text_of(last)
        serialized = chat.SerializeToString().decode(errors="replace")
        (end,) = private_characters(1, [serialized, self._model.template])

        def before_end(content: str, change: Change) -> str:
            before, *others = self._fill(_ending(chat, content), change, opens=False).split(end)
            if len(others) != 1:
                raise _endless(f"writes its text {len(others)} times")
            return before

        # Except for white space, which templates trim, the text must be in the expected place.
        if _solid(before_end(text + end, str)) != _solid(before_end(end, str) + text):
            raise _endless("changes or moves its text; put reasoning into its own field")
        return before_end(end, change)

    def _fill(self, chat: generation_pb2.ChatPrompt, change: Change, *, opens: bool) -> str:
        variables = {**self._variables, **template_variables(chat, change)}

        first: Exception | None = None
        for arguments, joined in forms(chat):
            try:
                messages, tools = template_input(
                    chat, self._model, change, arguments, joined=joined
                )
                text: str = self._tokenizer.apply_chat_template(
                    messages,
                    tools=tools or None,
                    chat_template=changed_template(messages, self._model),
                    tokenize=False,
                    add_generation_prompt=opens,
                    **variables,
                )
                # An unpaired surrogate, possible in JSON escapes only, stays escaped.
                return text.encode("utf-8", "backslashreplace").decode()
            except TEMPLATE_ERRORS as error:
                first = first or error
        raise rpc.invalid(
            "chat.messages", f"the model's chat template refuses chat.messages: {first}"
        ) from first


def _ending(chat: generation_pb2.ChatPrompt, text: str) -> generation_pb2.ChatPrompt:
    """Return a chat with another text in its last message."""
    other = generation_pb2.ChatPrompt()
    other.CopyFrom(chat)
    other.messages[-1].ClearField("parts")
    other.messages[-1].content = text
    return other


def _solid(text: str) -> str:
    return "".join(text.split())


def _endless(why: str) -> rpc.RpcError:
    return rpc.invalid(
        "chat.continue_final_message",
        "chat.continue_final_message cannot continue the last message: the model's chat template "
        f"{why}",
    )
