"""The old name of `bridge.targets.onnx.run.runtime`, for one release."""

from __future__ import annotations

import warnings

from bridge.targets.onnx.run.runtime import Runtime as Runtime

warnings.warn("bridge.targets.trt.runtime is now bridge.targets.onnx.run.runtime", DeprecationWarning, stacklevel=2)
