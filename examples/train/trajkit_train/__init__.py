"""``python -m trajkit_train``: a small model that learns from what its agent did.

An agent with two tools (`task`, `agents`) calls the model through the gateway. The recorded
turns become rows, the rows tree packs, and the packs one update of the weights, which the
gateway gives to the engine (`trainer`). The same seeds are trained under several policies.
"""
