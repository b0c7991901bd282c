"""Lets vLLM's second model runner start on a CPU, in Triton's own interpreter.

Active only with TRITON_INTERPRET=1. Two changes: Triton lists a "cpu" backend (vLLM asks
for one), and top_k and top_p use the torch code, which the interpreter cannot replace.
"""

import importlib.abc
import importlib.machinery
import os
import sys
import types

_SAMPLER = "vllm.v1.sample.ops.topk_topp_sampler"


class _Finder(importlib.abc.MetaPathFinder):
    def find_spec(self, name, path, target=None):
        if name != _SAMPLER:
            return None
        spec = importlib.machinery.PathFinder.find_spec(name, path)
        run = spec.loader.exec_module

        def exec_module(module):
            run(module)
            module.HAS_TRITON = False

        spec.loader.exec_module = exec_module
        return spec


if os.environ.get("TRITON_INTERPRET") == "1":
    try:
        from triton.backends import backends
    except ImportError:  # a Python without triton, such as a build step's
        pass
    else:
        active = staticmethod(lambda: True)
        backends["cpu"] = types.SimpleNamespace(
            compiler=None, driver=type("Driver", (), {"is_active": active})
        )
        sys.meta_path.insert(0, _Finder())
