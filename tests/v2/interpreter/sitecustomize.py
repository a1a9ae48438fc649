"""Lets vLLM's model runner V2 run on a CPU. Python imports this before a program begins.

Triton is told that it has a backend for CPUs. Its interpreter (``TRITON_INTERPRET=1``) runs the
kernels. With ``RAGCACHE_TEST_ASYNC=1`` vLLM's CPU platform keeps asynchronous scheduling on, which
it otherwise turns off.
"""

from __future__ import annotations

import importlib.abc
import importlib.util
import os
import sys
import types
from collections.abc import Callable, Sequence
from importlib.machinery import ModuleSpec
from typing import Any


class _After(importlib.abc.MetaPathFinder):
    """Changes a module right after it was imported."""

    def __init__(self, module: str, change: Callable[[Any], None]) -> None:
        self._module = module
        self._change = change

    def find_spec(
        self, name: str, path: Sequence[str] | None, target: types.ModuleType | None = None
    ) -> ModuleSpec | None:
        if name != self._module:
            return None
        sys.meta_path.remove(self)
        spec = importlib.util.find_spec(name)
        assert spec is not None
        assert spec.loader is not None
        execute = spec.loader.exec_module

        def exec_module(module: types.ModuleType) -> None:
            execute(module)
            self._change(module)

        spec.loader.exec_module = exec_module  # type: ignore[method-assign]
        return spec


def _add_cpu_backend(module: Any) -> None:
    driver = types.SimpleNamespace(is_active=lambda: True)
    module.backends["cpu"] = types.SimpleNamespace(driver=driver, compiler=None)


def _keep_async_scheduling(module: Any) -> None:
    check = module.CpuPlatform.check_and_update_config.__func__

    def check_and_keep(cls: Any, config: Any) -> None:
        check(cls, config)
        config.scheduler_config.async_scheduling = True

    module.CpuPlatform.check_and_update_config = classmethod(check_and_keep)


sys.meta_path.insert(0, _After("triton.backends", _add_cpu_backend))
if os.environ.get("RAGCACHE_TEST_ASYNC") == "1":
    sys.meta_path.insert(0, _After("vllm.platforms.cpu", _keep_async_scheduling))
