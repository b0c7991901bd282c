"""What the parsers of an installed SGLang read, as JSON on standard output.

Runs with SGLang's interpreter, in `test_sglang_real.py`.
"""

import asyncio
import json
import sys

import numpy as np

from trajkit_shim.replies.external_parsers import InstalledParser

ARGUMENTS = '{"n":  1.50e1}'
_DEEPSEEK = """\
Look.<\uff5ctool\u2581calls\u2581begin\uff5c><\uff5ctool\u2581call\u2581begin\uff5c>\
function<\uff5ctool\u2581sep\uff5c>f
```json
ARGUMENTS
```<\uff5ctool\u2581call\u2581end\uff5c><\uff5ctool\u2581calls\u2581end\uff5c>"""
_QWEN = """\
Look.
<tool_call>
{"name": "f", "arguments": ARGUMENTS}
</tool_call>"""
_CODER = """\
Look.
<tool_call>
<function=f>
<parameter=n>
15.0
</parameter>
</function>
</tool_call>"""
REPLIES = {
    "qwen25": _QWEN.replace("ARGUMENTS", ARGUMENTS),
    "qwen3_coder": _CODER,
    "deepseekv3": _DEEPSEEK.replace("ARGUMENTS", ARGUMENTS),
}
SCHEMA = {"type": "object", "properties": {"n": {"type": "number"}}}
TOOLS = [{"type": "function", "function": {"name": "f", "parameters": SCHEMA}}]


async def read(name: str, text: str) -> dict[str, object]:
    parser = InstalledParser(name, "qwen3")
    found = await parser.parse(
        f"hm</think>{text}", TOOLS, np.zeros(1, np.int32), opened=True
    )
    return {
        "reasoning": found.reasoning,
        "text": found.text.strip(),
        "calls": [(call.name, call.arguments) for call in found.calls],
        "ill_formed": found.ill_formed,
        "tag": parser.form and [parser.form.opens, parser.form.tag("f", SCHEMA)],
    }


async def main() -> None:
    found = {name: await read(name, text) for name, text in REPLIES.items()}
    try:
        InstalledParser("nobody's", None)
    except ValueError as error:
        found["unknown"] = str(error)
    json.dump(found, sys.stdout)


asyncio.run(main())
