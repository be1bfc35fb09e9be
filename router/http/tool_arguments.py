"""Tool arguments in OpenAI's form."""

from typing import Annotated, Any, Literal, TypeAlias

from pydantic import Discriminator, Tag

from octavo.client import Tool
from octavo.common.sampling_parameters import ChatOptions
from octavo.router.http.bodies import OpenBody
from octavo.router.http.no_ops import Never, only


class Function(OpenBody):
    """The function's description for the model."""

    name: str
    description: str | None = None
    parameters: dict[str, Any] | None = None
    strict: bool | None = None
    input_schema: Never = None  # Anthropic's name of `parameters`


class FunctionTool(OpenBody):
    """A tool; only functions are supported."""

    type: Annotated[str, only("function")]
    function: Function
    custom: Never = None

    def tool(self) -> Tool:
        """Convert to the client's `Tool`."""
        function = self.function
        return Tool(
            function.name,
            function.description or "",
            function.parameters or {},
            strict=bool(function.strict),
        )


class FunctionName(OpenBody):
    """A function's name."""

    name: str


class NamedTool(OpenBody):
    """A tool that the model must call."""

    type: Annotated[str, only("function")]
    function: FunctionName
    allowed_tools: Never = None
    custom: Never = None


def _kind_of_choice(value: object) -> str:
    return "[rule]" if isinstance(value, str) else "[function]"


ToolChoice: TypeAlias = Annotated[
    Annotated[Literal["auto", "none", "required"], Tag("[rule]")]
    | Annotated[NamedTool, Tag("[function]")],
    Discriminator(_kind_of_choice),
]
"""A rule, or the tool that the model must call."""


class ToolArguments(OpenBody):
    """The tools of a chat."""

    tools: list[FunctionTool] | None = None
    tool_choice: ToolChoice | None = None
    parallel_tool_calls: bool | None = None

    def tool_options(self) -> ChatOptions:
        """Return the arguments as options of the client's `tokenize`.

        Without tools, rules have no effect and are dropped. A named tool is called once, as in
        OpenAI's API, unless `parallel_tool_calls` is set.
        """
        tools = [tool.tool() for tool in self.tools or ()] or None
        choice: str | Tool | None = None
        parallel = self.parallel_tool_calls
        if isinstance(self.tool_choice, NamedTool):
            parallel = bool(parallel)
            choice = Tool(self.tool_choice.function.name)
        elif tools or self.tool_choice == "required":
            choice = self.tool_choice
        return {"tools": tools, "tool_choice": choice, "parallel_tool_calls": parallel}
