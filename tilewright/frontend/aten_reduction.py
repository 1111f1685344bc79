"""."""
from .handlers import Handlers

HANDLERS = Handlers()
