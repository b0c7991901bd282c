"""The tests of engines that start processes of their own need TRAJKIT_ENGINES."""

import os

collect_ignore = (
    []
    if "TRAJKIT_ENGINES" in os.environ
    else ["test_ray.py", "test_ray_rollouts.py", "test_spark.py"]
)
