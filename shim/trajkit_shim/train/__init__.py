"""``trajkit train-demo``: a small model that learns from what its agent did."""
