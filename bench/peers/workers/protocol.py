"""What a worker and a sitting say to each other, one JSON object a line.

A worker is started with its options as one JSON argument. Once it has made its first token it writes
`{"ready": versions}`. For each line `{"prompts": [[token ids]], "tokens": [n]}` it answers all prompts at once, greedy
and past end tokens, with n tokens each, and writes `{"stamps": [[seconds]]}`: when each token of each answer came. It
ends with its input.

Workers run in the Python of the engine they drive, so this file needs nothing but the standard library.
"""

import json
import os
import sys

_out = os.fdopen(os.dup(1), "w")
os.dup2(2, 1)  # what libraries print must not get between the lines


def options():
    return json.loads(sys.argv[1])


def serve(generate, versions):
    generate([[100]], [1])
    _say({"ready": versions})
    for line in sys.stdin:
        asked = json.loads(line)
        _say({"stamps": generate(asked["prompts"], asked["tokens"])})


def _say(value):
    _out.write(json.dumps(value) + "\n")
    _out.flush()
