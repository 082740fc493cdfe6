"""The old name of `bridge.targets.onnx.export.templates.make`, for one release."""

from __future__ import annotations

import sys

from bridge.targets.onnx.export.templates.make import main as main

if __name__ == "__main__":
    print("bridge.targets.trt.graph.templates.make is now bridge.targets.onnx.export.templates.make", file=sys.stderr)
    main()
