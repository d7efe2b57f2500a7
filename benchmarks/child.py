"""Commands for a child process, as JSON lines on its stdin: [name, arguments...]; each is answered on stdout."""

from __future__ import annotations

import json
import sys

ANSWER = "=> "
"""What a line with an answer begins with; the wheels print as well."""


def serve(end: object) -> None:
    """Says that it is ready, then calls methods of `end` until stdin is closed."""
    print(f"{ANSWER}true", flush=True)
    for line in sys.stdin:
        name, *arguments = json.loads(line)
        try:
            answer = {"value": getattr(end, name)(*arguments)}
        except Exception as error:
            answer = {"error": f"{type(error).__name__}: {error}"}
        print(f"{ANSWER}{json.dumps(answer)}", flush=True)
