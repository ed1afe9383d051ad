"""Tool calls: what a request offers, how families of models write their calls, and how these are found and forced."""

from worker.server.tools.formats import FORMAT_NAMES, ToolFormat, tool_format_of
from worker.server.tools.pieces import CallArguments, CallStart, Piece, Text, ToolCallParser, new_call_id
from worker.server.tools.request import Tool, ToolUse, read_tools

__all__ = [
    "FORMAT_NAMES",
    "CallArguments",
    "CallStart",
    "Piece",
    "Text",
    "Tool",
    "ToolCallParser",
    "ToolFormat",
    "ToolUse",
    "new_call_id",
    "read_tools",
    "tool_format_of",
]
