"""Jobs from file to file, for runs larger than memory or than one machine."""

from typing import TYPE_CHECKING

from trajkit._lazy import lazy_names

if TYPE_CHECKING:
    from trajkit.jobs.stages import compact_file as compact_file
    from trajkit.jobs.stages import expand_file as expand_file
    from trajkit.jobs.stages import linearize_file as linearize_file
    from trajkit.jobs.verification import verify_file as verify_file
else:
    __getattr__, __dir__ = lazy_names(__name__)
