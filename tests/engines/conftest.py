"""The tests of engines that start processes of their own need TRAJKIT_ENGINES."""

import os
import sys
import warnings

import pytest

collect_ignore = (
    []
    if "TRAJKIT_ENGINES" in os.environ
    else ["test_ray.py", "test_ray_rollouts.py", "test_spark.py"]
)


@pytest.fixture(scope="module")
def cluster():
    """Ray with two workers that import what this process does."""
    import ray
    from ray.data import DataContext

    paths = os.pathsep.join(path or os.getcwd() for path in sys.path)
    ray.init(
        num_cpus=2,
        include_dashboard=False,
        log_to_driver=False,
        runtime_env={"env_vars": {"PYTHONPATH": paths}},
    )
    with warnings.catch_warnings():
        # a warning that Ray gives when it makes its context
        warnings.simplefilter("ignore", DeprecationWarning)
        DataContext.get_current()
    yield
    ray.shutdown()
