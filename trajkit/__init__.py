"""Token-exact trajectories for RL post-training: recorded calls in, loss-masked rows out."""
