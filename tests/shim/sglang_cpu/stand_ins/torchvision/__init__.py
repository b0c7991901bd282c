"""An empty torchvision: SGLang's image modules import it, and text never uses it."""

from stand_in import stand_in

__version__ = "0.28.0"

stand_in(__name__, may_be_called=True)
