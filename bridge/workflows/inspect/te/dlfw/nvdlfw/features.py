"""Register the features of bridge with nvdlfw-inspect, whose engine runs this file.

They stand in for those of Transformer Engine's folder, whichever of the two is named first. Without that folder the
namespace `transformer_engine` is registered here, too.
"""

from __future__ import annotations

from pathlib import Path
from typing import Any

import nvdlfw_inspect.api as debug_api
from nvdlfw_inspect.base import BaseConfigAPIMapper, BaseNamespaceAPI
from nvdlfw_inspect.logging import MetricLogger, get_logger
from nvdlfw_inspect.registry import Registry, api_method

from bridge.workflows.inspect.te.dlfw.upstream import Answers, calls_of
from bridge.workflows.inspect.te.features import CALLS, KINDS

NAMESPACE = "transformer_engine"
TENSORS = [call for call in CALLS if call != "fp8_gemm_enabled"]  # calls with a tensor's name
GEMMS = ["fp8_gemm_enabled", "modify_tensor_enabled", "modify_tensor"]  # calls with a GEMM


class State:
    """The answers of the run, from its first call on; the next `initialize` runs this file again."""

    answers: Answers | None = None

    @classmethod
    def get(cls) -> Answers:
        if cls.answers is None:
            cls.answers = Answers(MetricLogger.log_scalar, Path(get_logger().root_log_dir))
            namespace = Registry.data[NAMESPACE].api
            step, answers = namespace.step, cls.answers

            def both() -> None:
                step()
                answers.step(debug_api.DEBUG_MANAGER._trainer_iteration_count - 1)

            namespace.step = both
        return cls.answers


class Mapper(BaseConfigAPIMapper):  # type: ignore[misc]
    """A feature of bridge: its options are read by bridge, as they are written."""

    def parse_config_and_api(self, config: Any, **call: Any) -> tuple[bool, Any]:
        takes = State.get().takes(type(self).__name__, config, call)
        return takes, config if takes else None


def _feature(name: str) -> type:
    def method(call: str) -> Any:
        def plain(self: Any, config: Any, layer_name: str, **given: Any) -> Any:
            return State.get().call(name, call, config, layer_name, given)

        def inspect_tensor(
            self: Any,
            config: Any,
            layer_name: str,
            quantizer: Any = None,
            rowwise_quantized_tensor: Any = None,
            columnwise_quantized_tensor: Any = None,
            **given: Any,
        ) -> None:
            """Words that Transformer Engine drops where a method does not name them."""
            taken = {"rowwise_quantized_tensor": rowwise_quantized_tensor}
            taken |= {"columnwise_quantized_tensor": columnwise_quantized_tensor, "quantizer": quantizer}
            State.get().call(name, call, config, layer_name, {**given, **taken})

        answer = inspect_tensor if call == "inspect_tensor" else plain
        answer.__name__ = call
        answer.__doc__ = f"{call} of Transformer Engine, answered by bridge."
        return api_method(answer)

    return type(name, (Mapper,), {"__doc__": KINDS[name].__doc__, **{call: method(call) for call in calls_of(name)}})


class Defaults:
    """What a call answers for a layer without features."""

    def fp8_gemm_enabled(self, config: Any, layer_name: str, **_: Any) -> tuple[bool, None]:
        return True, None

    def _no(self, config: Any, layer_name: str, **_: Any) -> tuple[bool, None]:
        return False, None

    def _nothing(self, config: Any, layer_name: str, **_: Any) -> None:
        return None

    def modify_tensor(self, config: Any, layer_name: str, **_: Any) -> Any:
        raise NotImplementedError(f"modify_tensor of {layer_name}: no feature of the config does it")

    modify_tensor_enabled = inspect_tensor_enabled = inspect_tensor_postquantize_enabled = _no
    inspect_tensor = inspect_tensor_postquantize = _nothing


class Namespace(BaseNamespaceAPI):  # type: ignore[misc]
    """The routing of Transformer Engine's calls."""

    def __init__(self) -> None:
        super().__init__()
        self._default_api_impl = Defaults()
        self._cacheable_api_kwargs_map = {
            call: [*(["tensor_name"] if call in TENSORS else []), *(["gemm"] if call in GEMMS else [])]
            for call in CALLS
        }

    def input_assertions_hook(self, api_name: str, **words: Any) -> None:
        needed = self._cacheable_api_kwargs_map[api_name]
        if lacking := [word for word in needed if word not in words]:
            raise TypeError(f"{api_name}: {', '.join(lacking)} is missing")

    def routing_condition(
        self, api_name: str, config: Any, layer_name: str, feature_obj: Any, **words: Any
    ) -> tuple[bool, Any]:
        found: tuple[bool, Any] = feature_obj.parse_config_and_api(
            config, gemm_parsing=api_name in GEMMS, tensor_parsing=api_name in TENSORS, **words
        )
        return found

    def output_assertions_hook(self, api_name: str, ret: Any, **_: Any) -> None:
        assert not api_name.endswith("_enabled") or isinstance(ret, bool | tuple), f"{api_name}: returned {ret!r}"

    def is_multiple_feature_invocation_allowed(self, api_name: str) -> bool:
        return not api_name.startswith("modify_tensor")

    def handle_multi_feature_output(self, api_name: str, outputs: list[Any], features: Any, **words: Any) -> Any:
        if not api_name.endswith("_enabled"):
            return None
        step = words["iteration"]
        answers = [output if isinstance(output, tuple) else (output, step + 1) for output in outputs]
        now = [answer[0] for answer in answers]
        later = [answer[1] for answer in answers if answer[1] is not None]
        return all(now) if api_name == "fp8_gemm_enabled" else any(now), min(later, default=None)


def _register() -> None:
    for name in KINDS:
        made, known = _feature(name), Registry.data.get(NAMESPACE)
        if known is None or name not in known.features:
            Registry.register_feature(NAMESPACE)(made)
            continue
        known.features[name] = made()
        for call in calls_of(name):
            if name not in known.feat_api_to_features[call]:
                known.feat_api_to_features[call].append(name)
    if Registry.data[NAMESPACE].api is None:
        Registry.register_namespace_api(NAMESPACE)(Namespace)


_register()
