"""Other weights for a model, as texts for a server on this machine.

python share_weights.py MODEL prints a JSON list with one text per process of the server.
The texts name shared memory, which exists until standard input ends.
"""

import base64
import io
import json
import sys
from multiprocessing.reduction import ForkingPickler

import torch
from safetensors.torch import load_file

# with the default strategy, only children of this process could read it
torch.multiprocessing.set_sharing_strategy("file_system")
tensors = load_file(f"{sys.argv[1]}/model.safetensors")
tensors["lm_head.weight"] = -tensors["lm_head.weight"]
buffer = io.BytesIO()
ForkingPickler(buffer).dump(list(tensors.items()))
json.dump([base64.b64encode(buffer.getvalue()).decode()], sys.stdout)
sys.stdout.write("\n")
sys.stdout.flush()
sys.stdin.read()
