"""The old name of `bridge.targets.onnx.families.templates`, for one release."""

from __future__ import annotations

import sys

from bridge.targets.onnx.families.templates import main as main

if __name__ == "__main__":
    print("bridge.targets.trt.graph.templates.make is now bridge.targets.onnx.families.templates", file=sys.stderr)
    main()
