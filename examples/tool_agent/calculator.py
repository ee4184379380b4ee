"""A calculator for verl's tool agent, which the quickstart policy calls by ending an answer.

verl loads this file in every agent-loop worker (`multi_turn.function_tool_path`). A real policy writes tool calls in a
format that verl parses itself (`multi_turn.format=hermes`). The quickstart policy knows only sums, so the last sum of
its answer is the call, and the tool returns the result.
"""

from __future__ import annotations

import json
import operator
import re
from typing import Any

from verl.experimental.agent_loop.tool_parser import FunctionCall, ToolParser
from verl.tools.function_tool import function_tool

OPERATORS = {"+": operator.add, "-": operator.sub, "*": operator.mul, "/": operator.floordiv}
SUM = re.compile(r"(\d+) ([-+*/]) (\d+) =")


@ToolParser.register("last_sum")
class LastSumParser(ToolParser):
    """Parses the last sum of an answer as a call of the calculator."""

    async def extract_tool_calls(self, responses_ids: list[int], tools: Any = None) -> tuple[str, list[FunctionCall]]:
        """Return the text of the answer, and its tool call, if any."""
        text = self.tokenizer.decode(responses_ids)
        sums = SUM.findall(text)
        if not sums:
            return text, []
        return text, [FunctionCall(name="calculate", arguments=json.dumps({"expression": " ".join(sums[-1])}))]


@function_tool
def calculate(expression: str) -> str:
    """Work out a sum of two whole numbers.

    Args:
        expression: For example "12 + 30".
    """
    left, sign, right = expression.split()
    if sign == "/" and int(right) == 0:
        return f"{expression} = 0"
    return f"{expression} = {OPERATORS[sign](int(left), int(right))}"
