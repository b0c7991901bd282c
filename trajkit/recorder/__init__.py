"""Sessions recorded call by call."""

from typing import TYPE_CHECKING

from trajkit._lazy import lazy_names

if TYPE_CHECKING:
    from trajkit.recorder.recorder import Recorded as Recorded
    from trajkit.recorder.recorder import Recorder as Recorder
    from trajkit.recorder.recorder import SessionRows as SessionRows
else:
    __getattr__, __dir__ = lazy_names(__name__)
